"""Shared memory of this client: its segment, divided into regions of groups, and segments of others."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmesh import native
from dmesh.collectives.backends.shm.lending import Loans
from dmesh.collectives.backends.shm.pool import Pool
from dmesh.collectives.backends.shm.segment import HEADER, Host, Segment, Ticket, attach, here, unsupported
from dmesh.collectives.tuning import SEND_BUFFER

FLAGS = 192
"""Bytes of a region before its slots: two flags and the count of sleepers, in cache lines of their own."""
_LINE = 64
MOST_MEMBERS = 64
"""Largest group that shares memory."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the parts of a region; the same for all members of a group."""

    slot: int = 64 * 1024
    """Bytes that a rank can contribute in one epoch; a multiple of 64, and at least 128."""
    staging: int = 512 * 1024
    """Bytes of each of the four staging buffers, through which larger contributions go piece by piece; a
    multiple of 64, and at least 512 for each member."""
    p2p_slot: int = SEND_BUFFER
    """Bytes of each of the two slots for transfers from one rank to another; a multiple of 64."""
    p2p_staging: int = 256 * 1024
    """Bytes of each of the two pieces of a larger transfer; a multiple of 64."""

    def region(self, members: int) -> int:
        """Return the bytes of a region, in whole pages. Pages that are never used take no memory."""
        return -(-self.outbox(members, members) // 4096) * 4096

    def inbox(self, position: int) -> int:
        """Return the offset in a region where this rank acknowledges data of a member."""
        return FLAGS + 2 * self.slot + 4 * self.staging + position * FLAGS

    def left(self, position: int) -> int:
        """Return the offset in a region of the mark of a member that has left: beside the sleepers."""
        return self.inbox(position) + 2 * _LINE + 8

    def outbox(self, members: int, position: int) -> int:
        """Return the offset in a region of the data that this rank sends to a member."""
        return self.inbox(members) + position * (FLAGS + 2 * self.p2p_slot + 2 * self.p2p_staging)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Region:
    """Part of this client's segment that one group uses. Given back when nothing here refers to it.

    Other members may still use it then. Each marks in the regions of all others when it has left (`leave`),
    and a region is used again when all have.
    """

    segment: Segment
    """Segment that it is in."""
    offset: int
    """Offset in the segment."""
    salt: int
    """64 random bits of this use of it."""


@dataclass(slots=True)
class _Use:
    """Current or last use of a region."""

    salt: int
    ranks: tuple[int, ...]
    position: int
    excused: set[int] = field(default_factory=set)
    """Positions of clients that are gone, which may not have left their marks."""
    retired: list[_Retired] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Retired:
    """Arrays that peers may still read or write, after a call that has failed."""

    processes: tuple[int, ...]
    """Process of each member."""
    objects: tuple[object, ...]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Attachment:
    """Segment with arrays of another client, registered as long as something refers to this."""

    memory: mmap.mmap


def leave(words: Sequence[tuple[mmap.mmap, int]], salts: Sequence[int], process: int) -> None:
    """Mark that this client has left regions. Takes no locks: finalizers call it.

    Args:
        words: Where the marks are: memory and offset.
        salts: Salt of each region.
        process: Process that used the regions. In its forked children nothing happens.
    """
    if os.getpid() == process:
        for (memory, at), salt in zip(words, salts, strict=True):
            memory[at : at + 8] = salt.to_bytes(8, sys.byteorder)


class SharedMemoryRegistry:
    """Memory that this client shares, and memory of others that it has mapped. Thread-safe.

    Args:
        limit: Most bytes that this client shares; 0 for none.
        core: The native core; without it, no memory is shared.
        cores: Cores that this process may use; detected if None.
        sizes: Sizes of regions.
        host: Host of this client; detected if None.
        read_from: Bytes from which peers read private arrays in this process; None for what suits the number
            of cores.
    """

    def __init__(
        self,
        limit: int,
        core: native.Core | None,
        cores: int | None = None,
        sizes: Sizes | None = None,
        host: Host | None = None,
        read_from: int | None = None,
    ) -> None:
        self.limit = limit
        self.core = core
        self.host = host or here()
        self.sizes = sizes or Sizes()
        self.read_from = read_from
        self.cores = cores if cores is not None else usable_cores()
        self.registered = None if core is None else core.RegisteredMemory()
        """Segments with arrays; None without the native core."""
        self.pool = (
            Pool(limit, self.registered, self._reclaim) if self.registered is not None and limit else None
        )
        self.loans = None if self.pool is None else Loans(self.pool)
        """Memory of the pool that groups have in common."""
        self._attachments: weakref.WeakValueDictionary[bytes, Attachment] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self.refusal = self._why_not()
        """Reason why this client shares no memory; empty if it does, as far as is known."""
        self._next = HEADER
        self._uses: dict[int, _Use] = {}  # by offset of the region
        # Offsets of regions that this client does not use any more, by number of members; and arrays to
        # retire, by offset. Appended to without the lock: the garbage collector does it.
        self._free: dict[int, deque[int]] = {}
        self._retiring: deque[tuple[int, _Retired]] = deque()
        self._mapped: weakref.WeakValueDictionary[bytes, mmap.mmap] = weakref.WeakValueDictionary()

    def region(self, ranks: Sequence[int], position: int) -> Region | None:
        """Return memory for one group, with all flags zero; None if there is none left.

        Args:
            ranks: The group's members.
            position: This client's position among them.
        """
        members, sizes = len(ranks), self.sizes
        nbytes = sizes.region(members)
        salt = secrets.randbits(64)
        with self._lock:
            self._prepare()
            segment = self._segment
            if segment is None:
                return None
            free = self._free.setdefault(members, deque())
            offset = self._left_by_all(segment, free)
            if offset is not None:
                inboxes = (0, *map(sizes.inbox, range(members)))
                for at in (*inboxes, *(sizes.outbox(members, member) for member in range(members))):
                    segment.memory[offset + at : offset + at + FLAGS] = bytes(FLAGS)
            elif self._next + nbytes <= len(segment.memory):
                offset, self._next = self._next, self._next + nbytes
            else:
                return None
            self._uses[offset] = _Use(salt, tuple(ranks), position)
        region = Region(segment, offset, salt)
        weakref.finalize(region, free.append, offset).atexit = False
        return region

    def abandon(self, region: Region) -> None:
        """Mark in the name of all members that they have left a region that none of them will use."""
        with self._lock:
            use = self._uses[region.offset]
            if use.salt == region.salt:
                use.excused.update(range(len(use.ranks)))

    def _left_by_all(self, segment: Segment, free: deque[int]) -> int | None:
        """Return the offset of a region that no client uses any more. With the lock held."""
        self._sort_retired(segment)
        for _ in range(len(free)):
            offset = free.popleft()
            use = self._uses[offset]
            if not use.retired and all(
                position in use.excused or self._has_left(segment, offset, use, position)
                for position in range(len(use.ranks))
                if position != use.position
            ):
                return offset
            free.append(offset)
        return None

    def _has_left(self, segment: Segment, offset: int, use: _Use, position: int) -> bool:
        word = offset + self.sizes.left(position)
        return segment.memory[word : word + 8] == use.salt.to_bytes(8, sys.byteorder)

    def excuse(self, rank: int) -> None:
        """Wait no more for a client that is gone to leave this client's regions.

        If its process is merely suspended, it may still read there, which has no effect.
        """
        with self._lock:
            for use in self._uses.values():
                if rank in use.ranks:
                    use.excused.add(use.ranks.index(rank))

    def retire(self, region: Region, processes: tuple[int, ...], objects: tuple[object, ...]) -> None:
        """Keep arrays of a failed call that peers may still access. Takes no locks: finalizers call it.

        They are released when each peer has left the group, or its process has ended: a process that is only
        suspended, or given up by the cluster, may go on with the call when it wakes.

        Args:
            region: This client's region of the group.
            processes: Process of each member.
            objects: The arrays.
        """
        self._retiring.append((region.offset, _Retired(processes, objects)))

    def _sort_retired(self, segment: Segment) -> None:
        """Release retired arrays that no peer can access any more. With the lock held."""
        while self._retiring:
            offset, retired = self._retiring.popleft()
            self._uses[offset].retired.append(retired)
        for offset, use in self._uses.items():
            use.retired = [
                retired
                for retired in use.retired
                if not all(
                    position == use.position
                    or self._has_left(segment, offset, use, position)
                    or _has_ended(process)
                    for position, process in enumerate(retired.processes)
                )
            ]

    def _reclaim(self) -> None:
        """Release retired arrays, if there are any, before the pool grows."""
        with self._lock:
            if self._segment is not None:
                self._sort_retired(self._segment)

    def attach(self, ticket: Ticket) -> mmap.mmap:
        """Map the segment of another client, or find it mapped already; see `segment.attach`."""
        with self._lock:
            own = self._segment
            if own is not None and ticket.nonce == own.nonce:
                return own.memory
            memory = self._mapped.get(ticket.nonce)
            if memory is None:
                memory = self._mapped[ticket.nonce] = attach(ticket, self.host)
            return memory

    def attach_registered(self, ticket: Ticket) -> Attachment:
        """Map and register a segment with another client's arrays, as long as the caller keeps the result."""
        memory = self.attach(ticket)
        with self._lock:
            attachment = self._attachments.get(ticket.nonce)
            if attachment is None:
                assert self.registered is not None
                # Registered memory stays mapped. So it does not matter when the finalizer runs, nor that
                # another thread may have attached the segment again by then.
                self.registered.add(memory, ticket.nonce, ticket.descriptor, False)
                attachment = self._attachments[ticket.nonce] = Attachment(memory)
                weakref.finalize(attachment, self.registered.drop, ticket.nonce).atexit = False
            return attachment

    def close(self) -> None:
        """Share nothing any more; mapped memory stays until nothing refers to it."""
        with self._lock:
            self.refusal = "it has been shut down"
            if self._segment is not None:
                self._segment.close()
        if self.pool is not None:
            self.pool.close()

    def _prepare(self) -> None:
        if self._segment is not None or self.refusal:
            return
        try:
            self._segment = Segment(self.limit // 4096 * 4096, self.host)
        except OSError as error:
            self.refusal = f"the system gives no shared memory: {error}"

    def _why_not(self) -> str:
        if self.limit < HEADER + self.sizes.region(2):
            return "DMESH_SHARED_MEMORY forbids it"
        return unsupported() or ("" if self.core else f"that needs the native core ({native.reason()})")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_ended(process: int) -> bool:
    """Return whether a process of this host has ended. If its id is in use again, it counts as running."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
