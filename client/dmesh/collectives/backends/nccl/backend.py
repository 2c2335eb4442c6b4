"""NCCL backend: arrays on GPUs. The ranks agree on each call by other means, and only then enter NCCL.

Three properties of NCCL decide the design:

- Calls that look asynchronous can block, without limit if a peer is dead: the creation of a communicator
  always, the first operations while they connect. So each communicator has a thread that makes all calls, and
  other threads wait for it with a time limit.
- All members must abort a communicator that has failed. That is allowed while another thread is blocked in it
  (since NCCL 2.19).
- An abort can block, too, so another thread makes it.
"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Sequence, Steps, Stream
from dmesh.collectives.backends.nccl.arrays import load_nccl, resolve
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.request import Buffers, Request
from dmesh.collectives.services import Members
from dmesh.collectives.work import Generation
from dmesh.coordination.waiting import Bell, Worker
from dmesh.errors import CollectiveError

_IDENTITY_BYTES = 128
"""Bytes of NCCL's unique ids."""
_EXPLAINED_WITHIN = 2.0
"""Seconds that the group gets to detect which rank is lost, after NCCL has reported an error."""
_COMES_WITHIN = 5.0
"""Seconds in which data of a rank that has said goodbye may still arrive."""


class NcclCommunicator:
    """NCCL communicator of some ranks' GPUs, in one generation, and the thread that uses it.

    NCCL frees a communicator that is aborted. So a thread takes it away before it aborts it, and no other
    thread can use it any more. It is made of the number of members, an id that is the same on all of them,
    and this rank's position.
    """

    def __init__(self, name: str, made_of: tuple[int, bytes, int]) -> None:
        self._made_of = made_of
        self._stream: Any = None
        self._lock = Lock()
        self._comm: Any = None
        self._taken = False
        self._operations: queue.SimpleQueue[NcclOperation | None] = queue.SimpleQueue()
        Worker(self._work, name).start()

    def submit(self, operation: NcclOperation) -> None:
        """Carry out an operation after those before it."""
        self._operations.put(operation)

    def enter(self) -> tuple[Any, Any]:
        """Return the communicator, which the first call creates, and its CUDA stream. Its own thread."""
        import cupy

        with self._lock:
            comm, taken = self._comm, self._taken
        if comm is None and not taken:
            comm = load_nccl().NcclCommunicator(*self._made_of)  # blocks until all members have come
            with self._lock:
                taken = self._taken
                self._comm = None if taken else comm
            if taken:
                _abort(comm)
        if taken:
            raise CollectiveError("the NCCL communicator has been aborted")
        # Non-blocking, so that the default stream does not wait for other members.
        self._stream = self._stream or cupy.cuda.Stream(non_blocking=True)
        return comm, self._stream

    def trouble(self) -> Exception | None:
        """Return the asynchronous error that NCCL reports, if any. Any thread."""
        with self._lock:
            if self._comm is not None:
                try:
                    self._comm.check_async_error()
                except Exception as error:  # noqa: BLE001 -- NcclError, or KeyError for a code new to CuPy
                    return error
        return None

    def end(self) -> None:
        """Destroy the communicator when nothing is under way in it. Any thread, does not wait."""
        self._operations.put(None)

    def abort(self) -> None:
        """Abort all operations under way; later ones fail, too. Any thread, does not wait. Idempotent."""
        comm = self._take()
        if comm is not None:
            Worker(partial(_abort, comm), "dmesh-nccl-abort").start()
        self.end()

    def _take(self) -> Any:
        """Take the communicator away; None if there is none yet, or it has been taken."""
        with self._lock:
            comm, self._comm, self._taken = self._comm, None, True
            return comm

    def _work(self) -> None:
        while (operation := self._operations.get()) is not None:
            operation.carry_out()
            del operation  # or its arrays would stay alive until the next one
        if (comm := self._take()) is not None:
            comm.destroy()


