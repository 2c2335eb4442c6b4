"""A group: which ranks, in what order, the number of each call; and how its failure reaches all members."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmesh.collectives.arguments import check_timeout
from dmesh.collectives.call import Call, Lane, called_text, label
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.messages import Abort, Here, State, Where, clean
from dmesh.collectives.operations import Operations
from dmesh.collectives.plans import Plan, Planner
from dmesh.collectives.worker import Worker
from dmesh.errors import CollectiveError, PeerLostError

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator


def group_id(*parts: object) -> int:
    """Returns the id that all members compute for themselves from what makes a group what it is."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, person=b"dmesh group").digest(), "big"
    )


class Group(Operations):
    """Ranks that call collectives together.

    All members must make the same calls on a group in the same order. Different groups, and the transfers
    (`send`, `recv`) between different pairs of ranks, are counted separately and may be used by different
    threads at once.

    The first failure of a group is the failure of all its members and of all later calls: ranks that have
    lost step cannot find it again. Other groups go on.

    Groups are made by `dmesh.collectives.new_group` and `Mesh.group`.

    Args:
        communicator: Of this client.
        number: The group's id, the same on all members.
        ranks: Its members.
        name: For people.
    """

    def __init__(self, communicator: Communicator, number: int, ranks: tuple[int, ...], name: str) -> None:
        self.communicator = communicator
        self.id = number
        self.ranks = ranks
        self.name = name
        self.world_rank = communicator.rank
        self._rank = ranks.index(communicator.rank)
        self._planner = Planner(len(ranks), self._rank)
        self._lock = threading.Lock()
        self._failing = threading.RLock()  # held by the one that fails the group, while it tells the others
        self._claimed = False
        self._told = False
        self._reported = False
        self._failure: Failure | None = None
        self._departed: dict[int, str] = {}
        self._lanes: dict[tuple[int, int] | None, Lane] = {None: Lane(number, None)}
        self._worker = Worker(f"dmesh-group-{name or 'ranks'}")
        self._finalizer = weakref.finalize(self, self._worker.stop)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name or '(unnamed)'}: ranks {list(self.ranks)}, this is position {self._rank}>"

    @property
    def rank(self) -> int:
        """This client's position in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @property
    def label(self) -> str:
        """The group as people read it."""
        return f"group {self.name}" if self.name else f"group of ranks {', '.join(map(str, self.ranks))}"

    @property
    def failure(self) -> Failure | None:
        """Why the group failed; None if it has not."""
        return self._failure

    # -- calls -----------------------------------------------------------------------------------------------

    def _make(
        self, plan: Plan, timeout: float | None, async_op: bool, pair: tuple[int, int] | None = None
    ) -> Any:
        """Gives a checked call its number, and carries it out now or in the group's thread."""
        seconds = check_timeout(timeout, self.communicator.timeout)
        flight = self.communicator.flight
        with self._lock:
            refusal = self._refusal()
            lane = self._lanes.get(pair) or self._add_lane(pair)
            if refusal is None:
                lane.issued += 1
                text = called_text(self, lane, self.world_rank, plan.signature)
                record = flight.called(self.name or self.label, lane.issued, text, plan.nbytes)
                call = Call(self, lane, lane.issued, plan.signature, seconds, record)
                lane.calls[call.sequence] = call
        if refusal is not None:
            with self._failing:
                if self._failure is not None and not self._told:
                    self._tell_members(refusal)  # they may be waiting for the call that is refused here
            if not self._reported:
                # To this rank's user it is the error of the call that failed elsewhere before it was made
                # here.
                self._reported = self._failure is not None
                raise refusal.during(
                    f"{called_text(self, lane, self.world_rank, plan.signature)} of {self.label}"
                )
            raise refusal.afterwards(self.label)
        if async_op:
            return self._worker.submit(lambda: self._carry_out(call, plan))
        return self._carry_out(call, plan)

    def _add_lane(self, pair: tuple[int, int] | None) -> Lane:
        lane = self._lanes[pair] = Lane(group_id(self.id, "transfers", pair), pair)
        self.communicator.register(lane.number, self)
        return lane

    def _refusal(self) -> Failure | None:
        if self._failure is None and self._departed:
            # Whoever has left had finished all calls that others had begun before, so it will not come to a
            # new one. Those that are under way may still succeed, so the group has not failed for them.
            rank = min(self._departed)
            return self._lost(rank, self._departed[rank])
        return self._failure

    def _carry_out(self, call: Call, plan: Plan) -> Any:
        flight = self.communicator.flight
        flight.began(call.record)
        try:
            result = plan.carry_out(self.ranks, lambda: self._open(call))
        except BaseException as error:
            final = self._explain(call, error)
            self._close(call, succeeded=False)
            flight.ended(call.record, final)
            if final is error:
                raise
            raise final from (error if isinstance(error, PeerLostError) else None)
        self._close(call, succeeded=True)
        flight.ended(call.record)
        return result

    def _open(self, call: Call) -> Call:
        if self.size == 1:
            return call
        signature = call.signature.encode()
        channel = self.communicator.transport.open(call.lane.number, call.sequence, signature)
        with self._lock:
            call.begin(channel)
            failure = self._failure
        if failure is not None:
            raise failure.during(str(call))
        return call

    def _close(self, call: Call, *, succeeded: bool) -> None:
        if call.channel is not None:
            call.channel.close()
        with self._lock:
            lane = call.lane
            lane.calls.pop(call.sequence, None)
            if succeeded and call.sequence > lane.finished:
                lane.finished, lane.last = call.sequence, call.signature

    def _explain(self, call: Call, error: BaseException) -> BaseException:
        """Makes sure that the group has failed, and returns what the caller is to get."""
        if isinstance(error, PeerLostError) and self._failure is None:
            # The transport found it out; the communicator's listener may hear of it in a moment, too.
            self.lose(error.rank, self.communicator.why_gone(error.rank) or str(error))
        elif self._failure is None:
            told = clean(f"{type(error).__name__}: {error}".rstrip(": "))
            self.fail(
                Failure(Cause.BROKEN, f"rank {self.world_rank} gave up {call}: {told}", (self.world_rank,))
            )
            self._reported = True
            return error
        failure = self._failure
        assert failure is not None
        self._reported = True
        if not isinstance(error, CollectiveError):
            return error  # a Ctrl-C stays one
        return failure.during(str(call))

    # -- failures --------------------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool | None = True) -> None:
        """Fails the group, unless it has failed before. Any thread.

        Args:
            failure: Why.
            tell: Whether the other members must hear of it from here. None leaves it until somebody may be
                waiting for this rank: at once if calls are under way, else when the next one is refused.
        """
        with self._failing:
            if self._failure is not None or self._claimed:
                return
            self._claimed = True
            with self._lock:
                waited_for = any(lane.calls for lane in self._lanes.values())
            self._told = tell is False
            if tell or (tell is None and waited_for):
                # Before anybody here can see the failure and act on it: withdraw a message, end the process.
                # The others must hear of the cause before they see its consequences.
                self._tell_members(failure)
            with self._lock:
                self._failure = failure
                calls = [call for lane in self._lanes.values() for call in lane.calls.values()]
        for call in calls:
            if call.channel is not None:
                call.channel.fail(failure.during(str(call)))

    def _tell_members(self, failure: Failure) -> None:
        self._told = True
        for rank in self.ranks:
            if rank != self.world_rank:
                self.communicator.tell(rank, Abort(self.id, failure))

    def close(self, failure: Failure) -> None:
        """Ends the group on this client alone: its calls fail, its thread stops."""
        self.fail(failure, tell=False)
        self._worker.stop()

    def lose(self, rank: int, reason: str) -> None:
        """Fails the group because a member is gone. Any thread."""
        self.fail(self._lost(rank, reason), tell=None)

    def _lost(self, rank: int, reason: str) -> Failure:
        return Failure(Cause.LOST, f"lost {self.communicator.describe(rank)}: {reason}", (rank,), reason)

    def member_left(self, rank: int, reason: str) -> None:
        """A member said goodbye: what it has sent is here, more will not come. Any thread."""
        with self._lock:
            self._departed[rank] = reason

    def departed(self) -> Mapping[int, str]:
        """The members that have said goodbye, and how."""
        return self._departed

    def mismatched(self, number: int, sequence: int, rank: int, signature: str) -> None:
        """A member calls something else than this rank under the same number. Any thread."""
        with self._lock:
            lane = next((lane for lane in self._lanes.values() if lane.number == number), None)
            call = None if lane is None else lane.calls.get(sequence)
        if lane is not None and call is not None and rank in self.ranks:
            self._fail_mismatch(lane, sequence, {self.world_rank: call.signature, rank: signature})

    def _fail_mismatch(self, lane: Lane, sequence: int, calls: Mapping[int, str]) -> None:
        sides = ", ".join(
            f"rank {rank} called {called_text(self, lane, rank, clean(calls[rank]))}"
            for rank in sorted(calls)
        )
        message = (
            f"{label(self, lane, sequence)}: {sides}. All ranks must make the same calls in the same order."
        )
        self.fail(Failure(Cause.MISMATCH, message, tuple(sorted(calls))))

    # -- questions -------------------------------------------------------------------------------------------

    def asked(self, rank: int, where: Where) -> None:
        """A member waits and asks where this rank is. The transport's thread."""
        if rank not in self.ranks:
            return
        with self._lock:
            failure = self._failure
            lane = self._lanes.get(where.pair)
            call = None if lane is None else lane.calls.get(where.sequence)
            finished, last = (0, "") if lane is None else (lane.finished, lane.last)
            if where.sequence > (0 if lane is None else lane.issued):
                failure = self._refusal()  # this rank will never come to that call, if it cannot make it
        if failure is not None:
            # It may have made the group after the others had heard of the failure.
            if failure.cause is not Cause.CLOSED:
                self.communicator.tell(rank, Abort(self.id, failure))
            return
        state: State = "absent"
        mine = None
        if call is not None:
            state = "queued" if call.channel is None else "running"
            mine = call.signature
        elif where.sequence <= finished:
            state = "finished"
            mine = last if where.sequence == finished else None
        if lane is not None and mine is not None and clean(mine) != where.signature:
            self._fail_mismatch(lane, where.sequence, {self.world_rank: mine, rank: where.signature})
            return
        busy = "" if state == "running" else self.communicator.busy()
        here = Here(self.id, where.pair, where.sequence, where.question, state, finished, last, busy)
        self.communicator.tell(rank, here)

    def answered(self, rank: int, here: Here) -> None:
        """A member says where it is. The transport's thread."""
        with self._lock:
            lane = self._lanes.get(here.pair)
            call = None if lane is None else lane.calls.get(here.sequence)
        if call is not None and rank in self.ranks:
            call.answered(rank, here)
