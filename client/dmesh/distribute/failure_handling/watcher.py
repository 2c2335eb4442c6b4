"""Announcements of preemptions by clients."""

from __future__ import annotations

import threading

from dmesh._locks import Lock
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.members import Member
from dmesh.coordination.preemption import PreemptionNotice

__all__ = ["PreemptionWatcher"]


class PreemptionWatcher:
    """Listens for the announcement that a client will be preempted.

    ```python
    watcher = dmesh.distribute.experimental.PreemptionWatcher()
    try:
        train()
    except dmesh.errors.PeerLostError:
        if watcher.preemption_message is None:
            raise
        watcher.block_until_worker_exit()
    ```

    Raises:
        NotInitializedError: `dmesh.initialize_accelerator_system` has not been called.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._notice: PreemptionNotice | None = None
        self._departed: set[str] = set()
        self._gone = threading.Event()
        agent = current_agent()
        agent.preemption.add_listener(self._note)
        agent.add_departure_listener(self._note_departure)

    @property
    def preemption_message(self) -> str | None:
        """Client that will be preempted, and the reason; None without an announcement."""
        with self._lock:
            return None if self._notice is None else str(self._notice)

    def block_until_worker_exit(self, timeout: float | None = None) -> bool:
        """Wait until the client that announced its preemption has left or is lost.

        Args:
            timeout: Seconds to wait; None for no limit.

        Returns:
            Whether it is gone. True at once without an announcement.
        """
        with self._lock:
            if self._notice is None:
                return True
        return self._gone.wait(timeout)

    def _note(self, notice: PreemptionNotice) -> None:
        with self._lock:
            self._notice = notice
            if notice.task not in self._departed:
                self._gone.clear()

    def _note_departure(self, member: Member) -> None:
        task = f"/job:{member.job}/task:{member.index}"
        with self._lock:
            self._departed.add(task)
            if self._notice is None or self._notice.task == task:
                self._gone.set()
