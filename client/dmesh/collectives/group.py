"""A group: its members, the order of its calls, its generation, and its failure on all members."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dmesh.collectives import api, data_movement
from dmesh.collectives.api import ProcessGroup, method
from dmesh.collectives.backends.base import Backend
from dmesh.collectives.backends.endpoints import EndpointOperation
from dmesh.collectives.backends.nccl.backend import NcclBackend
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.connect import connect
from dmesh.collectives.control_messages import NOT_BLOCKED, Abort, Position, State, WhereAreYou, clean
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.futures import Completed, Transfer, Worker, pend, settle
from dmesh.collectives.generation import Generation
from dmesh.collectives.request import TRANSFER, Request, check_timeout
from dmesh.collectives.services import Services
from dmesh.collectives.skipped import blocked_in
from dmesh.collectives.stream import Stream
from dmesh.collectives.validation import RequestBuilder
from dmesh.collectives.work import Members, Work
from dmesh.errors import CollectiveError, NotInitializedError, PeerLostError
from dmesh.native import Endpoint

_ATTEMPTS = 5
"""Attempts to end a call that Ctrl-C interrupts again and again."""


def group_id(*parts: object) -> int:
    """Return the id that all members compute for themselves from what makes a group what it is."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, person=b"dmesh group").digest(), "big"
    )


