"""MPI backend: MPI's own collectives on the memory of the arrays, for networks that MPI knows best.

A group whose members are all in one MPI launch gets an MPI communicator in its first call. MPI carries the
arrays alone; control messages, and the choice of backends before that call, go over TCP.

```
every call:  compare descriptors -> MPI's collective -> (large arrays) every rank says that it is done
```

MPI would corrupt memory or hang if ranks called different things, so no rank enters a collective before all
have called the same one. MPI cannot cancel what it has begun. Therefore it never writes to an array of the
caller's, and memory that it still uses when a call has failed is kept until it lets go (`MpiWorld.retire`).
It may go on reading an input, but no rank gets a result then: the call's last step never comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.mpi_world import MOVING_FOR, MpiWorld
from dmesh.collectives.backends.tcp.frames import SIGNATURE_LIMIT
from dmesh.collectives.request import KINDS, OPS, Buffers, Reduction, Request, agreed
from dmesh.collectives.schedules.program import bounds
from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.errors import CollectiveError

Array = NDArray[Any]
Steps = Generator[Sequence[Any], None, Sequence[Any]]
"""Yields the MPI requests that must be complete before the next step; returns those that outlive the call."""
SMALL = 1 << 16
"""Largest contribution, in bytes, that is copied before MPI gets it."""
MOST_BUFFERED = 1 << 20
"""Bytes of buffered sends to one rank, beyond which a send waits for its receiver."""
_SPARES = 2
_SPARE_BYTES = 1 << 25
"""Largest memory that is kept from one call for the next."""
_MAX_COUNT = 2**31 - 1
"""Largest count, and largest displacement, in MPI 3."""
_ALONE = 0.0001
"""Seconds of waiting in which a call keeps the processor; then others may have it between two looks."""
_SPIN = 0.0003
"""Seconds of waiting for other ranks before the first nap."""
_LONGEST_NAP = 0.015
"""Longest nap, in seconds, while waiting for other ranks: that takes about one percent of a core."""
_MOVING_SPIN = 0.02
"""Seconds of waiting before the first nap while data moves, which it does only when MPI is called."""
_MOVING_NAP = 0.00005
_EXPLAINED_WITHIN = 2.0
"""Seconds in which the group finds out which rank is gone, after an error of MPI's."""
_ANSWERED_WITHIN = 5.0
"""Seconds in which the other ranks say what they called, after a mismatch."""
_ARRIVES_WITHIN = 5.0
"""Seconds in which data of a rank arrives after the rank's goodbye."""
_WORDS = 24
"""Bytes of a transfer's header before its descriptor."""
_HEADER, _READY, _DATA, _DONE = range(4)
"""MPI tags."""
_INTEGER_OPS = {
    "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX",
    "bitwise_and": "BAND", "bitwise_or": "BOR", "bitwise_xor": "BXOR",
}  # fmt: skip
_BOOL_OPS = {
    "any": "LOR", "max": "LOR", "bitwise_or": "LOR", "all": "LAND", "min": "LAND", "bitwise_and": "LAND",
    "bitwise_xor": "LXOR",
}  # fmt: skip


class _MismatchedCall(Exception):
    """Another rank has called something else."""


