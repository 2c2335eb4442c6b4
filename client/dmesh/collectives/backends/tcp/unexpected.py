"""Unexpected messages: frames that came before their receive was posted, within a budget per peer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from dmesh.collectives.backends.tcp.frames import Frame, Kind

Key = tuple[int, int, int]
"""Generation, group and sequence number of a channel."""

FRAME_OVERHEAD = 256
"""Bytes charged for a buffered frame beside its payload and signature: about the size of its objects."""


class Account:
    """Bytes charged to one process of a peer for its buffered frames."""

    __slots__ = ("charged", "peer", "refused")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.charged = 0
        self.refused = False


class BufferedFrame:
    """A complete frame that no receive has taken yet."""

    __slots__ = ("account", "frame", "payload")

    def __init__(self, account: Account, frame: Frame, payload: bytearray | None) -> None:
        self.account = account
        self.frame = frame
        self.payload = payload

    @property
    def peer(self) -> int:
        """Rank of the sender."""
        return self.account.peer


class UnexpectedFrames:
    """Frames of channels that are not open yet, and the accounts of all buffered frames.

    Open channels hold their own buffered frames, charged to the same accounts. The message queue's lock
    guards everything here.

    Args:
        limit: Bytes buffered for each peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: dict[Key, list[BufferedFrame]] = {}
        self._accounts: dict[int, Account] = {}

    def charge(self, peer: int, frame: Frame) -> Account | None:
        """Charge a peer for a frame; return None if its budget has no room for it now."""
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = Account(peer)
        cost = _cost(frame)
        # An empty account takes any frame: one that is larger than the budget would otherwise wait forever.
        if account.charged and account.charged + cost > self._limit:
            account.refused = True
            return None
        account.charged += cost
        return account

    def refund(self, buffered: BufferedFrame) -> int | None:
        """Return a frame's charge; return its peer if a frame of that peer waits for room."""
        account = buffered.account
        account.charged -= _cost(buffered.frame)
        if not account.refused:
            return None
        account.refused = False
        # A former process of the peer has another account, and nothing waits on its behalf.
        return account.peer if self._accounts.get(account.peer) is account else None

    def charged(self, peer: int) -> int:
        """Return the bytes charged to a peer."""
        account = self._accounts.get(peer)
        return 0 if account is None else account.charged

    def add(self, buffered: BufferedFrame) -> None:
        """Buffer a complete, charged frame until its channel opens."""
        frame = buffered.frame
        self._frames.setdefault((frame.generation, frame.group, frame.sequence), []).append(buffered)

    def take(self, key: Key) -> list[BufferedFrame]:
        """Remove and return a channel's frames in order of arrival; they stay charged."""
        return self._frames.pop(key, [])

    def drop(self, generation: int, group: int, sequences: ClosedSequences) -> list[BufferedFrame]:
        """Remove and return the frames of channels that will never open; the caller refunds them."""
        stale = [key for key in self._frames if key[:2] == (generation, group) and key[2] in sequences]
        return [buffered for key in stale for buffered in self._frames.pop(key)]

    def clear(self) -> None:
        """Drop all frames."""
        self._frames.clear()

    def renew(self, generation: int, replaced: Collection[int]) -> list[BufferedFrame]:
        """Remove and return the frames of earlier generations and of replaced processes.

        Args:
            generation: The one that begins.
            replaced: Peers that are other processes now; they get new accounts.
        """
        stale: list[BufferedFrame] = []
        for key, frames in list(self._frames.items()):
            if key[0] < generation:
                stale += self._frames.pop(key)
            else:
                stale += [buffered for buffered in frames if buffered.peer in replaced]
                self._frames[key] = [buffered for buffered in frames if buffered.peer not in replaced]
        for peer in replaced:
            self._accounts.pop(peer, None)
        return stale


def _cost(frame: Frame) -> int:
    payload = frame.length if frame.kind is Kind.DATA else 0
    return payload + len(frame.signature) + FRAME_OVERHEAD


class ClosedSequences:
    """Sequence numbers of a group's closed channels, stored as disjoint ranges in bounded memory.

    Collectives of a group close nearly in order, so a handful of ranges is enough. Numbers that are never
    opened here leave gaps; beyond `limit` ranges the two lowest are joined, and the numbers between them
    count as closed.

    Args:
        limit: Largest number of ranges.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number <= self._ends[at]

    def add(self, number: int) -> bool:
        """Add a number; return True if numbers that were never added count as closed from now on, too."""
        at = bisect_right(self._starts, number)
        if at > 0 and number <= self._ends[at - 1]:
            return False
        joins_before = at > 0 and self._ends[at - 1] == number - 1
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_before:
            self._ends[at - 1] = number
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number)
        if len(self._starts) <= self._limit:
            return False
        self._starts.pop(1)
        self._ends.pop(0)
        return True
