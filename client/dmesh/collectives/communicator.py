"""A client's end of the data plane: its groups, and what it hears of its peers."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmesh._log import logger
from dmesh.collectives.arguments import check_position
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.flight import FlightRecorder
from dmesh.collectives.group import Group, group_id
from dmesh.collectives.messages import (
    Abort,
    BadMessage,
    Farewell,
    Here,
    Message,
    Where,
    clean,
    decode,
    encode,
)
from dmesh.collectives.patience import Patience
from dmesh.collectives.transport.base import Peer, Transport
from dmesh.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CollectiveValueError,
    InitializationTimeoutError,
    PeerLostError,
)

_REMEMBERED = 256
"""How many failures are kept of groups that this client has not made yet."""
_RELAY_LIMIT = 64
"""Up to this size, members of a group pass on failures that they hear of."""


class Communicator:
    """The collectives of one client. It is also what its transport reports to.

    Args:
        rank: This client's id.
        peers: All clients; this one may be among them.
        transport: Moves bytes; not started yet.
        timeout: Seconds that a collective may take if its caller says nothing else.
        on_gone: Told once of each client that is gone, and why, when the collectives have been told. Any
            thread; must not block.
        patience: When a waiting rank asks and announces.
        clock: Seconds, monotonic.

    Raises:
        CollectiveValueError: The peers are not the ranks 0 to n - 1.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        transport: Transport,
        timeout: float,
        *,
        on_gone: Callable[[int, str], None] | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        known = {peer.rank: peer for peer in peers}
        ranks = tuple(sorted(known.keys() | {rank}))
        if ranks != tuple(range(len(ranks))) or len(known) != len(peers):
            raise CollectiveValueError(
                f"the clients of a communicator must have the ranks 0 to n - 1, once each; got "
                f"{sorted(peer.rank for peer in peers)} for the client of rank {rank}"
            )
        self.rank = rank
        self.transport = transport
        self.timeout = timeout
        self.patience = patience or Patience()
        self._on_gone = on_gone
        self.clock = clock
        self.flight = FlightRecorder(clock=clock)
        self._peers = known
        self._lock = threading.Lock()  # never held while a group is called
        self._making = threading.Lock()
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._numbers: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._mesh_groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        self._made: dict[tuple[tuple[int, ...], str], int] = {}
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._early_aborts: OrderedDict[int, tuple[int, Failure]] = OrderedDict()
        self._closed: Failure | None = None
        self.world = self._add(group_id("world"), ranks, "world")
        """The group of all clients."""
        others = [peer for peer in peers if peer.rank != rank]
        if others:
            transport.start(self, others)

    # -- groups ----------------------------------------------------------------------------------------------

    def new_group(self, ranks: Iterable[int], name: str = "") -> Group:
        """Makes a group; all its members must do so, with the same arguments.

        They do not talk to each other: members that make groups of the same ranks and name make them in the
        same order, and so mean the same group.

        Args:
            ranks: Client ids in the order of their positions in the group; this client must be among them.
            name: For messages, and to tell apart groups of the same ranks.

        Raises:
            CollectiveValueError: A rank does not exist, is named twice, or this client's is missing.
        """
        if not isinstance(name, str):
            raise CollectiveValueError(f"name of new_group must be a string, got {name!r}")
        checked = self._check_ranks(ranks, "new_group")
        with self._lock:
            count = self._made.get((checked, name), 0)
            self._made[checked, name] = count + 1
        return self._add(group_id("new", name, checked, count), checked, clean(name))

    def mesh_group(self, fingerprint: str, axis: str, ranks: Iterable[int]) -> Group:
        """Returns the group of clients along an axis of a mesh; the same object for the same arguments.

        Args:
            fingerprint: What identifies the mesh among all meshes, the same on all clients.
            axis: Name of the mesh dimension.
            ranks: Client ids along it.

        Raises:
            CollectiveValueError: A rank does not exist, is named twice, or this client's is missing.
        """
        checked = self._check_ranks(ranks, f"the group of mesh dimension {axis!r}")
        key = (fingerprint, axis, checked)
        with self._making:
            group = self._mesh_groups.get(key)
            if group is None:
                group = self._add(group_id("mesh", *key), checked, clean(axis))
                self._mesh_groups[key] = group
            return group

    def _check_ranks(self, ranks: Iterable[int], what: str) -> tuple[int, ...]:
        try:
            given = list(ranks)
        except TypeError:
            raise CollectiveValueError(f"{what} needs a list of ranks, got {ranks!r}") from None
        checked = tuple(check_position(rank, self.world.size, "rank", what) for rank in given)
        if len(set(checked)) != len(checked):
            raise CollectiveValueError(f"{what} got a rank more than once: {list(checked)}")
        if self.rank not in checked:
            raise CollectiveValueError(
                f"{what} is for its members alone: this client, rank {self.rank}, is not among "
                f"{list(checked)}"
            )
        return checked

    def _add(self, number: int, ranks: tuple[int, ...], name: str) -> Group:
        group = Group(self, number, ranks, name)
        with self._lock:
            self._groups[number] = self._numbers[number] = group
            failure = self._closed or self._known_failure(group)
            left = {rank: reason for rank, reason in self._left.items() if rank in ranks}
        for rank, reason in left.items():
            group.member_left(rank, reason)
        if failure is not None:
            group.fail(failure, tell=False)
        return group

    def _known_failure(self, group: Group) -> Failure | None:
        """What is already known to be wrong with a group that is being made."""
        source, failure = self._early_aborts.pop(group.id, (-1, None))
        if failure is not None and source in group.ranks:
            return failure
        for rank in group.ranks:
            if rank in self._lost:
                reason = self._lost[rank]
                return Failure(Cause.LOST, f"lost {self.describe(rank)}: {reason}", (rank,), reason)
        return None

    def register(self, number: int, group: Group) -> None:
        """Notes that a transport's group number is one of this group's."""
        with self._lock:
            self._numbers[number] = group

    def _groups_with(self, rank: int) -> list[Group]:
        with self._lock:
            return [group for group in self._groups.values() if rank in group.ranks]

    # -- membership ------------------------------------------------------------------------------------------

    def connect_all(self, timeout: float) -> None:
        """Waits until this client has a connection with every other.

        For clients that have nobody to tell them who is there: they must all call it.

        Raises:
            InitializationTimeoutError: Some did not come in time.
            PeerLostError: One of them died meanwhile.
        """
        deadline = self.clock() + timeout
        everybody = self.mesh_group("connect", "all clients", self.world.ranks)
        try:
            if self.world.size > 1:
                self.transport.connect_all(timeout)
            # Not only have we reached all, all have reached us.
            everybody.all_gather(np.array(self.rank), timeout=max(deadline - self.clock(), 0.1))
        except InitializationTimeoutError as error:
            # Others may be about to give up for the same reason, and must not take our leaving for it.
            everybody.fail(Failure(Cause.TIMEOUT, str(error)))
            raise
        except (CollectiveTimeoutError, PeerLostError) as error:
            failure = everybody.failure
            if failure is None or failure.cause is not Cause.TIMEOUT:
                raise
            raise InitializationTimeoutError(
                f"not all of the {self.world.size} clients came in time: {failure.message}. Check that each "
                "of them was started with the same DTENSOR_JOBS and can be reached; DMESH_INIT_TIMEOUT sets "
                "the limit."
            ) from error

    def departed(self, rank: int, reason: str) -> None:
        """The coordination service says that a client is gone. Any thread.

        All pending and later collectives of groups that contain it fail.
        """
        self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        if rank == self.rank or rank not in self._peers:
            return
        reason = clean(reason)
        with self._lock:
            if rank in self._lost or self._closed is not None:
                return
            self._lost[rank] = reason
        for group in self._groups_with(rank):
            group.lose(rank, reason)
        self._note_gone(rank, reason)

    def _note_gone(self, rank: int, reason: str) -> None:
        if self._on_gone is not None:
            self._on_gone(rank, reason)

    def why_gone(self, rank: int) -> str | None:
        """Returns what is known of the departure of a client; None if it is not known to have departed."""
        with self._lock:
            return self._lost.get(rank) or self._left.get(rank)

    def describe(self, rank: int) -> str:
        """Names a client to a person."""
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank}, {peer.description}"

    def watch(self, rank: int) -> None:
        """Sees to it that the death of a client is noticed at once, before any collective needs it."""
        self.transport.watch(rank)

    def shut_off(self, reason: str) -> None:
        """Ends the collectives of this client alone, because it may not act for its rank any more."""
        self._end(Failure(Cause.CLOSED, clean(reason)))

    def _end(self, failure: Failure) -> None:
        with self._lock:
            if self._closed is None:
                self._closed = failure
            ended, groups = self._closed, list(self._groups.values())
        for group in groups:
            group.close(ended)

    def close(self, linger: float, reason: str = "") -> None:
        """Says goodbye and ends everything; pending collectives of other threads fail. Idempotent.

        Args:
            linger: Seconds for which what has been sent may still be delivered.
            reason: Why this client ends without a proper shutdown, for the others to report; else empty.
        """
        if reason and self.world.size <= _RELAY_LIMIT:
            for rank in self.world.ranks:
                if rank != self.rank:
                    self.tell(rank, Farewell(reason))
        self._end(Failure(Cause.CLOSED, "the collectives of this client have been shut down"))
        self.transport.close(linger)

    # -- what groups need ------------------------------------------------------------------------------------

    def tell(self, rank: int, message: Message) -> None:
        """Sends a message to a client, as far as that is possible."""
        if self.why_gone(rank) is not None:
            return
        try:
            self.transport.control(rank, encode(message))
        except (CollectiveError, OSError) as error:
            # Whoever cannot be reached is lost, which the transport reports by itself.
            logger.debug("%s could not be told: %s", self.describe(rank), error)

    def busy(self) -> str:
        """Returns what this client has been doing for longest; empty if nothing."""
        for record in self.flight.records():
            if record.began is not None and record.ended is None:
                return f"{record.call}, #{record.sequence} of group {record.group}"
        return ""

    # -- what the transport reports; on its thread -----------------------------------------------------------

    def on_control(self, peer: int, message: bytes) -> None:
        """A message came from another client."""
        try:
            decoded = decode(message)
        except BadMessage as error:
            logger.warning("a message from %s makes no sense and is ignored: %s", self.describe(peer), error)
            return
        match decoded:
            case Abort(number, failure):
                self._on_abort(peer, number, failure)
            case Where(number, pair, sequence, _, question):
                group = self._find(self._groups, number)
                if group is not None:
                    group.asked(peer, decoded)
                else:
                    here = Here(number, pair, sequence, question, "unknown", 0, "", self.busy())
                    self.tell(peer, here)
            case Farewell(reason):
                self._lose(peer, reason)
            case Here(number):
                group = self._find(self._groups, number)
                if group is not None:
                    group.answered(peer, decoded)

    def _on_abort(self, peer: int, number: int, failure: Failure) -> None:
        lost = failure.ranks[0] if failure.cause is Cause.LOST and failure.ranks else None
        if lost == self.rank:
            reason = f"it has given up on this client ({failure.reason})"
            lost, failure = (
                peer,
                Failure(Cause.LOST, f"lost {self.describe(peer)}: {reason}", (peer,), reason),
            )
        with self._lock:
            group = self._groups.get(number)
            if group is None:
                self._early_aborts.setdefault(number, (peer, failure))
                while len(self._early_aborts) > _REMEMBERED:
                    self._early_aborts.popitem(last=False)
        if group is not None:
            if peer not in group.ranks or not set(failure.ranks) <= set(group.ranks):
                return
            # Passed on, so that nobody sees this process end before the cause has reached it on another way;
            # in large groups that would be too many messages.
            group.fail(failure, tell=None if group.size <= _RELAY_LIMIT else False)
        if lost is not None:
            # It is lost to the other groups, too, and this client may have no connection with it that would
            # show it.
            self._lose(lost, failure.reason)

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """A client's connection ended without a goodbye."""
        self._lose(peer, reason)

    def on_peer_left(self, peer: int) -> None:
        """A client said goodbye."""
        reason = "it has left the cluster"
        with self._lock:
            self._left[peer] = reason
            known = peer in self._lost
        for group in self._groups_with(peer):
            group.member_left(peer, reason)
        if not known:
            self._note_gone(peer, reason)

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes) -> None:
        """A client's message for one of this client's calls is of another call."""
        found = self._find(self._numbers, group)
        if found is not None:
            found.mismatched(group, sequence, peer, clean(signature.decode("utf-8", "replace")))

    def _find(self, groups: weakref.WeakValueDictionary[int, Group], number: int) -> Group | None:
        with self._lock:
            return groups.get(number)
