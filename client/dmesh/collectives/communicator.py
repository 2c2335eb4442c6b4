"""A client's end of the data plane: its groups, and what it hears of its peers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmesh._log import logger
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.arrays import SharedMemory
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.control import RELAY_LIMIT, ControlHandler
from dmesh.collectives.control_messages import Farewell, Message, clean, encode
from dmesh.collectives.events import EventRing
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.group import Group, group_id
from dmesh.collectives.roster import Roster, ranks_text
from dmesh.collectives.services import Barriers, WaitPolicy
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.collectives.validation import check_position
from dmesh.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CollectiveValueError,
    InitializationTimeoutError,
    PeerLostError,
)

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


class Communicator:
    """The collectives of one client. It is also what its transport reports to.

    Args:
        rank: This client's id.
        peers: All clients; this one may be among them.
        transport: Moves bytes; not started yet.
        timeout: Seconds that a collective may take if its caller says nothing else.
        on_gone: Told once of each client that is gone, and why, when the collectives have been told. Any
            thread; must not block.
        wait_policy: When a waiting rank asks and announces.
        stuck_after: Seconds of waiting after which, and again after as many more, a call's wait is reported
            (`EventRing.on_waiting`); 0 for never.
        joined: If this process takes the seat of one that was lost: the cluster's epoch when it was
        registered,
            or any later one before its first barrier. It can make no calls before its first `renew`. 0 if it
            has been there from the beginning.
        shared_memory: What it shares with clients on its host; None for nothing: all groups exchange messages
            then, and say nothing of their tuning.
        tuning: Of this client's machine. Without shared memory it must be the same on all clients; else
            each group takes that of its first member.
        mpi: MPI launch that carries the arrays; None if TCP does.
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
        wait_policy: WaitPolicy | None = None,
        stuck_after: float = 0.0,
        joined: int = 0,
        shared_memory: SharedMemory | None = None,
        tuning: Tuning = SHIPPED,
        mpi: MpiWorld | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = Roster(rank, peers)
        self.rank = rank
        self.transport = transport
        self.timeout = timeout
        self.wait_policy = wait_policy or WaitPolicy()
        self.stuck_after = stuck_after
        self.generation = max(joined - 1, 0)
        """In which life of the groups this client is."""
        self.shared_memory = shared_memory
        self.mpi = mpi
        self.tuning = tuning
        """Tuning that this client offers to groups whose first call is yet to come."""
        self.neighbours = _neighbours(rank, peers)
        """Number of clients on this host, this one included, according to their addresses."""
        self._joining = None if not joined else Failure(Cause.JOINING, _JOINING)
        self._on_gone = on_gone
        self.clock = clock
        self.events = EventRing(clock)
        self.barriers: Barriers = Barriers()
        """The barriers of the coordination service, if there is one."""
        self.lock = threading.Lock()  # never held while a group is called
        self._making = threading.Lock()
        self._renewing = threading.Lock()
        self.groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._mesh_groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        self._made: dict[tuple[tuple[int, ...], str], int] = {}
        self._watched: set[int] = set()
        self.control = ControlHandler(self)
        self._closed: Failure | None = None
        self.world = self._add(group_id("world"), self._roster.ranks, "world")
        """The group of all clients."""
        if others := self._roster.others():
            transport.start(self, others, self.generation)

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
        with self.lock:
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
        with self.lock:
            group = self.groups[number] = Group(self, number, ranks, name, self._joining)
            failure = self._known_failure(group)
            left = {rank: reason for rank, reason in self._roster.left.items() if rank in ranks}
        for rank, reason in left.items():
            group.current.member_left(rank, reason)
        if failure is not None:
            group.fail(failure, tell=False)
        return group

    def _known_failure(self, group: Group) -> Failure | None:
        """Return the failure that is already known of a group that begins; None if there is none."""
        if self._closed is not None:
            return self._closed
        early = self.control.early_failure(self.generation, group.id)
        if early is not None and early[0] in group.ranks:
            return early[1]
        for rank in group.ranks:
            if (reason := self._roster.lost(rank)) is not None:
                return Failure(Cause.LOST, f"lost {self.describe(rank)}: {reason}", (rank,), reason)
        return None

    def all_groups(self) -> list[Group]:
        """Returns the groups that this client has made and still holds."""
        with self.lock:
            return list(self.groups.values())

    def _groups_with(self, rank: int) -> list[Group]:
        with self.lock:
            return [group for group in self.groups.values() if rank in group.ranks]

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

    def departed(self, rank: int, reason: str, incarnation: int = 0) -> None:
        """The coordination service says that a client is gone. Any thread.

        All pending and later collectives of groups that contain it fail.

        Args:
            rank: The client.
            reason: How it showed.
            incarnation: Which process of it; 0 for the present one. News of a process that has been replaced
                since comes too late to matter.
        """
        # Not for ever: if the service names the same process as a member later, that is how it is.
        self.lose(rank, reason, incarnation, hearsay=True)

    def lose(self, rank: int, reason: str, incarnation: int = 0, *, hearsay: bool = False) -> None:
        """A client is lost; see `Roster.lose`. Any thread."""
        reason = clean(reason)
        with self.lock:
            if self._closed is not None or not self._roster.lose(rank, reason, incarnation, hearsay=hearsay):
                return
        self._excuse(rank)
        for group in self._groups_with(rank):
            group.current.lose(rank, reason)
        self._note_gone(rank, reason)

    def finished(self, rank: int, reason: str, incarnation: int = 0) -> None:
        """Take note that a client's program has ended normally. Any thread.

        Its last calls are complete, and what it has sent for them is here or on its way. Calls that need more
        of it fail.

        Args:
            rank: The client.
            reason: How its program ended.
            incarnation: Which process of it; 0 for the present one.
        """
        with self.lock:
            current = self._roster.process_of(rank)
        if current is not None and incarnation in (0, current):
            self._leave(rank, clean(reason))

    def left(self, rank: int, reason: str, incarnation: int = 0) -> None:
        """Take note that the coordination service calls a client's leave a clean one. Any thread.

        The data plane hears more exactly when: behind what the client sent before, if it sent anything.
        """
        if not self.transport.hears_from(rank):
            self.finished(rank, reason, incarnation)

    def _leave(self, rank: int, reason: str) -> bool:
        with self.lock:
            news = self._roster.leave(rank, reason)
            reason = self._roster.left[rank]
        self._excuse(rank)
        for group in self._groups_with(rank):
            group.current.member_left(rank, reason)
        return news

    def _excuse(self, rank: int) -> None:
        """Waits no more for a client that is gone to say that it is done with this client's memory."""
        if self.shared_memory is not None:
            self.shared_memory.excuse(rank)

    def _note_gone(self, rank: int, reason: str) -> None:
        if self._on_gone is not None:
            self._on_gone(rank, reason)

    def why_gone(self, rank: int) -> str | None:
        """Returns what is known of the departure of a client; None if it is not known to have departed."""
        with self.lock:
            return self._roster.lost(rank) or self._roster.left.get(rank)

    def process_of(self, rank: int) -> int | None:
        """Tells one process of a client from the next; None if it is lost."""
        with self.lock:
            return self._roster.process_of(rank)

    def describe(self, rank: int) -> str:
        """Names a client to a person."""
        return self._roster.describe(rank)

    def watch(self, rank: int) -> None:
        """Sees to it that the death of a client is noticed at once, before any collective needs it.

        Of whoever takes its seat later, too.
        """
        self._watched.add(rank)
        self.transport.watch(rank)

    def renew(self, peers: Sequence[Peer], generation: int) -> None:
        """Goes on with the clients that there are now: all groups begin anew, in a new generation.

        To be called by all clients when they have passed a barrier of all clients since which the membership
        is another one, with the cluster's epoch as of that barrier, the same for all. Not only by those to
        whom a process is new: everybody must come to the same generation. Groups that users hold go on
        working. Calls of the former generation that are still under way fail, here and (as they hear of it)
        elsewhere; what was sent for them is dropped. Messages of the new generation may come before this
        call: they are kept, whereas a process that is not known here before is let in by this call.

        A client that was lost, and whose process is still the same, stays lost.

        Args:
            peers: All clients; this one may be among them.
            generation: Larger than any before.

        Raises:
            CollectiveError: The collectives are shut down.
            CollectiveValueError: The generation is not a new one, the ranks are not the same as before, or
            there
                is no coordination service (incarnations are 0).
        """
        with self._renewing:
            with self.lock:
                if self._closed is not None:
                    raise self._closed.afterwards("the world")
                if generation <= self.generation:
                    raise CollectiveValueError(
                        f"generation {generation} is not a new one: this client is in generation "
                        f"{self.generation} already"
                    )
                self._roster.check_successors(peers)
                groups = list(self.groups.values())
            over = Failure(
                Cause.RENEWED,
                f"generation {generation} of the collectives has begun, because the cluster's members have "
                f"changed: calls of generation {self.generation} have ended",
            )
            # Now, so that none of them takes the end of its channel for an error of its own.
            for group in groups:
                group.fail(over, tell=False)
            if self.world.size == 1:
                self._switch(peers, generation, over)
            else:
                others = [peer for peer in peers if peer.rank != self.rank]
                self.transport.renew(others, generation, lambda: self._switch(peers, generation, over))

    def _switch(self, peers: Sequence[Peer], generation: int, over: Failure) -> None:
        """Begins a generation. On the transport's thread: no report of the former one comes any more."""
        former = {rank: self.process_of(rank) for rank in self.world.ranks}
        with self.lock:
            self._roster.renew(peers)
            self.generation = generation
            self._joining = None
            groups = list(self.groups.values())
            heard = self.control.begin(generation)
            left = dict(self._roster.left)
        for rank in self.world.ranks:
            if former[rank] != self.process_of(rank):  # replaced, and its end was perhaps not heard of here
                self._excuse(rank)
        for group in groups:
            group.renew(generation, over)
            for rank in group.ranks:
                if rank in left:
                    group.current.member_left(rank, left[rank])
                if (reason := self._lost_now(rank)) is not None:
                    group.current.lose(rank, reason)
            if self._closed is not None:
                group.close(self._closed)
        for source, number, failure in heard:
            self.control.aborted(source, generation, number, failure)
        for rank in self._watched:
            self.transport.watch(rank)

    def _lost_now(self, rank: int) -> str | None:
        with self.lock:
            return self._roster.lost(rank)

    def shut_off(self, reason: str) -> None:
        """Ends the collectives of this client alone, because it may not act for its rank any more."""
        self._end(Failure(Cause.CLOSED, clean(reason)))

    def _end(self, failure: Failure) -> None:
        with self.lock:
            if self._closed is None:
                self._closed = failure
            ended, groups = self._closed, list(self.groups.values())
        for group in groups:
            group.close(ended)

    def finish(self, reason: str, seconds: float, *, dial: bool = False) -> None:
        """Complete the asynchronous calls that have been made, and tell the others that no more will come.

        Args:
            reason: How this client's program ends.
            seconds: Limit for the calls; they fail by themselves at their own limits.
            dial: Whether clients are told with whom this one has had no connection so far.
        """
        deadline = self.clock() + seconds
        pause = _SHORTEST_PAUSE
        while any(group.busy for group in self.all_groups()) and self.clock() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if self.world.size <= RELAY_LIMIT:
            for rank in self.world.ranks:
                if rank != self.rank and (dial or self.transport.sends_to(rank)):
                    self.tell(rank, Farewell(reason, clean=True))

    def close(self, linger: float, reason: str = "") -> None:
        """Says goodbye and ends everything; pending collectives of other threads fail. Idempotent.

        Args:
            linger: Seconds for which what has been sent may still be delivered.
            reason: Why this client ends without a proper shutdown, for the others to report; else empty.
        """
        if reason and self.world.size <= RELAY_LIMIT:
            for rank in self.world.ranks:
                if rank != self.rank:
                    self.tell(rank, Farewell(reason))
        self._end(Failure(Cause.CLOSED, "the collectives of this client have been shut down"))
        if self.shared_memory is not None:
            self.shared_memory.close()
        self.transport.close(linger)
        if self.mpi is not None:
            self.mpi.close()

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

    @property
    def is_joining(self) -> bool:
        """True if this process has taken a seat, and has not met the others yet."""
        return self._joining is not None

    def busy(self) -> str:
        """Returns what this client has been doing for longest; empty if nothing."""
        record = self.events.oldest_running()
        if record is None:
            return ""
        text = record.call
        if record.group:  # else it is a barrier of the coordination service
            text += f", #{record.sequence} of group {record.group}"
        waits_for = record.waits_for()
        return f"{text}, and waits for {ranks_text(waits_for)}" if waits_for else text

    # -- what the transport reports; on its thread -----------------------------------------------------------

    def on_control(self, peer: int, message: bytes) -> None:
        """A message came from another client."""
        self.control.receive(peer, message)

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """A client's connection ended without a goodbye."""
        self.lose(peer, reason)

    def on_peer_left(self, peer: int) -> None:
        """Take note of a client's goodbye."""
        if self._leave(peer, LEFT):
            self._note_gone(peer, self._roster.left[peer])

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        """A client's message for one of this client's calls is of another call."""
        text = clean(signature.decode("utf-8", "replace"))
        self.control.mismatched(generation, group, sequence, peer, text)


def _neighbours(rank: int, peers: Sequence[Peer]) -> int:
    hosts = {peer.rank: peer.addresses[0].rpartition(":")[0] for peer in peers if peer.addresses}
    return sum(other == rank or host == hosts.get(rank) for other, host in hosts.items())
