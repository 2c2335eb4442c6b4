"""Setup of shared memory: in a group's first call, its members find out whether all of them share it.

A client shares a segment of memory, an anonymous file (`memfd_create`) that is gone with its last process. It
is sealed against shrinking, so that no access to it can fail later. Its owner sends others a ticket, over
connections that have proven their peers: the process, the descriptor there, and a random number at the
beginning of the memory. They open it through `/proc`, which the kernel permits to processes of the same user
that could trace each other. Containers with process ids of their own do not see each other there. The random
number shows that it is the right segment.

Each member of a group sends all others the location of its region, a part of its segment, or that it has
none. Each maps all regions, and tells all others whether it could. Only if all could, the group shares
memory: so all decide alike. In the same messages they find out whether each may read
the memory of every other's process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from dmesh import native
from dmesh._locks import Lock
from dmesh.collectives.backends.base import Agreement, Exchange
from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.collectives.tuning import SEND_BUFFER

MOST_MEMBERS = 256
"""Largest group that shares memory; the native core's `DMESH_MEMBERS`."""
PROTOCOL = 4
"""Version of the layout of regions. Members with another one do not share memory."""
HEADER = 4096
"""Bytes of the header of a segment."""
FLAGS = 192
"""Bytes of a region before its slots: two flags and the count of sleepers, in cache lines of their own."""
ENVELOPE = 1088
"""Bytes of the description of a sent array: `struct dmesh_envelope` of `collective.h`."""
_LINE = 64
_MAGIC = b"dmesh segment 1\n"
_NAME = "dmesh"
_TICKET = struct.Struct("!16sQIiQ16s")
_OFFER = struct.Struct("!B7xQQQQQQQ")
_CANNOT, _CAN_MAP, _CAN_READ = range(3)

Host = tuple[bytes, int]
"""Boot id of a host, 16 bytes, and a namespace of process ids there."""


