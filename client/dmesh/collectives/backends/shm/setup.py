"""Setup of shared memory: in a group's first call, its members find out whether all of them share it.

Each member sends all others the location of its region, or that it has none. Each maps all regions, and
tells all others whether it could. Only if all could, the group shares memory, from its second call on: so all
decide alike. In the same messages they find out whether each may read the memory of every other's process,
and from which number on the transfers between two ranks go through shared memory: the first that neither has
begun.

The messages travel in the channel of the call itself, with its descriptor. So a member that calls something
else, or does not come, is found out as in every call.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial

from dmesh.collectives.backends.shm.registry import (
    Attachment,
    Region,
    SharedMemoryRegistry,
    Sizes,
    leave,
)
from dmesh.collectives.backends.shm.segment import HEADER, Ticket
from dmesh.collectives.backends.tcp.exchange import Waits, exchange
from dmesh.collectives.backends.tcp.transport import Channel

FIRST_STEP = 2**31
"""Number of the first message, far from the steps of schedules."""
STEPS = 2
PROTOCOL = 3
"""Version of the layout of regions. Members with another one do not share memory."""
_OFFER = struct.Struct("!B7xQQQQQQQ")
_OFFER_SIZE = _OFFER.size + Ticket.SIZE
_VERDICT = struct.Struct("!??QQ")

Counts = tuple[int, int]
"""Number of transfers to a member, and from it."""


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
    can_read_peers: bool
    """True if each member may read the memory of every other's process."""
    mappings: list[Attachment] = field(default_factory=list)
    """Segments with arrays of others that calls have used: they stay mapped as long as there may be calls."""


@dataclass(frozen=True, slots=True)
class SharedMemorySetup:
    """Outcome of the setup."""

    memory: SharedMemoryGroup | None
    """Memory that the members share, if they do."""
    refusal: str
    """Reason why they do not."""
    sends_from: tuple[int, ...]
    """For each member, the number of the first transfer to it that neither has begun."""
    receives_from: tuple[int, ...]
    """The same of transfers from it."""


def share_memory(
    channel: Channel,
    ranks: Sequence[int],
    position: int,
    shared_memory: SharedMemoryRegistry,
    freeze: Callable[[], Sequence[Counts]],
    step: int = FIRST_STEP,
) -> Waits[SharedMemorySetup]:
    """Find out whether a group shares memory; all its members must call this.

    Args:
        channel: Channel of its first call.
        ranks: Its members.
        position: This client's position.
        shared_memory: Of this client.
        freeze: Returns the counts for each member; no later transfer may begin before this is over.
        step: Number of the first of `STEPS` messages.
    """
    region = shared_memory.region(ranks, position)
    attempt = _Attempt()
    try:
        return (yield from _set_up(channel, ranks, position, shared_memory, region, attempt, freeze, step))
    finally:
        if not attempt.shared:
            if region is not None and not attempt.undecided:
                shared_memory.abandon(region)
            at = shared_memory.sizes.left(position)
            words = [(member.memory, member.offset + at) for member in attempt.found]
            leave(words, [member.salt for member in attempt.found], os.getpid())


@dataclass(slots=True)
class _Attempt:
    """Progress of a setup, which may fail at any message."""

    found: list[_Member] = field(default_factory=list)
    """Members whose regions are mapped."""
    undecided: bool = False
    """True if other members may go on to use this client's region, although this one does not know."""
    shared: bool = False
    """True if the group shares memory."""


def _set_up(
    channel: Channel,
    ranks: Sequence[int],
    position: int,
    shared_memory: SharedMemoryRegistry,
    region: Region | None,
    attempt: _Attempt,
    freeze: Callable[[], Sequence[Counts]],
    step: int,
) -> Waits[SharedMemorySetup]:
    found = attempt.found
    refusal = shared_memory.refusal() or ("" if region else "its shared memory is used up by other groups")
    offer = bytes(_OFFER_SIZE) if region is None else _offer(shared_memory, region)
    offers = yield from exchange(channel, ranks, position, step, [offer] * len(ranks))
    for rank, theirs in zip(ranks, offers, strict=True):
        if refusal:
            break
        member = _accept(shared_memory, rank, theirs, len(ranks))
        if isinstance(member, str):
            refusal = member
        else:
            found.append(member)
    counts = freeze()
    reads = not refusal and all(_reads(shared_memory, member) for member in found)
    mine = [_VERDICT.pack(not refusal, reads, *count) for count in counts]
    attempt.undecided = not refusal
    answers = yield from exchange(channel, ranks, position, step + 1, mine)
    verdicts = [_VERDICT.unpack(answer) for answer in answers]
    met = partial(
        SharedMemorySetup,
        sends_from=tuple(1 + max(sent, got) for (sent, _), (*_, got) in zip(counts, verdicts, strict=True)),
        receives_from=tuple(
            1 + max(got, sent) for (_, got), (*_, sent, _) in zip(counts, verdicts, strict=True)
        ),
    )
    against = [rank for rank, (agrees, *_) in zip(ranks, verdicts, strict=True) if not agrees]
    if refusal or against:
        attempt.undecided = False
        return met(None, refusal or f"rank {against[0]} cannot share memory with all of the group")
    assert region is not None
    attempt.shared = True
    shm = SharedMemoryGroup(
        region=region,
        regions=[(member.memory, member.offset) for member in found],
        salts=[member.salt for member in found],
        sizes=shared_memory.sizes,
        tickets=[member.ticket for member in found],
        can_read_peers=all(may_read for _, may_read, *_ in verdicts),
    )
    at = shared_memory.sizes.left(position)
    words = [(member.memory, member.offset + at) for member in found]
    weakref.finalize(shm, leave, words, list(shm.salts), os.getpid()).atexit = False
    return met(shm, "")


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