class MpiOperation(Operation):
    """A call under way in MPI.

    `begin` returns its steps, which put all memory that MPI gets into the list. `on_mismatch` is called again
    and again while another rank is there with another call.
    """

    def __init__(
        self,
        world: MpiWorld,
        begin: Callable[[list[Any]], Steps],
        others: tuple[int, ...],
        on_mismatch: Callable[[], None],
    ) -> None:
        self._world = world
        self._memory: list[Any] = []
        self._steps = begin(self._memory)
        self._others = others
        self._on_mismatch = on_mismatch
        self._requests: list[Any] = []
        self._unknown = False  # whether MPI may have a request that is not in the list
        self._complete = False
        self._mismatched = False
        self._trouble: CollectiveError | None = None  # raised if the group does not find out more in time
        self._found_out_within = _EXPLAINED_WITHIN
        self._error: BaseException | None = None
        self._since = time.monotonic()  # beginning of the step, or of the trouble
        self._goodbyes: dict[int, float] = {}
        world.hold(self)

    def progress(self, seconds: float) -> bool:
        """See `Operation.progress`."""
        deadline = time.monotonic() + seconds
        while True:
            if self._error is not None:
                raise self._error
            if self._go_on():
                return True
            now = time.monotonic()
            quiet = now - self._since
            if self._trouble is not None and quiet > self._found_out_within:
                raise self._trouble
            if now >= deadline:
                return False
            moving = len(self._memory) > 1  # at first, the descriptor alone
            if moving:
                self._world.moving_until = now + MOVING_FOR
            if quiet > (_MOVING_SPIN if moving else _SPIN):
                nap = _MOVING_NAP if moving else min(quiet / 10, _LONGEST_NAP)
                time.sleep(min(nap, deadline - now))
            elif quiet > _ALONE:
                os.sched_yield()

    def _go_on(self) -> bool:
        """Begin all steps that can begin; return whether the last one is complete."""
        if self._mismatched:
            self._on_mismatch()
        if self._trouble is not None:
            return False
        try:
            while not self._complete:
                self._requests = [request for request in self._requests if not request.Test()]
                if self._requests:
                    return False
                self._unknown = True  # Ctrl-C may come when MPI has begun, and this list is empty
                try:
                    self._requests = list(next(self._steps))
                except StopIteration as end:
                    self._requests, self._complete = list(end.value), True
                self._unknown = False
                self._since = time.monotonic()
        except _MismatchedCall:
            self._mismatched, self._unknown, self._since = True, False, time.monotonic()
            self._found_out_within = _ANSWERED_WITHIN
            self._trouble = CollectiveError("a rank has called something else, and does not say what")
        except self._world.mpi.Exception as error:
            self._unknown, self._since = True, time.monotonic()
            self._trouble = CollectiveError(f"MPI has failed: {error}")
            self._trouble.__cause__ = error
        return self._complete

    def missing(self) -> tuple[int, ...]:
        """Return all other ranks: MPI does not say whose data is missing."""
        return () if self._complete else self._others

    def fail(self, error: BaseException) -> None:
        """See `Operation.fail`."""
        self._error = self._error or error

    def may_still_come(self, rank: int) -> bool:
        """Return whether MPI may still deliver data of a rank whose goodbye has come over TCP."""
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _ARRIVES_WITHIN

    def revoke(self) -> None:
        """End the operation; memory that MPI still uses is kept, and none of it is the caller's to write."""
        if not self._unknown:
            (self._world.retire if self._requests else self._world.release)(self)

    def is_done_with_memory(self) -> bool:
        """Return whether MPI has let go of a revoked operation's memory; see `MpiWorld.retire`."""
        self._requests = [request for request in self._requests if not request.Test()]
        if not self._requests:
            self._memory.clear()
        return not self._requests


class _Header:
    """Header of the next transfer from a rank: three words, the descriptor, and small data."""

    def __init__(self, world: MpiWorld, comm: Any, peer: int) -> None:
        self.memory = np.empty(_WORDS + SIGNATURE_LIMIT + SEND_BUFFER, np.uint8)
        self.request = comm.Irecv([self.memory, world.mpi.BYTE], peer, _HEADER)
        world.hold(self)

    @property
    def words(self) -> list[int]:
        """Hash of the call, its order, and the bytes of its descriptor."""
        found: list[int] = self.memory[:_WORDS].view(np.uint64).tolist()
        return found

    def is_done_with_memory(self) -> bool:
        """Return whether MPI has let go of the memory; see `MpiWorld.retire`."""
        return bool(self.request.Test())


