"""Backends whose calls go through native endpoints: shared memory, and dedicated TCP connections."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.dedicated import TcpEndpoints
from dmesh.collectives.request import DTYPES, KINDS, OPS, TRANSFER, Buffers, Descriptor, Request, describe
from dmesh.collectives.schedules.blocks import Blocks
from dmesh.coordination.waiting import take
from dmesh.errors import CollectiveError
from dmesh.native import Endpoint

_EXPLAINED_WITHIN = 5.0
"""Seconds in which a rank tells what it has called instead, or the transport that it has ended."""


_LOOK = 0.05
"""Seconds between looks at a connection that has ended."""


class EndpointOperation(Operation):
    """A call in a native endpoint of `ranks`, in which it begins before `progress` is called.

    `on_mismatch` is called again and again while a rank is there with another call.
    """

    def __init__(self, endpoint: Endpoint, ranks: Sequence[int], on_mismatch: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.result: Any = None
        """Return value of the endpoint for a call that it took whole."""
        self._ranks = ranks
        self._on_mismatch = on_mismatch
        self._unexplained_since = 0.0
        self._goodbyes: dict[int, float] = {}
        self._error: BaseException | None = None
        self._failed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def progress(self, seconds: float) -> bool:
        """Wait for the other ranks; see `Operation.progress`."""
        self._check()
        endpoint = self.endpoint
        result = endpoint.progress(seconds)
        if result is not endpoint:
            self.result = result
            return True
        self._check()
        if endpoint.corrupt:
            raise self.corrupt()
        # If the process of a rank that is cut off has ended, or failed, the transport knows that in a moment.
        if endpoint.disconnected and self._waited_enough(seconds):
            raise self._disconnected() from endpoint.cause
        if endpoint.mismatched:
            # Its call is asked for by a message, and the answer ends this wait.
            self._on_mismatch()
            if self._waited_enough(seconds):
                rank = self._ranks[endpoint.culprit]
                raise CollectiveError(
                    f"rank {rank} called a different operation than this rank; its log may show which one"
                )
        return False

    def _waited_enough(self, seconds: float) -> bool:
        """Wait for a better explanation, and raise it; True if there was time enough for one."""
        now = time.monotonic()
        self._unexplained_since = self._unexplained_since or now
        if now - self._unexplained_since > _EXPLAINED_WITHIN:
            return True
        with contextlib.suppress(queue.Empty):
            take(self._failed, seconds)
        self._check()
        return False

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not come. Any thread."""
        return tuple(sorted(self._ranks[position] for position in self.endpoint.missing()))

    def fail(self, error: BaseException) -> None:
        """Make every pending and later `progress` raise `error`; see `Operation.fail`."""
        if self._error is None:
            self._error = error
            self.endpoint.abort()
            self._failed.put(None)

    def may_still_come(self, rank: int) -> bool:
        """Return whether a dedicated connection may have more data, although the peer said goodbye."""
        if not self.endpoint.over_tcp or self.endpoint.disconnected:
            return False
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _EXPLAINED_WITHIN

    def revoke(self) -> None:
        """Do nothing: an endpoint that was aborted is left by the thread that drives it."""

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def corrupt(self) -> CollectiveError:
        """Return the error of an endpoint in which a rank has left invalid data."""
        rank = self._ranks[self.endpoint.culprit]
        if self.endpoint.over_tcp:
            return CollectiveError(f"rank {rank} has sent invalid data: a bug in its program, or in dmesh")
        return CollectiveError(
            f"the memory that rank {rank} shares holds invalid data: a bug in its program, or in dmesh, has "
            "overwritten it"
        )

    def _disconnected(self) -> CollectiveError:
        rank = self._ranks[self.endpoint.culprit]
        if not self.endpoint.over_tcp:
            return CollectiveError(
                f"the memory of rank {rank} cannot be read any more, although its process has not ended: it "
                "has abandoned the call, or the system forbids reading it (see ptrace_scope)"
            )
        return CollectiveError(
            f"the connection with rank {rank} for this group has ended, although its process has not: its "
            "program has dropped the group, or something between the hosts has cut the connection"
        )


