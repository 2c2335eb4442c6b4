"""The stream of changes: events as they happen, resumed, with gaps told, and slow readers cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.faults.secured import write_tokens
from tests.server.raw_client import PATIENCE, PATIENT, RawClient
from tests.server.web_server import Web, join_all, serving_web

from dmesh.security import tokens
from dmesh_server.event_log import EventLog, ServerNote
from dmesh_server.runtime import Runtime
from dmesh_server.store.memory import MemoryStore
from dmesh_server.web import event_stream, overview
from dmesh_server.web.listener import HttpLimits

PATH = "/api/v1/events/stream"


@dataclass
class Block:
    """One block of a stream."""

    event: str = ""
    id: str = ""
    data: dict | None = None


class Following:
    """A reader of the stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def block(self) -> Block:
        """Returns the next block that is not a comment."""
        block = Block()
        async with asyncio.timeout(PATIENCE):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if line == "" and block.event:
                    return block
                if name == "event":
                    block.event = value
                elif name == "id":
                    block.id = value
                elif name == "data":
                    block.data = json.loads(value)
        raise EOFError

    async def next(self, event: str) -> Block:
        """Returns the next block of a kind."""
        while (block := await self.block()).event != event:
            pass
        return block


@contextlib.asynccontextmanager
async def following(
    http: httpx.AsyncClient, headers: dict[str, str] | None = None, **query: str
) -> AsyncIterator[Following]:
    async with http.stream("GET", PATH, params=query, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Following(response)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime(MemoryStore(), PATIENT)
    await runtime.start()
    yield runtime
    await runtime.close()


@pytest.fixture
async def web(runtime: Runtime, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(runtime, tmp_path) as web:
        yield web


def note(web: Web, *texts: str) -> None:
    for text in texts:
        web.runtime.event_log.note(ServerNote("store_failed", text))


def reason(block: Block) -> str:
    assert block.data is not None
    return block.data["details"]["reason"]


async def gone(web: Web) -> None:
    """Waits until nobody follows any more."""
    async with asyncio.timeout(PATIENCE):
        while web.runtime.event_log.feeds:
            await asyncio.sleep(0.01)


async def test_what_happens_is_told_as_it_happens_and_read_on(web: Web) -> None:
    async with web.client() as http:
        async with following(http) as stream:
            hello = await stream.next("hello")
            assert hello.data == {"cursor": f"{web.runtime.server_incarnation:016x}-1"}
            note(web, "one")
            first = await stream.next("happened")
            assert first.data is not None
            assert (first.id, first.data["details"]) == (first.data["cursor"], {"reason": "one"})
        await gone(web)
        note(web, "two", "three")
        async with following(http, {"Last-Event-ID": first.id}) as stream:
            note(web, "four")
            told = [await stream.next("happened") for _ in range(3)]
            assert [reason(block) for block in told] == ["two", "three", "four"]
        async with following(http, after=told[1].id) as stream:
            last = await stream.next("happened")
            assert last.id == told[2].id


async def test_who_comes_later_is_told_for_how_long_a_cluster_has_waited_by_then(
    served, make_client: Callable[..., RawClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await make_client(0, cluster="train", size=2).join()
    await session.enter("epoch", timeout_ms=60_000)
    runtime = served.runtime
    async with asyncio.timeout(PATIENCE):
        while runtime.views.summary("train").oldest is None:
            await asyncio.sleep(0.01)

    async def waited(stream: Following) -> float:
        told = (await stream.next("clusters")).data
        assert told is not None
        return told["clusters"][0]["waits_in"]["age"]

    async with serving_web(runtime, tmp_path) as web, web.client() as http:
        async with following(http) as first:
            assert await waited(first) < PATIENCE
            now = runtime.now
            monkeypatch.setattr(runtime, "now", lambda: now() + 1000)
            async with following(http) as second:
                assert await waited(second) >= 1000
        await gone(web)
        monkeypatch.setattr(runtime, "now", lambda: now() + 2000)
        async with following(http) as third:  # nobody has looked for a while
            assert await waited(third) >= 2000


async def test_clusters_that_look_different_are_told(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_LOOK", 0.01)
    await join_all(web.runtime, 1, "a")
    async with web.client() as http, following(http) as stream, following(http, cluster="b") as other:
        first = (await stream.next("clusters")).data
        assert first is not None
        assert [(one["name"], one["members"]) for one in first["clusters"]] == [("a", {"CONNECTED": 1})]
        await join_all(web.runtime, 2, "b")
        for reader in (stream, other):
            kinds, members = [], {}
            while len(kinds) < 3 or members != {"CONNECTED": 2}:  # it may be told of the half of it first
                block = await reader.block()
                assert block.data is not None
                if block.event == "happened":
                    kinds.append(block.data["kind"])
                elif block.event == "clusters":
                    members = {one["name"]: one["members"] for one in block.data["clusters"]}.get("b")
            assert kinds == ["cluster_formed", "member_joined", "member_joined"]


@pytest.mark.parametrize("clusters", [0, 1, 101])
async def test_a_mark_follows_the_last_of_all_clusters(web: Web, clusters: int) -> None:
    names = [f"c{number}" for number in range(clusters)]
    for name in names:
        await join_all(web.runtime, 1, name)
    async with web.client() as http, following(http, kind="store_failed") as stream:
        assert (await stream.block()).event == "hello"
        told = []
        while (block := await stream.block()).event == "clusters":
            assert block.data is not None
            told += [one["name"] for one in block.data["clusters"]]
        assert (block.event, block.data, sorted(told)) == ("complete", {}, sorted(names))
        note(web, "something else")
        assert (await stream.block()).event == "happened", "the mark comes once"


@pytest.mark.parametrize("cursor", ["00000000000000aa-7", "{own}-1"])
async def test_a_gap_is_told(web: Web, cursor: str) -> None:
    runtime = web.runtime
    runtime.event_log = EventLog(lambda: 0.0, most=3)
    note(web, *"abcdef")
    own = f"{runtime.server_incarnation:016x}"
    async with web.client() as http, following(http, {"Last-Event-ID": cursor.format(own=own)}) as stream:
        assert (await stream.next("gap")).data is not None
        told = [await stream.block() for _ in range(3)]
        assert [reason(block) for block in told] == ["d", "e", "f"]


async def test_barriers_that_pass_are_told_to_who_asks_for_them(web: Web) -> None:
    async with web.client() as http:
        async with following(http, kind="store_recovered") as stream:
            await stream.next("hello")
            note(web, "not this one")
            web.runtime.event_log.note(ServerNote("store_recovered", "this one"))
            assert (await stream.next("happened")).data["details"] == {"reason": "this one"}  # type: ignore[index]
        assert (await http.get(PATH, params={"kind": "nothing"})).status_code == 422
        assert (await http.get(PATH, headers={"Last-Event-ID": "x"})).status_code == 422


async def test_silence_is_broken_now_and_then(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_STILL_HERE", 0.02)
    async with web.client() as http, following(http) as stream:
        async with asyncio.timeout(PATIENCE):
            async for line in stream.response.aiter_lines():
                if line == ": still here":
                    break


async def test_it_ends_when_the_token_is_revoked_and_says_so(web: Web, tmp_path: Path) -> None:
    async with web.client() as http, following(http) as stream:
        await stream.next("hello")
        write_tokens(tmp_path / "tokens", tokens.generate())
        web.access.refresh()
        assert (await stream.next("end")).data == {"reason": "the token is not accepted any more"}
    await gone(web)


async def test_it_ends_when_the_server_stops_and_says_so(web: Web) -> None:
    async with web.client() as http, following(http) as stream:
        await stream.next("hello")
        web.runtime.begin_shutdown()
        assert (await stream.next("end")).data == {"reason": "the server is shutting down"}
        with pytest.raises(EOFError):
            await stream.block()


async def test_there_are_only_so_many_readers(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MOST_STREAMS", 2)
    async with web.client() as http, following(http) as one, following(http) as two:
        await one.next("hello")
        await two.next("hello")
        response = await http.get(PATH)
        assert (response.status_code, response.json()["kind"]) == (503, "LIMIT_EXCEEDED")
    await gone(web)
    async with web.client() as http, following(http) as stream:
        await stream.next("hello")


@pytest.mark.parametrize("reads_again", [True, False])
async def test_who_does_not_read_is_cut_off_and_costs_nobody_anything(
    runtime: Runtime, tmp_path: Path, reads_again: bool
) -> None:
    limits = HttpLimits(unread_seconds=PATIENCE if reads_again else 0.3)
    async with serving_web(runtime, tmp_path, limits) as web, web.client() as http:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = web.server.address
        slow.connect((address.host, address.port))
        token = web.tokens["viewer"]
        slow.sendall(
            f"GET {PATH} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        async with asyncio.timeout(PATIENCE):
            while not web.runtime.event_log.feeds:
                await asyncio.sleep(0.01)
        async with following(http) as quick:
            await quick.next("hello")
            sent = 0
            while web.runtime.measures.readers_dropped == 0 and web.runtime.event_log.feeds == 2:
                for _ in range(200):  # the quick one keeps up with as much as fits into its queue
                    sent += 1
                    note(web, "x" * 2000)
                while (block := await quick.next("happened")).data["id"] != sent + 1:  # type: ignore[index]
                    pass
                assert block.data is not None
                if sent >= 4000:  # more than its queue holds: it was dropped, or is not read from
                    break
            if reads_again:
                slow.setblocking(False)
                said = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE):
                        while piece := await asyncio.get_running_loop().sock_recv(slow, 1 << 20):
                            said = (said + piece)[-20_000:]
                            if b"event: end" in said:
                                break
                assert b"event: gap" in said
                assert b"event: end" in said
                assert web.runtime.measures.readers_dropped == 1
            else:
                async with asyncio.timeout(PATIENCE):
                    while web.runtime.event_log.feeds == 2:
                        await asyncio.sleep(0.01)
                assert web.server.refusals.counts["http_connection_not_read"] == 1
            note(web, "still served")
            assert (await quick.next("happened")).data["details"] == {"reason": "still served"}  # type: ignore[index]
        slow.close()
