"""Data plane of a client: its groups, its transport, and the losses of its peers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dmesh._locks import Lock, RLock
from dmesh._log import logger
from dmesh.collectives.api import resolve
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.arrays import pool_of
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.control import RELAY_LIMIT, ControlHandler
from dmesh.collectives.control_messages import Farewell, Message, clean, encode
from dmesh.collectives.events import EventRing
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.group import Group
from dmesh.collectives.services import Barriers, WaitPolicy, ranks_text
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.collectives.validation import check_position
from dmesh.collectives.work import Generation, group_id
from dmesh.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CollectiveValueError,
    InitializationTimeoutError,
    PeerLostError,
)
from dmesh.runtime import context

if TYPE_CHECKING:
    from dmesh.collectives.consensus import Store

LEFT = (
    "it has left the cluster: its program has ended, or has called dmesh.shutdown_accelerator_system() alone"
)
"""Reason given for a client that has said goodbye without naming one."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
"""Seconds between looks at whether the asynchronous calls of a client that ends are complete."""
_JOINING = (
    "this process has replaced a lost client, and cannot use collectives before its first barrier with all "
    'other clients: call dmesh.coordination.barrier("...") as they do'
)


@dataclass(eq=False, repr=False)
class Communicator:
    """The collectives of one client, and the listener of its transport; `Services` has its other methods.

    Raises:
        CollectiveValueError: The peers are not the ranks 0 to n - 1.
    """

    rank: int
    peers: InitVar[Sequence[Peer]]
    """All clients; this one may be among them."""
    transport: Transport
    """Not started yet."""
    timeout: float
    _: KW_ONLY
    on_gone: Callable[[int, str], None] = lambda rank, reason: None
    """Called once for each client that is gone, with the reason, when the groups know. Any thread; must not
    block."""
    wait_policy: WaitPolicy = field(default_factory=WaitPolicy)
    stuck_after: float = 0.0
    joined: InitVar[int] = 0
    """For a process that replaces a lost client: the cluster's epoch when it was registered, or a later one
    before its first barrier. It can make no calls before its first `renew`. Else 0."""
    shared_memory: SharedMemoryRegistry | None = None
    """None if all groups exchange messages, and say nothing of their tuning."""
    tuning: Tuning = SHIPPED
    """Tuning that it offers to groups. Without shared memory it must be the same on all clients; else each
    group takes that of its first member."""
    mpi: MpiWorld | None = None
    store: Callable[[], Store] | None = None
    """Returns the keys of the coordination service, by which survivors agree; None without one."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, peers: Sequence[Peer], joined: int) -> None:
        self._peers = {peer.rank: peer for peer in peers}
        ranks = tuple(sorted(self._peers.keys() | {self.rank}))
        if ranks != tuple(range(len(ranks))) or len(self._peers) != len(peers):
            raise CollectiveValueError(
                f"the clients of a communicator must have the ranks 0 to n - 1, once each; got "
                f"{sorted(peer.rank for peer in peers)} for the client of rank {self.rank}"
            )
        self.generation = max(joined - 1, 0)
        self.is_joining = bool(joined)
        """True if this process replaces a lost client, and has not met the others yet."""
        self.pool = pool_of(self.shared_memory)
        hosts = {peer.rank: peer.addresses[0].rpartition(":")[0] for peer in peers if peer.addresses}
        mine = hosts.get(self.rank)
        self.neighbours = sum(rank == self.rank or host == mine for rank, host in hosts.items())
        self.events = EventRing(self.clock)
        self.barriers: Barriers = Barriers()
        self.lock = RLock()  # never held while a group is called
        """Guards the groups and the table of other clients."""
        self._lost: dict[int, str] = {}  # how the loss of a client was detected
        self._hearsay: set[int] = set()  # losses that only others have reported
        self._left: dict[int, str] = {}  # clients that have said goodbye, and their reasons
        self._acknowledged: set[int] = set()  # clients without which survivors went on
        self._changing = Lock()  # held while a generation begins, or the group of a mesh is made
        self.groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._mesh_groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        self._made: dict[tuple[tuple[int, ...], str], int] = {}
        self._watched: set[int] = set()
        self.control = ControlHandler(self)
        self._closed: Failure | None = None
        self.world = self.add_group(group_id("world"), ranks, "world")
        """The group of all clients."""
        if others := self._others():
            self.transport.start(self, others, self.generation)

    # -- groups ----------------------------------------------------------------------------------------------

    def new_group(self, ranks: Iterable[int], name: str = "") -> Group:
        """Make a group; see the function `new_group`."""
        if not isinstance(name, str):
            raise CollectiveValueError(f"name of new_group must be a string, got {name!r}")
        checked = self._check_ranks(ranks, "new_group")
        with self.lock:
            count = self._made.get((checked, name), 0)
            self._made[checked, name] = count + 1
        return self.add_group(group_id("new", name, checked, count), checked, clean(name))

    def mesh_group(self, fingerprint: str, axis: str, ranks: Iterable[int]) -> Group:
        """Return the group of clients along an axis of a mesh; the same object for the same arguments."""
        checked = self._check_ranks(ranks, f"the group of mesh dimension {axis!r}")
        key = (fingerprint, axis, checked)
        with self._changing:
            group = self._mesh_groups.get(key)
            if group is None:
                group = self._mesh_groups[key] = self.add_group(group_id("mesh", *key), checked, clean(axis))
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
                f"{what} can only be called by its members: this client, rank {self.rank}, is not one of "
                f"{list(checked)}"
            )
        return checked

    def add_group(self, number: int, ranks: tuple[int, ...], name: str) -> Group:
        """Make the group of an id that its members have agreed on."""
        with self.lock:
            joining = Failure(Cause.JOINING, _JOINING) if self.is_joining else None
            group = self.groups[number] = Group(self, number, ranks, name, joining)
        self._inform(group)
        return group

    def restart(self, group: Group) -> None:
        """Let a group that has failed begin anew, under another id; all its members must do so."""
        with self.lock:
            former = group.restart()
            self.groups.pop(former.members.group, None)
            self.groups[group.id] = group
            if former.failure is not None:
                self.control.remember(former.number, former.members.group, former.failure)
        self._drop_messages(former)
        self._inform(group)

    def acknowledge(self, missing: Iterable[int], group: str) -> None:
        """Take note that the survivors of a group go on without some clients, whatever was known of them."""
        for rank in missing:
            if self.why_gone(rank) is None:
                self.lose(rank, f"the survivors of {group} went on without it", hearsay=True)
            self._acknowledged.add(rank)

    @property
    def goes_on(self) -> bool:
        """True if clients are gone, and survivors have decided to go on without them."""
        return any(self.why_gone(rank) is not None for rank in tuple(self._acknowledged))

    def _drop_messages(self, generation: Generation) -> None:
        """Drop messages, also later ones, for calls with a group's former id."""
        members = generation.members
        me, others = members.rank, range(len(members.ranks))
        pairs = [pair for other in others for pair in ((me, other), (other, me))]
        streams = [group_id(members.group, "transfers", pair) for pair in pairs]
        self.transport.message_queue.close_groups([members.group, *streams])

    def _inform(self, group: Group) -> None:
        """Pass the known losses of members to a new group."""
        with self.lock:
            failure = self._known_failure(group)
            left = {rank: reason for rank, reason in self._left.items() if rank in group.ranks}
        for rank, reason in left.items():
            group.current.member_left(rank, reason)
        if failure is not None:
            group.fail(failure, notify=False)

    def _known_failure(self, group: Group) -> Failure | None:
        """Return the failure that is already known of a group that begins; None if there is none."""
        if self._closed is not None:
            return self._closed
        early = self.control.early_failure(self.generation, group.id)
        if early is not None and early[0] in group.ranks:
            return early[1]
        for rank in group.ranks:
            if (reason := self._lost.get(rank)) is not None:
                return Failure(Cause.LOST, f"lost {self.describe(rank)}: {reason}", (rank,), reason)
        return None

    def all_groups(self) -> list[Group]:
        """Return the groups that this client has made and still holds."""
        with self.lock:
            return list(self.groups.values())

    def _groups_with(self, rank: int) -> list[Group]:
        return [group for group in self.all_groups() if rank in group.ranks]

    # -- the other clients -----------------------------------------------------------------------------------

    def connect_all(self, timeout: float) -> None:
        """Wait until all clients are connected, without a coordination service; all must call it.

        Raises InitializationTimeoutError if some do not come in time.
        """
        deadline = self.clock() + timeout
        all_clients = self.mesh_group("connect", "all clients", self.world.ranks)
        try:
            if self.world.size > 1:
                self.transport.connect_all(timeout)
            # Not only have we reached all, all have reached us.
            all_clients.all_gather(np.array(self.rank), timeout=max(deadline - self.clock(), 0.1))
        except InitializationTimeoutError as error:
            # Others may be about to give up for the same reason, and must not take our leaving for it.
            all_clients.fail(Failure(Cause.TIMEOUT, str(error)))
            raise
        except (CollectiveTimeoutError, PeerLostError) as error:
            failure = all_clients.failure
            if failure is None or failure.cause is not Cause.TIMEOUT:
                raise
            raise InitializationTimeoutError(
                f"not all of the {self.world.size} clients connected in time: {failure.message}. Check "
                "that each "
                "of them was started with the same DTENSOR_JOBS and can be reached; DMESH_INIT_TIMEOUT sets "
                "the limit."
            ) from error

    def _others(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.rank != self.rank]

    def lose(self, rank: int, reason: str, incarnation: int = 0, *, hearsay: bool = False) -> None:
        """Fail all groups that contain a client, because it is lost. Any thread.

        Args:
            rank: The client.
            reason: Symptom by which that was detected.
            incarnation: Its process; 0 for the present one. News of a process that has been replaced since is
                ignored.
            hearsay: True if others have reported it, such as the coordination service, and not this client's
                own connection. Then the client counts again if a later generation has the same process.
        """
        reason = clean(reason)
        with self.lock:
            peer = self._peers.get(rank)
            if self._closed is not None or peer is None or rank == self.rank:
                return
            if incarnation not in (0, peer.incarnation):
                return
            known = rank in self._lost
            self._lost.setdefault(rank, reason)
            if not hearsay:
                self._hearsay.discard(rank)
            elif not known:
                self._hearsay.add(rank)
        if known:
            return
        self._excuse(rank)
        for group in self._groups_with(rank):
            group.current.lose(rank, reason)
        self.on_gone(rank, reason)

    def finished(self, rank: int, reason: str, incarnation: int = 0) -> None:
        """Take note that a client's program has ended normally. Any thread.

        Its last calls are complete, and what it has sent for them is here or on its way. Calls that need more
        of it fail. An incarnation of 0 is the present process.
        """
        current = self.process_of(rank)
        if current is not None and incarnation in (0, current):
            self._leave(rank, clean(reason))

    def left(self, rank: int, reason: str, incarnation: int = 0) -> None:
        """Take note that the coordination service calls a client's leave a clean one. Any thread.

        The data plane hears more exactly when: behind what the client sent before, if it sent anything.
        """
        if not self.transport.hears_from(rank):
            self.finished(rank, reason, incarnation)

    def _leave(self, rank: int, reason: str) -> str:
        with self.lock:
            reason = self._left.setdefault(rank, reason)
        self._excuse(rank)
        for group in self._groups_with(rank):
            group.current.member_left(rank, reason)
        return reason

    def _excuse(self, rank: int) -> None:
        """Wait no more for a client that is gone to say that it is done with this client's memory."""
        if self.shared_memory is not None:
            self.shared_memory.excuse(rank)

    def why_gone(self, rank: int) -> str | None:
        """Return why a client is gone; None if it is not known to be."""
        with self.lock:
            return self._lost.get(rank) or self._left.get(rank)

    def process_of(self, rank: int) -> int | None:
        """Return the incarnation of a client's process: 0 if it is unknown, None if the client is lost."""
        with self.lock:
            peer = self._peers.get(rank)
            return None if rank in self._lost else 0 if peer is None else peer.incarnation

    def describe(self, rank: int) -> str:
        """Return a client's name for people."""
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank}, {peer.description}"

    def watch(self, rank: int) -> None:
        """Notice the death of a client, and of its successors, at once, before any collective needs it."""
        self._watched.add(rank)
        self.transport.watch(rank)

    # -- generations -----------------------------------------------------------------------------------------

    def renew(self, peers: Sequence[Peer], generation: int) -> None:
        """Go on with the clients that there are now: all groups begin anew, in a new generation.

        All clients must call it after the first barrier of all clients that follows a change of the
        membership, with the cluster's epoch at that barrier, also clients to which no process is new: all
        must have the same generation. Users' groups stay valid. Unfinished calls of the former generation
        fail, here and, once notified, on the other clients; their messages are dropped. Messages of the new
        generation that arrive before this call are kept; a process that was unknown here is admitted by this
        call.

        A client that was lost stays lost if its process is still the same, unless that was hearsay: others
        may have meant its predecessor.

        Args:
            peers: All clients; this one may be among them.
            generation: Larger than any before.

        Raises:
            CollectiveError: The collectives are shut down.
            CollectiveValueError: The generation is not a new one, the ranks are not the same as before, or
                there is no coordination service (incarnations are 0).
        """
        with self._changing:
            with self.lock:
                if self._closed is not None:
                    raise self._closed.afterwards("the world")
                if generation <= self.generation:
                    raise CollectiveValueError(
                        f"generation {generation} is not a new one: this client is in generation "
                        f"{self.generation} already"
                    )
                self._check_successors(peers)
            over = Failure(
                Cause.RENEWED,
                f"generation {generation} of the collectives has begun, because the cluster's members have "
                f"changed: calls of generation {self.generation} have ended",
            )
            # Now, so that none of them takes the end of its channel for an error of its own.
            for group in self.all_groups():
                group.fail(over, notify=False)
            if self.world.size == 1:
                self._switch(peers, generation, over)
            else:
                others = [peer for peer in peers if peer.rank != self.rank]
                self.transport.renew(others, generation, lambda: self._switch(peers, generation, over))

    def _check_successors(self, peers: Sequence[Peer]) -> None:
        if any(not peer.incarnation for peer in self._others()):
            raise CollectiveValueError(
                "clients without a coordination service cannot be replaced: nobody could tell the "
                "processes apart"
            )
        others = [peer for peer in peers if peer.rank != self.rank]
        if sorted(peer.rank for peer in others) != [at for at in self.world.ranks if at != self.rank]:
            raise CollectiveValueError(
                f"a new generation must have the same ranks 0 to {self.world.size - 1} as before, once "
                f"each; got {sorted(peer.rank for peer in peers)}"
            )
        if nameless := [peer.rank for peer in others if not peer.incarnation]:
            raise CollectiveValueError(f"the incarnations of the ranks {nameless} are missing")
        own = self._peers.get(self.rank)
        for peer in peers:
            if peer.rank == self.rank and own is not None and peer.incarnation != own.incarnation:
                raise CollectiveValueError(
                    f"another process ({peer.description}) has taken the place of this client, "
                    f"rank {self.rank}"
                )

    def _switch(self, peers: Sequence[Peer], generation: int, over: Failure) -> None:
        """Begin a generation. On the transport's thread: no report of the former one comes any more."""
        with self.lock:
            before = {rank: self.process_of(rank) for rank in self.world.ranks}
            former, self._peers = self._peers, {peer.rank: peer for peer in peers}
            for rank, peer in self._peers.items():
                same = rank in former and former[rank].incarnation == peer.incarnation
                if not same:
                    self._left.pop(rank, None)
                if not same or rank in self._hearsay:
                    self._lost.pop(rank, None)
            self._hearsay.clear()
            self.generation = generation
            self.is_joining = False
            groups = self.all_groups()
            heard = self.control.begin(generation)
        for rank in self.world.ranks:
            if before[rank] != self.process_of(rank):  # replaced, and its end was perhaps not heard of here
                self._excuse(rank)
        for group in groups:
            number = group.id
            group.renew(generation, over)
            if group.id != number:  # it was reset
                with self.lock:
                    self.groups.pop(number, None)
                    self.groups[group.id] = group
            for rank in group.ranks:  # also those of which this client has heard since
                if (reason := self._left.get(rank)) is not None:
                    group.current.member_left(rank, reason)
                if (reason := self._lost.get(rank)) is not None:
                    group.current.lose(rank, reason)
            if self._closed is not None:
                group.close(self._closed)
        for source, number, failure in heard:
            self.control.aborted(source, generation, number, failure)
        for rank in self._watched:
            self.transport.watch(rank)

    # -- the end ---------------------------------------------------------------------------------------------

    def shut_off(self, reason: str) -> None:
        """End the collectives of this client alone, because it may not act for its rank any more."""
        with self.lock:
            if self._closed is None:
                self._closed = Failure(Cause.CLOSED, clean(reason))
            ended = self._closed
        for group in self.all_groups():
            group.close(ended)

    def finish(self, reason: str, seconds: float, *, dial: bool = False) -> None:
        """Complete the asynchronous calls, and notify the others that no more will come.

        Args:
            reason: How this client's program ends.
            seconds: Limit for the calls; they fail by themselves at their own limits.
            dial: Whether to connect for that with clients with which there has been no connection so far.
        """
        deadline = self.clock() + seconds
        pause = _SHORTEST_PAUSE
        while any(group.busy for group in self.all_groups()) and self.clock() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._say_farewell(Farewell(reason, clean=True), dial=dial)

    def _say_farewell(self, farewell: Farewell, *, dial: bool) -> None:
        if self.world.size <= RELAY_LIMIT:
            for rank in self.world.ranks:
                if rank != self.rank and (dial or self.transport.sends_to(rank)):
                    self.send_control(rank, farewell)

    def close(self, linger: float, reason: str = "") -> None:
        """Say goodbye and end everything; pending collectives of other threads fail. Idempotent.

        What has been sent may still be delivered for `linger` seconds. A reason is for the others to report,
        if this client ends without a proper shutdown.
        """
        if reason:
            self._say_farewell(Farewell(reason), dial=True)
        self.shut_off("the collectives of this client have been shut down")
        if self.shared_memory is not None:
            self.shared_memory.close()
        if self.pool is not None:
            self.pool.close()
        self.transport.close(linger)
        if self.mpi is not None:
            self.mpi.close()

    # -- messages --------------------------------------------------------------------------------------------

    def send_control(self, rank: int, message: Message) -> None:
        """Send a control message to a client, as far as that is possible."""
        if self.why_gone(rank) is not None:
            return
        try:
            self.transport.control(rank, encode(message))
        except (CollectiveError, OSError) as error:
            # A client that cannot be reached is lost, which the transport reports by itself.
            logger.debug("cannot send a control message to %s: %s", self.describe(rank), error)

    def busy(self) -> str:
        """Return the call that this client has been in for longest; empty if there is none."""
        record = self.events.oldest_running()
        if record is None:
            return ""
        text = record.call
        if record.group:  # else it is a barrier of the coordination service
            text += f", #{record.sequence} of group {record.group}"
        waits_for = record.waits_for()
        return f"{text}, and waits for {ranks_text(waits_for)}" if waits_for else text

    # -- reports of the transport, on its thread; see `TransportListener` ------------------------------------

    def on_control(self, peer: int, message: bytes) -> None:
        """Take a message of another client."""
        self.control.receive(peer, message)

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """Take note that a client's connection ended without a goodbye."""
        self.lose(peer, reason)

    def on_peer_left(self, peer: int) -> None:
        """Take note of a client's goodbye."""
        reason = self._leave(peer, LEFT)
        if peer not in self._lost:
            self.on_gone(peer, reason)

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        """Take note that a client's message for one of this client's calls is of another call."""
        text = clean(signature.decode("utf-8", "replace"))
        # In a channel of number 0 the members choose the group's backends, for its first call.
        self.control.mismatched(generation, group, max(sequence, 1), peer, text)


