"""Frames that came before somebody wanted them: kept, for each peer within a budget."""

from __future__ import annotations

from collections.abc import Collection

from dmesh.collectives.transport.closed import ClosedSequences
from dmesh.collectives.transport.frames import Frame
from dmesh.collectives.transport.records import Account, Kept, frame_cost

Key = tuple[int, int, int]
"""Generation, group and sequence number of a channel."""


class EarlyFrames:
    """What is kept for channels that are not open yet, and what each peer is charged for it.

    Guarded by the mailbox's lock. Charged is also what channels keep because its receive is not posted yet.

    Args:
        limit: Bytes that are kept for each peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: dict[Key, list[Kept]] = {}
        self._accounts: dict[int, Account] = {}

    def charge(self, peer: int, frame: Frame) -> Account | None:
        """Charges a peer for keeping a frame; None if there is no room for it now."""
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = Account(peer)
        cost = frame_cost(frame)
        # A budget that is all free takes any frame, or a frame larger than the budget would wait for ever.
        if account.charged and account.charged + cost > self._limit:
            account.refused = True
            return None
        account.charged += cost
        return account

    def refund(self, kept: Kept) -> int | None:
        """Gives back what a kept frame was charged; returns its peer if that waits for room."""
        account = kept.account
        account.charged -= kept.cost
        if not account.refused:
            return None
        account.refused = False
        # Who waits on behalf of a former process of the peer waits for nothing any more.
        return account.peer if self._accounts.get(account.peer) is account else None

    def charged(self, peer: int) -> int:
        """How much is kept of a peer's frames, as counted for its budget."""
        account = self._accounts.get(peer)
        return 0 if account is None else account.charged

    def keep(self, kept: Kept) -> None:
        """Keeps a complete, charged frame until its channel opens."""
        self._frames.setdefault(_key(kept.frame), []).append(kept)

    def take(self, key: Key) -> list[Kept]:
        """Hands out what has come for a channel, in the order in which it came; still charged."""
        return self._frames.pop(key, [])

    def drop(self, generation: int, group: int, sequences: ClosedSequences) -> list[Kept]:
        """Hands out, to be refunded, what has come for channels of a group that will not open any more."""
        stale = [key for key in self._frames if key[:2] == (generation, group) and key[2] in sequences]
        return [kept for key in stale for kept in self._frames.pop(key)]

    def clear(self) -> None:
        """Forgets all frames."""
        self._frames.clear()

    def renew(self, generation: int, replaced: Collection[int]) -> list[Kept]:
        """Hands out, to be refunded, what is of earlier generations or from processes that are no more.

        Args:
            generation: The one that begins.
            replaced: The peers that are other processes now; their budgets begin anew.
        """
        stale: list[Kept] = []
        for key, frames in list(self._frames.items()):
            if key[0] < generation:
                stale += self._frames.pop(key)
            else:
                stale += [kept for kept in frames if kept.peer in replaced]
                self._frames[key] = [kept for kept in frames if kept.peer not in replaced]
        for peer in replaced:
            self._accounts.pop(peer, None)
        return stale


def _key(frame: Frame) -> Key:
    return frame.generation, frame.group, frame.sequence