class NcclOperation(Operation):
    """An operation in NCCL, which keeps its memory alive until it is over."""

    def __init__(
        self, communicator: NcclCommunicator, request: Request, buffers: Buffers, others: tuple[int, ...]
    ) -> None:
        self._communicator = communicator
        self._request = request
        self._buffers = buffers
        self._others = others
        self._bell = Bell()
        self._is_over = False
        self._outcome: BaseException | None = None
        self._trouble: BaseException | None = None
        self._trouble_since = 0.0
        self._error: BaseException | None = None
        self._goodbyes: dict[int, float] = {}

    def carry_out(self) -> None:
        """Do it, and wait until it is over on this GPU. The communicator's thread."""
        request = self._request
        try:
            import cupy

            with cupy.cuda.Device(request.device):
                # Here, and not on the GPU: NCCL is not entered before it can begin at once. What becomes of
                # an operation behind other work when its communicator is aborted, NCCL does not say.
                request.ready.synchronize()
                comm, stream = self._communicator.enter()
                _enqueue(request, self._buffers, len(self._others) + 1, comm, stream.ptr)
                with stream:
                    request.finish(self._buffers)  # enqueues the copy into the result, if there is one
                done = cupy.cuda.Event(block=True, disable_timing=True)  # its waiters sleep
                done.record(stream)
                done.synchronize()
                self._outcome = self._communicator.trouble()
        except BaseException as error:  # noqa: BLE001 -- raised by `progress`
            self._outcome = error
        self._is_over = True
        self._bell.ring()

    def progress(self, seconds: float) -> bool:
        """Wait until it is over; see `Operation.progress`."""
        troubled = self._trouble is not None
        self._bell.wait_for(lambda: self._error is not None or (self._is_over and not troubled), seconds)
        if self._error is not None:
            raise self._error
        if not troubled:
            self._trouble = self._outcome if self._is_over else self._communicator.trouble()
            self._trouble_since = time.monotonic()
            return self._is_over and self._trouble is None
        # NCCL may be the first to notice that a member is gone, but it cannot say which.
        if time.monotonic() - self._trouble_since > _EXPLAINED_WITHIN:
            if isinstance(self._trouble, CollectiveError):
                raise self._trouble
            text = f"NCCL has failed: {type(self._trouble).__name__}: {self._trouble}"
            if "INVALID_USAGE" in text:
                text += (
                    ". Do ranks of this group share a GPU? NCCL allows that from 2.30 on, if "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 is set for all of them"
                )
            raise CollectiveError(text) from self._trouble
        return False

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that it may be waiting for: NCCL does not say whose data is missing."""
        return () if self._is_over else self._others

    def fail(self, error: BaseException) -> None:
        """See `Operation.fail`."""
        self._error = self._error or error
        self._bell.ring()

    def may_still_come(self, rank: int) -> bool:
        """Return whether there may be more of a rank that has said goodbye: its GPU was done before ours."""
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _COMES_WITHIN

    def revoke(self) -> None:
        """Abort NCCL's communicator unless the operation is over: this rank's memory must be free."""
        if not self._is_over or self._error is not None or self._trouble is not None:
            self._communicator.abort()


class NcclBackend(Backend):
    """NCCL among the GPUs of a group's ranks, one communicator for each stream.

    The generation's other backends let the ranks agree on each collective, the messages on each transfer.
    """

    name = "nccl"
    capabilities = Capabilities(
        media="NVLink, PCIe, InfiniBand or TCP, as NCCL finds them",
        arrays="CuPy",
        operations="all but gather, scatter, permute",
        dtypes="those of NCCL; others are moved as bytes, and not reduced",
        condition="arrays on GPUs, and CuPy with NCCL",
    )

    def __init__(
        self, members: Members, generation: Callable[[], Generation | None], messages: MessageBackend
    ) -> None:
        self._members = members
        self._generation = generation
        self._messages = messages
        self._communicators: dict[int, NcclCommunicator] = {}

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the arrays are on GPUs."""
        return request.device is not None

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin with the agreement; see `Backend.start`."""
        return Sequence(self._steps(request, buffers, call))

    def close(self, *, orderly: bool) -> None:
        """End the communicators, or abort their unfinished operations."""
        for communicator in tuple(self._communicators.values()):
            (communicator.end if orderly else communicator.abort)()

    def _steps(self, request: Request, buffers: Buffers, call: Call) -> Steps:
        """Let all ranks of a call agree on it, or the first of them broadcast a new communicator's id."""
        stream, own = call.stream, self._members.ranks[self._members.rank]
        ranks = self._members.of(stream.pair)
        place = ranks.index(own)
        communicator = self._communicators.get(stream.number)
        agreement = Request("barrier", request.text)
        if communicator is None and request.nbytes:
            data = np.zeros(_IDENTITY_BYTES, np.uint8) if place else np.frombuffer(_new_identity(), np.uint8)
            agreement = Request(
                "broadcast", request.text, nbytes_per_rank=data.size, count=data.size,
                contributes=place == 0, source=data, shape=data.shape,
            )  # fmt: skip
        agreed = agreement.allocate()
        backend: Backend
        if stream.pair is not None:
            # By messages, which go in both directions: neither rank may begin before the other has come.
            backend = self._messages.between(ranks, place)
        else:
            generation = self._generation()
            assert generation is not None  # a call is under way
            backend = next(
                one for one in generation.backends if one.supports(agreement, stream, call.sequence)
            )
        yield backend.start(agreement, agreed, call)
        if not request.nbytes:
            return
        if communicator is None:
            made_of = len(ranks), agreement.finish(agreed).tobytes(), place
            communicator = NcclCommunicator(f"dmesh-nccl-{self._members.label}", made_of)
            self._communicators[stream.number] = communicator
            weakref.finalize(self, communicator.end).atexit = False
        others = tuple(rank for rank in ranks if rank != own)
        operation = NcclOperation(communicator, request, buffers, others)
        communicator.submit(operation)
        yield operation


