"""Arrays in shared memory: of one client, or lent by one member of a group and mapped by all.

A fresh page of shared memory costs as much time as copying it many times over, here and in each process that
maps it. So memory is kept when its array is gone, and the next array gets it.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dmesh.collectives.backends.shm.setup import HEADER, Segment, SharedMemoryRegistry, Ticket, has_ended
from dmesh.errors import SharedMemoryError

_CHUNK = 64 << 20
"""Bytes of a segment, unless an array needs more."""
_PAGE = 4096
_LINE = 64
_PLACE = struct.Struct("!Q")
PLACE_SIZE = Ticket.SIZE + _PLACE.size
"""Bytes of the place of common memory, as members send it to each other."""
_LEFT = b"\1"
_PROCESS = struct.Struct("=Q")

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class _Chunk:
    """Segment with its free memory."""

    segment: Segment
    free: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of each free piece, sorted; no two pieces touch."""

    def take(self, nbytes: int) -> int | None:
        """Take the first piece that is large enough."""
        for number, (begin, end) in enumerate(self.free):
            if end - begin >= nbytes:
                self.free[number : number + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        return None

    def give_back(self, begin: int, end: int) -> None:
        """Free a piece, and merge it with adjacent free ones."""
        number = bisect.bisect(self.free, (begin, end))
        if number < len(self.free) and self.free[number][0] == end:
            end = self.free.pop(number)[1]
        if number and self.free[number - 1][1] == begin:
            number -= 1
            begin = self.free.pop(number)[0]
        self.free.insert(number, (begin, end))


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    memory: Bytes
    """Array of the pool, which keeps the memory."""
    ranks: tuple[int, ...]
    gone: Callable[[int], bool]
    place: bytes
    group: int
    """Id of the group, which is another one after a reset."""
    excused: set[int] = field(default_factory=set)
    """Positions of members that have not mapped the memory."""

    def is_over(self) -> bool:
        """Return whether no member uses the memory any more."""
        return all(self._has_left(at, rank) for at, rank in enumerate(self.ranks))

    def _has_left(self, at: int, rank: int) -> bool:
        if at in self.excused or self.memory[at * _LINE]:
            return True
        if not self.gone(rank):
            return False
        # The process of a departed client may still use its mappings.
        process = self.process_of(at)
        return not process or has_ended(process)

    def process_of(self, at: int) -> int:
        """Return the process of a member that has mapped the memory; 0 if it has not."""
        (process,) = _PROCESS.unpack_from(self.memory.data, at * _LINE + _LINE // 2)
        return int(process)


class Pool:
    """Arrays in memory that this client shares, and arrays lent to groups. Thread-safe.

    Memory that the members of a group have in common is lent by one of them, and given back when each has
    forgotten every view of it, or its process has ended. Each marks that in a cache line of its own at the
    beginning, as members of groups do in their regions, beside the number of its process.
    """

    def __init__(self, shared_memory: SharedMemoryRegistry) -> None:
        assert shared_memory.registered is not None
        self._shared_memory = shared_memory
        self._registered = shared_memory.registered
        self._lock = Lock()
        self._chunks: list[_Chunk] = []
        # Appended to without the lock: the garbage collector does it.
        self._returned: deque[tuple[_Chunk, int, int]] = deque()
        self._lending = Lock()
        self._loans: list[_Loan] = []
        self._borrowed: dict[Ticket, mmap.mmap] = {}  # the latest last; mapped anew, all pages would be fresh

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array with arbitrary contents; SharedMemoryError if there is no more memory."""
        wanted = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(lengths) * wanted.itemsize
        if wanted.hasobject or not nbytes:
            return np.empty(lengths, wanted)  # nothing of it could be shared
        return self.take(nbytes)[0].view(wanted).reshape(lengths)

    def take(self, nbytes: int) -> tuple[Bytes, Segment, int]:
        """Return bytes with arbitrary contents, their segment, and their offset in it, at a page.

        They are given back when the array and all views of it are gone. Raises SharedMemoryError.
        """
        size = _pages(nbytes)
        chunk, begin = self._take(size)
        # Views refer to this array, so its block is not given back as long as any view of it lives.
        data = np.frombuffer(memoryview(chunk.segment.memory)[begin : begin + nbytes], np.uint8)
        weakref.finalize(data, self._returned.append, (chunk, begin, begin + size)).atexit = False
        return data, chunk.segment, begin

    def lend(
        self, nbytes: int, ranks: tuple[int, ...], position: int, gone: Callable[[int], bool], group: int
    ) -> tuple[Bytes, bytes]:
        """Lend memory of the pool to a group; return it, and its place for `borrow`.

        Raises SharedMemoryError.

        Args:
            nbytes: How many bytes.
            ranks: The group's members.
            position: This client's position in it.
            gone: Returns True for a rank that leaves no mark once its process has ended.
            group: The group's id.
        """
        self._end_loans()
        header = _pages(len(ranks) * _LINE)
        memory, segment, begin = self.take(header + nbytes)
        memory[:header] = 0
        place = segment.ticket.encode() + _PLACE.pack(begin)
        with self._lending:
            self._loans.append(_Loan(memory, ranks, gone, place, group))
        return _use(segment.memory, begin, nbytes, len(ranks), position), place

    def excuse(self, place: bytes, positions: Iterable[int]) -> None:
        """Wait no more for the marks of members that have not mapped memory that was lent, and will not."""
        with self._lending:
            for loan in self._loans:
                if loan.place == place:
                    loan.excused.update(positions)

    def settle(self, group: int) -> None:
        """Take note that all members of a group have failed it, and none will map what was lent to it."""
        with self._lending:
            for loan in self._loans:
                if loan.group == group:
                    absent = [at for at in range(len(loan.ranks)) if not loan.process_of(at)]
                    loan.excused.update(absent)

    def borrow(self, place: bytes, nbytes: int, members: int, position: int) -> Bytes:
        """Map memory that another member has lent, at the place that its owner has sent.

        Raises:
            OSError: It cannot be mapped: its owner is on another host, or is another user.
            ValueError: It is not at that place.
        """
        (begin,) = _PLACE.unpack(place[Ticket.SIZE :])
        ticket = Ticket.decode(place[: Ticket.SIZE])
        memory = self._shared_memory.attach(ticket)
        self._keep_mapped(ticket, memory)
        if begin % _PAGE or begin + _pages(members * _LINE) + nbytes > len(memory):
            raise ValueError(f"there is no common memory of {nbytes} bytes at {begin} of {len(memory)}")
        return _use(memory, begin, nbytes, members, position)

    def has_spare(self, nbytes: int) -> bool:
        """Return whether there is memory for an array, and as much left as half of what may be shared."""
        self._end_loans()
        with self._lock:
            self._take_returned()
            mapped = sum(len(chunk.segment.memory) for chunk in self._chunks)
            free = sum(end - begin for chunk in self._chunks for begin, end in chunk.free)
        limit = self._shared_memory.limit
        return mapped - free + nbytes <= limit // 2

    def close(self) -> None:
        """Let no process attach any more; arrays stay usable."""
        with self._lock:
            for chunk in self._chunks:
                self._registered.drop(chunk.segment.ticket.nonce)
                chunk.segment.close()
            self._chunks.clear()
        with self._lending:
            self._borrowed.clear()

    def _end_loans(self) -> None:
        with self._lending:
            self._loans = [loan for loan in self._loans if not loan.is_over()]

    def _keep_mapped(self, ticket: Ticket, memory: mmap.mmap) -> None:
        """Keep the latest segments of other processes that run, no more bytes than this client may share."""
        with self._lending:
            self._borrowed.pop(ticket, None)
            kept, left = {ticket: memory}, self._shared_memory.limit - len(memory)
            for one, mapped in reversed(self._borrowed.items()):
                if len(mapped) <= left and not has_ended(one.pid):
                    kept[one] = mapped
                    left -= len(mapped)
            self._borrowed = dict(reversed(kept.items()))

    def _take_returned(self) -> None:
        """Free what finalizers have returned, one by one: they may append meanwhile. The lock is held."""
        while self._returned:
            chunk, begin, end = self._returned.popleft()
            chunk.give_back(begin, end)

    def _take(self, nbytes: int) -> tuple[_Chunk, int]:
        self._shared_memory.release_retired()
        limit = self._shared_memory.limit
        with self._lock:
            self._take_returned()
            for chunk in self._chunks:
                if (at := chunk.take(nbytes)) is not None:
                    return chunk, at
            left = limit - sum(len(chunk.segment.memory) for chunk in self._chunks)
            size = min(max(_CHUNK, nbytes + HEADER), max(left, 0))
            if size < nbytes + HEADER:
                raise SharedMemoryError(
                    f"{nbytes} bytes of shared memory are needed, but only {left} are left of "
                    f"the {limit} that this client may share; raise DMESH_SHARED_MEMORY, or share "
                    "smaller arrays"
                )
            try:
                segment = Segment(size)
            except OSError as error:
                raise SharedMemoryError(
                    f"the system cannot allocate {size} bytes of shared memory: {error}"
                ) from error
            self._registered.add(segment.memory, segment.ticket.nonce, segment.ticket.descriptor, True)
            chunk = _Chunk(segment, [(HEADER + nbytes, size // _PAGE * _PAGE)])
            self._chunks.append(chunk)
            return chunk, HEADER


def pool_of(shared_memory: SharedMemoryRegistry | None) -> Pool | None:
    """Return a pool of arrays, if this client shares memory at all."""
    if shared_memory is None or shared_memory.core is None or not shared_memory.limit:
        return None
    return Pool(shared_memory)


def _pages(nbytes: int) -> int:
    """Return the bytes of as many whole pages as are needed."""
    return -(-nbytes // _PAGE) * _PAGE


def _use(memory: mmap.mmap, begin: int, nbytes: int, members: int, position: int) -> Bytes:
    at = begin + _pages(members * _LINE)
    _PROCESS.pack_into(memory, begin + position * _LINE + _LINE // 2, os.getpid())
    data = np.frombuffer(memoryview(memory)[at : at + nbytes], np.uint8)
    # All views reference this array, as for arrays of the pool: when it is freed, there are no views left.
    weakref.finalize(data, _leave, memory, begin + position * _LINE, os.getpid()).atexit = False
    return data


def _leave(memory: mmap.mmap, at: int, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        memory[at : at + 1] = _LEFT