class MpiBackend(Backend):
    """Carries out a group's calls in an MPI communicator of its own; MPI ranks are positions in the group."""

    name = "mpi"
    capabilities = Capabilities(
        media="the MPI library's networks",
        arrays="NumPy, up to 2^31 elements",
        operations="all",
        dtypes="all of fixed size",
        condition="`DMESH_BACKEND=mpi`, for groups that do not share memory",
    )

    def __init__(self, world: MpiWorld, comm: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._world = world
        self._mpi = world.mpi
        self._comm = comm
        self._ranks = ranks
        self._rank = rank
        self._spares: list[Array] = []
        self._headers: dict[int, _Header] = {}  # received, or awaited, of transfers without a receive
        self._buffered: dict[int, list[list[Any]]] = {}  # memory of sends to each position; empty when sent

    polls = True

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether MPI can count the elements."""
        if request.device is not None or request.messages_only or not stream.uses_endpoint(sequence):
            return False
        if (reduction := request.reduction) is None:
            if (blocks := request.blocks) is not None:
                width = max(request.dtype.itemsize // _unit(request.dtype.itemsize), 1)
                return max(blocks.total, blocks.largest * len(self._ranks)) * width <= _MAX_COUNT
            block = request.count * request.dtype.itemsize
            return block // _unit(block) <= _MAX_COUNT
        if request.kind not in KINDS or reduction.op not in OPS:
            return False
        elements = request.nbytes_per_rank // reduction.wire.itemsize
        width = max(dtype.itemsize // _unit(dtype.itemsize) for dtype in (reduction.wire, reduction.result))
        return (elements + len(self._ranks)) * width <= _MAX_COUNT

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """See `Backend.start`."""
        text = f"{call.stream.number} {call.sequence} {agreed(request.text)}"
        number = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint64)
        pair = call.stream.pair
        steps = self._collective
        if pair is not None:
            peer = sum(pair) - self._rank
            order = call.order
            steps = (
                partial(self._send, peer, order) if pair[0] == self._rank else partial(self._receive, peer)
            )
        positions = range(len(self._ranks)) if pair is None else pair
        return MpiOperation(
            self._world,
            partial(steps, request, buffers, number),
            tuple(self._ranks[position] for position in positions if position != self._rank),
            call.ask_everybody,
        )

    # -- collectives -----------------------------------------------------------------------------------------

    def _collective(self, request: Request, buffers: Buffers, number: Array, memory: list[Any]) -> Steps:
        comm, mpi = self._comm, self._mpi
        agreed = np.concatenate([number, ~number])
        memory.append(agreed)
        yield [comm.Iallreduce(mpi.IN_PLACE, [agreed, mpi.UINT64_T], mpi.MIN)]
        if agreed[0] != ~agreed[1]:  # the least and the greatest number
            raise _MismatchedCall
        if not request.count:
            return []
        is_small = request.nbytes_per_rank <= SMALL
        source = buffers.source
        if source is not None and is_small:
            source = source.copy()
        result = self._writable(request, buffers)
        memory += [source, result]
        if (reduction := request.reduction) is None:
            move = self._move if request.blocks is None else self._exchange
            yield move(request, source, result)
        else:
            assert source is not None
            if request.blocks is None and (op := _native_op(reduction)) is not None:
                yield self._reduce(request, source, result, op)
            else:
                yield from self._fold(request, reduction, source, result, memory)
        if not is_small:
            yield [comm.Ibarrier()]
        self._copy_out(result, buffers.result)
        return []

    def _move(self, request: Request, source: Array | None, result: Array) -> list[Any]:
        """Begin a collective that moves data."""
        comm, root, me = self._comm, request.root, self._rank
        datatype = self._datatype(request.count * request.dtype.itemsize)
        give = None if source is None else [_octets(source), datatype]
        take = None if not result.size else [_octets(result), datatype]
        match request.kind:
            case "broadcast":
                if source is not None:
                    _copy(source, result)
                return [comm.Ibcast(give or take, root)]
            case "all_gather":
                return [comm.Iallgather(give, take)]
            case "gather":
                return [comm.Igather(give, take, root)]
            case "scatter":
                return [comm.Iscatter(give, take, root)]
            case "all_to_all":
                return [comm.Ialltoall(give, take)]
        if source is not None and (me, me) in request.pairs:
            _copy(source, result)
        pairs = [(giver, taker) for giver, taker in request.pairs if giver != taker]
        received = [comm.Irecv(take, giver, _DATA) for giver, taker in pairs if taker == me]
        return received + [comm.Isend(give, taker, _DATA) for giver, taker in pairs if giver == me]

    def _exchange(self, request: Request, source: Array | None, result: Array) -> list[Any]:
        """Begin a collective that moves blocks of different lengths."""
        comm, root, blocks = self._comm, request.root, request.blocks
        assert blocks is not None
        datatype = self._datatype(request.dtype.itemsize)
        take = self._parts(result, blocks.receives)
        give = None if source is None else self._parts(source, blocks.sends)
        whole = None if source is None else [_octets(source), datatype]
        match request.kind:
            case "all_gather":
                return [comm.Iallgatherv(whole, take)]
            case "gather":
                return [comm.Igatherv(whole, take if self._rank == root else None, root)]
            case "scatter":
                return [comm.Iscatterv(give, [_octets(result), datatype], root)]
        return [comm.Ialltoallv(give, take)]

    def _reduce(self, request: Request, source: Array, result: Array, name: str) -> list[Any]:
        """Begin a reduction of MPI's own: its order does not matter to integers."""
        comm, root, size = self._comm, request.root, source.dtype.itemsize
        datatype = self._datatype(size)  # sums and products of signed integers have the same bits, and wrap
        if source.dtype.kind == "i" and name in ("MIN", "MAX"):
            datatype = getattr(self._mpi, f"INT{8 * size}_T")
        give, take, op = [_octets(source), datatype], [_octets(result), datatype], getattr(self._mpi, name)
        match request.kind:
            case "all_reduce":
                return [comm.Iallreduce(give, take, op)]
            case "reduce":
                return [comm.Ireduce(give, take if self._rank == root else None, op, root)]
        return [comm.Ireduce_scatter_block(give, take, op)]

    def _fold(
        self, request: Request, reduction: Reduction, source: Array, result: Array, memory: list[Any]
    ) -> Generator[Sequence[Any], None, None]:
        """Reduce in the order of ranks, on which floats depend, and of which MPI makes no promise.

        Every rank gets its part of all contributions, folds it, and passes the result on.
        """
        comm, size, me, count = self._comm, len(self._ranks), self._rank, request.count
        if request.kind == "reduce_scatter":
            equal = [(rank * count, (rank + 1) * count) for rank in range(size)]
            parts = equal if request.blocks is None else list(request.blocks.sends)
        elif source.nbytes * size <= SMALL:  # every rank gets all contributions: one step, for short arrays
            stage = self._scratch(size * count, reduction.wire)
            memory.append(stage)
            datatype = self._datatype(reduction.wire.itemsize)
            yield [comm.Iallgather([_octets(source), datatype], [_octets(stage), datatype])]
            if result.size:
                _fold_rows(reduction, list(stage.reshape(size, count)), result)
            self._give_back(stage)
            return
        else:
            parts = [bounds(count, size, rank) for rank in range(size)]
        start, stop = parts[me]
        length = stop - start
        stage = self._scratch((size - 1) * length, reduction.wire)
        rows = list(stage.reshape(size - 1, length))
        places = [(at * length, (at + 1) * length) for at in range(size - 1)]
        places.insert(me, (0, 0))
        target = result if request.kind == "reduce_scatter" else result[start:stop]
        if not result.size:
            target = np.empty(length, reduction.result)
        memory += [stage, target]
        others = [part if rank != me else (0, 0) for rank, part in enumerate(parts)]
        yield [comm.Ialltoallv(self._parts(source, others), self._parts(stage, places))]
        rows.insert(me, source[start:stop])
        _fold_rows(reduction, rows, target)
        self._give_back(stage)
        take = self._parts(result, parts) if result.size else None
        give = [_octets(target), self._datatype(target.dtype.itemsize)]
        if request.kind == "all_reduce":
            yield [comm.Iallgatherv(self._mpi.IN_PLACE, take)]
        elif request.kind == "reduce":
            yield [comm.Igatherv(self._mpi.IN_PLACE if take else give, take, request.root)]

    def _writable(self, request: Request, buffers: Buffers) -> Array:
        """Return memory for MPI to write a call's result to: never the caller's."""
        result = buffers.result
        if request.out is None or request.fill is not None or not np.may_share_memory(result, request.out):
            return result
        return self._scratch(result.size, result.dtype)

    def _copy_out(self, result: Array, into: Array) -> None:
        """Copy a complete result to the caller's memory, if it is not there."""
        if result is not into:
            _copy(result, into)
            self._give_back(result)

    def _scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for a call: that of an earlier one, if it is large enough, as new pages are slow."""
        nbytes = count * dtype.itemsize
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()  # atomic, as transfers have threads of their own
            if spare.nbytes >= nbytes:
                return spare[:nbytes].view(dtype)
        return np.empty(nbytes, np.uint8).view(dtype)

    def _give_back(self, scratch: Array) -> None:
        """Keep memory of a complete call for the next one."""
        whole = scratch.base
        if isinstance(whole, np.ndarray) and whole.nbytes <= _SPARE_BYTES and len(self._spares) < _SPARES:
            self._spares.append(whole)

    def _parts(self, array: Array, parts: Sequence[tuple[int, int]]) -> list[Any]:
        """Return MPI's view of an array of which each rank has a part, given in elements."""
        width = array.dtype.itemsize // _unit(array.dtype.itemsize)
        counts = [(stop - start) * width for start, stop in parts]
        starts = [start * width for start, _ in parts]
        return [_octets(array), counts, starts, self._datatype(array.dtype.itemsize)]

    def _datatype(self, nbytes: int) -> Any:
        """Return MPI's type of the largest integers that fit exactly into some bytes."""
        return getattr(self._mpi, f"UINT{8 * _unit(nbytes)}_T")

    # -- transfers -------------------------------------------------------------------------------------------

    def arrival(self, stream: Stream, sequence: int, seconds: float) -> tuple[str, int] | None:
        """Return the contents of a transfer's header; see `Backend.arrival`."""
        del seconds
        if stream.pair is None or not stream.uses_endpoint(sequence):
            return None
        peer = stream.pair[0]
        header = self._headers.get(peer)
        if header is None:
            header = self._headers[peer] = _Header(self._world, self._comm, peer)
        if not header.request.Test():
            return None
        _, order, length = header.words
        return header.memory[_WORDS : _WORDS + length].tobytes().decode("utf-8", "replace"), order

    def close(self, *, orderly: bool) -> None:
        """Keep memory that MPI still uses; see `Backend.close`."""
        del orderly
        for header in self._headers.values():
            self._world.retire(header)

    def _send(
        self, peer: int, order: int, request: Request, buffers: Buffers, number: Array, memory: list[Any]
    ) -> Steps:
        """Send: small data with the descriptor, large data once the receiver has called the same."""
        comm, source, nothing = self._comm, buffers.source, [None, 0, self._mpi.BYTE]
        assert source is not None
        is_small = request.nbytes_per_rank <= SEND_BUFFER
        text = request.text.encode()
        words = np.array([number[0], order, len(text)], np.uint64)
        parts = [_octets(words), np.frombuffer(text, np.uint8), *([_octets(source)] if is_small else [])]
        header = np.concatenate(parts)
        memory.append(header)
        sent = comm.Isend([header, self._mpi.BYTE], peer, _HEADER)
        if is_small:
            self._buffered[peer] = kept = [one for one in self._buffered.get(peer, ()) if one]
            if sum(array.nbytes for one in kept for array in one) < MOST_BUFFERED:
                kept.append(memory)
            else:
                yield [sent]
            return [sent]
        yield [sent, comm.Irecv(nothing, peer, _READY)]
        memory.append(source)
        yield [comm.Isend([_octets(source), self._datatype(source.nbytes)], peer, _DATA)]
        yield [comm.Isend(nothing, peer, _DONE)]
        return []

    def _receive(
        self, peer: int, request: Request, buffers: Buffers, number: Array, memory: list[Any]
    ) -> Steps:
        """Receive; see `_send`."""
        comm, nothing = self._comm, [None, 0, self._mpi.BYTE]
        header = self._headers.pop(peer, None) or _Header(self._world, comm, peer)
        memory.append(header.memory)
        self._world.release(header)
        yield [header.request]
        if header.words[0] != number[0]:
            raise _MismatchedCall
        if (nbytes := request.nbytes_per_rank) <= SEND_BUFFER:
            begin = _WORDS + header.words[2]
            _octets(buffers.result)[...] = header.memory[begin : begin + nbytes]
            return []
        result = self._writable(request, buffers)
        memory.append(result)
        received = comm.Irecv([_octets(result), self._datatype(nbytes)], peer, _DATA)
        yield [received, comm.Isend(nothing, peer, _READY), comm.Irecv(nothing, peer, _DONE)]
        self._copy_out(result, buffers.result)
        return []


def _native_op(reduction: Reduction) -> str | None:
    """Return the name of MPI's own op if it gives the same bits in any order, as that of integers does."""
    dtype = reduction.wire
    if reduction.accumulator != dtype or reduction.result != dtype or dtype.isbuiltin != 1:
        return None
    if dtype.kind == "b":
        return _BOOL_OPS.get(reduction.op)
    return _INTEGER_OPS.get(reduction.op) if dtype.kind in "iu" else None


def _fold_rows(reduction: Reduction, rows: Sequence[Array], target: Array) -> None:
    """Fold all ranks' contributions, in their order."""
    accumulator = target
    if reduction.accumulator != reduction.result:
        accumulator = np.empty(target.size, reduction.accumulator)
    for rank, row in enumerate(rows):
        reduction.fold(row, accumulator, rank == 0)
    reduction.finish(accumulator, target, len(rows))


def _unit(nbytes: int) -> int:
    return next(size for size in (8, 4, 2, 1) if nbytes % size == 0)


def _octets(array: Array) -> NDArray[np.uint8]:
    return array.view(np.uint8)


def _copy(source: Array, into: Array) -> None:
    # As bytes: NumPy would leave out the padding of structured elements.
    if source is not into:
        _octets(into)[...] = _octets(source)
