"""Clients of a communicator: the process of each rank, and the ranks that are lost or have left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.errors import CollectiveValueError

NAMED = 8
"""Largest number of ranks that one message names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a process."""

    reason: str
    """Symptom by which it was detected."""
    hearsay: bool
    """True if other clients reported it, and not this client's own connection."""


class Roster:
    """The clients of a communicator. Guarded by the communicator's lock, but for `peer`.

    Args:
        rank: This client's id.
        peers: All clients; this one may be among them.

    Raises:
        CollectiveValueError: They are not the ranks 0 to n - 1.
    """

    def __init__(self, rank: int, peers: Sequence[Peer]) -> None:
        known = {peer.rank: peer for peer in peers}
        self.ranks = tuple(sorted(known.keys() | {rank}))
        if self.ranks != tuple(range(len(self.ranks))) or len(known) != len(peers):
            raise CollectiveValueError(
                f"the clients of a communicator must have the ranks 0 to n - 1, once each; got "
                f"{sorted(peer.rank for peer in peers)} for the client of rank {rank}"
            )
        self._rank = rank
        self._peers: Mapping[int, Peer] = known
        self._lost: dict[int, Loss] = {}
        self._left: dict[int, str] = {}

    def check_successors(self, peers: Sequence[Peer]) -> None:
        """Check the clients of a new generation before anything changes.

        Raises:
            CollectiveValueError: They have other ranks, or this client is another process.
        """
        if any(not peer.incarnation for peer in self.others()):
            raise CollectiveValueError(
                "clients without a coordination service cannot be replaced: nobody could tell the "
                "processes apart"
            )
        ranks = sorted(peer.rank for peer in peers if peer.rank != self._rank)
        if ranks != [rank for rank in self.ranks if rank != self._rank]:
            raise CollectiveValueError(
                f"a new generation must have the same ranks 0 to {len(self.ranks) - 1} as before, once "
                f"each; got {sorted(peer.rank for peer in peers)}"
            )
        nameless = [peer.rank for peer in peers if peer.rank != self._rank and not peer.incarnation]
        if nameless:
            raise CollectiveValueError(f"the incarnations of the ranks {nameless} are missing")
        own = self._peers.get(self._rank)
        for peer in peers:
            if peer.rank == self._rank and own is not None and peer.incarnation != own.incarnation:
                raise CollectiveValueError(
                    f"another process ({peer.description}) has taken the place of this client, "
                    f"rank {self._rank}"
                )

    def renew(self, peers: Sequence[Peer]) -> None:
        """Go on with the clients of a new generation.

        Who is lost stays lost if its process is the same, unless that was hearsay: others may have meant its
        predecessor.
        """
        former, self._peers = self._peers, {peer.rank: peer for peer in peers}
        same = {
            rank
            for rank, peer in self._peers.items()
            if rank in former and former[rank].incarnation == peer.incarnation
        }
        self._lost = {rank: loss for rank, loss in self._lost.items() if rank in same and not loss.hearsay}
        self._left = {rank: reason for rank, reason in self._left.items() if rank in same}

    def others(self) -> tuple[Peer, ...]:
        """All clients but this one."""
        return tuple(peer for peer in self._peers.values() if peer.rank != self._rank)

    def lose(self, rank: int, reason: str, incarnation: int = 0, *, hearsay: bool = False) -> bool:
        """Note that a client is lost; False if that is known, or about none of the present processes.

        Args:
            rank: The client.
            reason: How it showed.
            incarnation: Which process of it is meant; 0 for the present one.
            hearsay: Whether others have said so, and not this client's own connection with it.
        """
        peer = self._peers.get(rank)
        if peer is None or rank == self._rank or (incarnation and incarnation != peer.incarnation):
            return False
        known = self._lost.get(rank)
        if known is None or (known.hearsay and not hearsay):
            self._lost[rank] = Loss(reason if known is None else known.reason, hearsay)
        return known is None

    def leave(self, rank: int, reason: str) -> bool:
        """Note that a client has said goodbye, unless that is known; False if it is known to be lost."""
        self._left.setdefault(rank, reason)
        return rank not in self._lost

    def process_of(self, rank: int) -> int | None:
        """Return the incarnation of a client's process: 0 if it is unknown, None if the client is lost."""
        peer = self._peers.get(rank)
        return None if rank in self._lost else 0 if peer is None else peer.incarnation

    def lost(self, rank: int) -> str | None:
        """Return how the loss of a client was detected; None if it is not lost."""
        loss = self._lost.get(rank)
        return None if loss is None else loss.reason

    @property
    def left(self) -> Mapping[int, str]:
        """Ranks that have said goodbye, and their reasons."""
        return self._left

    def describe(self, rank: int) -> str:
        """Return the name of a client for people."""
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank}, {peer.description}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the names of some ranks for people, of `NAMED` at most."""
    shown = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
