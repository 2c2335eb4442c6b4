"""Calls that wait for the next change of a cluster's membership."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmesh_server.core.deadlines import WaitDue
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.messages import quote
from dmesh_server.core.model import ClusterState
from dmesh_server.core.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from dmesh_server.core.events import GetClusterState
    from dmesh_server.core.roster import TaskSlot
    from dmesh_server.core.transaction import Transaction


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    slot: TaskSlot | None
    """None for an observer."""
    known_epoch: int


class EpochWaits:
    """Blocked reads of the state of one generation of a cluster.

    Args:
        cluster: Name of the cluster.
        shared: State of all clusters.
        state: Returns the cluster's state to a caller that knows an epoch.
    """

    def __init__(self, cluster: str, shared: Shared, state: Callable[[int], ClusterState]) -> None:
        self._cluster = cluster
        self._shared = shared
        self._state = state
        self._waits: dict[int, _Wait] = {}

    def tokens(self) -> list[int]:
        """Return the tokens of the calls that wait, in order of arrival."""
        return list(self._waits)

    def wait(self, event: GetClusterState, slot: TaskSlot | None, transaction: Transaction) -> None:
        """Let a call wait for another epoch; when its time is over, it is answered with the known one."""
        if len(self._waits) >= self._shared.limits.max_waiters:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"{len(self._waits)} calls wait for the next epoch of cluster {quote(self._cluster)}, which "
                "is the server's limit",
            )
        self._waits[event.token] = _Wait(slot, event.known_epoch)
        self._shared.waiting[event.token] = self
        if slot is not None:
            slot.tokens.add(event.token)
        if event.timeout is not None:
            self._shared.deadlines.set(WaitDue(event.token), transaction.now + event.timeout)

    def release(self, transaction: Transaction) -> None:
        """Answer all calls: the epoch has changed."""
        if self._waits:
            state = self._state(0)
            for token in self.tokens():
                self.dismiss(token, None, transaction)
                transaction.reply(token, state)

    def time_out(self, token: int, transaction: Transaction) -> None:
        """Answer a call whose time is over."""
        known_epoch = self._waits[token].known_epoch
        self.dismiss(token, None, transaction)
        transaction.reply(token, self._state(known_epoch))

    def dismiss(self, token: int, error: CoreError | None, transaction: Transaction) -> None:
        """End a call, with an error unless its caller is gone."""
        wait = self._waits.pop(token)
        del self._shared.waiting[token]
        self._shared.deadlines.cancel(WaitDue(token))
        if wait.slot is not None:
            wait.slot.tokens.discard(token)
        if error is not None:
            transaction.reply(token, error)
