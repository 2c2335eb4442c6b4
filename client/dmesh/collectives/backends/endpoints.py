"""Backends whose calls go through native endpoints: shared memory, and dedicated TCP connections."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.tcp.dedicated import TcpEndpoints
from dmesh.collectives.request import KINDS, Buffers, Descriptor, Request
from dmesh.coordination.waiting import take
from dmesh.errors import CollectiveError
from dmesh.native import Endpoint

_EXPLAINED_WITHIN = 5.0
"""Seconds in which a rank tells what it has called instead, or the transport that it has ended."""


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
            raise self._corrupt()
        # If the process of a rank that is cut off has ended, or failed, the transport knows that in a moment.
        if endpoint.disconnected and self._waited_enough(seconds):
            raise self._disconnected()
        if endpoint.mismatched:
            # Its call is asked for by a message, and the answer ends this wait.
            self._on_mismatch()
            if self._waited_enough(seconds):
                rank = self._ranks[endpoint.culprit]
                raise CollectiveError(
                    f"rank {rank} has called something else than this rank; its log may say what"
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
        """Return whether there may be more on a dedicated connection than on the one that said goodbye."""
        if not self.endpoint.over_tcp or self.endpoint.disconnected:
            return False
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _EXPLAINED_WITHIN

    def revoke(self) -> None:
        """Do nothing: an endpoint that was aborted is left by the thread that drives it."""

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _corrupt(self) -> CollectiveError:
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
        if request.device is not None or endpoint is None or not stream.uses_endpoint(sequence):
            return False
        if stream.pair is not None or request.reduction is None:
            return not (endpoint.over_tcp and request.kind == "permute")
        return request.descriptor is not None and endpoint.supports(request.descriptor)

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin a call at the stream's endpoint; see `Backend.start`."""
        endpoint, pair = call.stream.endpoint, call.stream.pair
        assert endpoint is not None
        ranks = self._ranks if pair is None else [self._ranks[at] for at in pair]
        operation = EndpointOperation(endpoint, ranks, call.ask_everybody)
        if pair is None:
            self._start(endpoint, request, buffers)
        elif pair[0] == self._rank:
            endpoint.start_send(request.hash, _octets(buffers.source))
        else:
            endpoint.start_recv(request.hash, _octets(buffers.result))
        return operation

    def _start(self, endpoint: Endpoint, request: Request, buffers: Buffers) -> None:
        kind, nbytes, root = request.kind, request.nbytes_per_rank, request.root
        if kind == "permute":
            root = next((source for source, target in request.pairs if target == self._rank), -1)
        number, op, _, dtype, _ = request.descriptor or Descriptor(KINDS.index(kind), 0, 0, 0, ())
        block = nbytes if kind in ("all_gather", "gather") else nbytes // len(self._ranks)
        both = buffers.source, buffers.result
        data = (None if array is None or not array.size else _octets(array) for array in both)
        endpoint.start(number, op, dtype, root, request.hash, nbytes, block, *data)


class SharedMemoryBackend(EndpointBackend):
    """Calls through memory that all members have mapped."""

    name = "shm"
    capabilities = Capabilities(
        media="shared memory",
        arrays="NumPy",
        operations="all",
        dtypes="all of fixed size; reductions of native dtypes",
        condition="all members on one host, up to 64, with the native core",
    )


class TcpBackend(EndpointBackend):
    """Calls over connections that carry nothing but the calls of this group."""

    name = "tcp"
    capabilities = Capabilities(
        media="dedicated TCP connections",
        arrays="NumPy",
        operations="all but permute",
        dtypes="all of fixed size; reductions of native dtypes",
        condition="up to 64 members with the native core, without peer TLS",
    )

    def __init__(self, ranks: tuple[int, ...], rank: int, endpoints: TcpEndpoints) -> None:
        super().__init__(ranks, rank)
        self._endpoints = endpoints

    def close(self, *, orderly: bool) -> None:
        """Drop arrays that have come without a `recv`, so that those that this rank has sent arrive."""
        del orderly
        self._endpoints.discard_transfers()


def _octets(array: Any) -> memoryview:
    return memoryview(array.view(np.uint8).data)
