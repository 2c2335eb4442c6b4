"""Failure of a group on this client: once, for all its calls, with notice to the other members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

from dmesh._locks import Lock, RLock
from dmesh._log import logger
from dmesh.collectives.backends.base import Backend
from dmesh.collectives.control_messages import Abort
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.services import Members
from dmesh.native import Endpoint


class Stoppable(Protocol):
    """A call under way."""

    def abort(self, failure: Failure) -> None:
        """End it with the group's failure."""


class Calls(Protocol):
    """Calls under way that are counted together; see `work.Stream`."""

    @property
    def calls(self) -> Mapping[int, Stoppable]:
        """Calls that Python carries out, by number."""

    def wake(self) -> None:
        """Make the calls that wait for their turn look again."""


class Failing(ABC):
    """A group in one generation, which fails at most once.

    Its first failure is the failure of all its calls, on all members: ranks that have lost step cannot find
    it again before the next generation, in which the group begins anew.
    """

    def __init__(self, members: Members, number: int, failure: Failure | None) -> None:
        self.members = members
        self.number = number
        self.lock = Lock()
        self.failure = failure
        self.reported = False
        """True if this rank's program knows of the failure."""
        self.departed: dict[int, str] = {}
        """Members that have said goodbye, and how."""
        self.backends: list[Backend] = []
        """Backends of the group, the preferred one first."""
        self._failing = RLock()  # held while the group is failed and the other members are notified
        self._is_failing = False
        self._members_know = failure is not None

    @property
    @abstractmethod
    def endpoints(self) -> list[Endpoint]:
        """All native endpoints of the group on this client."""

    @abstractmethod
    def all_calls(self) -> Iterable[Calls]:
        """Return the calls under way; with the lock held."""

    def fail(self, failure: Failure, *, notify: bool | None = True) -> None:
        """Fail the group, unless it has failed before. Any thread.

        If Ctrl-C ends it in the middle, the next one who fails the group does what is left to do.

        Args:
            failure: Why.
            notify: Whether this rank notifies the other members. None leaves it until somebody may be
                waiting for this rank: at once if calls are under way, else when the next one is refused.
        """
        with self._failing:
            if self.failure is not None or self._is_failing:
                return
            self._is_failing = True
            try:
                with self.lock:
                    waited_for = any(stream.calls for stream in self.all_calls())
                    waited_for = waited_for or any(endpoint.pending for endpoint in self.endpoints)
                self._members_know = notify is False
                if notify or (notify is None and waited_for):
                    # Before any thread of this process can see the failure and act on it: withdraw a message,
                    # end the process. The others must hear of the cause before they see its consequences.
                    self._notify_members(failure)
                with self.lock:
                    streams = list(self.all_calls())
                    calls = [call for stream in streams for call in stream.calls.values()]
                    backends = list(self.backends)  # later ones are closed by `settle`
                    self.failure = failure
                    for endpoint in self.endpoints:
                        endpoint.abort()
            finally:
                self._is_failing = False
        for call in calls:
            call.abort(failure)
        for stream in streams:
            stream.wake()
        close_all(backends, orderly=failure.cause is Cause.CLOSED and not calls)

    def notify_of(self, failure: Failure) -> None:
        """Notify the other members, unless they know: they may wait for a call that fails or is refused."""
        with self._failing:
            if self.failure is not None and not self._members_know:
                self._notify_members(failure)

    def _notify_members(self, failure: Failure) -> None:
        members, services = self.members, self.members.services
        for rank in members.ranks:
            if rank != services.rank:
                services.send_control(rank, Abort(self.number, members.group, failure))
        self._members_know = True

    def lose(self, rank: int, reason: str) -> None:
        """Fail the group because a member is gone. Any thread."""
        cause = Cause.LEFT if rank in self.departed else Cause.LOST
        message = f"lost {self.members.services.describe(rank)}: {reason}"
        self.fail(Failure(cause, message, (rank,), reason), notify=None)

    def member_left(self, rank: int, reason: str) -> None:
        """Note a member's goodbye: all that it has sent is here, and no more will come. Any thread.

        The group has not failed: what the member sent before may be all that later calls need of it. A call
        that waits for it fails.
        """
        with self.lock:
            self.departed[rank] = reason
            for endpoint in self.endpoints:
                endpoint.close()


def close_all(backends: Iterable[Backend], *, orderly: bool) -> None:
    """Close backends; see `Backend.close`."""
    for backend in backends:
        try:
            backend.close(orderly=orderly)
        except Exception:  # noqa: BLE001 -- a program's own backend must not keep other groups from failing
            logger.exception("the backend %r could not be closed", backend.name)
