"""A group: which ranks, in what order, the number of each call; and how its failure reaches all members."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dmesh.collectives import ways
from dmesh.collectives.arena.meeting import Meeting
from dmesh.collectives.arena.port import Port
from dmesh.collectives.arena.titles import Title, text_of
from dmesh.collectives.arguments import check_timeout
from dmesh.collectives.call import Call, called_text, label
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.flight import Record
from dmesh.collectives.gpu.planner import GpuPlan, GpuPlanner
from dmesh.collectives.lane import Lane
from dmesh.collectives.messages import Abort, Here, State, Where, clean
from dmesh.collectives.operations import Operations
from dmesh.collectives.plan import Plan
from dmesh.collectives.planner import Planner
from dmesh.collectives.quick import hasten
from dmesh.collectives.term import Term
from dmesh.collectives.worker import Worker
from dmesh.errors import CollectiveError, PeerLostError

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator

_ATTEMPTS = 5
"""How often an interrupted ending of a call is begun anew."""


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
    lost step cannot find it again. Other groups go on. Only when lost clients have been replaced and all have
    met at a barrier (`Communicator.renew`), every group begins anew.

    Groups are made by `dmesh.collectives.new_group` and `Mesh.group`.

    Args:
        communicator: Of this client.
        number: The group's id, the same on all members.
        ranks: Its members.
        name: For people.
        failure: Why it cannot be used from the beginning, if so.
    """

    def __init__(
        self,
        communicator: Communicator,
        number: int,
        ranks: tuple[int, ...],
        name: str,
        failure: Failure | None = None,
    ) -> None:
        self.communicator = communicator
        self.id = number
        self.ranks = ranks
        self.name = name
        self.world_rank = communicator.rank
        self._rank = ranks.index(communicator.rank)
        self._planner = Planner(len(ranks), self._rank)
        self._gpu_planner = GpuPlanner(len(ranks), self._rank)
        self._term = Term(communicator, number, ranks, communicator.generation, failure)
        self.worker = Worker(f"dmesh-group-{name or 'ranks'}")
        self._finalizer = weakref.finalize(self, self.worker.stop)
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
        return self._term.failure

    @property
    def generation(self) -> int:
        """The generation in which it is."""
        return self._term.generation

    # -- calls -----------------------------------------------------------------------------------------------

    def _make(
        self,
        plan: Plan | GpuPlan,
        timeout: float | None,
        async_op: bool,
        pair: tuple[int, int] | None = None,
    ) -> Any:
        """Gives a checked call its number, and carries it out now or in the group's thread."""
        seconds = check_timeout(timeout, self.communicator.timeout)
        flight = self.communicator.flight
        term = self._term
        signature = plan.subject.signature
        call: Call | None = None
        before: int | None = None
        try:
            with term.lock:
                refusal = term.refusal()
                lane = term.lanes.get(pair) or self._add_lane(term, pair)
                if refusal is None:
                    before = lane.issued
                    number = lane.issue()
                    text = called_text(self, lane, self.world_rank, signature)
                    record = flight.called(self.name or self.label, number, text, plan.nbytes, lane.number)
                    call = Call(self, term, lane, number, signature, seconds, record)
                    lane.calls[number] = call
            if call is None:
                assert refusal is not None
                raise self._refused(term, refusal, called_text(self, lane, self.world_rank, signature))
            if async_op:
                made = call
                return self.worker.submit(lambda: self._carry_out(made, lambda: ways.carry_out(made, plan)))
            made = call
            return self._carry_out(call, lambda: ways.carry_out(made, plan))
        except BaseException as error:
            if call is not None and call.lane.calls.get(call.sequence) is call:
                self._abandon(call, error, carried_out_elsewhere=async_op)
            elif call is None and before is not None and lane.issued > before:
                self._give_up(term, before + 1, error)  # it has a number, for which the others wait
            raise

    def _refused(self, term: Term, refusal: Failure, text: str) -> CollectiveError:
        term.tell_of(refusal)
        if term.reported:
            return refusal.afterwards(self.label)
        # To this rank's user it is the error of the call that failed elsewhere before it was made here.
        term.reported = term.failure is not None
        return refusal.during(f"{text} of {self.label}")

    def _abandon(self, call: Call, error: BaseException, *, carried_out_elsewhere: bool) -> None:
        """Ends a call that has its number, so that others wait for it, but was interrupted out of turn.

        By Ctrl-C before it began, or by a second one while the first was dealt with. There may be a third.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._explain(call, error)
                if not carried_out_elsewhere:  # the thread that does it sees that the group has failed
                    self._close(call, succeeded=False)
            except KeyboardInterrupt:
                continue
            return

    def _add_lane(self, term: Term, pair: tuple[int, int] | None) -> Lane:
        assert pair is not None  # the lane of collectives is there from the beginning
        lane = term.add_lane(group_id(self.id, "transfers", pair), pair)
        self.communicator.register(lane.number, self)
        for listener in self.communicator.flight.listeners:
            listener.added(self, lane)
        return lane

    def _go_on(self, port: Port) -> Any:
        """Goes on with a call that a port has taken: others have not come to it yet."""
        term = self._term
        number = port.number
        with term.lock:
            lane = term.lane_of(port)
            if lane is None:
                raise CollectiveError(f"call #{number} of {self.label} is over: its members have changed")
            signature, nbytes = lane.taken(number)
            text = called_text(self, lane, self.world_rank, signature)
            record = self.communicator.flight.called(
                self.name or self.label, number, text, nbytes, lane.number
            )
            call = Call(self, term, lane, number, signature, self.communicator.timeout, record)
            lane.calls[number] = call
            port.forget(number)
        members = self.ranks if lane.pair is None else [self.ranks[position] for position in lane.pair]
        meeting = Meeting(port, members, call.ask)

        def go_on() -> Any:
            call.begin(meeting)
            call.meet(meeting)
            return meeting.result

        return self._carry_out(call, go_on)

    def _interrupted(self, port: Port, error: BaseException) -> None:
        """Fails the group, if a call that its port has taken was left before it was over."""
        for _ in range(_ATTEMPTS):
            try:
                if port.pending and self._term.lane_of(port) is not None:
                    self._give_up(self._term, port.number, error)
            except KeyboardInterrupt:
                continue
            return

    def _give_up(self, term: Term, number: int, error: BaseException) -> None:
        told = clean(f"{type(error).__name__}: {error}".rstrip(": "))
        reason = f"rank {self.world_rank} gave up call #{number} of {self.label}: {told}"
        term.fail(Failure(Cause.BROKEN, reason, (self.world_rank,)))

    def _carry_out(self, call: Call, do: Callable[[], Any]) -> Any:
        flight = self.communicator.flight
        observer = self.communicator.observer
        flight.began(call.record)
        observer.begin(call)
        try:
            try:
                result = do()
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
        finally:
            observer.end(call)

    def progress(self) -> tuple[int, float]:
        """Returns how many calls are over, and when the last one was that a port has taken whole."""
        ports = self._term.ports
        return sum(port.finished for port in ports), max((port.ended / 1e9 for port in ports), default=0.0)

    def recent(self, most: int) -> list[Record]:
        """Returns the last calls that the group's ports have taken whole, of each lane. Any thread."""
        return [record for lane in tuple(self._term.lanes.values()) for record in self.taken(lane, most)]

    def taken(self, lane: Lane, most: int) -> list[Record]:
        """Returns the last calls that the port of a lane has taken whole, oldest first. Any thread."""
        return [
            Record(
                self.name or self.label,
                number,
                called_text(self, lane, self.world_rank, text_of(Title(*title))),
                nbytes,
                called=began / 1e9,
                began=began / 1e9,
                waited=max(waited, 0) / 1e9,
                ended=ended / 1e9 if ended else None,
                lane=lane.number,
                timed=waited >= 0,
            )
            for number, title, nbytes, began, ended, waited in (
                () if lane.port is None else lane.port.recent(most)
            )
        ]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What is counted together: the collectives, and the transfers of each pair. Any thread."""
        return tuple(self._term.lanes.values())

    def _close(self, call: Call, *, succeeded: bool) -> None:
        if call.way is not None:
            call.way.close()
        with call.term.lock:
            # In this order: if Ctrl-C comes in between, the call is still there, to be given up.
            if succeeded:
                call.lane.finish(call.sequence, call.signature)
            call.lane.calls.pop(call.sequence, None)
        call.lane.ring()
        call.way = None  # which may refer to the call

    def _explain(self, call: Call, error: BaseException) -> BaseException:
        """Makes sure that the group has failed, and returns what the caller is to get."""
        term = call.term
        if isinstance(error, PeerLostError) and term.failure is None:
            # The transport found it out; the communicator's listener may hear of it in a moment, too.
            term.lose(error.rank, self.communicator.why_gone(error.rank) or str(error))
        elif term.failure is None:
            told = clean(f"{type(error).__name__}: {error}".rstrip(": "))
            term.fail(
                Failure(Cause.BROKEN, f"rank {self.world_rank} gave up {call}: {told}", (self.world_rank,))
            )
            term.reported = True
            return error
        failure = term.failure
        assert failure is not None
        term.tell_of(failure)  # who failed the group did not, if it was before this call had begun
        term.reported = True
        if not isinstance(error, CollectiveError):
            return error  # a Ctrl-C stays one
        return failure.during(str(call))

    # -- what happens to the group; any thread ---------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool | None = True) -> None:
        """Fails the group in its present generation; see `Term.fail`."""
        self._term.fail(failure, tell=tell)

    def lose(self, rank: int, reason: str) -> None:
        """Fails the group because a member is gone."""
        self._term.lose(rank, reason)

    def member_left(self, rank: int, reason: str) -> None:
        """A member said goodbye: what it has sent is here, more will not come."""
        self._term.member_left(rank, reason)

    def renew(self, generation: int, over: Failure) -> None:
        """Begins anew, in a new generation.

        Args:
            generation: Its number.
            over: What calls of the former one fail with that are still under way.
        """
        former = self._term
        self._term = Term(self.communicator, self.id, self.ranks, generation)
        former.fail(over, tell=False)

    def close(self, failure: Failure) -> None:
        """Ends the group on this client alone: its calls fail, its thread stops."""
        self.fail(failure, tell=False)
        self.worker.stop()

    def mismatched(self, generation: int, number: int, sequence: int, rank: int, signature: str) -> None:
        """A member calls something else than this rank under the same number."""
        term = self._term
        if generation != term.generation:
            return
        with term.lock:
            lane = next((lane for lane in term.lanes.values() if lane.number == number), None)
            call = None if lane is None else lane.calls.get(sequence)
        if lane is not None and call is not None and rank in self.ranks:
            self._fail_mismatch(term, lane, sequence, {self.world_rank: call.signature, rank: signature})

    def _fail_mismatch(self, term: Term, lane: Lane, sequence: int, calls: Mapping[int, str]) -> None:
        sides = ", ".join(
            f"rank {rank} called {called_text(self, lane, rank, clean(calls[rank]))}"
            for rank in sorted(calls)
        )
        message = (
            f"{label(self, lane, sequence)}: {sides}. All ranks must make the same calls in the same order."
        )
        term.fail(Failure(Cause.MISMATCH, message, tuple(sorted(calls))))

    # -- questions -------------------------------------------------------------------------------------------

    def asked(self, rank: int, where: Where) -> None:
        """A member waits and asks where this rank is. The transport's thread."""
        term = self._term
        if rank not in self.ranks or where.generation != term.generation:
            return
        with term.lock:
            failure = term.failure
            lane = term.lanes.get(where.pair)
            call = None if lane is None else lane.calls.get(where.sequence)
            finished, last = (0, "") if lane is None else lane.last()
            if where.sequence > (0 if lane is None else lane.issued):
                failure = term.refusal()  # this rank will never come to that call, if it cannot make it
        if failure is not None:
            # It may have made the group after the others had heard of the failure.
            if failure.cause is not Cause.CLOSED:
                self.communicator.tell(rank, Abort(term.generation, self.id, failure))
            return
        state: State = "absent"
        mine = None
        waits_for: tuple[int, ...] = ()
        if call is not None:
            way = call.way
            state = "queued" if way is None else "running"
            mine = call.signature
            waits_for = () if way is None else way.waiting_for()
        elif where.sequence <= finished:
            state = "finished"
            mine = last if where.sequence == finished and last else None
        if lane is not None and mine is not None and clean(mine) != where.signature:
            self._fail_mismatch(term, lane, where.sequence, {self.world_rank: mine, rank: where.signature})
            return
        busy = "" if state == "running" else self.communicator.busy()
        here = Here(
            term.generation,
            self.id,
            where.pair,
            where.sequence,
            where.question,
            state,
            finished,
            last,
            busy,
            waits_for,
        )
        self.communicator.tell(rank, here)

    def answered(self, rank: int, here: Here) -> None:
        """A member says where it is. The transport's thread."""
        term = self._term
        if here.generation != term.generation:
            return
        with term.lock:
            lane = term.lanes.get(here.pair)
            call = None if lane is None else lane.calls.get(here.sequence)
        if call is not None and rank in self.ranks:
            call.answered(rank, here)


hasten(Group)
