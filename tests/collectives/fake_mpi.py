"""MPI within one process: as much of mpi4py's `MPI` as dmesh uses, with the same names and rules.

MPI reads and writes the memory that it was given when a request completes, not when the operation begins: a
test that changes memory too early, or looks too early, sees it. A rank that is dead answers nothing; who
sends to it gets the error of MPI's fault tolerance, as far as libraries have that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmesh.collectives.backends.mpi_world import MpiWorld, join


class FakeMpiError(RuntimeError):
    """What mpi4py calls `MPI.Exception`."""


class Network:
    """State that all ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.contexts: dict[object, Context] = {}

    def context(self, name: object) -> Context:
        with self.lock:
            return self.contexts.setdefault(name, Context())

    def mpi(self, rank: int) -> FakeMpi:
        """Return what `from mpi4py import MPI` gives to a rank."""
        return FakeMpi(self, rank)


class Context:
    """State of one communicator."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, tuple[str, Any]]] = []
        self.messages: dict[tuple[int, int, int], list[tuple[bytes, Request]]] = {}


class Request:
    """A request: complete once `attempt` says so."""

    def __init__(self, network: Network, attempt: Callable[[], bool]) -> None:
        self._network, self._attempt = network, attempt
        self.done = False

    def Test(self) -> bool:
        with self._network.lock:
            self.done = self.done or self._attempt()
            return self.done


class Comm:
    """A communicator, as one rank has it."""

    def __init__(
        self, mpi: FakeMpi, network: Network, members: tuple[int, ...], me: int, name: object
    ) -> None:
        self.mpi, self.network, self.members, self.me, self.name = mpi, network, members, me, name
        self.rank = members.index(me)
        self.context = network.context(name)
        self._rounds = 0
        self._copies = 0

    # -- communicators ---------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        return len(self.members)

    def Get_attr(self, key: object) -> int:
        assert key is FakeMpi.TAG_UB
        return 32767

    def Set_errhandler(self, handler: object) -> None:
        assert handler is FakeMpi.ERRORS_RETURN

    def Idup(self) -> tuple[Comm, Request]:
        self._copies += 1
        copy = Comm(self.mpi, self.network, self.members, self.me, (self.name, "copy", self._copies))
        return copy, self._together("Idup", None, lambda _: None)

    def Get_group(self) -> Comm:
        return self

    def Incl(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.members[rank] for rank in ranks)

    def Create_group(self, group: tuple[int, ...], tag: int) -> Comm:
        return Comm(self.mpi, self.network, group, self.me, (self.name, group, tag))

    def Iprobe(self, source: int, tag: int) -> bool:
        del source, tag
        return False

    # -- collectives -----------------------------------------------------------------------------------------

    def _together(self, kind: str, mine: Any, finish: Callable[[dict[int, Any]], None]) -> Request:
        with self.network.lock:
            number, self._rounds = self._rounds, self._rounds + 1
            rounds = self.context.rounds
            if number == len(rounds):
                rounds.append({})
            rounds[number][self.rank] = (kind, mine)

        def attempt() -> bool:
            found = rounds[number]
            if len(found) < len(self.members):
                return False
            assert {kind for kind, _ in found.values()} == {kind}, "MPI would corrupt memory, or hang"
            finish({rank: given for rank, (_, given) in found.items()})
            return True

        return Request(self.network, attempt)

    def Ibarrier(self) -> Request:
        return self._together("Ibarrier", None, lambda _: None)

    def Iallreduce(self, mine: Any, into: Any, op: Any) -> Request:
        given = into if mine is FakeMpi.IN_PLACE else mine
        # In place, every rank must have read all contributions before the first one is overwritten.
        values = _typed(given).copy() if mine is FakeMpi.IN_PLACE else None

        def finish(found: dict[int, Any]) -> None:
            _typed(into)[...] = _reduced(found, op)

        return self._together("Iallreduce", [values, None] if values is not None else given, finish)

    def Ireduce(self, mine: Any, into: Any, op: Any, root: int) -> Request:
        def finish(found: dict[int, Any]) -> None:
            if self.rank == root:
                _typed(into)[...] = _reduced(found, op)

        return self._together("Ireduce", mine, finish)

    def Ireduce_scatter_block(self, mine: Any, into: Any, op: Any) -> Request:
        def finish(found: dict[int, Any]) -> None:
            _typed(into)[...] = _block(_reduced(found, op), len(self.members), self.rank)

        return self._together("Ireduce_scatter_block", mine, finish)

    def Ibcast(self, buffer: Any, root: int) -> Request:
        def finish(found: dict[int, Any]) -> None:
            if self.rank != root:
                _typed(buffer)[...] = _typed(found[root])

        return self._together("Ibcast", buffer, finish)

    def Iallgather(self, mine: Any, into: Any) -> Request:
        def finish(found: dict[int, Any]) -> None:
            _octets(into)[...] = np.concatenate([_octets(found[rank]) for rank in sorted(found)])

        return self._together("Iallgather", mine, finish)

    def Igather(self, mine: Any, into: Any, root: int) -> Request:
        def finish(found: dict[int, Any]) -> None:
            if self.rank == root:
                _octets(into)[...] = np.concatenate([_octets(found[rank]) for rank in sorted(found)])

        return self._together("Igather", mine, finish)

    def Iscatter(self, mine: Any, into: Any, root: int) -> Request:
        def finish(found: dict[int, Any]) -> None:
            _octets(into)[...] = _block(_octets(found[root]), len(self.members), self.rank)

        return self._together("Iscatter", mine, finish)

    def Ialltoall(self, mine: Any, into: Any) -> Request:
        def finish(found: dict[int, Any]) -> None:
            size = len(self.members)
            _octets(into)[...] = np.concatenate(
                [_block(_octets(found[rank]), size, self.rank) for rank in range(size)]
            )

        return self._together("Ialltoall", mine, finish)

    def Ialltoallv(self, mine: Any, into: Any) -> Request:
        def finish(found: dict[int, Any]) -> None:
            for rank, given in found.items():
                _part(into, rank)[...] = _part(given, self.rank)

        return self._together("Ialltoallv", mine, finish)

    def Iallgatherv(self, mine: Any, into: Any) -> Request:
        if mine is FakeMpi.IN_PLACE:
            mine = [_part(into, self.rank), None]

        def finish(found: dict[int, Any]) -> None:
            for rank, given in found.items():
                _part(into, rank)[...] = _typed(given)

        return self._together("Iallgatherv", mine, finish)

    def Igatherv(self, mine: Any, into: Any, root: int) -> Request:
        if mine is FakeMpi.IN_PLACE:
            mine = [_part(into, self.rank), None]

        def finish(found: dict[int, Any]) -> None:
            for rank, given in found.items() if self.rank == root else ():
                _part(into, rank)[...] = _typed(given)

        return self._together("Igatherv", mine, finish)

    def Iscatterv(self, mine: Any, into: Any, root: int) -> Request:
        def finish(found: dict[int, Any]) -> None:
            _typed(into)[...] = _part(found[root], self.rank)

        return self._together("Iscatterv", mine, finish)

    # -- messages --------------------------------------------------------------------------------------------

    def Isend(self, data: Any, dest: int, tag: int) -> Request:
        queue = self._queue(self.rank, dest, tag)
        request = Request(self.network, lambda: False)
        with self.network.lock:
            queue.append((_octets(data), request))
        return request

    def Irecv(self, into: Any, source: int, tag: int) -> Request:
        queue = self._queue(source, self.rank, tag)

        def attempt() -> bool:
            if not queue:
                return False
            data, sent = queue.pop(0)
            if data.nbytes > _octets(into).nbytes:
                raise FakeMpiError("MPI_ERR_TRUNCATE: message truncated")
            _octets(into)[: data.nbytes] = data
            sent.done = True
            return True

        return Request(self.network, attempt)

    def _queue(self, source: int, dest: int, tag: int) -> list[Any]:
        with self.network.lock:
            return self.context.messages.setdefault((source, dest, tag), [])


def _octets(spec: Any) -> Any:
    data = spec[0] if isinstance(spec, list) else spec
    if data is None:
        return np.empty(0, np.uint8)
    return data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)


def _typed(spec: Any) -> Any:
    data, datatype = spec[0], spec[-1]
    return data if datatype is None else data.reshape(-1).view(datatype)


def _part(spec: Any, rank: int) -> Any:
    _, counts, starts, _ = spec
    return _typed(spec)[starts[rank] : starts[rank] + counts[rank]]


def _block(data: Any, size: int, rank: int) -> Any:
    length = data.size // size
    return data[rank * length : (rank + 1) * length]


def _reduced(found: dict[int, Any], op: np.ufunc) -> Any:
    """Return the reduction, in an order that is nobody's."""
    values = [_typed(found[rank]) for rank in sorted(found, reverse=True)]
    total = values[0].copy()
    for value in values[1:]:
        total = op(total, value).astype(total.dtype)
    return total


