"""A group: its members, their calls from the first to the last step, and its generations."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dmesh.collectives import api, data_movement, objects, point_to_point
from dmesh.collectives.api import ProcessGroup, method
from dmesh.collectives.backends.base import Backend
from dmesh.collectives.backends.endpoints import EndpointOperation
from dmesh.collectives.backends.loopback import LoopbackBackend
from dmesh.collectives.backends.nccl.backend import NcclBackend
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.connect import connect
from dmesh.collectives.control_messages import clean
from dmesh.collectives.counts import CountsRequestBuilder
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.futures import Completed, Future, Transfer, Worker, do, do_now, pend, settle
from dmesh.collectives.matching import Matcher
from dmesh.collectives.receiver import Receiver
from dmesh.collectives.request import TRANSFER, Request, check_timeout
from dmesh.collectives.services import Members, Pair, Services
from dmesh.collectives.validation import check_int64
from dmesh.collectives.work import Generation, Key, Stream, Work, group_id
from dmesh.coordination.waiting import do_aside
from dmesh.errors import CollectiveError, CollectiveMismatchError, NotInitializedError, PeerLostError
from dmesh.native import Endpoint

if TYPE_CHECKING:
    from dmesh.collectives.consensus import Consensus, Store

_SHRUNK = ", shrunk"
"""End of the name of a group that `shrink` has made."""
_ATTEMPTS = 5
"""Attempts to end a call that Ctrl-C interrupts again and again."""


class Owner(Services, Protocol):
    """The client that a group belongs to; see `communicator.Communicator`."""

    store: Callable[[], Store] | None
    """Returns the keys of the coordination service; None without one."""

    def add_group(self, number: int, ranks: tuple[int, ...], name: str) -> Group:
        """Make a group."""

    def restart(self, group: Group) -> None:
        """Let a group that has failed begin anew."""

    def acknowledge(self, missing: Iterable[int], group: str) -> None:
        """Take note that the survivors of a group go on without some clients."""


class Group(ProcessGroup):
    """Ranks that call collectives together.

    All members must make the same calls on a group in the same order. Different groups, and the transfers
    (`send`, `recv`) between different pairs of ranks, are counted separately and may be used by different
    threads at once.

    The first failure of a group fails it on all members, and all later calls with it, because its ranks are
    out of step. Other groups go on. If no member was lost, all members together can `reset` the group;
    otherwise the survivors `shrink` it to another group. When lost clients have been replaced and all have
    met at a barrier (`Communicator.renew`), every group begins anew.

    Groups are made by `dmesh.collectives.new_group`, `split` and `Mesh.group`. Their methods are the
    functions of `dmesh.collectives`, with `group=` this group.
    """

    all_reduce = method(api.all_reduce)
    reduce = method(api.reduce)
    reduce_scatter = method(api.reduce_scatter)
    scan = method(api.scan)
    exscan = method(api.exscan)
    broadcast = method(data_movement.broadcast)
    all_gather = method(data_movement.all_gather)
    gather = method(data_movement.gather)
    scatter = method(data_movement.scatter)
    all_to_all = method(data_movement.all_to_all)
    permute = method(data_movement.permute)
    send = method(point_to_point.send)
    recv = method(point_to_point.recv)
    sendrecv = method(point_to_point.sendrecv)
    isend = method(point_to_point.isend)
    irecv = method(point_to_point.irecv)
    probe = method(point_to_point.probe)
    iprobe = method(point_to_point.iprobe)
    barrier = method(api.barrier)
    broadcast_object = method(objects.broadcast_object)
    all_gather_object = method(objects.all_gather_object)
    gather_object = method(objects.gather_object)
    scatter_object = method(objects.scatter_object)
    all_to_all_object = method(objects.all_to_all_object)
    send_object = method(objects.send_object)
    recv_object = method(objects.recv_object)

    def __init__(
        self,
        communicator: Owner,
        number: int,
        ranks: tuple[int, ...],
        name: str,
        failure: Failure | None = None,
    ) -> None:
        self.communicator = communicator
        self.ranks = ranks
        self.name = name
        self._members = members = Members(communicator, ranks, name, number)  # before any reset
        self.label = members.label
        """The group's name for people."""
        self.rank = members.rank
        """This client's position in the group."""
        self.size = len(ranks)
        """Number of ranks in the group."""
        self.requests = CountsRequestBuilder(self.size, self.rank)
        self._splits = 0  # how often this rank has split the group
        self._process = os.getpid()
        self._generation = self._begin(communicator.generation, members, failure)
        self._consensus: Consensus | None = None
        self._workers: dict[Key, Worker] = {}
        self._unnumbered: set[Any] = set()  # asynchronous calls with threads of their own
        self._receiver = Receiver(communicator.transport.message_queue.arrivals)
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name or '(unnamed)'}: ranks {list(self.ranks)}, this is position {self.rank}>"

    @property
    def id(self) -> int:
        """Number that its members compute alike; another one after each reset."""
        return self._generation.members.group

    @property
    def members(self) -> Members:
        """The members, as its calls need them."""
        return self._generation.members

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

    def _begin(self, number: int, members: Members, failure: Failure | None = None) -> Generation:
        made = Generation(members, number, failure)
        reference = weakref.ref(made)  # not the generation itself, which has the backends
        messages = MessageBackend(self.communicator.transport, self.ranks, self.rank, number)
        loopback = LoopbackBackend(self.communicator.transport.message_queue.arrivals)
        made.connects = partial(connect, members, reference, messages)
        made.backends += [messages, loopback, NcclBackend(members, reference, messages)]
        made.matcher = Matcher(members, messages, loopback)
        return made

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Group | None:
        """Divide the group into groups of the ranks with equal colors; see the function `split`."""
        member = color is not None
        numbers = [check_int64(color if member else 0, "color", "split"), check_int64(key, "key", "split")]
        request = self.requests.make("all_gather", np.array([member, *numbers, self._splits], np.int64))
        rows = self.call(replace(request, text="split()", descriptor=None), timeout, False).tolist()
        # The same on all ranks, also if a call failed on some of them, or a rank has been replaced.
        self._splits = count = max(row[3] for row in rows) + 1
        if not member:
            return None
        alike = [at for at, row in enumerate(rows) if row[:2] == [1, numbers[0]]]
        alike.sort(key=lambda at: rows[at][2])  # stable: equal keys in the order of ranks
        number = group_id("split", self.id, count, numbers[0])
        name = f"{self.name or 'unnamed'}/color={numbers[0]}"
        return self.communicator.add_group(number, tuple(self.ranks[at] for at in alike), name)

    # -- calls -----------------------------------------------------------------------------------------------

    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Give a validated call its number, and carry it out now or, if it is asynchronous, in a thread."""
        self.refuse_forked_child()
        seconds = check_timeout(timeout, self.communicator.timeout)
        generation = self._generation
        key = self._key_of(request)
        work: Work | None = None
        before: int | None = None
        if key is not None and (former := generation.streams.get(key)) is not None:
            settle(former.endpoint)
        try:
            with generation.lock:
                refusal = generation.failure
                if refusal is None:
                    stream = generation.stream(key)
                    before = stream.issued
                    number = generation.issue(key)
                    work = Work(generation, stream, number, request, request.text, request.nbytes, seconds)
                    stream.calls[number] = work
                    stream.callers.add(threading.get_ident())
            if work is None:
                assert refusal is not None
                pair = None if key is None else generation.pair_of(key)
                raise self._refused(generation, refusal, pair, request.text)
            if key == ():
                work.search(request)  # in the order of calls, in which the threads need not begin
            if async_op:
                self._submit(key, work, request)
                return work
            if (worker := self._workers.get(key)) is not None:
                worker.catch_up(partial(stream.ready, work.sequence, alone=request.device is not None))
            return self._carry_out(work, work.run)
        except BaseException as error:
            if work is not None:
                if work.stream.calls.get(work.sequence) is work:
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
                f"this process was forked from process {self._process} and cannot use its {self.label}: "
                "its connections and memory belong to its parent. Do not call dmesh in it, or start it with "
                'multiprocessing.get_context("spawn")'
            )

    def _key_of(self, request: Request) -> Key:
        """Return the stream in which a call is counted."""
        pattern, me = request.pattern, self.rank
        if pattern is not None:
            numbered = pattern.tag == 0 and pattern.source not in (None, me) and not pattern.probes
            return (request.root, me) if numbered else ()
        if request.kind != TRANSFER:
            return None
        if not request.contributes:
            return request.root, me
        return (me, request.root, 1) if request.tag and request.root != me else (me, request.root)

    def look(self, request: Request) -> Any:
        """Return the message that a probe finds without waiting; None if there is none."""
        self.refuse_forked_child()
        generation, pattern = self._generation, request.pattern
        assert pattern is not None
        if generation.failure is not None:
            raise self._refused(generation, generation.failure, None, request.text)
        return generation.matcher.look(generation, pattern)

    def _submit(self, key: Key, work: Work, request: Request) -> None:
        """Carry out an asynchronous call in a thread, unless it is complete at once."""
        work.set_running_or_notify_cancel()  # it cannot be cancelled: other ranks count on it
        if key is None or work.stream.numbered:
            self._worker(key).submit(work, partial(self._carry_out, work, work.run))
        elif request.pattern is None:
            self._finish(work)
        elif self._receiver.add(work):
            self._worker(key).submit(Future(), partial(self._receiver.run, self._finish))

    def _finish(self, work: Work) -> None:
        """Carry out a call whose turn it is, in a thread of its own unless it is complete at once."""
        carry_out = partial(self._carry_out, work, work.run)
        if work.begin():
            do_now(work, carry_out)
        else:
            # It may wait for long, and later ones must not wait for it.
            self._unnumbered.add(work)
            work.add_done_callback(self._unnumbered.discard)
            do_aside(f"dmesh-group-{self.name or 'ranks'}-transfer", partial(do, work, carry_out))

    def _worker(self, key: Key) -> Worker:
        """Return the thread of a stream, so that no transfer waits behind other calls of the group."""
        worker = self._workers.get(key)
        if worker is None:
            name = "-".join(["dmesh-group", self.name or "ranks", *map(str, key or ())])
            worker = self._workers.setdefault(key, Worker(name))
        return worker

    def _refused(
        self, generation: Generation, refusal: Failure, pair: Pair | None, text: str
    ) -> CollectiveError:
        generation.notify_of(refusal)
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
                raise CollectiveError(f"call #{number} of {self.label} is over: the group has begun anew")
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
        final: BaseException | None
        try:
            result = do()
        except BaseException as error:
            final = self._explain(work, error)
            self._close(work, succeeded=False)
            events.ended(work.record, final)
            if final is error:
                raise
            raise final from (error if isinstance(error, PeerLostError) else None)
        finally:
            final = None  # its traceback has this frame: the cycle would keep the generation and its sockets
        self._close(work, succeeded=True)
        events.ended(work.record)
        return result

    @property
    def busy(self) -> bool:
        """True while an asynchronous call is under way."""
        return bool(self._unnumbered) or any(worker.busy for worker in tuple(self._workers.values()))

    def _close(self, work: Work, *, succeeded: bool) -> None:
        work.end()
        with work.generation.lock:
            # In this order: if Ctrl-C comes in between, the call is still there, to be given up.
            if succeeded:
                work.stream.complete(work.sequence, work.text)
            work.stream.calls.pop(work.sequence, None)
        work.stream.wake()

    def _explain(self, work: Work, error: BaseException) -> BaseException:
        """Fail the group if it has not failed yet, and return the error for the caller."""
        generation = work.generation
        if isinstance(error, PeerLostError) and generation.failure is None:
            # The transport found it out; the communicator may hear of it in a moment, too.
            generation.lose(error.rank, self.communicator.why_gone(error.rank) or str(error))
        elif isinstance(error, CollectiveMismatchError) and generation.failure is None:
            generation.fail(Failure(Cause.MISMATCH, str(error)))
        elif generation.failure is None:
            self._give_up(generation, str(work), error)
            generation.reported = True
            return error
        failure = generation.failure
        assert failure is not None
        generation.notify_of(
            failure
        )  # if it failed before this call began, the others have not been notified
        generation.reported = True
        if not isinstance(error, CollectiveError):
            return error  # a Ctrl-C stays one
        return failure.during(str(work))

    # -- after a failure -------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that took no part in the latest `agree` or `shrink`: the same on all that did."""
        consensus = self._consensus
        return consensus.missing if consensus is not None and consensus.generation is self.current else ()

    def agree(self, flag: bool | int, timeout: float | None = None) -> bool | int:
        """Return the AND of the flags of all members that are alive; see `dmesh.collectives.agree`."""
        from dmesh.collectives.consensus import flag_of  # few programs agree on anything

        kind, value = flag_of(flag)
        consensus, seconds = self._prepare("agree", timeout)
        found = consensus.reach("agree", (kind, value), seconds).flag
        self.communicator.acknowledge(consensus.missing, self.label)
        return bool(found) if kind == "bool" else found

    def shrink(self, timeout: float | None = None) -> Group:
        """Return a new group of the members that are alive; see `dmesh.collectives.shrink`."""
        consensus, seconds = self._prepare("shrink", timeout)
        self._end("shrink")
        decision = consensus.reach("shrink", ("", 0), seconds)
        self.communicator.acknowledge(consensus.missing, self.label)
        self._settle_loans(self.id)
        number = group_id("shrink", self.id, consensus.count)
        name = self.name if self.name.endswith(_SHRUNK) else (self.name or self.label) + _SHRUNK
        return self.communicator.add_group(number, decision.survivors, name)

    def reset(self, timeout: float | None = None) -> None:
        """Make the group work again after an error; see `dmesh.collectives.reset`."""
        self.refuse_forked_child()
        check_timeout(timeout, self.communicator.timeout)
        self._end("reset")
        failure = self.current.failure
        if failure is not None and failure.cause in (Cause.CLOSED, Cause.RENEWED, Cause.JOINING):
            raise failure.afterwards(self.label)
        former = self.id
        self.communicator.restart(self)
        self.barrier(timeout=timeout)
        self._settle_loans(former)

    def _end(self, call: str) -> None:
        """Fail the group, if it has not failed: this rank makes no more calls as it is."""
        rank = self.communicator.rank
        who = "its members" if call == "reset" else "its members that are alive"
        text = f"rank {rank} called {call}() of {self.label}, as all {who} must"
        self.fail(Failure(Cause.BROKEN, text, (rank,)))

    def _settle_loans(self, number: int) -> None:
        """Take note that all members have ended the calls of a former id of the group."""
        if self.communicator.pool is not None:
            self.communicator.pool.settle(number)

    def _prepare(self, call: str, timeout: float | None) -> tuple[Consensus, float]:
        """Return how the members decide, and the limit in seconds."""
        self.refuse_forked_child()
        seconds = check_timeout(timeout, self.communicator.timeout)
        store = self.communicator.store
        if store is None:
            raise CollectiveError(
                f"{call}() of {self.label} needs a coordination service, which decides who is alive: "
                "initialize with enable_coordination_service=True"
            )
        consensus = self._consensus
        if consensus is None or consensus.generation is not self.current:
            from dmesh.collectives.consensus import Consensus

            consensus = self._consensus = Consensus(self.current, store())
        return consensus, seconds

    # -- what happens to the group; any thread ---------------------------------------------------------------

    def fail(self, failure: Failure, *, notify: bool | None = True) -> None:
        """Fail the group in its present generation; see `Generation.fail`."""
        self._generation.fail(failure, notify=notify)

    def renew(self, generation: int, over: Failure) -> None:
        """Begin a new generation; calls of the former one that are under way fail as `over` says."""
        former = self._generation
        self._settle_loans(former.members.group)
        self._generation = self._begin(generation, self._members)
        former.fail(over, notify=False)

    def restart(self) -> Generation:
        """Reset a failed group with a new id; return the former generation."""
        former = self._generation
        resets = former.members.resets + 1
        number = group_id("reset", self._members.group, resets)
        members = Members(self.communicator, self.ranks, self.name, number, resets)
        self._generation = self._begin(former.number, members)
        return former

    def close(self, failure: Failure) -> None:
        """End the group on this client alone: its calls fail, its threads stop."""
        self.fail(failure, notify=False)
        _stop_all(self._workers)


def _stop_all(workers: dict[Key, Worker]) -> None:
    for worker in tuple(workers.values()):
        worker.stop()