# -- segments ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Location of a segment: boot id of the host, namespace of the process id, process, descriptor there."""

    boot: bytes
    namespace: int
    pid: int
    descriptor: int
    nbytes: int
    nonce: bytes
    """16 random bytes that it begins with."""

    SIZE = _TICKET.size

    @property
    def beginning(self) -> bytes:
        """First bytes of the memory."""
        return _MAGIC + self.nonce

    def encode(self) -> bytes:
        """Return it as `SIZE` bytes."""
        return _TICKET.pack(*astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Return the ticket that `encode` wrote."""
        return cls(*_TICKET.unpack(data))


class Segment:
    """Memory that this process shares: `nbytes`, header included. Costs nothing before it is written to.

    OSError if the system cannot do that, or has no memory for it.
    """

    def __init__(self, nbytes: int, host: Host | None = None) -> None:
        self._descriptor = -1  # until there is one, also for `__del__`
        if missing := unsupported():
            raise OSError(errno.ENOTSUP, missing)
        import fcntl

        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self.memory = mmap.mmap(self._descriptor, nbytes)
        except BaseException:
            self.close()
            raise
        nonce = secrets.token_bytes(16)
        self.ticket = Ticket(*(host or here()), os.getpid(), self._descriptor, nbytes, nonce)
        self.memory[: len(self.ticket.beginning)] = self.ticket.beginning
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def close(self) -> None:
        """Let no process attach any more. The memory goes when no process uses it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


def attach(ticket: Ticket, host: Host | None = None) -> mmap.mmap:
    """Map another process's segment; `host` is that of this process, detected if None.

    Raises:
        OSError: It cannot be opened: another host or container, another user, or its process is gone.
        ValueError: It is not the segment of the ticket.
    """
    import fcntl

    if (ticket.boot, ticket.namespace) != (host or here()):
        raise OSError(errno.EXDEV, "its process is on another host or in another container")
    path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
        raise ValueError(f"{path} is no segment")  # found out before it is opened, which can have effects
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        # Another user could truncate their file while it is mapped, which would kill this process.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise ValueError(f"{path} is not sealed")
        if os.fstat(descriptor).st_size != ticket.nbytes or ticket.nbytes < HEADER:
            raise ValueError(f"{path} has not {ticket.nbytes} bytes")
        memory = mmap.mmap(descriptor, ticket.nbytes)
    finally:
        os.close(descriptor)
    if memory[: len(ticket.beginning)] != ticket.beginning:
        memory.close()
        raise ValueError(f"{path} is another segment")
    return memory


def unsupported() -> str:
    """Return why memory cannot be shared on this system; empty if it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "shared memory without names needs Linux"
    return "" if here()[1] else "/proc is not there"


def here() -> Host:
    """Return the host and the namespace of process ids of this process; (b"", 0) if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return b"", 0


# -- regions -------------------------------------------------------------------------------------------------


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
        each = FLAGS + 2 * self.p2p_slot + 2 * self.p2p_staging + 2 * ENVELOPE
        return self.inbox(members) + position * each


@dataclass(slots=True, eq=False)
class Region:
    """Part of this client's segment that one group uses.

    Each member marks in the regions of all others when it has left the group. When all have, and this client
    has given the region back, another group can have it.
    """

    segment: Segment
    sizes: Sizes
    offset: int
    ranks: tuple[int, ...]
    excused: set[int]
    """Positions that leave no mark: this client's, and those of clients that are gone."""
    retired: list[tuple[dict[int, int], tuple[object, ...]]] = field(default_factory=list)
    """Process of each peer by position, and arrays of a failed call that they may still access. Appended to
    without locks: finalizers do it."""
    salt: int = field(default_factory=lambda: secrets.randbits(64))
    """64 random bits of this use of the memory."""
    may_be_used: bool = False
    """True if other members may use it, although this client may not know."""
    given_back: bool = False

    def _has_left(self, position: int) -> bool:
        at = self.offset + self.sizes.left(position)
        return self.segment.memory[at : at + 8] == self.salt.to_bytes(8, sys.byteorder)

    def is_free(self) -> bool:
        """Return whether no client uses the region any more."""
        members = range(len(self.ranks)) if self.may_be_used else ()
        left = self.given_back and all(at in self.excused or self._has_left(at) for at in members)
        return left and not self.retired

    def clear_flags(self) -> None:
        """Set all flags to zero, for the next use."""
        sizes, members = self.sizes, len(self.ranks)
        inboxes = (0, *map(sizes.inbox, range(members)))
        for at in (*inboxes, *(sizes.outbox(members, member) for member in range(members))):
            self.segment.memory[self.offset + at : self.offset + at + FLAGS] = bytes(FLAGS)

    def release_retired(self) -> None:
        """Release retired arrays that no peer can access any more.

        Each has left the group, or its process has ended: a process that is only suspended, or given up by
        the cluster, may go on with the call when it wakes.
        """
        for index in reversed(range(len(self.retired))):
            if all(self._has_left(at) or has_ended(pid) for at, pid in self.retired[index][0].items()):
                del self.retired[index]


class SharedMemoryRegistry:
    """Memory that this client shares with groups, and memory of others that it has mapped. Thread-safe.

    It shares at most `limit` bytes, and none without the native core. `single_copy_from`: bytes from which
    peers read private arrays in this process; None for what suits the number of cores.
    """

    def __init__(
        self,
        limit: int,
        core: native.Core | None,
        sizes: Sizes | None = None,
        host: Host | None = None,
        single_copy_from: int | None = None,
    ) -> None:
        self.limit = limit
        self.core = core
        self.host = host or here()
        self.sizes = sizes or Sizes()
        self.single_copy_from = single_copy_from
        self.registered = None if core is None else core.RegisteredMemory()
        """Segments with arrays; None without the native core."""
        self._mapped: weakref.WeakValueDictionary[bytes, mmap.mmap] = weakref.WeakValueDictionary()
        self._lock = Lock()
        self._segment: Segment | None = None
        self.refusal = self._why_not()
        """Reason why this client shares no memory; empty if it does, as far as is known."""
        self._next = HEADER
        self._regions: dict[int, Region] = {}  # by offset

    def region(self, ranks: Sequence[int], position: int) -> Region | str:
        """Return memory for a group of `ranks`, all flags zero, or why it gets none."""
        sizes = self.sizes
        self.release_retired()
        with self._lock:
            segment = self._segment
            if segment is None and not self.refusal:
                try:
                    segment = self._segment = Segment(self.limit // 4096 * 4096, self.host)
                except OSError as error:
                    self.refusal = f"the system gives no shared memory: {error}"
            if self.refusal or segment is None:
                return self.refusal
            region = Region(segment, sizes, self._next, tuple(ranks), {position})
            for former in self._regions.values():
                if len(former.ranks) == len(ranks) and former.is_free():
                    former.clear_flags()
                    region.offset, region.retired = former.offset, former.retired
                    break
            else:
                end = region.offset + sizes.region(len(ranks))
                if end > len(segment.memory):
                    return "its shared memory is used up by other groups"
                self._next = end
                # By its owner first, not by a peer that waits: so the page is near the owner.
                segment.memory[region.offset : region.offset + FLAGS] = bytes(FLAGS)
            self._regions[region.offset] = region
            return region

    def _why_not(self) -> str:
        if self.limit < HEADER + self.sizes.region(2):
            return "DMESH_SHARED_MEMORY forbids it"
        return unsupported() or ("" if self.core else f"that needs the native core ({native.reason()})")

    def excuse(self, rank: int) -> None:
        """Wait no more for a client that is gone to leave this client's regions.

        If its process is merely suspended, it may still read there, which has no effect.
        """
        with self._lock:
            for region in self._regions.values():
                if rank in region.ranks:
                    region.excused.add(region.ranks.index(rank))

    def release_retired(self) -> None:
        """Release retired arrays that no peer can access any more."""
        with self._lock:
            for region in self._regions.values():
                region.release_retired()

    def attach(self, ticket: Ticket) -> mmap.mmap:
        """Map the segment of another client, or find it mapped already; see the function `attach`."""
        with self._lock:
            own = self._segment
            if own is not None and ticket.nonce == own.ticket.nonce:
                return own.memory
            memory = self._mapped.get(ticket.nonce)
            if memory is None:
                memory = self._mapped[ticket.nonce] = attach(ticket, self.host)
            return memory

    def close(self) -> None:
        """Share nothing any more; mapped memory stays until nothing refers to it."""
        with self._lock:
            self.refusal = "it has been shut down"
            if self._segment is not None:
                self._segment.close()


def has_ended(process: int) -> bool:
    """Return whether a process of this host has ended. If its id is in use again, it counts as running."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


# -- groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A member's region, mapped: segment, offset and salt."""

    ticket: Ticket
    memory: mmap.mmap
    offset: int
    salt: int
    address: int
    """Address of the segment in the member's process."""


class SharedMemoryGroup:
    """Memory of a group, which opens endpoints in it; see `work.EndpointOpener`.

    When nothing refers to it any more, the other members see that this one has left.
    """

    agreement: Agreement
    """Outcome of the setup."""

    def __init__(self, shared_memory: SharedMemoryRegistry, region: Region, position: int) -> None:
        self.region = region
        self.members: list[Member] = []
        self.oversubscribed = False
        """True if ranks share cores."""
        self._shared_memory = shared_memory
        self._position = position
        self._attached: set[bytes] = set()  # segments with arrays of others that calls have used
        mark = region.sizes.left(position)
        self.leave = weakref.finalize(self, _leave, region, self.members, mark, os.getpid())
        self.leave.atexit = False

    def open_collectives(self) -> native.Endpoint:
        """Open this rank's endpoint for collectives."""
        sizes = self._shared_memory.sizes
        return self._open([(m, 0) for m in self.members], self._position, sizes.slot, sizes.staging)

    def open_transfers(self, sender: int, receiver: int) -> native.Endpoint:
        """Open this rank's endpoint for transfers from one position to another, of which it is one."""
        sizes, members = self._shared_memory.sizes, self.members
        outgoing = members[sender], sizes.outbox(len(members), receiver)
        incoming = members[receiver], sizes.inbox(sender)
        position = int(self._position == receiver)
        return self._open([outgoing, incoming], position, sizes.p2p_slot, sizes.p2p_staging, pipe=True)

    def _open(
        self, ends: list[tuple[Member, int]], position: int, slot: int, staging: int, pipe: bool = False
    ) -> native.Endpoint:
        """Open an endpoint of members, each with the offset in its region."""
        members = [member for member, _ in ends]
        regions = [(member.memory, member.offset + offset) for member, offset in ends]
        shared_memory, region = self._shared_memory, self.region
        core, registered = shared_memory.core, shared_memory.registered
        assert core is not None
        assert registered is not None
        peers = {at: member.ticket.pid for at, member in enumerate(self.members) if at != self._position}
        endpoint = core.Endpoint(
            regions, [member.salt for member in members], position, slot, staging, self.oversubscribed, pipe
        )
        endpoint.keep_alive = self  # during a call, no other group may get the memory

        def attach_arrays(member: int, nonce: bytes, nbytes: int, descriptor: int) -> None:
            if nonce not in self._attached:
                ticket = replace(members[member].ticket, nonce=nonce, nbytes=nbytes, descriptor=descriptor)
                registered.add(shared_memory.attach(ticket), nonce, descriptor, False)
                # It stays mapped as long as there may be calls, and as long as another group has added it.
                weakref.finalize(self, registered.drop, nonce).atexit = False
                self._attached.add(nonce)

        def retire(objects: tuple[object, ...]) -> None:
            region.retired.append((peers, objects))

        # The ranks access each other's large arrays in place.
        processes = [member.ticket.pid for member in members] if self.agreement.level == _CAN_READ else []
        endpoint.advertise(registered, attach_arrays, retire, processes)
        if shared_memory.single_copy_from is not None:
            endpoint.single_copy_from = shared_memory.single_copy_from
        return endpoint


def _leave(region: Region, members: list[Member], mark: int, process: int) -> None:
    """Give a region back, and mark in those of other members that this client has left. Takes no locks."""
    if os.getpid() == process:  # not in a forked child
        for member in members:
            at = member.offset + mark
            member.memory[at : at + 8] = member.salt.to_bytes(8, sys.byteorder)
        region.given_back = True


def is_oversubscribed(processes: Sequence[int], neighbours: int) -> bool:
    """Return whether the processes of a group share cores.

    `neighbours`: ranks on this host, in all groups. They compete for the same cores, unless the group's
    processes are bound to different ones.
    """
    allowed = set()
    for process in set(processes):
        with contextlib.suppress(OSError):  # it has ended, or may not be asked
            allowed.add(frozenset(os.sched_getaffinity(process)))
    ranks = neighbours if len(allowed) < 2 else len(processes)
    return ranks > len(frozenset().union(*allowed))


def share_memory(
    exchange: Exchange, shared_memory: SharedMemoryRegistry, neighbours: int
) -> Waits[SharedMemoryGroup | str]:
    """Let the members of a group share memory; return it, or why they do not. All of them must call this.

    `neighbours`: ranks on this host, in all groups.
    """
    ranks, refusal = exchange.ranks, ""
    region = shared_memory.region(ranks, exchange.position)
    if isinstance(region, str):
        yield from exchange.swap([bytes(_OFFER.size + Ticket.SIZE)] * len(ranks))
        yield from exchange.agree(_CANNOT)
        return region
    group = SharedMemoryGroup(shared_memory, region, exchange.position)
    segment, is_shared = region.segment, False
    try:
        place = _OFFER.pack(PROTOCOL, segment.address, region.offset, region.salt, *astuple(region.sizes))
        offers = yield from exchange.swap([place + segment.ticket.encode()] * len(ranks))
        for rank, offer in zip(ranks, offers, strict=True):
            member = _accept(shared_memory, rank, offer, len(ranks))
            if isinstance(member, str):
                refusal = member
                break
            group.members.append(member)
        reads = not refusal and all(_reads(shared_memory, member) for member in group.members)
        region.may_be_used = not refusal
        agreement = yield from exchange.agree(_CANNOT if refusal else _CAN_READ if reads else _CAN_MAP)
        is_shared = region.may_be_used = bool(agreement.level)
        group.agreement = agreement
        group.oversubscribed = is_oversubscribed([member.ticket.pid for member in group.members], neighbours)
    finally:
        if not is_shared:
            group.leave()
    if not is_shared:
        return refusal or f"rank {agreement.against} cannot share memory with all of the group"
    return group


def _accept(shared_memory: SharedMemoryRegistry, rank: int, offer: bytes, members: int) -> Member | str:
    """Map a member's segment; return why not, if that fails."""
    protocol, address, offset, salt, *sizes = _OFFER.unpack_from(offer)
    ours = list(astuple(shared_memory.sizes))
    if not protocol:
        return f"rank {rank} shares no memory"
    if protocol != PROTOCOL:
        return f"rank {rank} uses version {protocol} of shared memory, not {PROTOCOL}"
    if sizes != ours:
        return f"rank {rank} divides shared memory into parts of {sizes} bytes, not {ours}"
    ticket = Ticket.decode(offer[_OFFER.size :])
    try:
        memory = shared_memory.attach(ticket)
    except (OSError, ValueError) as error:
        return f"the memory of rank {rank} cannot be mapped: {error}"
    if offset % 4096 or not HEADER <= offset <= len(memory) - shared_memory.sizes.region(members):
        return f"rank {rank} names a region that is outside of its memory"
    return Member(ticket, memory, offset, salt, address)


def _reads(shared_memory: SharedMemoryRegistry, member: Member) -> bool:
    """Return whether this client may read a member's process, and it is that process."""
    registered, ticket = shared_memory.registered, member.ticket
    return registered is not None and registered.can_read(ticket.pid, member.address, ticket.beginning)