class FakeMpi:
    """The module."""

    ANY_SOURCE = ANY_TAG = -1
    TAG_UB = object()
    IN_PLACE = object()
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    ERRORS_RETURN = object()
    Exception = FakeMpiError
    BYTE = UINT8_T = np.uint8
    UINT16_T, UINT32_T, UINT64_T = np.uint16, np.uint32, np.uint64
    INT8_T, INT16_T, INT32_T, INT64_T = np.int8, np.int16, np.int32, np.int64
    SUM, PROD, MIN, MAX = np.add, np.multiply, np.minimum, np.maximum
    BAND, BOR, BXOR = np.bitwise_and, np.bitwise_or, np.bitwise_xor
    LAND, LOR, LXOR = np.logical_and, np.logical_or, np.logical_xor

    def __init__(self, network: Network, rank: int) -> None:
        self.COMM_WORLD = Comm(self, network, tuple(range(network.size)), rank, "world")
        self.initialized, self.finalized, self.level = True, False, self.THREAD_MULTIPLE

    def Is_initialized(self) -> bool:
        return self.initialized

    def Is_finalized(self) -> bool:
        return self.finalized

    def Query_thread(self) -> int:
        return self.level


def launch(size: int) -> tuple[Network, list[MpiWorld]]:
    """Return an MPI launch in which client c is rank size - 1 - c: no test can take one for the other."""
    network = Network(size)
    jobs = [f"host:{1 + client}" for client in range(size)]
    worlds: dict[int, MpiWorld] = {}

    def meet(client: int) -> None:
        worlds[client] = join(network.mpi(size - 1 - client), client, jobs, 60.0)

    threads = [threading.Thread(target=meet, args=(client,)) for client in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return network, [worlds[client] for client in range(size)]
