"""MPI backend: MPI's own collectives on the memory of the arrays, for networks that MPI knows best.

A group whose members are all in one MPI launch gets an MPI communicator in its first call. MPI carries the
arrays alone; control messages, and that first call, go over TCP.

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
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.backends.mpi_operation import MismatchedCall, MpiOperation, Steps
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.request import Buffers, Reduction, Request
from dmesh.collectives.schedules import bounds
from dmesh.collectives.tuning import SEND_BUFFER

Array = NDArray[Any]
SMALL = 1 << 16
"""Largest contribution, in bytes, that is copied before MPI gets it."""
MOST_BUFFERED = 1 << 20
"""Bytes of buffered sends to one rank, beyond which a send waits for its receiver."""
_SPARES = 2
_SPARE_BYTES = 1 << 25
"""Largest memory that is kept from one call for the next."""
_MAX_COUNT = 2**31 - 1
"""Largest count, and largest displacement, in MPI 3."""
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


class MpiBackend(Backend):
    """Carries out a group's calls in an MPI communicator of its own.

    Args:
        world: The MPI launch.
        comm: The group's communicator; its MPI ranks are positions in the group.
        ranks: The group's members, by position.
        rank: This client's position.
    """

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
        self._buffered: dict[int, list[list[Any]]] = {}  # memory of sends to each position; empty when sent

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether MPI can count the elements; see `Backend.supports`."""
        if request.device is not None or not stream.uses_endpoint(sequence):
            return False
        if (reduction := request.reduction) is None:
            block = request.count * request.dtype.itemsize
            return block // _unit(block) <= _MAX_COUNT
        elements = request.nbytes_per_rank // reduction.wire.itemsize
        width = max(dtype.itemsize // _unit(dtype.itemsize) for dtype in (reduction.wire, reduction.result))
        return (elements + len(self._ranks)) * width <= _MAX_COUNT

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin a call; see `Backend.start`."""
        text = f"{call.stream.number} {call.sequence} {request.text}"
        number = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint64)
        pair = call.stream.pair
        others = tuple(rank for position, rank in enumerate(self._ranks) if position != self._rank)
        if pair is None:
            return MpiOperation(
                self._world,
                lambda memory: self._collective(request, buffers, number, memory),
                others,
                call.ask_everybody,
            )
        peer = pair[1] if pair[0] == self._rank else pair[0]
        carry = self._send if pair[0] == self._rank else self._receive
        return MpiOperation(
            self._world,
            lambda memory: carry(peer, request, buffers, number, memory),
            (self._ranks[peer],),
            call.ask_everybody,
        )

    # -- collectives -----------------------------------------------------------------------------------------

    def _collective(self, request: Request, buffers: Buffers, number: Array, memory: list[Any]) -> Steps:
        comm, mpi = self._comm, self._mpi
        agreed = np.concatenate([number, ~number])
        memory.append(agreed)
        yield [comm.Iallreduce(mpi.IN_PLACE, [agreed, mpi.UINT64_T], mpi.MIN)]
        if agreed[0] != ~agreed[1]:  # the least and the greatest number
            raise MismatchedCall
        if not request.count:
            return []
        is_small = request.nbytes_per_rank <= SMALL
        source = buffers.source
        if source is not None and is_small:
            source = source.copy()
        result = self._writable(request, buffers)
        memory += [source, result]
        if (reduction := request.reduction) is None:
            yield self._move(request, source, result)
        else:
            assert source is not None
            if (op := _native_op(reduction)) is not None:
                yield self._reduce(request, reduction, source, result, getattr(mpi, op))
            else:
                yield from self._fold(request, reduction, source, result, memory)
        if not is_small:
            yield [comm.Ibarrier()]
        self._copy_out(result, buffers.result)
        return []

    def _move(self, request: Request, source: Array | None, result: Array) -> list[Any]:
        """Begin a collective that moves data."""
        comm, root, me = self._comm, request.root, self._rank
        unit = _unit(request.count * request.dtype.itemsize)
        give = None if source is None else [_octets(source), self._datatype(unit)]
        take = None if not result.size else [_octets(result), self._datatype(unit)]
        match request.kind:
            case "broadcast":
                if source is not None:
                    _copy(source, result)
                return [comm.Ibcast(take if give is None else give, root)]
            case "all_gather":
                return [comm.Iallgather(give, take)]
            case "gather":
                return [comm.Igather(give, take, root)]
            case "scatter":
                return [comm.Iscatter(give, take, root)]
            case "all_to_all":
                return [comm.Ialltoall(give, take)]
        begun = []
        for giver, taker in request.pairs:
            if giver == taker == me:
                assert source is not None
                _copy(source, result)
            elif taker == me:
                begun.append(comm.Irecv(take, giver, _DATA))
            elif giver == me:
                begun.append(comm.Isend(give, taker, _DATA))
        return begun

    def _reduce(
        self, request: Request, reduction: Reduction, source: Array, result: Array, op: Any
    ) -> list[Any]:
        """Begin a reduction of MPI's own: its order does not matter to integers."""
        comm, root, size = self._comm, request.root, source.dtype.itemsize
        datatype = self._datatype(size)  # sums and products of signed integers have the same bits, and wrap
        if source.dtype.kind == "i" and reduction.op in ("min", "max"):
            datatype = getattr(self._mpi, f"INT{8 * size}_T")
        give, take = [_octets(source), datatype], [_octets(result), datatype]
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
        is_flat = request.kind != "reduce_scatter" and source.nbytes * size <= SMALL
        if is_flat:  # every rank gets all contributions: one step, for short arrays
            stage = self._scratch(size * count, reduction.wire)
            memory.append(stage)
            unit = self._datatype(_unit(reduction.wire.itemsize))
            yield [comm.Iallgather([_octets(source), unit], [_octets(stage), unit])]
            if not result.size:
                return
            rows, target = list(stage.reshape(size, count)), result
        else:
            parts = [(rank * count, (rank + 1) * count) for rank in range(size)]
            if request.kind != "reduce_scatter":
                parts = [bounds(count, size, rank) for rank in range(size)]
            start, stop = parts[me]
            others = [part if rank != me else (0, 0) for rank, part in enumerate(parts)]
            stage = self._scratch((size - 1) * (stop - start), reduction.wire)
            rows = list(stage.reshape(size - 1, stop - start))
            places = [(at * (stop - start), (at + 1) * (stop - start)) for at in range(size - 1)]
            places.insert(me, (0, 0))
            target = result if request.kind == "reduce_scatter" else result[start:stop]
            if not result.size:
                target = np.empty(stop - start, reduction.result)
            memory += [stage, target]
            yield [comm.Ialltoallv(self._parts(source, others), self._parts(stage, places))]
            rows.insert(me, source[start:stop])
        accumulator = target
        if reduction.accumulator != reduction.result:
            accumulator = np.empty(target.size, reduction.accumulator)
        for rank, row in enumerate(rows):
            reduction.fold(row, accumulator, rank == 0)
        reduction.finish(accumulator, target, size)
        self._give_back(stage)
        if is_flat or request.kind == "reduce_scatter":
            return
        take = self._parts(result, parts) if result.size else None
        give = [_octets(target), self._datatype(_unit(target.dtype.itemsize))]
        if request.kind == "all_reduce":
            yield [comm.Iallgatherv(self._mpi.IN_PLACE, take)]
        else:
            yield [comm.Igatherv(self._mpi.IN_PLACE if take else give, take, request.root)]

    def _writable(self, request: Request, buffers: Buffers) -> Array:
        """Return memory for MPI to write a call's result to: never the caller's."""
        result = buffers.result
        if request.out is None or request.zero_fill or not np.may_share_memory(result, request.out):
            return result
        return self._scratch(result.size, result.dtype)

    def _copy_out(self, result: Array, into: Array) -> None:
        """Copy a complete result to the caller's memory, if it is not there."""
        if result is not into:
            _octets(into)[...] = _octets(result)
            self._give_back(result)

    def _scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for a call: that of an earlier one, if it is large enough, as new pages are slow."""
        nbytes = count * dtype.itemsize
        spare = None
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()  # atomic, as transfers have threads of their own
        if spare is None or spare.nbytes < nbytes:
            spare = np.empty(nbytes, np.uint8)
        return spare[:nbytes].view(dtype)

    def _give_back(self, scratch: Array) -> None:
        """Keep memory of a complete call for the next one."""
        whole = scratch.base
        if isinstance(whole, np.ndarray) and whole.nbytes <= _SPARE_BYTES and len(self._spares) < _SPARES:
            self._spares.append(whole)

    def _parts(self, array: Array, parts: Sequence[tuple[int, int]]) -> list[Any]:
        """Return MPI's view of an array of which each rank has a part, given in elements."""
        unit = _unit(array.dtype.itemsize)
        width = array.dtype.itemsize // unit
        counts = [(stop - start) * width for start, stop in parts]
        return [_octets(array), counts, [start * width for start, _ in parts], self._datatype(unit)]

    def _datatype(self, nbytes: int) -> Any:
        return getattr(self._mpi, f"UINT{8 * nbytes}_T")

    # -- transfers -------------------------------------------------------------------------------------------

    def _send(self, peer: int, request: Request, buffers: Buffers, number: Array, memory: list[Any]) -> Steps:
        """Send: small data with the descriptor, large data once the receiver has called the same."""
        comm, source = self._comm, buffers.source
        assert source is not None
        is_small = request.nbytes_per_rank <= SEND_BUFFER
        header = np.concatenate([_octets(number), _octets(source)]) if is_small else _octets(number)
        memory.append(header)
        sent = comm.Isend([header, self._mpi.BYTE], peer, _HEADER)
        if is_small:
            self._buffered[peer] = kept = [one for one in self._buffered.get(peer, ()) if one]
            if sum(array.nbytes for one in kept for array in one) < MOST_BUFFERED:
                kept.append(memory)
                return [sent]
            yield [sent]
            return []
        yield [sent, comm.Irecv([None, 0, self._mpi.BYTE], peer, _READY)]
        memory.append(source)
        yield [comm.Isend([_octets(source), self._datatype(_unit(source.nbytes))], peer, _DATA)]
        yield [comm.Isend([None, 0, self._mpi.BYTE], peer, _DONE)]
        return []

    def _receive(
        self, peer: int, request: Request, buffers: Buffers, number: Array, memory: list[Any]
    ) -> Steps:
        """Receive; see `_send`."""
        comm, nothing = self._comm, [None, 0, self._mpi.BYTE]
        header = np.empty(number.nbytes + SEND_BUFFER, np.uint8)
        memory.append(header)
        yield [comm.Irecv([header, self._mpi.BYTE], peer, _HEADER)]
        if bytes(header[: number.nbytes]) != number.tobytes():
            raise MismatchedCall
        if (nbytes := request.nbytes_per_rank) <= SEND_BUFFER:
            _octets(buffers.result)[...] = header[number.nbytes : number.nbytes + nbytes]
            return []
        result = self._writable(request, buffers)
        memory.append(result)
        received = comm.Irecv([_octets(result), self._datatype(_unit(nbytes))], peer, _DATA)
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


def _unit(nbytes: int) -> int:
    """Return the size of the largest integers that fit exactly into some bytes."""
    return next(size for size in (8, 4, 2, 1) if nbytes % size == 0)


def _octets(array: Array) -> NDArray[np.uint8]:
    return array.view(np.uint8)


def _copy(source: Array, into: Array) -> None:
    # As bytes: NumPy would leave out the padding of structured elements.
    if source is not into:
        _octets(into)[...] = _octets(source)
