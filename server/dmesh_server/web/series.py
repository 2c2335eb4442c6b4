"""Time series of clusters and of the server: the last 15 minutes, in fixed memory, for charts.

Everything is drawn from what members report anyway, some seconds old; of each rank only its last report is
compared with the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.errors import CoreError
from dmesh_server.core.model import Task
from dmesh_server.progress import MemberProgress, loops_of
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.pacer import Pacer, Steps

STEP = 5.0
"""Seconds from one column to the next."""
KEPT = 180
"""Columns that are kept: 15 minutes."""
MOST_ROWS = 64
"""Rows of the wait heat map; of more ranks, a row shows the one of several that waits least."""
MOST_CLUSTERS = 16
"""Clusters of which columns are kept: those that have members, in the order of their names."""
UNKNOWN = 255
"""Stands in the heat map for a rank of which nothing is known."""
_MOST_READ = 1_000
"""Reports of a cluster that are read for one column; of more ranks, each is read in turn."""
_WAITING = pb.CALL_STATE_WAITING


class ClusterColumn(BaseModel):
    """Activity of a cluster in one time step."""

    n: int = Field(description="number of the column, shared by all series of the server")
    t: float = Field(description="Unix time of its end, seconds")
    calls: float | None = Field(description="finished collectives a second, mean of the ranks that reported")
    bytes: float | None = Field(description="bytes a second that these moved, all ranks together")
    pace: float | None = Field(description="seconds a step of the program's loop takes, slowest rank")
    done: int | None = Field(description="steps that the slowest rank has done")
    silence: float | None = Field(description="seconds since the last sign of life, the longest of all")
    wait: str = Field(
        description="for each row, two hexadecimal digits: share of its time that the rank waited for "
        f"others, 0 to 254; ff: unknown. At most {MOST_ROWS} rows"
    )


class ServerColumn(BaseModel):
    """Activity of the server in one time step."""

    n: int = Field(description="number of the column")
    t: float = Field(description="Unix time of its end, seconds")
    cpu: float = Field(description="share of one processor that its process took")
    lag: float | None = Field(description="mean lateness of its event loop, seconds")
    requests: float = Field(description="requests and calls a second")
    sessions: int = Field(description="open sessions")


@dataclass(slots=True)
class _Rank:
    """Last report of a rank that was read, and what followed from it."""

    received_at: float
    finished: dict[tuple[int, int], int]
    calls: float = 0.0
    nbytes: float = 0.0
    share: int = UNKNOWN


@dataclass(slots=True)
class ClusterSeries:
    """Columns of one generation of a cluster."""

    incarnation: int
    tasks: int
    loop: str = ""
    """Name of the loop in the columns; empty if there is none."""
    columns: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=KEPT))
    ranks: dict[Task, _Rank] = field(default_factory=dict)

    @property
    def band(self) -> int:
        """Ranks of one row of the heat map."""
        return max(1, -(-self.tasks // MOST_ROWS))


class Recorder:
    """Adds a column to the series of each cluster and of the server, every `STEP` seconds."""

    def __init__(self, runtime: Runtime, pacer: Pacer) -> None:
        """Make a recorder that has not begun.

        Args:
            runtime: The server's state.
            pacer: Schedules the reading of many reports in steps.
        """
        self.clusters: dict[str, ClusterSeries] = {}
        self.server: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        """Columns of the server, numbered and encoded."""
        self._runtime = runtime
        self._pacer = pacer
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._before = (time.process_time(), runtime.now(), 0, 0.0, 0)

    def start(self) -> None:
        """Begin to record."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="dmesh-series")

    async def stop(self) -> None:
        """End the recording. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def record(self) -> None:
        """Add one column to each series."""
        self._number += 1
        self._add_server_column()
        names = [name for name in self._runtime.views.names() if self._runtime.views.summary(name).present]
        for name in self.clusters.keys() - names[:MOST_CLUSTERS]:
            if name not in self._runtime.views.names() or len(self.clusters) > MOST_CLUSTERS:
                del self.clusters[name]  # a finished cluster keeps its last minutes, if there is room
        for name in names[:MOST_CLUSTERS]:
            with contextlib.suppress(CoreError):  # it made room for another one meanwhile
                await self._add_column(name, Steps(self._pacer))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP)
            try:
                await self.record()
            except CoreError:  # the server starts, or stops
                continue
            except Exception:  # noqa: BLE001 -- a bug, but without columns nobody would see anything more
                logs.error("series_failed", exc_info=True)

    def _add_server_column(self) -> None:
        measures, now = self._runtime.measures, self._runtime.now()
        requests = sum(histogram.count for histogram in measures.rpcs.values())
        seen = (time.process_time(), now, measures.lag.count, measures.lag.total, requests)
        cpu, then, lags, late, asked = self._before
        self._before, elapsed = seen, max(1e-3, now - then)
        column = ServerColumn(
            n=self._number,
            t=round(time.time(), 1),
            cpu=round((seen[0] - cpu) / elapsed, 4),
            lag=round((seen[3] - late) / (seen[2] - lags), 6) if seen[2] > lags else None,
            requests=round((requests - asked) / elapsed, 2),
            sessions=self._runtime.open_sessions,
        )
        self.server.append((self._number, column.model_dump_json().encode()))

    async def _add_column(self, name: str, steps: Steps) -> None:
        runtime, views = self._runtime, self._runtime.views
        summary = views.summary(name)
        series = self.clusters.get(name)
        if series is None or series.incarnation != summary.incarnation:
            tasks = sum(len(job.addresses) for job in summary.jobs)
            series = self.clusters[name] = ClusterSeries(summary.incarnation, tasks)
        starts, start = dict[str, int](), 0
        for job, count in sorted((job.name, len(job.addresses)) for job in summary.jobs):
            starts[job], start = start, start + count
        reports, now = runtime.progress.members(name), runtime.now()
        turns = -(-len(reports) // _MOST_READ) or 1
        fresh = 3 * turns * max(STEP, summary.settings.heartbeat_interval)
        rows, reporting, loops = (
            [UNKNOWN] * -(-series.tasks // series.band),
            list[_Rank](),
            list[tuple[float, int]](),
        )
        for place, said in enumerate(reports):
            holder = views.holder(name, said.task)
            if holder is None or holder.incarnation != said.incarnation or not holder.present:
                series.ranks.pop(said.task, None)
                continue
            if place % turns == self._number % turns:
                self._read(series, said, loops)
                await steps.pause()
            rank = series.ranks.get(said.task)
            if rank is None or now - rank.received_at > fresh or rank.share == UNKNOWN:
                continue
            reporting.append(rank)
            row = (starts[said.task.job] + said.task.index) // series.band
            rows[row] = min(rows[row], rank.share)
        standing = views.standing(name)
        departed = {
            p for p, condition in standing.conditions.items() if condition in ("LOST", "FAILED", "LEFT")
        }
        heard = [at for place, at in enumerate(standing.last_seen_at) if place not in departed]
        column = ClusterColumn(
            n=self._number,
            t=round(time.time(), 1),
            calls=round(sum(rank.calls for rank in reporting) / len(reporting), 3) if reporting else None,
            bytes=round(sum(rank.nbytes for rank in reporting)) if reporting else None,
            pace=max((round(pace, 6) for pace, _ in loops), default=None),
            done=min((done for _, done in loops), default=None),
            silence=round(max(0.0, now - min(heard)), 2) if heard else None,
            wait=bytes(rows).hex(),
        )
        series.columns.append((self._number, column.model_dump_json().encode()))

    def _read(self, series: ClusterSeries, said: MemberProgress, loops: list[tuple[float, int]]) -> None:
        """Compare a rank's report with its last one."""
        message = said.message()
        if message is None:
            return
        for loop in loops_of(message)[-1:]:
            if not loop.over and loop.rate > 0:
                series.loop = loop.name or "loop"
                loops.append((1 / loop.rate, loop.done))
        last = series.ranks.get(said.task)
        if last is not None and last.received_at == said.received_at:
            return
        finished = {(group.id, group.generation): group.finished for group in message.groups}
        rank = series.ranks[said.task] = _Rank(said.received_at, finished)
        if last is None:
            return
        seconds, waited = max(1e-3, said.received_at - last.received_at), 0.0
        for group in message.groups:
            calls = max(0, group.finished - last.finished.get((group.id, group.generation), 0))
            rank.calls += calls / seconds
            rank.nbytes += calls * max(0, group.last.nbytes) / seconds
            if group.counted > 0:
                waited += calls * group.waited_us / group.counted / 1e6
            if group.last.state == _WAITING:
                waited += max(0, group.last.waited_us, group.last.elapsed_us) / 1e6
        rank.share = max(0, min(254, round(254 * waited / seconds)))


def columns_after(columns: deque[tuple[int, bytes]], number: int) -> Iterator[bytes]:
    """Yield the encoded columns with larger numbers."""
    return (encoded for n, encoded in columns if n > number)
