"""Progress reports of this process to the coordinator, sent with some of its heartbeats.

Made off the hot path, by the thread that sends heartbeats, from what is there to be looked at: nothing is
noted for its sake. Nothing is decided by a report, so one that is late, cut short or left out does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.config.host import own_nodes
from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.barriers import Barriers
from dmesh.v1 import progress_pb2 as pb

MOST_BYTES = 16 << 10
"""Size of a report; the server drops larger ones."""
_SHORTEST = 0.5
"""Seconds between two reports, where heartbeats come faster than that."""
_MOST_BARRIERS = 16
_MOST_MESHES = 16
_MOST_NODES = 64
_MOST_PLACED_BYTES = 4 << 10
"""Bytes that all meshes together may take to list their devices; a regular mesh takes some 15 bytes."""


class ReportSource(Protocol):
    """Knows something about the progress of this process."""

    def fill(self, report: pb.ProgressReport) -> None:
        """Add the source's data to a report. Called by any thread; must not block."""


class Reports:
    """Makes the reports of one agent. Used by one thread at a time, but for `add` and `announce_mesh`.

    Args:
        tracker: Knows what the main thread does.
        barriers: Those at which this process waits.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, tracker: ActivityTracker, barriers: Barriers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracker = tracker
        self._barriers = barriers
        self._clock = clock
        self._meshes: dict[bytes, pb.AnnouncedMesh] = {}
        self._lock = Lock()
        self._sources: tuple[ReportSource, ...] = ()
        self._next = 0.0
        self._nodes = sorted(own_nodes())[:_MOST_NODES]

    def add(self, source: ReportSource) -> None:
        """Ask `source`, too, from now on."""
        self._sources = (*self._sources, source)

    def announce_mesh(self, mesh: pb.AnnouncedMesh) -> None:
        """Note a mesh that the program has made; equal ones are one. Any thread."""
        with self._lock:
            self._meshes[mesh.SerializeToString(deterministic=True)] = mesh
            if len(self._meshes) > _MOST_MESHES:
                del self._meshes[next(iter(self._meshes))]

    def due(self) -> pb.ProgressReport | None:
        """Return a report for the heartbeat that is about to be sent; None if there was one just now."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + _SHORTEST
        try:
            return self.make()
        except Exception:  # noqa: BLE001 -- the heartbeat must go out, or this process is taken for dead
            logger.exception("a report of this process's progress could not be made")
            return None

    def make(self) -> pb.ProgressReport:
        """Return a report of the current state, within the size limit."""
        now = self._clock()
        position = self._tracker.position()
        report = pb.ProgressReport(
            where=position.where, operation=position.operation, idle_ms=round(position.age * 1000)
        )
        for arrival in self._barriers.waiting()[:_MOST_BARRIERS]:
            age = max(0.0, now - arrival.called)
            report.barriers.add(name=arrival.name, instance=arrival.instance, age_ms=round(age * 1000))
        with self._lock:
            report.meshes.extend(_within(self._meshes.values()))
        report.numa_nodes.extend(self._nodes)
        for source in self._sources:
            source.fill(report)
        _cut(report)
        return report


def _within(meshes: Iterable[pb.AnnouncedMesh]) -> list[pb.AnnouncedMesh]:
    """Return meshes; older ones without their devices if the report would become too large."""
    kept: list[pb.AnnouncedMesh] = []
    room = _MOST_PLACED_BYTES
    for mesh in reversed(list(meshes)):
        bare = pb.AnnouncedMesh(name=mesh.name, axes=mesh.axes, device_type=mesh.device_type)
        room -= mesh.ByteSize() - bare.ByteSize()
        kept.append(mesh if room >= 0 else bare)
    return kept[::-1]


def _cut(report: pb.ProgressReport) -> None:
    """Leave out what matters least until the report is small enough."""
    while report.ByteSize() > MOST_BYTES and report.recent:
        del report.recent[0]
    for part in (report.links, report.meshes, report.groups, report.barriers):
        while report.ByteSize() > MOST_BYTES and part:
            del part[-1]
