"""Memory that the members of a group have in common: lent by the pool of one of them, mapped by all.

It is given back when every member has forgotten every view of it, or is gone. Each marks that in a cache line
of its own at the beginning, as members of groups do in their regions.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.backends.shm.pool import Pool
from dmesh.collectives.backends.shm.segment import Ticket

_LINE = 64
_PAGE = 4096
_PLACE = struct.Struct("!Q")
PLACE_SIZE = Ticket.SIZE + _PLACE.size
"""Bytes of the place of common memory, as members send it to each other."""
_LEFT = b"\1"

Bytes = NDArray[np.uint8]


class Attaches(Protocol):
    """Maps other clients' segments; see `registry.SharedMemoryRegistry`."""

    def attach(self, ticket: Ticket) -> mmap.mmap:
        """Map the segment of another client, or find it mapped already."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    memory: Bytes
    """Array of the pool, which keeps the memory."""
    ranks: tuple[int, ...]
    gone: Callable[[int], bool]
    place: bytes

    def is_over(self) -> bool:
        """Return whether no member uses the memory any more."""
        return all(self.memory[at * _LINE] or self.gone(rank) for at, rank in enumerate(self.ranks))


class Loans:
    """Loans of this client. Thread-safe.

    Args:
        pool: Pool of the memory.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = Lock()
        self._loans: list[_Loan] = []

    def lend(
        self, nbytes: int, ranks: tuple[int, ...], position: int, gone: Callable[[int], bool]
    ) -> tuple[Bytes, bytes]:
        """Lend memory to a group.

        Args:
            nbytes: Its size.
            ranks: The group's members.
            position: This client's among them.
            gone: Returns whether a rank is gone, and leaves no mark.

        Returns:
            The memory, and its place for `borrow`.

        Raises:
            SharedMemoryError: There is none left.
        """
        with self._lock:
            self._loans = [loan for loan in self._loans if not loan.is_over()]
        memory, segment, begin = self._pool.lend(_header(len(ranks)) + nbytes)
        memory[: _header(len(ranks))] = 0
        place = segment.ticket.encode() + _PLACE.pack(begin)
        with self._lock:
            self._loans.append(_Loan(memory, ranks, gone, place))
        return _use(segment.memory, begin, nbytes, len(ranks), position), place

    def take_back(self, place: bytes) -> None:
        """End a loan that no other member uses."""
        with self._lock:
            self._loans = [loan for loan in self._loans if loan.place != place]


def borrow(shared_memory: Attaches, place: bytes, nbytes: int, members: int, position: int) -> Bytes:
    """Map memory that another member has lent.

    Args:
        shared_memory: Of this client.
        place: Its place, as its owner has sent it.
        nbytes: Its size.
        members: Number of members of the group.
        position: This client's position.

    Raises:
        OSError: It cannot be mapped: its owner is on another host, or is another user.
        ValueError: It is not at that place.
    """
    ticket = Ticket.decode(place[: Ticket.SIZE])
    (begin,) = _PLACE.unpack(place[Ticket.SIZE :])
    memory = shared_memory.attach(ticket)
    if begin % _PAGE or begin + _header(members) + nbytes > len(memory):
        raise ValueError(f"there is no common memory of {nbytes} bytes at {begin} of {len(memory)}")
    return _use(memory, begin, nbytes, members, position)


def _header(members: int) -> int:
    return -(-members * _LINE // _PAGE) * _PAGE


def _use(memory: mmap.mmap, begin: int, nbytes: int, members: int, position: int) -> Bytes:
    at = begin + _header(members)
    data = np.frombuffer(memoryview(memory)[at : at + nbytes], np.uint8)
    # Views refer to this array, as to those of the pool: when it is gone, all of them are.
    weakref.finalize(data, _leave, memory, begin + position * _LINE, os.getpid()).atexit = False
    return data


def _leave(memory: mmap.mmap, at: int, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        memory[at : at + 1] = _LEFT