def _enqueue(request: Request, buffers: Buffers, size: int, comm: Any, stream: int) -> None:
    """Enqueue a call on a communicator and a CUDA stream."""
    nccl = load_nccl()
    given: Any = buffers.source
    wanted: Any = buffers.result
    source = 0 if given is None else given.data.ptr
    result = 0 if not wanted.size else wanted.data.ptr
    octets, nbytes = nccl.NCCL_UINT8, request.nbytes_per_rank
    code, op, width = octets, 0, 1
    if request.reduction is not None:
        op, code, width, _ = resolve(request.reduction.op, request.reduction.wire, request.kind)
    count = request.count * width
    match request.kind:
        case "all_reduce":
            comm.allReduce(source, result, count, code, op, stream)
        case "reduce":
            comm.reduce(source, result, count, code, op, request.root, stream)
        case "reduce_scatter":
            comm.reduceScatter(source, result, count, code, op, stream)
        case "broadcast":
            # NCCL reads the root's array alone, but wants an address on all ranks.
            comm.broadcast(source or result, result, nbytes, octets, request.root, stream)
        case "all_gather":
            comm.allGather(source, result, nbytes, octets, stream)
        case "all_to_all":
            block = nbytes // size
            nccl.groupStart()
            try:
                for peer in range(size):
                    at = peer * block
                    comm.send(source + at, block, octets, peer, stream)
                    comm.recv(result + at, block, octets, peer, stream)
            finally:
                nccl.groupEnd()
        case _ if request.contributes:  # a transfer among two: the sender is 0, the receiver 1
            comm.send(source, nbytes, octets, 1, stream)
        case _:
            comm.recv(result, nbytes, octets, 0, stream)


def _new_identity() -> bytes:
    """Return a new id, by which the members' communicators connect."""
    nccl = load_nccl()
    try:
        identity = nccl.get_unique_id()
    except nccl.NcclError as error:
        raise CollectiveError(f"NCCL cannot make an id for a communicator: {error}") from error
    if not isinstance(identity, bytes) or len(identity) != _IDENTITY_BYTES:  # before 14, ids were tuples
        raise CollectiveError("collectives of GPU arrays need CuPy 14 or later")
    return identity


def _abort(comm: Any) -> None:
    try:
        comm.abort()
    except Exception:  # noqa: BLE001 -- nobody waits for this
        logger.exception("an NCCL communicator could not be aborted")