class Group(ProcessGroup):
    """Ranks that call collectives together.

    All members must make the same calls on a group in the same order. Different groups, and the transfers
    (`send`, `recv`) between different pairs of ranks, are counted separately and may be used by different
    threads at once.

    The first failure of a group is the failure of all its members and of all later calls: ranks that have
    lost step cannot find it again. Other groups go on. Only when lost clients have been replaced and all have
    met at a barrier (`Communicator.renew`), every group begins anew.

    Groups are made by `dmesh.collectives.new_group` and `Mesh.group`. Their methods are the functions of
    `dmesh.collectives`, with `group=` this group.

    Args:
        communicator: Of this client.
        number: The group's id, the same on all members.
        ranks: Its members.
        name: For people.
        register: Notes that a stream's number is one of this group's.
        failure: Why it cannot be used from the beginning, if so.
    """

    all_reduce = method(api.all_reduce)
    reduce = method(api.reduce)
    reduce_scatter = method(api.reduce_scatter)
    broadcast = method(data_movement.broadcast)
    all_gather = method(data_movement.all_gather)
    gather = method(data_movement.gather)
    scatter = method(data_movement.scatter)
    all_to_all = method(data_movement.all_to_all)
    permute = method(data_movement.permute)
    send = method(data_movement.send)
    recv = method(data_movement.recv)
    barrier = method(api.barrier)

    def __init__(
        self,
        communicator: Services,
        number: int,
        ranks: tuple[int, ...],
        name: str,
        register: Callable[[int, Group], None],
        failure: Failure | None = None,
    ) -> None:
        self.communicator = communicator
        self.id = number
        self.ranks = ranks
        self.name = name
        self.world_rank = communicator.rank
        self.requests = RequestBuilder(len(ranks), ranks.index(communicator.rank))
        self.members = Members(communicator, ranks, self.label, number)
        self._register = register
        self._process = os.getpid()
        self._generation = self._begin(communicator.generation, failure)
        self._workers: dict[tuple[int, int] | None, Worker] = {}
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name or '(unnamed)'}: ranks {list(self.ranks)}, this is position {self.rank}>"

    @property
    def rank(self) -> int:
        """This client's position in the group."""
        return self.requests.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def label(self) -> str:
        """The group's name for people."""
        return f"group {self.name}" if self.name else f"group of ranks {', '.join(map(str, self.ranks))}"

    @property
    def failure(self) -> Failure | None:
        """Reason of the group's failure; None if it has not failed."""
        return self._generation.failure

    @property
    def generation(self) -> int:
        """Number of the generation that the group is in."""
        return self._generation.number

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Streams of calls: the collectives, and the transfers of each pair. Any thread."""
        return tuple(self._generation.streams.values())

    @property
    def endpoint(self) -> Endpoint | None:
        """Native endpoint for collectives, once the group has one."""
        return self._generation.endpoint

    def backend(self, name: str) -> Backend | None:
        """Return the group's backend of a name; None if it has none, or has not chosen yet."""
        return next((found for found in self._generation.backends if found.name == name), None)

    def _begin(self, number: int, failure: Failure | None = None) -> Generation:
        made = Generation(self.communicator, self.id, self.name or self.label, self.ranks, number, failure)
        reference = weakref.ref(made)  # not the generation itself, which has the backends
        connects = partial(connect, self.members, reference)
        messages = MessageBackend(self.communicator.transport, self.ranks, self.rank, number, connects)
        made.backends += [NcclBackend(self.members, reference, messages), messages]
        return made

    # -- calls -----------------------------------------------------------------------------------------------

    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Give a validated call its number, and carry it out now or in the stream's thread.

        Args:
            request: The call.
            timeout: Seconds; None for the cluster's limit.
            async_op: Whether to return the future of the result at once.
        """
        self.refuse_forked_child()
        seconds = check_timeout(timeout, self.communicator.timeout)
        events = self.communicator.events
        generation = self._generation
        pair = self._pair_of(request)
        work: Work | None = None
        before: int | None = None
        if pair is not None and (former := generation.streams.get(pair)) is not None:
            settle(former.endpoint)
        try:
            with generation.lock:
                refusal = generation.refusal()
                stream = generation.streams.get(pair) or self._add_stream(generation, pair)
                text = self.members.call_text(stream, self.world_rank, request.text)
                if refusal is None:
                    before = stream.issued
                    number = stream.issue()
                    record = events.called(
                        self.name or self.label, number, text, request.nbytes, stream.number
                    )
                    work = Work(
                        self.members, generation, stream, number, request, request.text, seconds, record
                    )
                    stream.calls[number] = work
                    stream.callers.add(threading.get_ident())
            if work is None:
                assert refusal is not None
                raise self._refused(generation, refusal, text)
            made = work
            if async_op:
                self._worker(pair).submit(made, lambda: self._carry_out(made, made.run))
                return made
            if (worker := self._workers.get(pair)) is not None:
                worker.catch_up(lambda: made.stream.ready(made.sequence, alone=request.device is not None))
            return self._carry_out(made, made.run)
        except BaseException as error:
            if work is not None:
                if work.sequence in stream.calls:
                    self._abandon(work, error, carried_out_elsewhere=async_op)
            elif before is not None and stream.issued > before:
                self._give_up(generation, before + 1, error)  # it has a number, for which the others wait
            raise

    def refuse_forked_child(self) -> None:
        """Raise NotInitializedError in a process that was forked from the group's.

        The child's calls would use the parent's connections, and write to the memory that it shares.
        """
        if os.getpid() != self._process:
            raise NotInitializedError(
                f"this process was forked from process {self._process} and cannot use its {self.label}: its "
                "parent's connections and memory are not its own. Let it compute only, or start it with "
                'multiprocessing.get_context("spawn")'
            )

    def _pair_of(self, request: Request) -> tuple[int, int] | None:
        """Return the (sender, receiver) positions of a transfer; None for a collective."""
        if request.kind != TRANSFER:
            return None
        return (self.rank, request.root) if request.contributes else (request.root, self.rank)

    def _worker(self, pair: tuple[int, int] | None) -> Worker:
        """Return the thread of a stream, so that no transfer waits behind other calls of the group."""
        worker = self._workers.get(pair)
        if worker is None:
            name = f"dmesh-group-{self.name or 'ranks'}" + ("" if pair is None else "-{}-{}".format(*pair))
            worker = self._workers.setdefault(pair, Worker(name))
        return worker

    def _add_stream(self, generation: Generation, pair: tuple[int, int] | None) -> Stream:
        assert pair is not None  # the stream of collectives is there from the beginning
        stream = generation.add_stream(group_id(self.id, "transfers", pair), pair)
        self._register(stream.number, self)
        return stream

    def _refused(self, generation: Generation, refusal: Failure, text: str) -> CollectiveError:
        generation.tell_of(refusal)
        if generation.reported:
            return refusal.afterwards(self.label)
        # To this rank's user it is the error of the call that failed elsewhere before it was made here.
        generation.reported = generation.failure is not None
        return refusal.during(f"{text} of {self.label}")

    def _abandon(self, work: Work, error: BaseException, *, carried_out_elsewhere: bool) -> None:
        """End a call that has its number, so that others wait for it, but was interrupted out of turn.

        By Ctrl-C before it began, or by a second one while the first was dealt with. There may be a third.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._explain(work, error)
                if not carried_out_elsewhere:  # the thread that does it sees that the group has failed
                    self._close(work, succeeded=False)
                    self.communicator.events.ended(work.record, error)
            except KeyboardInterrupt:
                continue
            return

    def _completed(self, result: Any) -> Completed:
        """Return the future of a transfer that a native endpoint has completed at once."""
        return Completed(result)

    def _begun(self, endpoint: Endpoint) -> Transfer:
        """Return the future of a transfer that is pending in its native endpoint."""
        return pend(endpoint, self._continue)

    def _continue(self, transfer: Transfer, endpoint: Endpoint) -> None:
        """Let the stream's thread carry on a transfer that is pending in its native endpoint."""
        stream = self._generation.stream_of(endpoint)
        self._worker(None if stream is None else stream.pair).submit(transfer, lambda: self._resume(endpoint))

    def _resume(self, endpoint: Endpoint) -> Any:
        """Go on with a call that a native endpoint has taken whole: other ranks have not come to it yet."""
        generation = self._generation
        number = endpoint.pending_sequence
        with generation.lock:
            stream = generation.stream_of(endpoint)
            if stream is None:
                raise CollectiveError(f"call #{number} of {self.label} is over: its members have changed")
            text, nbytes = stream.recorded(number)
            record = self.communicator.events.called(
                self.name or self.label,
                number,
                self.members.call_text(stream, self.world_rank, text),
                nbytes,
                stream.number,
            )
            work = Work(
                self.members, generation, stream, number, None, text, self.communicator.timeout, record
            )
            stream.calls[number] = work
            stream.callers.add(threading.get_ident())
            endpoint.forget(number)
        operation = EndpointOperation(endpoint, self.members.of(stream), work.ask_everybody)

        def resume() -> Any:
            work.resume(operation)
            return operation.result

        return self._carry_out(work, resume)

    def _interrupted(self, endpoint: Endpoint, error: BaseException) -> None:
        """Fail the group, if a call that its endpoint has taken was left before it was over."""
        for _ in range(_ATTEMPTS):
            try:
                if endpoint.pending and self._generation.stream_of(endpoint) is not None:
                    self._give_up(self._generation, endpoint.pending_sequence, error)
            except KeyboardInterrupt:
                continue
            return

    def _give_up(self, generation: Generation, number: int, error: BaseException) -> None:
        generation.fail(
            Failure(
                Cause.BROKEN,
                f"rank {self.world_rank} gave up call #{number} of {self.label}: {_said(error)}",
                (self.world_rank,),
            )
        )

    def _carry_out(self, work: Work, do: Callable[[], Any]) -> Any:
        events = self.communicator.events
        events.began(work.record, work)
        try:
            result = do()
        except BaseException as error:
            final = self._explain(work, error)
            self._close(work, succeeded=False)
            events.ended(work.record, final)
            if final is error:
                raise
            raise final from (error if isinstance(error, PeerLostError) else None)
        self._close(work, succeeded=True)
        events.ended(work.record)
        return result

    @property
    def busy(self) -> bool:
        """True while an asynchronous call is under way."""
        return any(worker.busy for worker in tuple(self._workers.values()))

    def _close(self, work: Work, *, succeeded: bool) -> None:
        work.end()
        with work.generation.lock:
            # In this order: if Ctrl-C comes in between, the call is still there, to be given up.
            if succeeded:
                work.stream.complete(work.sequence, work.text)
            work.stream.calls.pop(work.sequence, None)
        work.stream.wake()

    def _explain(self, work: Work, error: BaseException) -> BaseException:
        """Make sure that the group has failed, and return what the caller gets."""
        generation = work.generation
        if isinstance(error, PeerLostError) and generation.failure is None:
            # The transport found it out; the communicator may hear of it in a moment, too.
            generation.lose(error.rank, self.communicator.why_gone(error.rank) or str(error))
        elif generation.failure is None:
            message = f"rank {self.world_rank} gave up {work}: {_said(error)}"
            generation.fail(Failure(Cause.BROKEN, message, (self.world_rank,)))
            generation.reported = True
            return error
        failure = generation.failure
        assert failure is not None
        generation.tell_of(failure)  # if it failed before this call had begun, nobody has told the others
        generation.reported = True
        if not isinstance(error, CollectiveError):
            return error  # a Ctrl-C stays one
        return failure.during(str(work))

    # -- what happens to the group; any thread ---------------------------------------------------------------

    def fail(self, failure: Failure, *, tell: bool | None = True) -> None:
        """Fail the group in its present generation; see `Generation.fail`."""
        self._generation.fail(failure, tell=tell)

    def lose(self, rank: int, reason: str) -> None:
        """Fail the group because a member is gone."""
        self._generation.lose(rank, reason)

    def member_left(self, rank: int, reason: str) -> None:
        """Note a member's goodbye: all that it has sent is here, and no more will come."""
        self._generation.member_left(rank, reason)

    def renew(self, generation: int, over: Failure) -> None:
        """Begin anew, in a new generation.

        Args:
            generation: Its number.
            over: Failure of the former generation's calls that are still under way.
        """
        former = self._generation
        self._generation = self._begin(generation)
        former.fail(over, tell=False)

    def close(self, failure: Failure) -> None:
        """End the group on this client alone: its calls fail, its threads stop."""
        self.fail(failure, tell=False)
        _stop_all(self._workers)

    def mismatched(self, generation: int, number: int, sequence: int, rank: int, text: str) -> None:
        """Fail the group: a member calls something else than this rank under the same number."""
        current = self._generation
        if generation != current.number:
            return
        with current.lock:
            stream = next((s for s in current.streams.values() if s.number == number), None)
            call = None if stream is None else stream.calls.get(sequence)
        if stream is not None and call is not None and rank in self.ranks:
            self._fail_mismatch(current, stream, sequence, {self.world_rank: call.text, rank: text})

    def _fail_mismatch(
        self, generation: Generation, stream: Stream, sequence: int, calls: Mapping[int, str]
    ) -> None:
        sides = ", ".join(
            f"rank {rank} called {self.members.call_text(stream, rank, clean(calls[rank]))}"
            for rank in sorted(calls)
        )
        message = (
            f"{self.members.call_label(stream, sequence)}: {sides}. All ranks must make the same calls in "
            "the same order."
        )
        generation.fail(Failure(Cause.MISMATCH, message, tuple(sorted(calls))))

    # -- questions of other ranks; the transport's thread ----------------------------------------------------

    def asked(self, rank: int, question: WhereAreYou, busy: Callable[[], str]) -> None:
        """Answer a member that waits and asks where this rank is."""
        generation = self._generation
        if rank not in self.ranks or question.generation != generation.number:
            return
        with generation.lock:
            failure = generation.failure
            stream = generation.streams.get(question.pair)
            call = None if stream is None else stream.calls.get(question.sequence)
            completed, last = (0, "") if stream is None else stream.last()
            callers = set() if stream is None else set(stream.callers)
            if question.sequence > (0 if stream is None else stream.issued):
                failure = generation.refusal()  # this rank will never make that call, if it cannot
        if failure is not None:
            # The asker may have made the group after the others had heard of the failure.
            if failure.cause is not Cause.CLOSED:
                self.communicator.tell(rank, Abort(generation.number, self.id, failure))
            return
        state: State = "absent"
        mine = None
        waits_for: tuple[int, ...] = ()
        if call is not None:
            state = "running" if call.started else "queued"
            mine, waits_for = call.text, call.waits_for()
        elif question.sequence <= completed:
            state = "finished"
            mine = last if question.sequence == completed else ""
            mine = mine or (stream.recorded(question.sequence)[0] if stream is not None else "") or None
        elif stream is not None and question.sequence <= stream.issued:
            state, mine = "running", stream.recorded(question.sequence)[0] or None  # a native endpoint has it
        if stream is not None and mine is not None and clean(mine) != question.signature:
            calls = {self.world_rank: mine, rank: question.signature}
            self._fail_mismatch(generation, stream, question.sequence, calls)
            return
        absent, communicator = state == "absent", self.communicator
        answer = Position(
            generation.number, self.id, question.pair, question.sequence, question.question, state,
            completed, last, "" if state == "running" else busy(), waits_for,
            blocked_in(communicator.barriers, callers, rank) if absent else NOT_BLOCKED,
        )  # fmt: skip
        self.communicator.tell(rank, answer)

    def answered(self, rank: int, answer: Position) -> None:
        """Take a member's answer to where it is."""
        generation = self._generation
        if answer.generation != generation.number:
            return
        with generation.lock:
            stream = generation.streams.get(answer.pair)
            call = None if stream is None else stream.calls.get(answer.sequence)
        if call is not None and rank in self.ranks:
            call.answered(rank, answer)


def _said(error: BaseException) -> str:
    return clean(f"{type(error).__name__}: {error}".rstrip(": "))


def _stop_all(workers: dict[tuple[int, int] | None, Worker]) -> None:
    for worker in tuple(workers.values()):
        worker.stop()
