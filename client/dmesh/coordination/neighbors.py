"""Other processes of this host: whether one whose session broke is still there, asked by the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable

from dmesh._locks import Lock
from dmesh.config import host
from dmesh.coordination.waiting import Worker
from dmesh.v1 import coordination_pb2 as pb

_LOOKS = (0.02, 0.03, 0.05, 0.1, 0.2)
"""Pauses between looks, seconds: a killed process closes its connections a moment before it is gone."""
_MOST = 8
"""Processes that are looked at for longer than a moment at a time."""


class NeighborWatch:
    """Answers the coordinator's queries about processes of this host."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watching = 0

    def ask(self, query: pb.ProcessQuery, answer: Callable[[pb.SessionRequest], object]) -> None:
        """Look at a process, and answer when it is gone, or was there all the time. Does not block."""
        with self._lock:
            crowded = self._watching >= _MOST
            self._watching += not crowded
        if crowded or host.is_gone(query.pid, query.start_ticks):
            if not crowded:
                self._end()
            _answer(query, answer)
        else:
            Worker(lambda: self._watch(query, answer), "dmesh-neighbor").start()

    def _watch(self, query: pb.ProcessQuery, answer: Callable[[pb.SessionRequest], object]) -> None:
        try:
            for pause in _LOOKS:
                time.sleep(pause)
                if host.is_gone(query.pid, query.start_ticks):
                    break
            _answer(query, answer)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._watching -= 1


def _answer(query: pb.ProcessQuery, answer: Callable[[pb.SessionRequest], object]) -> None:
    gone = host.is_gone(query.pid, query.start_ticks)
    answer(pb.SessionRequest(process_report=pb.ProcessReport(task=query.task, lease=query.lease, gone=gone)))
