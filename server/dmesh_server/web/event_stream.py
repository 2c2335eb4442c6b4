"""The stream of changes (server-sent events): what happens, as it happens, to any number of slow readers.

What a reader is sent, each a block of lines with an empty one behind it:

- `event: hello`: first, with the cursor at which the stream begins.
- `id: CURSOR`, `event: happened`: an event, as `GET /api/v1/events` shows it.
- `event: clusters`: the clusters whose numbers have changed, as `GET /api/v1/clusters` shows them; at most
  once a second. First, all of them.
- `event: complete`: all clusters have been sent, once; those that the reader knows and was not sent are gone.
- `event: gap`: events were missed that are not kept any more. Read the state anew.
- `event: end`: the server ends the stream, and says why. Come back with the last id.
- `: still here`: a comment, when nothing else was sent for a while.

A reader that comes back says with `Last-Event-ID` (or `after`) what it knows. Every reader has a bounded
queue; who does not read loses its place, never the server its memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import nullcontext
from typing import Any

from starlette.responses import Response

from dmesh_server.event_log import Entry, Feed, Filter
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.web.api.event_views import cursor_of, encode_event
from dmesh_server.web.gate import token_of
from dmesh_server.web.overview import Look, Overview

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STILL_HERE = 15.0
"""Seconds without a message after which a comment shows the reader, and proxies in between, that the
stream lives."""
_PACE = 0.1
"""Minimum seconds between two writes to one reader: changes meanwhile are sent together."""
_PAGE = 500
_STOPPING = "the server is shutting down"
_MOST_CLUSTERS = 100
"""Clusters that one block names."""


class Reader:
    """Pending messages of one reader."""

    def __init__(self, feed: Feed) -> None:
        """Have nothing for its reader.

        Args:
            feed: The events that the reader asked for.
        """
        self.feed = feed
        self._changed: dict[str, Look | None] = {}
        self._complete = False
        self._news = asyncio.Event()
        feed.send_queue.on_news = self._news.set

    def notify(self, changed: Iterable[Look], gone: Iterable[str]) -> None:
        """Note which clusters look different now; of each, the latest look counts."""
        only = self.feed.keep.cluster
        self._changed |= {one.summary.name: one for one in changed if only in (None, one.summary.name)}
        self._changed |= {name: None for name in gone if only in (None, name)}
        self._news.set()

    async def news(self, patience: float) -> bool:
        """Wait until there is something to be sent; False: nothing came for so long."""
        try:
            # Not `wait_for`, which swallows a cancellation that comes together with news.
            async with asyncio.timeout(patience):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def take(self, incarnation: int) -> bytes:
        """Return all that is to be sent, and forget it; the first time, with the mark behind all clusters."""
        blocks = [_happened(entry, incarnation) for entry in self.feed.send_queue.take_all()]
        while self._changed:
            names = list(self._changed)[:_MOST_CLUSTERS]
            some = {name: self._changed.pop(name) for name in names}
            shown = b",".join(one.encode() for one in some.values() if one is not None)
            gone = json.dumps([name for name, one in some.items() if one is None], separators=(",", ":"))
            blocks.append(b'event: clusters\ndata: {"clusters":[%b],"gone":%b}\n\n' % (shown, gone.encode()))
        if not self._complete:
            self._complete = True
            blocks.append(_block("complete", {}))
        return b"".join(blocks)


class EventStream(Response):
    """Answers one reader until either side ends it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        runtime: Runtime,
        overview: Overview,
        access: Access | None,
        keep: Filter,
        after: int | None,
        restarted: bool,
    ) -> None:
        """Make an answer that has not begun.

        Args:
            runtime: The server's state and event log.
            overview: The clusters' numbers.
            access: The accepted tokens; None if callers need none.
            keep: The reader's filter.
            after: Number of the last event that it has; None for events from now on.
            restarted: True if its position is of an earlier start of the server.
        """
        super().__init__(headers={"x-accel-buffering": "no"})
        self._runtime = runtime
        self._overview = overview
        self._access = access
        self._keep = keep
        self._after = after
        self._restarted = restarted

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Serve the reader."""
        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        speaking = asyncio.create_task(self._speak(scope, send), name="dmesh-event-stream")
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((speaking, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            speaking.cancel()
            await asyncio.gather(speaking, leaving, return_exceptions=True)
        if not speaking.cancelled() and (failure := speaking.exception()) is not None:
            raise failure

    async def _speak(self, scope: _Scope, send: _Send) -> None:
        async def say(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        token = token_of(scope)
        held = nullcontext() if self._access is None or token is None else self._access.holding(token)
        with held as hold:
            try:
                why = await self._stream(say)
            except asyncio.CancelledError:
                if hold is None or not hold.revoked:
                    raise
                why = "the token is not accepted any more"
        await say(_block("end", {"reason": why}), more=False)

    async def _stream(self, say: Callable[[bytes], Awaitable[None]]) -> str:
        """Send the reader the events as they come; return the reason for the stream's end."""
        runtime, incarnation = self._runtime, self._runtime.server_incarnation
        event_log = runtime.event_log
        if event_log.closed:
            return _STOPPING
        reader = Reader(event_log.subscribe(self._keep))
        try:
            begin = event_log.last
            self._overview.join(reader.notify)
            await say(b"retry: 2000\n\n" + _block("hello", {"cursor": cursor_of(incarnation, begin)}))
            await self._catch_up(say, begin)
            while True:
                if not await reader.news(_STILL_HERE):
                    await say(b": still here\n\n")
                    continue
                if reader.feed.send_queue.overflowed:
                    runtime.measures.readers_dropped += 1
                    await say(_block("gap", {"reason": "you did not read what you were sent"}))
                    return "you did not read what you were sent; come back with the id of your last event"
                if body := reader.take(incarnation):
                    await say(body)
                if reader.feed.send_queue.closed and not reader.feed.send_queue.overflowed:
                    return _STOPPING
                await asyncio.sleep(_PACE)
        finally:
            self._overview.leave(reader.notify)
            event_log.unsubscribe(reader.feed)

    async def _catch_up(self, say: Callable[[bytes], Awaitable[None]], begin: int) -> None:
        """Send the reader the events since its last visit, up to the event `begin`."""
        if self._after is None and not self._restarted:
            return
        incarnation, at = self._runtime.server_incarnation, self._after or 0
        if self._restarted:
            await say(_block("gap", {"reason": "the server was restarted; what was before is not kept"}))
        reported = self._restarted
        while True:
            page = self._runtime.event_log.page(at, _PAGE, self._keep)
            if page.lost and not reported:
                reported = True
                await say(_block("gap", {"reason": f"events up to {page.lost} are not kept any more"}))
            missed = [_happened(entry, incarnation) for entry in page.entries if entry.number <= begin]
            if missed:
                await say(b"".join(missed))
            at = page.last
            if not page.more or at >= begin:
                return


def _happened(entry: Entry, incarnation: int) -> bytes:
    cursor = cursor_of(incarnation, entry.number).encode()
    return b"id: " + cursor + b"\nevent: happened\ndata: " + encode_event(entry, incarnation) + b"\n\n"


def _block(event: str, content: object) -> bytes:
    # JSON has no line breaks of its own, so that one line of data is enough.
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


async def _gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
