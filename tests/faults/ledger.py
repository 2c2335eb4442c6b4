"""Traffic on the key-value store, and a ledger of what was acknowledged to hold the server to.

Each writer makes one call at a time. A call has one of three outcomes: acknowledged, refused, or unknown (the
connection broke). What is unknown may have happened, once and wholly, or not at all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
from tests.server.raw_client import RawClient

from dmesh.v1 import key_value_pb2 as kv

WRITERS = 4
CALL_TIMEOUT = 60.0


class Writer:
    """One member of the cluster that writes keys of its own, and counts on one key with the others."""

    def __init__(self, ledger: Ledger, index: int) -> None:
        self.ledger = ledger
        self.index = index
        self.incarnation = 1000 + index
        self.kept: dict[str, bytes] = {}
        """Its keys as they must be; what is unknown is not in here."""
        self.unknown: dict[str, tuple[bytes | None, ...]] = {}
        """What each of its other keys may be."""
        self.steps = itertools.count()
        self.counted = 0
        self.deleting: list[str] = []
        """Keys of a deletion whose outcome is unknown."""
        self.retry: kv.IncrementRequest | None = None
        """An increment whose outcome is unknown."""

    async def register(self, address: str) -> RawClient:
        client = RawClient(address, self.index, size=WRITERS, incarnation=self.incarnation)
        # The same request at every start, as a client that never got its answer would send it.
        await client.coordination.Register(
            client.registration(request_id=f"register-{self.index}"), timeout=CALL_TIMEOUT
        )
        return client

    async def write(self, client: RawClient, size: int) -> None:
        """Makes the next call."""
        step = next(self.steps)
        name = f"w{self.index}/{step % 24}"
        match step % 6:
            case 3:
                await self._increment(client)
            case 4:
                await self._delete(client, f"w{self.index}/{step % 24 // 10}")
            case _:
                await self._set(client, name, f"{self.index}:{step}:".encode().ljust(size, b"."))

    def _id(self) -> str:
        return f"{self.incarnation}-{next(self.ledger.ids)}"

    async def _set(self, client: RawClient, key: str, value: bytes) -> None:
        request = kv.SetRequest(
            caller=client.caller, request_id=self._id(), key=key, value=value, allow_overwrite=True
        )
        before = self.unknown.pop(key, (self.kept.pop(key, None),))
        self.unknown[key] = (*before, value)
        answer = await client.key_value.Set(request, timeout=CALL_TIMEOUT)
        self.ledger.saw(answer.revision)
        del self.unknown[key]
        self.kept[key] = value

    async def _delete(self, client: RawClient, prefix: str) -> None:
        """Deletes several keys at once: all of them are gone or none."""
        request = kv.DeleteRequest(caller=client.caller, request_id=self._id(), key=prefix, is_prefix=True)
        keys = [key for key in {*self.kept, *self.unknown} if key.startswith(prefix)]
        for key in keys:
            before = self.unknown.pop(key, (self.kept.pop(key, None),))
            self.unknown[key] = (*before, None)
        self.deleting = keys
        answer = await client.key_value.Delete(request, timeout=CALL_TIMEOUT)
        self.deleting = []
        self.ledger.saw(answer.revision)
        for key in keys:
            del self.unknown[key]

    async def _increment(self, client: RawClient) -> None:
        request = kv.IncrementRequest(caller=client.caller, request_id=self._id(), key="count", amount=1)
        self.retry = request
        answer = await client.key_value.Increment(request, timeout=CALL_TIMEOUT)
        self.ledger.saw(answer.revision)
        self.retry = None
        self.counted += 1


class Ledger:
    """What a server must have."""

    def __init__(self) -> None:
        self.ids = itertools.count()
        self.writers = [Writer(self, index) for index in range(WRITERS)]
        self.revision = 0
        """The highest that anybody was told."""
        self.calls = 0
        """How many were acknowledged."""

    def saw(self, revision: int) -> None:
        self.revision = max(self.revision, revision)
        self.calls += 1

    async def traffic(self, address: str, until: Callable[[], bool], *, size: int = 40) -> None:
        """Lets all writers write until something is so, or their connection breaks."""

        async def run(writer: Writer) -> None:
            client: RawClient | None = None
            try:
                client = await writer.register(address)
                while not until():
                    await writer.write(client, size)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                if client is not None:
                    await client.channel.close()

        await asyncio.gather(*(run(writer) for writer in self.writers))

    async def check(self, address: str) -> None:
        """Checks that the server has what it must have, and settles what was unknown."""
        clients = [await writer.register(address) for writer in self.writers]
        try:
            found = await clients[0].key_value.List(
                kv.ListRequest(caller=clients[0].caller, prefix=""), timeout=CALL_TIMEOUT
            )
            values = {item.key: item.value for item in found.kvs}
            assert found.revision >= self.revision, "the revision went back"
            assert all(item.mod_revision <= found.revision for item in found.kvs)
            assert len({item.mod_revision for item in found.kvs}) == len(found.kvs), (
                "one change, one revision"
            )
            self.saw(found.revision)
            count = int(values.pop("count", b"0"))
            counted = sum(writer.counted for writer in self.writers)
            retries = [writer for writer in self.writers if writer.retry is not None]
            assert counted <= count <= counted + len(retries)
            for writer in self.writers:
                # All or none of those that were certainly there before.
                certain = [key for key in writer.deleting if None not in writer.unknown[key][:-1]]
                assert len({key in values for key in certain}) < 2, f"half of a deletion: {certain}"
                writer.deleting = []
                for key, value in writer.kept.items():
                    assert values.pop(key, None) == value, f"acknowledged, and lost: {key}"
                for key, choices in writer.unknown.items():
                    value = values.pop(key, None)
                    assert value in choices, f"{key} is what it never was"
                    if value is not None:
                        writer.kept[key] = value
                writer.unknown.clear()
            assert not values, f"never written: {list(values)}"
            # A retry with the same request id has one effect, whether or not the first attempt had it.
            for writer in retries:
                assert writer.retry is not None
                await clients[writer.index].key_value.Increment(writer.retry, timeout=CALL_TIMEOUT)
                writer.retry = None
                writer.counted += 1
            if counted + len(retries):
                final = await clients[0].key_value.Get(
                    kv.GetRequest(caller=clients[0].caller, key="count"), timeout=CALL_TIMEOUT
                )
                assert int(final.kv.value) == counted + len(retries), "a retry counted twice"
        finally:
            for client in clients:
                await client.channel.close()
