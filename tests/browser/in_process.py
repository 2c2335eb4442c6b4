"""A server with its members in this process, on a thread of their own: a thousand are there at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.e2e.clients import DEADLINE
from tests.event_loops import entered
from tests.server.raw_client import PATIENT
from tests.server.web_server import Web, serving_web

from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.model import Caller, Task
from dmesh_server.runtime import Runtime
from dmesh_server.store.memory import MemoryStore

T = TypeVar("T")


@dataclass
class Held:
    """A running server, as the test's thread sees it."""

    web: Web
    loop: asyncio.AbstractEventLoop

    def do(self, work: Callable[[Runtime], Awaitable[T]]) -> T:
        """Run something on the server's event loop; return its result."""

        async def run() -> T:
            return await work(self.web.runtime)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE)

    def report(self, rank: int, report: pb.ProgressReport, cluster: str = "big") -> None:
        """Let a member of `join_all` report; returns when the server has it."""
        caller = Caller(cluster, Task("worker", rank), 1000 + rank)

        async def note(runtime: Runtime) -> None:
            runtime.progress.note(caller, report.SerializeToString())

        self.do(note)


@contextlib.asynccontextmanager
async def _serving(directory: Path) -> AsyncIterator[Held]:
    runtime = Runtime(MemoryStore(), PATIENT)
    await runtime.start()
    try:
        async with serving_web(runtime, directory) as web:
            yield Held(web, asyncio.get_running_loop())
    finally:
        await runtime.close()


def held_server(directory: Path) -> AbstractContextManager[Held]:
    """Serves a runtime over HTTP until the block ends."""
    return entered(_serving(directory))


def calls(
    rank: int, issued: int, size: int, *, waits_for: int | None = None, line: int = 11
) -> pb.ProgressReport:
    """Returns a report of a rank that made so many calls, and waits for another in the last one, or not."""
    waiting = waits_for is not None
    last = pb.CallRecord(
        group=7, sequence=issued, call="all_reduce(sum, float64, shape (20000,))", nbytes=160_000,
        age_us=12_000_000 if waiting else 200_000, elapsed_us=12_000_000 if waiting else 40_000,
        waited_us=12_000_000 if waiting else 20_000, waits_for=[] if waits_for is None else [waits_for],
        state=pb.CALL_STATE_WAITING if waiting else pb.CALL_STATE_DONE,
    )  # fmt: skip
    group = pb.GroupProgress(
        id=7, name="world", size=size, issued=issued, finished=issued - waiting, last=last, counted=8,
        elapsed_us=320_000, waited_us=160_000,
    )  # fmt: skip
    return pb.ProgressReport(
        where=f"/home/me/late.py:{line} in step", operation="all_reduce", idle_ms=400, recent=[last],
        groups=[group], loops=[pb.LoopProgress(name="train", unit="steps", done=issued, total=900, rate=9)],
    )  # fmt: skip
