"""NCCL backend: arrays on GPUs. The ranks agree on each call by other means, and only then enter NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Sequence, Steps, Stream
from dmesh.collectives.backends.nccl.communicator import IDENTITY_BYTES, NcclCommunicator, new_identity
from dmesh.collectives.backends.nccl.reductions import load_nccl, resolve
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.request import Buffers, Request
from dmesh.collectives.services import Members
from dmesh.collectives.work import Generation
from dmesh.coordination.waiting import Bell
from dmesh.errors import CollectiveError

_EXPLAINED_WITHIN = 2.0
"""Seconds that the group gets to detect which rank is lost, after NCCL has reported an error."""
_COMES_WITHIN = 5.0
"""Seconds in which data of a rank that has said goodbye may still arrive."""


class NcclOperation(Operation):
    """An operation in NCCL; see `Operation`.

    Args:
        communicator: Carries it out.
        others: The other ranks that take part.
    """

    def __init__(self, communicator: NcclCommunicator, others: tuple[int, ...]) -> None:
        self._communicator = communicator
        self._others = others
        self._bell = Bell()
        self._is_over = False
        self._outcome: BaseException | None = None
        self._trouble: BaseException | None = None
        self._trouble_since = 0.0
        self._error: BaseException | None = None
        self._goodbyes: dict[int, float] = {}

    def over(self, error: BaseException | None) -> None:
        """Note that it is over on this GPU. The communicator's thread."""
        self._outcome, self._is_over = error, True
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
            raise CollectiveError(
                f"NCCL has failed: {type(self._trouble).__name__}: {self._trouble}"
            ) from self._trouble
        return False

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that it may be waiting for: NCCL does not say whose data is missing."""
        return () if self._is_over else self._others

    def fail(self, error: BaseException) -> None:
        """Make every pending and later `progress` raise `error`; see `Operation.fail`."""
        if self._error is None:
            self._error = error
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

    Args:
        members: The group.
        generation: Returns its generation, whose other backends let the ranks agree on each call.
        messages: The group's message backend.
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
        self,
        members: Members,
        generation: Callable[[], Generation | None],
        messages: MessageBackend,
    ) -> None:
        self._members = members
        self._generation = generation
        self._messages = messages
        self._communicators: dict[int, NcclCommunicator] = {}

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the arrays are on GPUs; see `Backend.supports`."""
        return request.device is not None

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin with the agreement; see `Backend.start`."""
        return Sequence(self._steps(request, buffers, call))

    def close(self, *, orderly: bool) -> None:
        """End the communicators, or abort what is under way in them; see `Backend.close`."""
        for communicator in tuple(self._communicators.values()):
            (communicator.end if orderly else communicator.abort)()

    def _steps(self, request: Request, buffers: Buffers, call: Call) -> Steps:
        number = call.stream.number
        communicator = self._communicators.get(number)
        needs_identity = communicator is None and request.nbytes > 0
        agreement = self._agreement(request, call, identity=needs_identity)
        agreed = agreement.allocate()
        yield self._agree(agreement, agreed, call)
        if not request.nbytes:
            return
        size, place = self._place(call)
        if communicator is None:
            name = f"dmesh-nccl-{self._members.label}"
            identity = agreement.finish(agreed).tobytes()
            assert request.device is not None
            communicator = NcclCommunicator(identity, size, place, request.device, name)
            self._communicators[number] = communicator
        ranks = self._members.of(call.stream.pair)
        operation = NcclOperation(communicator, tuple(r for at, r in enumerate(ranks) if at != place))
        communicator.perform(request, buffers, _entry(request, buffers, size), operation.over)
        yield operation

    def _place(self, call: Call) -> tuple[int, int]:
        """Return how many ranks take part in a call, and this rank's place among them."""
        pair = call.stream.pair
        if pair is None:
            return len(self._members.ranks), self._members.rank
        return 2, pair.index(self._members.rank)

    def _agreement(self, request: Request, call: Call, *, identity: bool) -> Request:
        """Return a barrier in the name of the call, or a broadcast of a new communicator's id."""
        _, place = self._place(call)
        if not identity:
            return Request("barrier", request.text)
        data = np.zeros(IDENTITY_BYTES, np.uint8)
        if place == 0:
            data = np.frombuffer(new_identity(), np.uint8)
        return Request(
            "broadcast", request.text, nbytes_per_rank=IDENTITY_BYTES, count=IDENTITY_BYTES,
            contributes=place == 0, source=data, shape=data.shape,
        )  # fmt: skip

    def _agree(self, agreement: Request, buffers: Buffers, call: Call) -> Operation:
        """Compare the descriptors of all ranks; complete when all have come."""
        if call.stream.pair is not None:
            # By messages, which go in both directions: neither rank may begin before the other has come.
            ranks = self._members.of(call.stream.pair)
            _, place = self._place(call)
            return self._messages.between(ranks, place).start(agreement, buffers, call)
        generation = self._generation()
        assert generation is not None  # a call is under way
        for backend in generation.backends:
            if backend.supports(agreement, call.stream, call.sequence):
                return backend.start(agreement, buffers, call)
        raise AssertionError("messages support every agreement")


def _entry(request: Request, buffers: Buffers, size: int) -> Callable[[Any, int], None]:
    """Return what enqueues the call on a communicator and a stream."""
    nccl = load_nccl()
    given: Any = buffers.source
    wanted: Any = buffers.result
    source = 0 if given is None else given.data.ptr
    result = 0 if not wanted.size else wanted.data.ptr
    octets, nbytes = nccl.NCCL_UINT8, request.nbytes_per_rank
    code, op, width = octets, 0, 1
    if request.reduction is not None:
        folding = resolve(request.reduction.op, request.reduction.wire, request.kind)
        code, op, width = folding.code, folding.op, folding.width
    count = request.count * width

    def all_to_all(comm: Any, stream: int) -> None:
        block = nbytes // size
        nccl.groupStart()
        try:
            for peer in range(size):
                at = peer * block
                comm.send(source + at, block, octets, peer, stream)
                comm.recv(result + at, block, octets, peer, stream)
        finally:
            nccl.groupEnd()

    match request.kind:
        case "all_reduce":
            return lambda comm, stream: comm.allReduce(source, result, count, code, op, stream)
        case "reduce":
            return lambda comm, stream: comm.reduce(source, result, count, code, op, request.root, stream)
        case "reduce_scatter":
            return lambda comm, stream: comm.reduceScatter(source, result, count, code, op, stream)
        case "broadcast":
            # NCCL reads the root's array alone, but wants an address on all ranks.
            return lambda comm, stream: comm.broadcast(
                source or result, result, nbytes, octets, request.root, stream
            )
        case "all_gather":
            return lambda comm, stream: comm.allGather(source, result, nbytes, octets, stream)
        case "all_to_all":
            return all_to_all
    if request.contributes:  # a transfer among two: the sender is 0, the receiver 1
        return lambda comm, stream: comm.send(source, nbytes, octets, 1, stream)
    return lambda comm, stream: comm.recv(result, nbytes, octets, 0, stream)