def world() -> Group:
    """Return the group of all clients, the default group of every collective.

    Raises:
        NotInitializedError: The system has not been initialized.
    """
    return context.current().get(Communicator).world


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Create a group of some clients, without communication. Only its members call this, in the same order.

    ```python
    assert dmesh.collectives.new_group([dmesh.rank()]).size == 1
    ```

    Args:
        ranks: Client ids, in the order of their positions in the group; this client's must be among them.
        name: Name in messages; it also distinguishes groups of the same ranks.

    Raises:
        CollectiveValueError: A rank does not exist or appears twice, or this client's is missing.
        NotInitializedError: The system has not been initialized.
    """
    return context.current().get(Communicator).new_group(ranks, name)


def split(
    color: int | None, key: int = 0, *, group: Group | None = None, timeout: float | None = None
) -> Group | None:
    """Split a group into groups of ranks with the same color. All its members must call it.

    Unlike `new_group`, no rank has to know the others' colors. The group's errors name it after the group
    that it is a part of, such as `world/color=1`.

    Args:
        color: Number of this rank's new group; None to be in none.
        key: Ranks are ordered by their keys in the new group; those with equal keys, as in `group`.
        group: Group to be divided; None for all clients.
        timeout: Seconds; None for the cluster's limit.

    Returns:
        This rank's new group; None without a color.

    Raises:
        CollectiveMismatchError: Another rank made a different call.
        CollectiveTimeoutError: The call timed out, on this rank or on another.
        CollectiveValueError: A color or key is not an integer of 64 bits.
        NotInitializedError: The system has not been initialized.
        PeerLostError: A member of the group died or left.
    """
    divided = resolve(group)
    assert isinstance(divided, Group)
    return divided.split(color, key, timeout=timeout)
