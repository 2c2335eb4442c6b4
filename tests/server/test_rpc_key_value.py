"""The key-value service over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from tests.server.raw_client import PATIENCE, PATIENT, RawClient, refusal

from dmesh.v1 import common_pb2
from dmesh.v1 import key_value_pb2 as pb

Make = Callable[..., RawClient]
Kind = common_pb2.ErrorKind
Code = grpc.StatusCode


@pytest.fixture
async def client(make_client: Make) -> RawClient:
    client = make_client(0)
    await client.register()
    return client


def setting(client: RawClient, key: str, value: bytes, overwrite: bool = False) -> pb.SetRequest:
    return pb.SetRequest(
        caller=client.caller, request_id=client.request_id(), key=key, value=value, allow_overwrite=overwrite
    )


async def put(client: RawClient, key: str, value: bytes = b"v", overwrite: bool = True) -> int:
    return (await client.key_value.Set(setting(client, key, value, overwrite), timeout=PATIENCE)).revision


def get(client: RawClient, key: str, timeout_ms: int = 0) -> grpc.aio.UnaryUnaryCall:
    return client.key_value.Get(pb.GetRequest(caller=client.caller, key=key, timeout_ms=timeout_ms))


async def keys(client: RawClient, prefix: str = "") -> list[str]:
    return [
        kv.key
        for kv in (await client.key_value.List(pb.ListRequest(caller=client.caller, prefix=prefix))).kvs
    ]


async def test_set_and_get(client: RawClient) -> None:
    assert await put(client, "k", b"\x00\xff") == 1
    assert await put(client, "k", b"two") == 2
    kv = (await get(client, "k")).kv
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision) == ("k", b"two", 1, 2)


async def test_set_without_overwrite_refuses_an_existing_key(client: RawClient) -> None:
    await put(client, "k")
    code, error = await refusal(lambda: put(client, "k", overwrite=False))
    assert (code, error.kind) == (Code.ALREADY_EXISTS, Kind.ERROR_KIND_KEY_EXISTS)


async def test_retried_set_has_one_effect(client: RawClient) -> None:
    request = setting(client, "k", b"v")
    first = await client.key_value.Set(request)
    assert await client.key_value.Set(request) == first
    assert await put(client, "other") == first.revision + 1


async def test_missing_key(client: RawClient) -> None:
    code, error = await refusal(lambda: get(client, "k"))
    assert (code, error.kind) == (Code.NOT_FOUND, Kind.ERROR_KIND_KEY_NOT_FOUND)


async def test_get_waits_for_the_key(client: RawClient) -> None:
    waiting = get(client, "k", timeout_ms=-1)
    await refusal(lambda: get(client, "k"))  # sent after it on the same connection, so it has arrived
    await put(client, "k", b"here")
    async with asyncio.timeout(PATIENCE):
        assert (await waiting).kv.value == b"here"


async def test_get_gives_up_in_time(client: RawClient) -> None:
    code, error = await refusal(lambda: get(client, "k", timeout_ms=20))
    assert (code, error.kind) == (Code.DEADLINE_EXCEEDED, Kind.ERROR_KIND_DEADLINE_EXCEEDED)


@pytest.mark.parametrize("timeout_ms", [-2, -(2**63)])
async def test_get_refuses_a_timeout_without_meaning(client: RawClient, timeout_ms: int) -> None:
    code, error = await refusal(lambda: get(client, "k", timeout_ms=timeout_ms))
    assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)


async def test_get_takes_the_longest_timeout_there_is(client: RawClient) -> None:
    await put(client, "k")
    assert (await get(client, "k", timeout_ms=2**63 - 1)).kv.key == "k"


@pytest.mark.parametrize("limits", [replace(PATIENT, max_waiters=1)])
async def test_cancelled_get_is_forgotten(client: RawClient) -> None:
    async def kind() -> int:
        return (await refusal(lambda: get(client, "b", timeout_ms=1)))[1].kind

    first = get(client, "a", timeout_ms=-1)
    # The limit of one waiter shows that the first has arrived, and later that it is gone.
    async with asyncio.timeout(PATIENCE):
        while await kind() != Kind.ERROR_KIND_LIMIT_EXCEEDED:
            pass
        first.cancel()
        while await kind() != Kind.ERROR_KIND_DEADLINE_EXCEEDED:
            pass


async def test_get_many_leaves_out_what_is_missing(client: RawClient) -> None:
    await put(client, "a", b"1")
    await put(client, "b", b"2")
    found = await client.key_value.GetMany(pb.GetManyRequest(caller=client.caller, keys=["b", "x", "a"]))
    assert [(kv.key, kv.value) for kv in found.kvs] == [("b", b"2"), ("a", b"1")]
    assert found.revision == 2


async def test_list_by_prefix(client: RawClient) -> None:
    for key in ("a/2", "b", "a/1"):
        await put(client, key, b"v")
    found = await client.key_value.List(pb.ListRequest(caller=client.caller, prefix="a/", keys_only=True))
    assert [(kv.key, kv.value) for kv in found.kvs] == [("a/1", b""), ("a/2", b"")]
    assert await keys(client) == ["a/1", "a/2", "b"]


async def test_large_response_arrives(client: RawClient) -> None:
    names = [f"k{index}" for index in range(6)]
    for name in names:
        await put(client, name, bytes(1 << 20))
    found = await client.key_value.GetMany(pb.GetManyRequest(caller=client.caller, keys=names))
    assert sum(len(kv.value) for kv in found.kvs) == 6 << 20


async def test_too_large_value_is_refused(client: RawClient) -> None:
    code, error = await refusal(lambda: put(client, "k", bytes((1 << 20) + 1)))
    assert (code, error.kind) == (Code.RESOURCE_EXHAUSTED, Kind.ERROR_KIND_LIMIT_EXCEEDED)


async def test_too_large_message_is_refused_and_the_server_lives(client: RawClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await put(client, "k", bytes(5 << 20))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert await put(client, "k") == 1


async def test_delete(client: RawClient) -> None:
    for key in ("a/1", "a/2", "b"):
        await put(client, key)
    request = pb.DeleteRequest(caller=client.caller, request_id="d1", key="a/", is_prefix=True)
    first = await client.key_value.Delete(request)
    assert first.deleted == 2
    assert await client.key_value.Delete(request) == first
    absent = await client.key_value.Delete(pb.DeleteRequest(caller=client.caller, request_id="d2", key="a/1"))
    assert (absent.deleted, absent.revision) == (0, first.revision)
    assert await keys(client) == ["b"]


async def test_increment(client: RawClient) -> None:
    request = pb.IncrementRequest(caller=client.caller, request_id="i1", key="n", amount=-5)
    first = await client.key_value.Increment(request)
    assert first.value == -5
    assert await client.key_value.Increment(request) == first
    assert (await get(client, "n")).kv.value == b"-5"
    await put(client, "text", b"abc")
    bad = pb.IncrementRequest(caller=client.caller, request_id="i2", key="text", amount=1)
    code, error = await refusal(lambda: client.key_value.Increment(bad))
    assert (code, error.kind) == (Code.FAILED_PRECONDITION, Kind.ERROR_KIND_KEY_NOT_INTEGER)


async def test_compare_and_set(client: RawClient) -> None:
    def request(request_id: str, **fields: bytes) -> pb.CompareAndSetRequest:
        return pb.CompareAndSetRequest(caller=client.caller, request_id=request_id, key="k", **fields)

    created = await client.key_value.CompareAndSet(request("c1", value=b"1"))
    assert created.succeeded
    assert await client.key_value.CompareAndSet(request("c1", value=b"1")) == created
    refused = await client.key_value.CompareAndSet(request("c2", value=b"2"))
    assert (refused.succeeded, refused.current.value, refused.revision) == (False, b"1", 1)
    changed = await client.key_value.CompareAndSet(request("c3", expected=b"1", value=b""))
    assert (changed.succeeded, changed.HasField("current"), changed.revision) == (True, False, 2)
    emptied = await client.key_value.CompareAndSet(request("c4", expected=b"", value=b"3"))
    assert emptied.succeeded, "an empty value is not the same as none"


async def test_observer_may_read_and_write_keys(client: RawClient, make_client: Make) -> None:
    await put(client, "k")
    observer = make_client(None)
    assert (await get(observer, "k")).kv.key == "k"
    await put(observer, "other")
    assert (await get(client, "other")).kv.key == "other"
    increment = pb.IncrementRequest(caller=observer.caller, request_id="r", key="n", amount=1)
    for _ in range(2):  # the second one is a retry
        assert (await observer.key_value.Increment(increment, timeout=PATIENCE)).value == 1


async def test_a_transaction(client: RawClient) -> None:
    await put(client, "old")
    request = pb.TransactionRequest(
        caller=client.caller,
        request_id="t1",
        compare=[
            pb.Condition(key="old", operator=pb.Condition.OPERATOR_EQUAL, create_revision=1),
            pb.Condition(key="new", operator=pb.Condition.OPERATOR_LESS, mod_revision=1),
        ],
        then=[
            pb.Operation(set=pb.SetRequest(key="new", value=b"1")),
            pb.Operation(delete=pb.DeleteRequest(key="old")),
            pb.Operation(increment=pb.IncrementRequest(key="n", amount=4)),
            pb.Operation(list=pb.ListRequest(prefix="n", keys_only=True)),
            pb.Operation(get_many=pb.GetManyRequest(keys=["new", "old"])),
        ],
        otherwise=[pb.Operation(get_many=pb.GetManyRequest(keys=["new"]))],
    )
    for _ in range(2):  # the second one is a retry
        response = await client.key_value.Transaction(request)
        assert (response.succeeded, response.revision) == (True, 2)
        assert [result.WhichOneof("kind") for result in response.results] == [
            "set", "delete", "increment", "read", "read",
        ]  # fmt: skip
        assert (response.results[1].delete.deleted, response.results[2].increment.value) == (1, 4)
        assert [kv.key for kv in response.results[3].read.kvs] == ["n", "new"]
        assert [(kv.key, kv.value) for kv in response.results[4].read.kvs] == [("new", b"1")]
    request.request_id = "t2"
    response = await client.key_value.Transaction(request)
    assert not response.succeeded
    assert response.results[0].read.kvs[0].mod_revision == 2


async def test_transactions_that_make_no_sense(client: RawClient) -> None:
    for field, items in (
        ("compare", [pb.Condition(key="k", operator=pb.Condition.OPERATOR_EQUAL)]),
        ("compare", [pb.Condition(key="k", value=b"")]),
        ("compare", [pb.Condition(key="k", operator=9, value=b"")]),  # type: ignore[arg-type]
        ("compare", [pb.Condition(key="", operator=pb.Condition.OPERATOR_EQUAL, value=b"")]),
        ("then", [pb.Operation()]),
    ):
        request = pb.TransactionRequest(caller=client.caller, request_id="t")
        getattr(request, field).extend(items)
        code, error = await refusal(lambda request=request: client.key_value.Transaction(request))
        assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)


async def test_calls_without_caller_are_refused(client: RawClient) -> None:
    for call in (
        client.key_value.Set(pb.SetRequest(key="k")),
        client.key_value.Get(pb.GetRequest(key="k")),
        client.key_value.GetMany(pb.GetManyRequest()),
        client.key_value.List(pb.ListRequest()),
        client.key_value.Delete(pb.DeleteRequest(key="k")),
        client.key_value.Increment(pb.IncrementRequest(key="k")),
        client.key_value.CompareAndSet(pb.CompareAndSetRequest(key="k")),
        client.key_value.Transaction(pb.TransactionRequest()),
        client.key_value.Watch(pb.WatchRequest()).read(),
    ):
        code, error = await refusal(lambda call=call: call)
        assert (code, error.kind) == (Code.INVALID_ARGUMENT, Kind.ERROR_KIND_INVALID_ARGUMENT)
        assert "caller" in error.message


class Watcher:
    """A watch in place."""

    def __init__(self, client: RawClient, prefix: str = "", from_revision: int = 0) -> None:
        request = pb.WatchRequest(caller=client.caller, prefix=prefix, from_revision=from_revision)
        self.call = client.key_value.Watch(request)

    async def read(self) -> pb.WatchResponse:
        async with asyncio.timeout(PATIENCE):
            response = await self.call.read()
        assert response is not grpc.aio.EOF
        return response

    async def events(self, count: int) -> list[tuple[int, str, bytes, bool]]:
        seen: list[tuple[int, str, bytes, bool]] = []
        while len(seen) < count:
            response = await self.read()
            seen += [(response.revision, e.kv.key, e.kv.value, e.deleted) for e in response.events]
        return seen


async def test_watch_tells_each_change_once_in_order(client: RawClient, make_client: Make) -> None:
    await put(client, "a/0")
    watch = Watcher(make_client(None), "a/")
    in_place = await watch.read()
    assert (in_place.revision, len(in_place.events)) == (1, 0)
    await put(client, "a/1", b"1")
    await put(client, "b", b"not mine")
    await put(client, "a/1", b"2")
    request = pb.DeleteRequest(caller=client.caller, request_id="d", key="a/", is_prefix=True)
    await client.key_value.Delete(request)
    assert await watch.events(4) == [
        (2, "a/1", b"1", False),
        (4, "a/1", b"2", False),
        (5, "a/0", b"", True),
        (5, "a/1", b"", True),
    ]


async def test_watch_from_a_past_revision(client: RawClient) -> None:
    for value in (b"1", b"2", b"3"):
        await put(client, "k", value)
    watch = Watcher(client, from_revision=2)
    assert [event[2] for event in await watch.events(2)] == [b"2", b"3"]
    await put(client, "k", b"4")
    assert [event[2] for event in await watch.events(1)] == [b"4"]


@pytest.mark.parametrize("limits", [replace(PATIENT, watch_history=3)])
async def test_watch_from_a_forgotten_revision(client: RawClient) -> None:
    for _ in range(10):
        await put(client, "k")
    code, error = await refusal(lambda: Watcher(client, from_revision=2).call.read())
    assert (code, error.kind) == (Code.OUT_OF_RANGE, Kind.ERROR_KIND_COMPACTED)


async def test_watch_refuses_a_negative_revision(client: RawClient) -> None:
    code, _ = await refusal(lambda: Watcher(client, from_revision=-1).call.read())
    assert code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("limits", [replace(PATIENT, max_waiters=1)])
async def test_cancelled_watch_is_forgotten(client: RawClient) -> None:
    watch = Watcher(client)
    await watch.read()
    assert (await refusal(lambda: Watcher(client).call.read()))[1].kind == Kind.ERROR_KIND_LIMIT_EXCEEDED
    watch.call.cancel()
    async with asyncio.timeout(PATIENCE):
        while True:
            second = Watcher(client)
            try:
                assert (await second.read()).revision == 0
                return
            except grpc.aio.AioRpcError:
                continue


async def test_shutdown_ends_watches_and_waits(client: RawClient, served) -> None:
    watch = Watcher(client)
    await watch.read()
    waiting = get(client, "k", timeout_ms=-1)
    async with asyncio.timeout(PATIENCE):
        await put(client, "other")
    await served.runtime.shutdown()
    await watch.events(1)
    for call in (watch.call.read, lambda: waiting):
        code, error = await refusal(call)
        assert (code, error.kind) == (Code.UNAVAILABLE, Kind.ERROR_KIND_SHUTTING_DOWN)


@pytest.mark.parametrize("limits", [replace(PATIENT, watch_history=10)])
async def test_watch_that_does_not_read_is_dropped(client: RawClient, make_client: Make) -> None:
    windows = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
    watch = Watcher(make_client(None, options=windows))
    await watch.read()
    for _ in range(60):
        await put(client, "k", bytes(50_000))

    async def read_all() -> None:
        while True:
            await watch.read()

    code, error = await refusal(read_all)
    assert (code, error.kind) == (Code.OUT_OF_RANGE, Kind.ERROR_KIND_COMPACTED)
