"""The threads in which replicas run: kept for a while after a step, as the next one usually follows soon.

To start a thread takes longer than a small step does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from dmesh._locks import Lock

__all__ = ["ReplicaThreads", "replica_threads"]

Work = Callable[[], object]


class ReplicaThreads:
    """Threads that do one piece of work after the other, each piece at once in a thread of its own.

    Args:
        idle_seconds: Seconds after which an idle thread ends.
    """

    def __init__(self, idle_seconds: float = 5.0) -> None:
        self._idle_seconds = idle_seconds
        self.forget()

    def forget(self) -> None:
        """Begin without threads, as in a child process: those there were have stayed in the parent."""
        self._lock = Lock()
        self._idle: list[SimpleQueue[tuple[Work, str]]] = []

    def start(self, work: Work, name: str) -> None:
        """Begin a piece of work in a thread that does nothing else meanwhile.

        Args:
            work: Function to call; it raises nothing.
            name: Of the thread, as long as it does it.
        """
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put((work, name))

    def _serve(self, inbox: SimpleQueue[tuple[Work, str]]) -> None:
        while True:
            try:
                work, threading.current_thread().name = inbox.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # another thread has just taken it, and is about to put work in
            work()
            del work  # and with it what the step has used
            threading.current_thread().name = "dmesh-replica-idle"
            with self._lock:
                self._idle.append(inbox)


replica_threads = ReplicaThreads()
"""Threads of all strategies."""

os.register_at_fork(after_in_child=replica_threads.forget)
