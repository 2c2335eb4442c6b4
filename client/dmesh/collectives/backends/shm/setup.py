"""Setup of shared memory: in a group's first call, its members find out whether all of them share it.

Each member sends all others the location of its region, or that it has none. Each maps all regions, and
tells all others whether it could. Only if all could, the group shares memory, from its second call on: so all
decide alike. In the same messages they find out whether each may read the memory of every other's process.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from dataclasses import astuple, dataclass, field

from dmesh.collectives.backends.shm.registry import (
    Attachment,
    Region,
    SharedMemoryRegistry,
    Sizes,
    leave,
)
from dmesh.collectives.backends.shm.segment import HEADER, Ticket
from dmesh.collectives.backends.tcp.exchange import Agreement, Exchange, Waits

PROTOCOL = 3
"""Version of the layout of regions. Members with another one do not share memory."""
_OFFER = struct.Struct("!B7xQQQQQQQ")
_OFFER_SIZE = _OFFER.size + Ticket.SIZE
_CANNOT, _CAN_MAP, _CAN_READ = range(3)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedMemoryGroup:
    """Memory of a group. When nothing refers to it any more, the other members see that this one has left."""

    region: Region
    """This client's own region."""
    regions: list[tuple[mmap.mmap, int]]
    """Each member's region: memory and offset."""
    salts: list[int]
    """Salt of each member's region."""
    sizes: Sizes
    """Sizes of their parts."""
    tickets: list[Ticket]
    """Tickets of the members' segments."""
    agreement: Agreement
    """Outcome of the setup."""
    mappings: list[Attachment] = field(default_factory=list)
    """Segments with arrays of others that calls have used: they stay mapped as long as there may be calls."""

    @property
    def can_read_peers(self) -> bool:
        """True if each member may read the memory of every other's process."""
        return self.agreement.level == _CAN_READ


def share_memory(exchange: Exchange, shared_memory: SharedMemoryRegistry) -> Waits[SharedMemoryGroup | str]:
    """Let the members of a group share memory; return it, or why they do not. All of them must call this."""
    region = shared_memory.region(exchange.ranks, exchange.position)
    attempt = _Attempt()
    try:
        return (yield from _set_up(exchange, shared_memory, region, attempt))
    finally:
        if not attempt.shared:
            if region is not None and not attempt.undecided:
                shared_memory.abandon(region)
            leave(*attempt.marks(shared_memory.sizes.left(exchange.position)), os.getpid())


@dataclass(slots=True)
class _Attempt:
    """Progress of a setup, which may fail at any message."""

    found: list[_Member] = field(default_factory=list)
    """Members whose regions are mapped."""
    undecided: bool = False
    """True if other members may go on to use this client's region, although this one does not know."""
    shared: bool = False
    """True if the group shares memory."""

    def marks(self, at: int) -> tuple[list[tuple[mmap.mmap, int]], list[int]]:
        """Return where this client marks that it has left, and the salts of these regions."""
        return [(member.memory, member.offset + at) for member in self.found], [m.salt for m in self.found]


def _set_up(
    exchange: Exchange, shared_memory: SharedMemoryRegistry, region: Region | None, attempt: _Attempt
) -> Waits[SharedMemoryGroup | str]:
    ranks, found = exchange.ranks, attempt.found
    refusal = shared_memory.refusal or ("" if region else "its shared memory is used up by other groups")
    offer = bytes(_OFFER_SIZE) if region is None else _offer(shared_memory, region)
    offers = yield from exchange.swap([offer] * len(ranks))
    for rank, theirs in zip(ranks, offers, strict=True):
        if refusal:
            break
        member = _accept(shared_memory, rank, theirs, len(ranks))
        if isinstance(member, str):
            refusal = member
        else:
            found.append(member)
    reads = not refusal and all(_reads(shared_memory, member) for member in found)
    attempt.undecided = not refusal
    agreement = yield from exchange.agree(_CANNOT if refusal else _CAN_READ if reads else _CAN_MAP)
    if not agreement.level:
        attempt.undecided = False
        return refusal or f"rank {agreement.against} cannot share memory with all of the group"
    assert region is not None
    attempt.shared = True
    shm = SharedMemoryGroup(
        region=region,
        regions=[(member.memory, member.offset) for member in found],
        salts=[member.salt for member in found],
        sizes=shared_memory.sizes,
        tickets=[member.ticket for member in found],
        agreement=agreement,
    )
    marks = attempt.marks(shared_memory.sizes.left(exchange.position))
    weakref.finalize(shm, leave, *marks, os.getpid()).atexit = False
    return shm


@dataclass(frozen=True, slots=True)
class _Member:
    ticket: Ticket
    memory: mmap.mmap
    offset: int
    salt: int
    address: int


def _offer(shared_memory: SharedMemoryRegistry, region: Region) -> bytes:
    sizes = astuple(shared_memory.sizes)
    segment = region.segment
    head = _OFFER.pack(PROTOCOL, segment.address, region.offset, region.salt, *sizes)
    return head + segment.ticket.encode()


def _accept(shared_memory: SharedMemoryRegistry, rank: int, offer: bytes, members: int) -> _Member | str:
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
    return _Member(ticket, memory, offset, salt, address)


def _reads(shared_memory: SharedMemoryRegistry, member: _Member) -> bool:
    """Return whether this client may read a member's process, and it is that process."""
    registered, ticket = shared_memory.registered, member.ticket
    return registered is not None and registered.can_read(ticket.pid, member.address, ticket.beginning)
