"""Pool of memory for arrays that clients of one host share.

A fresh page of shared memory costs as much time as copying it many times over, here and in each process that
maps it. So memory is kept when its array is gone, and the next array gets it.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dmesh.collectives.backends.shm.segment import HEADER, Segment
from dmesh.errors import SharedMemoryError
from dmesh.native import RegisteredMemory

_CHUNK = 64 << 20
"""Bytes of a segment, unless an array needs more."""
_UNIT = 4096


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
        """Free a piece, and merge it with its neighbors."""
        number = bisect.bisect(self.free, (begin, end))
        if number < len(self.free) and self.free[number][0] == end:
            end = self.free.pop(number)[1]
        if number and self.free[number - 1][1] == begin:
            number -= 1
            begin = self.free.pop(number)[0]
        self.free.insert(number, (begin, end))


class Pool:
    """Pool of shared memory for arrays. Thread-safe.

    Args:
        limit: Most bytes of it.
        registered: Table in which its segments are registered.
        reclaim: Gives back arrays that were retired, as far as possible.
    """

    def __init__(
        self, limit: int, registered: RegisteredMemory, reclaim: Callable[[], None] = lambda: None
    ) -> None:
        self._limit = limit
        self._registered = registered
        self._reclaim = reclaim
        self._lock = Lock()
        self._chunks: list[_Chunk] = []
        # Appended to without the lock: the garbage collector does it.
        self._returned: deque[tuple[_Chunk, int, int]] = deque()

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array with arbitrary contents.

        Args:
            shape: Its shape.
            dtype: Of its elements.

        Raises:
            SharedMemoryError: There is no more memory.
        """
        wanted = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(lengths) * wanted.itemsize
        if wanted.hasobject or not nbytes:
            return np.empty(lengths, wanted)  # nothing of it could be shared
        data, _, _ = self.lend(nbytes)
        return data.view(wanted).reshape(lengths)

    def lend(self, nbytes: int) -> tuple[NDArray[np.uint8], Segment, int]:
        """Return bytes with arbitrary contents, their segment, and their offset in it, at a page.

        They are given back when the array and all views of it are gone.

        Raises:
            SharedMemoryError: There is no more memory.
        """
        chunk, begin = self._take(-(-nbytes // _UNIT) * _UNIT)
        # Views refer to this array, so its block is not given back as long as any view of it lives.
        data = np.frombuffer(memoryview(chunk.segment.memory)[begin : begin + nbytes], np.uint8)
        end = begin + -(-nbytes // _UNIT) * _UNIT
        weakref.finalize(data, self._returned.append, (chunk, begin, end)).atexit = False
        return data, chunk.segment, begin

    def close(self) -> None:
        """Let no process attach any more; arrays stay usable."""
        with self._lock:
            for chunk in self._chunks:
                self._registered.drop(chunk.segment.nonce)
                chunk.segment.close()
            self._chunks.clear()

    def _take(self, nbytes: int) -> tuple[_Chunk, int]:
        self._reclaim()
        with self._lock:
            while self._returned:
                chunk, begin, end = self._returned.popleft()
                chunk.give_back(begin, end)
            for chunk in self._chunks:
                if (at := chunk.take(nbytes)) is not None:
                    return chunk, at
            used = sum(len(chunk.segment.memory) for chunk in self._chunks)
            size = min(max(_CHUNK, nbytes + HEADER), max(self._limit - used, 0))
            if size < nbytes + HEADER:
                raise SharedMemoryError(
                    f"{nbytes} bytes of shared memory are needed, but only {self._limit - used} are left of "
                    f"the {self._limit} that this client may share; raise DMESH_SHARED_MEMORY, or share less"
                )
            try:
                segment = Segment(size)
            except OSError as error:
                raise SharedMemoryError(
                    f"the system gives no shared memory of {size} bytes: {error}"
                ) from error
            chunk = _Chunk(segment, [(HEADER, size // _UNIT * _UNIT)])
            self._registered.add(segment.memory, segment.nonce, segment.ticket.descriptor, True)
            self._chunks.append(chunk)
            at = chunk.take(nbytes)
            assert at is not None
            return chunk, at
