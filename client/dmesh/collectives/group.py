"""A group: its members, their calls from the first to the last step, and its generations."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from dmesh.collectives import api, data_movement
from dmesh.collectives.api import ProcessGroup, method
from dmesh.collectives.backends.base import Backend
from dmesh.collectives.backends.endpoints import EndpointOperation
from dmesh.collectives.backends.nccl.backend import NcclBackend
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.connect import connect
from dmesh.collectives.control_messages import clean
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.futures import Completed, Transfer, Worker, pend, settle
from dmesh.collectives.request import TRANSFER, Request, check_timeout
from dmesh.collectives.services import Members, Pair, Services
from dmesh.collectives.validation import RequestBuilder
from dmesh.collectives.work import Generation, Stream, Work
from dmesh.errors import CollectiveError, NotInitializedError, PeerLostError
from dmesh.native import Endpoint

_ATTEMPTS = 5
"""Attempts to end a call that Ctrl-C interrupts again and again."""


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
        failure: Failure | None = None,
    ) -> None:
        self.communicator = communicator
        self.id = number
        self.ranks = ranks
        self.name = name
        self.members = Members(communicator, ranks, name, number)
        self.label = self.members.label
        """The group's name for people."""
        self.rank = self.members.rank
        """This client's position in the group."""
        self.size = len(ranks)
        """Number of ranks in the group."""
        self.requests = RequestBuilder(self.size, self.rank)
        self._process = os.getpid()
        self._generation = self._begin(communicator.generation, failure)
        self._workers: dict[Pair | None, Worker] = {}
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name or '(unnamed)'}: ranks {list(self.ranks)}, this is position {self.rank}>"

    @property
    def current(self) -> Generation:
        """The generation that the group is in."""
        return self._generation

    @property
    def generation(self) -> int:
        """Number of the generation that the group is in."""
        return self._generation.number

    @property
    def failure(self) -> Failure | None:
        """Reason of the group's failure; None if it has not failed."""
        return self._generation.failure

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
        made = Generation(self.members, number, failure)
        reference = weakref.ref(made)  # not the generation itself, which has the backends
        messages = MessageBackend(self.communicator.transport, self.ranks, self.rank, number)
        made.connects = partial(connect, self.members, reference, messages)
        made.backends += [messages, NcclBackend(self.members, reference, messages)]
        return made

    # -- calls -----------------------------------------------------------------------------------------------

    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Give a validated call its number, and carry it out now or, if it is asynchronous, in a thread."""
        self.refuse_forked_child()
        seconds = check_timeout(timeout, self.communicator.timeout)
        generation = self._generation
        pair = self._pair_of(request)
        work: Work | None = None
        before: int | None = None
        if pair is not None and (former := generation.streams.get(pair)) is not None:
            settle(former.endpoint)
        try:
            with generation.lock:
                refusal = generation.failure
                if refusal is None:
                    stream = generation.streams.get(pair) or generation.add_stream(pair)
                    before = stream.issued
                    number = stream.issue()
                    work = Work(generation, stream, number, request, request.text, request.nbytes, seconds)
                    stream.calls[number] = work
                    stream.callers.add(threading.get_ident())
            if work is None:
                assert refusal is not None
                raise self._refused(generation, refusal, pair, request.text)
            if async_op:
                self._worker(pair).submit(work, partial(self._carry_out, work, work.run))
                return work
            if (worker := self._workers.get(pair)) is not None:
                worker.catch_up(partial(stream.ready, work.sequence, alone=request.device is not None))
            return self._carry_out(work, work.run)
        except BaseException as error:
            if work is not None:
                if work.sequence in stream.calls:
                    self._abandon(work, error, carried_out_elsewhere=async_op)
            elif before is not None and stream.issued > before:
                # It has a number, for which the others wait.
                self._give_up(generation, f"call #{before + 1} of {self.label}", error)
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

    def _pair_of(self, request: Request) -> Pair | None:
        """Return the (sender, receiver) positions of a transfer; None for a collective."""
        if request.kind != TRANSFER:
            return None
        return (self.rank, request.root) if request.contributes else (request.root, self.rank)

    def _worker(self, pair: Pair | None) -> Worker:
        """Return the thread of a stream, so that no transfer waits behind other calls of the group."""
        worker = self._workers.get(pair)
        if worker is None:
            name = f"dmesh-group-{self.name or 'ranks'}" + ("" if pair is None else "-{}-{}".format(*pair))
            worker = self._workers.setdefault(pair, Worker(name))
        return worker

    def _refused(
        self, generation: Generation, refusal: Failure, pair: Pair | None, text: str
    ) -> CollectiveError:
        generation.tell_of(refusal)
        if generation.reported:
            return refusal.afterwards(self.label)
        # To this rank's user it is the error of the call that failed elsewhere before it was made here.
        generation.reported = True
        return refusal.during(f"{self.members.call_text(pair, self.communicator.rank, text)} of {self.label}")

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

    _completed = staticmethod(Completed)
    """Future of a transfer that a native endpoint has completed at once; see `fast_path.c`."""

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
            work = Work(generation, stream, number, None, text, nbytes, self.communicator.timeout)
            stream.calls[number] = work
            stream.callers.add(threading.get_ident())
            endpoint.forget(number)
        operation = EndpointOperation(endpoint, self.members.of(stream.pair), work.ask_everybody)

        def resume() -> Any:
            work.drive(operation)
            return operation.result

        return self._carry_out(work, resume)

    def _interrupted(self, endpoint: Endpoint, error: BaseException) -> None:
        """Fail the group, if a call that its endpoint has taken was left before it was over."""
        for _ in range(_ATTEMPTS):
            try:
                if endpoint.pending and self._generation.stream_of(endpoint) is not None:
                    call = f"call #{endpoint.pending_sequence} of {self.label}"
                    self._give_up(self._generation, call, error)
            except KeyboardInterrupt:
                continue
            return

    def _give_up(self, generation: Generation, call: str, error: BaseException) -> None:
        said, rank = clean(f"{type(error).__name__}: {error}".rstrip(": ")), self.communicator.rank
        generation.fail(Failure(Cause.BROKEN, f"rank {rank} gave up {call}: {said}", (rank,)))

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
            self._give_up(generation, str(work), error)
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

    def renew(self, generation: int, over: Failure) -> None:
        """Begin a new generation; calls of the former one that are under way fail as `over` says."""
        former = self._generation
        self._generation = self._begin(generation)
        former.fail(over, tell=False)

    def close(self, failure: Failure) -> None:
        """End the group on this client alone: its calls fail, its threads stop."""
        self.fail(failure, tell=False)
        _stop_all(self._workers)


def _stop_all(workers: dict[Pair | None, Worker]) -> None:
    for worker in tuple(workers.values()):
        worker.stop()