class EndpointBackend(Backend):
    """Calls through native endpoints of `ranks`, at position `rank`, over either medium."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the stream's endpoint takes the call; see `Backend.supports`."""
        endpoint = stream.endpoint
        if request.device is not None or request.messages_only:
            return False
        if endpoint is None or not stream.uses_endpoint(sequence):
            return False
        if stream.pair is not None or request.reduction is None:
            return True
        descriptor = _numbers(request)
        return descriptor is not None and endpoint.supports(descriptor)

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin a call at the stream's endpoint; see `Backend.start`."""
        endpoint, pair = call.stream.endpoint, call.stream.pair
        assert endpoint is not None
        ranks = self._ranks if pair is None else [self._ranks[at] for at in pair]
        operation = EndpointOperation(endpoint, ranks, call.ask_everybody)
        if pair is None:
            self._start(endpoint, request, buffers)
        elif pair[0] == self._rank:
            endpoint.start_send(request.hash, _octets(buffers.source), call.order, *_described(request))
        else:
            endpoint.start_recv(request.hash, _octets(buffers.result), 0, *_described(request))
        return operation

    def arrival(self, stream: Stream, sequence: int, seconds: float) -> tuple[str, int] | None:
        """Return the contents of the sender's envelope; see `Backend.arrival`."""
        endpoint = stream.endpoint
        if endpoint is None or stream.pair is None or not stream.uses_endpoint(sequence):
            return None
        found = endpoint.arrival(seconds)
        if found is None:
            if seconds and endpoint.disconnected:  # soon the transport knows why
                time.sleep(min(seconds, _LOOK))
            elif endpoint.corrupt:
                ranks = [self._ranks[at] for at in stream.pair]
                raise EndpointOperation(endpoint, ranks, lambda: None).corrupt()
            return None
        order, dtype, shape, text = found
        return text if dtype < 0 else describe(TRANSFER, DTYPES[dtype], shape)[0], order

    def _start(self, endpoint: Endpoint, request: Request, buffers: Buffers) -> None:
        kind, nbytes, root = request.kind, request.nbytes_per_rank, request.root
        number, op, _, dtype, _ = _numbers(request) or Descriptor(KINDS.index(kind), 0, 0, 0, ())
        block = nbytes if kind in ("all_gather", "gather") else nbytes // len(self._ranks)
        both = buffers.source, buffers.result
        source, target = (None if array is None or not array.size else _octets(array) for array in both)
        blocks = request.blocks
        if kind == "permute":
            blocks = permuted(request.pairs, request.count, len(self._ranks), self._rank)
        layout = None if blocks is None else layout_bytes(blocks, _travels_as(request).itemsize)
        endpoint.start(number, op, dtype, root, request.hash, nbytes, block, source, target, layout)


class SharedMemoryBackend(EndpointBackend):
    """Calls through memory that all members have mapped."""

    name = "shm"
    capabilities = Capabilities(
        media="shared memory",
        arrays="NumPy",
        operations="all",
        dtypes="all of fixed size; reductions of native dtypes",
        condition="all members on one host, up to 256, with the native core",
    )


class TcpBackend(EndpointBackend):
    """Calls over connections that carry nothing but the calls of this group."""

    name = "tcp"
    capabilities = Capabilities(
        media="dedicated TCP connections, encrypted if the cluster says so",
        arrays="NumPy",
        operations="all",
        dtypes="all of fixed size; reductions of native dtypes",
        condition="up to 64 members with the native core",
    )

    def __init__(self, ranks: tuple[int, ...], rank: int, endpoints: TcpEndpoints) -> None:
        super().__init__(ranks, rank)
        self._endpoints = endpoints

    def close(self, *, orderly: bool) -> None:
        """Drop received arrays without a `recv`, so that this rank's own sends can complete."""
        del orderly
        self._endpoints.discard_transfers()


@lru_cache(maxsize=64)
def permuted(pairs: tuple[tuple[int, int], ...], count: int, size: int, rank: int) -> Blocks:
    """Return the layout of a permutation: whole arrays, for one rank and from one rank."""
    whole = (0, count)
    sends = tuple(whole if (rank, peer) in pairs else (0, 0) for peer in range(size))
    receives = tuple(whole if (peer, rank) in pairs else (0, 0) for peer in range(size))
    return Blocks(sends, receives, (0,) * size, count, count, closes=True)


@lru_cache(maxsize=256)
def layout_bytes(blocks: Blocks, itemsize: int) -> bytes:
    """Return a layout as `Endpoint.start` takes it: in bytes."""
    spans = zip(blocks.sends, blocks.receives, blocks.origins, strict=True)
    words = [(b - a, a, d - c, c, origin) for (a, b), (c, d), origin in spans]
    flat = [*itertools.chain.from_iterable(words), blocks.largest]
    return (np.array(flat, np.uint64) * np.uint64(itemsize)).tobytes()


def _travels_as(request: Request) -> np.dtype[Any]:
    return request.dtype if request.reduction is None else request.reduction.wire


def _numbers(request: Request) -> Descriptor | None:
    """Return kind, op and dtype of a call in numbers; None if the native core does not know them."""
    reduction = request.reduction
    if request.blocks is None or reduction is None:
        return request.descriptor
    known = reduction.op in OPS and reduction.wire == reduction.result and reduction.wire in DTYPES
    if not known:
        return None
    dtype = DTYPES.index(reduction.wire)
    return Descriptor(KINDS.index(request.kind), OPS.index(reduction.op), 0, dtype, ())


def _described(request: Request) -> tuple[Any, ...]:
    descriptor = request.descriptor
    return (-1, (), request.text) if descriptor is None else (descriptor.dtype, descriptor.shape)


def _octets(array: Any) -> memoryview:
    return memoryview(array.view(np.uint8).data)
