"""Capability exchange of a group: in its first call, its members find out which backends all of them have.

First each member sends all others one message with all that it can do. Then the best medium that all have is
set up, or the next one if that fails, and the call itself uses it. The messages travel in a channel of their
own, number 0, with the call's descriptor: a member that calls something else, or does not come, is found out
as in every call. Every decision follows from messages that all members have, so all decide alike. Backends
that the program has registered are preferred, then shared memory, then MPI, then dedicated TCP connections;
messages always work.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dmesh._log import logger
from dmesh.collectives.backends import mpi_world, registered
from dmesh.collectives.backends.base import Agreement, Backend, Operation
from dmesh.collectives.backends.endpoints import SharedMemoryBackend, TcpBackend
from dmesh.collectives.backends.hierarchical import HierarchicalBackend, cells_of, find_hierarchy
from dmesh.collectives.backends.mpi import MpiBackend
from dmesh.collectives.backends.shm.setup import MOST_MEMBERS, share_memory
from dmesh.collectives.backends.tcp import dedicated
from dmesh.collectives.backends.tcp.channel import Channel, Steps, Waits
from dmesh.collectives.backends.tcp.dedicated import PROTOCOL, Connections, TcpEndpoints, open_connections
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.schedules.choice import MOST_DIRECT
from dmesh.collectives.services import Members
from dmesh.collectives.tuning import FOLDINGS, SHIPPED, Tuning
from dmesh.collectives.work import Connection, Generation

_DIGEST = 16
_TUNING = struct.Struct("!QIQQQI5QB")
_CARD = struct.Struct(f"!{_DIGEST}s{_DIGEST}s?{mpi_world.TOKEN_BYTES}sB{_TUNING.size}s")


class _Card(NamedTuple):
    """Capabilities of a member, as it sends them to all others."""

    registered: bytes
    """Hash of the names of the backends that its program has registered."""
    host: bytes
    """Hash of the host's boot id and namespace of process ids."""
    shares: bool
    """True if it shares memory on its host."""
    launch: bytes
    """Token of its MPI launch; zeros without one."""
    protocol: int
    """Version of the format on dedicated connections; 0 if it cannot use them."""
    tuning: bytes


_VERDICT = struct.Struct("!BQQ")
_ODD = struct.Struct("!i")


@dataclass(eq=False)
class Exchange:
    """Messages among members of a group before its first call; see `base.Exchange`."""

    channel: Channel
    ranks: Sequence[int]
    position: int
    freeze: Callable[[], Sequence[tuple[int, int]]] | None = None
    """Returns the transfers to and from each member, after which none may begin before the group has chosen;
    None if transfers are none of this exchange's concern."""
    steps: Iterator[int] = field(default_factory=itertools.count)
    """Step numbers of the messages."""

    def among(self, positions: Sequence[int]) -> Exchange:
        """Return an exchange among some of the members, while all others make as many rounds."""
        ranks = [self.ranks[at] for at in positions]
        return Exchange(self.channel, ranks, positions.index(self.position), None, self.steps)

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""
        self.channel.wait((), 0.0)

    def swap(self, messages: Sequence[bytes]) -> Waits[list[bytes]]:
        """Send each member a message, all of equal length; return the members' messages for this one."""
        channel, step = self.channel, next(self.steps)
        if len(self.ranks) > MOST_DIRECT:
            return (yield from self._swap_in_rounds(messages, step))
        found = [bytearray(message) for message in messages]
        others = [(rank, at) for at, rank in enumerate(self.ranks) if at != self.position]
        receives = [channel.receive(rank, step, memoryview(found[at])) for rank, at in others]
        for rank, at in others:
            channel.send(rank, step, memoryview(messages[at]))
        yield partial(channel.wait, receives)
        yield channel.flush
        return [bytes(data) for data in found]

    def _swap_in_rounds(self, messages: Sequence[bytes], step: int) -> Waits[list[bytes]]:
        """Swap messages as `bruck.all_to_all_bruck` does, so that large groups need few connections."""
        channel, ranks, at = self.channel, self.ranks, self.position
        size, length, distance = len(ranks), len(messages[0]), 1
        blocks = [messages[(at + number) % size] for number in range(size)]
        while distance < size:
            moved = [number for number in range(size) if number & distance]
            data = bytearray(len(moved) * length)
            receive = channel.receive(ranks[(at - distance) % size], step, memoryview(data))
            packed = b"".join(blocks[number] for number in moved)
            channel.send(ranks[(at + distance) % size], step, memoryview(packed))
            yield partial(channel.wait, [receive])
            for place, number in enumerate(moved):
                blocks[number] = bytes(data[place * length : (place + 1) * length])
            distance *= 2  # to another pair of peers, so that one step number is enough
        yield channel.flush
        return [blocks[(at - source) % size] for source in range(size)]

    def agree(self, level: int) -> Waits[Agreement]:
        """Find out how far all members go along; on level 0 a member does not."""
        counts = [(0, 0)] * len(self.ranks) if self.freeze is None else self.freeze()
        answers = yield from self.swap([_VERDICT.pack(level, *count) for count in counts])
        verdicts = [_VERDICT.unpack(answer) for answer in answers]
        levels = [theirs for theirs, _, _ in verdicts]
        pairs = list(zip(counts, verdicts, strict=True))
        return Agreement(
            min(levels),
            self.ranks[levels.index(min(levels))],
            sends_from=tuple(1 + max(sent, got) for (sent, _), (_, _, got) in pairs),
            receives_from=tuple(1 + max(got, sent) for (_, got), (_, sent, _) in pairs),
        )

    def find_odd(self, mine: bytes) -> Waits[int]:
        """Return the position of a member whose message is zero or differs from the first's; -1 if none does.

        The messages go through a tree: so large groups do not need all connections.
        """
        first = yield from self.spread(mine)
        none = len(self.ranks)
        odd = none if mine == first and any(mine) else self.position
        step, (_, below) = next(self.steps), self._tree()
        found = {at: bytearray(_ODD.size) for at in below}
        receives = [
            self.channel.receive(self.ranks[at], step, memoryview(data)) for at, data in found.items()
        ]
        yield partial(self.channel.wait, receives)
        least = min([odd, *(_ODD.unpack(data)[0] for data in found.values())])
        if self.position:
            self.channel.send(self.ranks[self._tree()[0]], step, memoryview(_ODD.pack(least)))
        yield self.channel.flush
        answer = yield from self.spread(_ODD.pack(least))
        odd = int(_ODD.unpack(answer)[0])
        return -1 if odd == none else odd

    def spread(self, mine: bytes) -> Waits[bytes]:
        """Return the first member's message; all are of equal length."""
        step, (above, below) = next(self.steps), self._tree()
        data = bytearray(mine)
        if self.position:
            yield partial(
                self.channel.wait, [self.channel.receive(self.ranks[above], step, memoryview(data))]
            )
        for at in reversed(below):
            self.channel.send(self.ranks[at], step, memoryview(data))
        yield self.channel.flush
        return bytes(data)

    def _tree(self) -> tuple[int, list[int]]:
        """Return the positions above and below this one in a binomial tree."""
        place, size = self.position, len(self.ranks)
        span = place & -place if place else size
        distances = itertools.takewhile(lambda distance: distance < span, (1 << k for k in itertools.count()))
        return place - span, [place + distance for distance in distances if place + distance < size]


class Connecting(Steps, Operation):
    """Choice of a group's backends under way; see `Operation`."""


def connect(
    members: Members, generation: Callable[[], Generation | None], messages: MessageBackend, text: str
) -> Operation:
    """Begin to find out which backends a group has, before its first call, whose descriptor is `text`."""
    made = generation()
    assert made is not None  # its first call is under way
    channel = members.services.transport.message_queue.open(members.group, 0, text.encode(), made.number)

    def steps() -> Waits[None]:
        exchange = Exchange(channel, members.ranks, members.rank, made.freeze)
        connection = yield from _choose(members, made.number, exchange)
        logger.info("%s %s", members.label, connection.reason)
        messages.tuning = connection.tuning
        made.settle(connection)

    return Connecting(channel, steps())


def _choose(members: Members, generation: int, exchange: Exchange) -> Waits[Connection]:
    services, ranks, rank = members.services, members.ranks, members.rank
    shared_memory, mpi = services.shared_memory, services.mpi
    # The others decide by this member's card, and so must it, whatever its other threads change meanwhile.
    factories = dict(registered.factories)
    refusal = "" if shared_memory is None else shared_memory.refusal
    is_large = len(ranks) > MOST_MEMBERS
    if shared_memory is None and mpi is None and (is_large or not factories):
        # Clients without a registry of shared memory are threads of one process: all of them see the same.
        return Connection(
            tuning=services.tuning, reason="exchanges messages: its ranks are threads of one process"
        )
    launch = bytes(mpi_world.TOKEN_BYTES) if mpi is None else mpi.token
    if is_large:
        # Not all members need a connection with all others: these messages go through a tree.
        outside = yield from exchange.find_odd(launch)
        connection = yield from _use_mpi(members, generation, exchange, outside)
        if connection is None:
            connection = Connection(
                tuning=_unpack((yield from exchange.spread(_pack(services.tuning)))),
                reason=f"exchanges messages: it has more than {MOST_MEMBERS} members",
            )
        return connection

    mine = _Card(
        _digest(*factories),
        bytes(_DIGEST) if shared_memory is None else _digest(*map(str, shared_memory.host)),
        shared_memory is not None and not refusal,
        launch,
        0 if _why_not_connected(members) else PROTOCOL,
        _pack(services.tuning),
    )
    messages = yield from exchange.swap([_CARD.pack(*mine)] * len(ranks))
    cards = dict(zip(ranks, map(_Card._make, map(_CARD.unpack, messages)), strict=True))
    first = cards[ranks[0]]

    other = next((at for at, card in cards.items() if card.registered != first.registered), None)
    if other is None and factories:
        place = registered.Membership(members.group, generation, ranks, rank)
        made = [registered.CollectivesOnly(factory(place)) for factory in factories.values()]
        return Connection(tuple(made), reason=f"uses registered backends: {', '.join(factories)}")
    if other is not None:
        logger.warning(
            "%s uses no registered backend: rank %d and rank %d have registered different ones; here: %s",
            members.label, ranks[0], other, ", ".join(factories) or "none",
        )  # fmt: skip

    for at, card in cards.items():
        if not card.shares:
            refusal = refusal or f"rank {at} shares no memory"
        if card.host != mine.host:
            refusal = refusal or f"rank {at} is on another host or in another container"
    if not refusal:
        assert shared_memory is not None
        memory = yield from share_memory(exchange, shared_memory, services.neighbours)
        if not isinstance(memory, str):
            reason = "shares memory: all its ranks are on one host"
            backend = SharedMemoryBackend(ranks, rank)
            return _settled(memory.agreement, backend, endpoints=memory, reason=reason)
        refusal = memory

    outside = next((at for at, card in enumerate(cards.values()) if card.launch != first.launch), -1)
    connection = yield from _use_mpi(members, generation, exchange, outside if any(first.launch) else 0)
    if connection is not None:
        return connection

    # Its own tuning is not decoded: it has been checked already.
    tuning = services.tuning if first.tuning == mine.tuning else _unpack(first.tuning)
    tuned = "" if first.tuning == _pack(SHIPPED) else f" with the tuning of rank {ranks[0]} ({tuning})"
    unable = _why_not_connected(members)
    for at, card in cards.items():
        if card.protocol != PROTOCOL:
            unable = unable or f"rank {at} has none, or of another protocol ({card.protocol})"
    if not unable:
        hosts = [card.host for card in cards.values()]
        found = yield from _use_tcp(members, exchange, tuning, hosts, tuned, refusal)
        if not isinstance(found, str):
            return found
        unable = found
    reason = f"exchanges messages{tuned}. It shares no memory: {refusal}. "
    reason += f"It has no dedicated connections: {unable}"
    return Connection(tuning=tuning, reason=reason)


def _use_mpi(members: Members, generation: int, exchange: Exchange, outside: int) -> Waits[Connection | None]:
    """Make a communicator for the group, unless a member (-1: none) is outside of the others' MPI launch."""
    world, ranks = members.services.mpi, members.ranks
    if world is None:
        return None
    refusal = f"rank {ranks[outside]} is not in the MPI launch of the others"
    if outside < 0:
        comm = yield from mpi_world.create(exchange, world, ranks, f"{members.group} {generation}")
        refusal = comm if isinstance(comm, str) else ""
        if len(ranks) > MOST_MEMBERS:
            without = yield from exchange.find_odd(bytes([not refusal]))
            agreement = Agreement(int(without < 0), ranks[without], (), ())
        else:
            agreement = yield from exchange.agree(not refusal)
        if agreement.level:
            reason = "uses MPI: all its ranks are of one MPI launch"
            return _settled(agreement, MpiBackend(world, comm, ranks, members.rank), reason=reason)
        refusal = refusal or f"rank {agreement.against} could not make a communicator"
    logger.info("%s does not use MPI: %s", members.label, refusal)
    return None


def _use_tcp(
    members: Members, exchange: Exchange, tuning: Tuning, hosts: Sequence[bytes], tuned: str, refusal: str
) -> Waits[Connection | str]:
    """Return the backends of a group whose members can have dedicated connections, or why it has none.

    Each member gets connections with all others, unless they are too many. `tuned` and `refusal` are for the
    reason for the user.
    """
    services, ranks = members.services, members.ranks
    places = [[at for at, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    lengths = ", ".join(str(len(place)) for place in places)
    found: Connections | None = None
    if len(ranks) <= dedicated.MOST_MEMBERS:
        connected = yield from open_connections(exchange, services.transport.connector, tuning)
        if isinstance(connected, str):
            return connected
        found = connected
    if tuning.folding == "rank":
        hierarchy: HierarchicalBackend | str = "it folds in the order of ranks alone"
    elif not 1 < len(places) < len(ranks):
        hierarchy = f"its hosts have {lengths} members; it needs at least two hosts, and two on one of them"
    elif len(places) > dedicated.MOST_MEMBERS:
        hierarchy = f"it has {len(places)} hosts, more than {dedicated.MOST_MEMBERS}"
    else:
        try:
            hierarchy = yield from find_hierarchy(exchange, members, places, tuning, shares=True)
        except BaseException:
            if found is not None:
                found.close()
            raise
    shared = f"between hosts, and shared memory among the ranks of each host ({lengths})"
    if found is None:
        too_many = f"it has more than {dedicated.MOST_MEMBERS} members"
        cells = cells_of(places)
        if isinstance(hierarchy, str) and tuning.folding != "rank" and cells:
            shared = f"within {len(cells)} cells, and between these"
            hierarchy = yield from find_hierarchy(exchange, members, cells, tuning, shares=False)
        if isinstance(hierarchy, str):
            return f"{too_many}, and is not hierarchical: {hierarchy}"
        reason = f"has dedicated connections{tuned} {shared}, for large arrays; others go by messages, for "
        return Connection((hierarchy,), tuning, inner=hierarchy.endpoints, reason=reason + too_many)
    assert services.shared_memory is not None
    assert services.shared_memory.core is not None
    endpoints = TcpEndpoints(services.shared_memory.core, members.rank, found)
    backend = TcpBackend(ranks, members.rank, endpoints)
    if isinstance(hierarchy, str):
        reason = (
            f"has dedicated connections{tuned}. It shares no memory: {refusal}. It is not hierarchical: "
            f"{hierarchy}"
        )
        return _settled(found.agreement, backend, tuning=tuning, endpoints=endpoints, reason=reason)
    endpoints.collectives.max_flat = hierarchy.minimum
    reason = f"has dedicated connections{tuned} {shared}"
    return _settled(
        found.agreement,
        hierarchy,
        backend,
        tuning=tuning,
        endpoints=endpoints,
        inner=hierarchy.endpoints,
        reason=reason,
    )


def _settled(agreement: Agreement, *backends: Backend, **others: Any) -> Connection:
    return Connection(
        backends, sends_from=agreement.sends_from, receives_from=agreement.receives_from, **others
    )


def _why_not_connected(members: Members) -> str:
    """Return why this client cannot use dedicated connections; empty if it can."""
    shared_memory = members.services.shared_memory
    if members.services.transport.connector is None:
        return "its connections are not over TCP"
    if shared_memory is None or shared_memory.core is None:
        return "this client has no native core"
    return "" if sys.byteorder == "little" else "this machine has another byte order"


def _pack(tuning: Tuning) -> bytes:
    *numbers, folding = astuple(tuning)
    return _TUNING.pack(*numbers, FOLDINGS.index(folding))


def _unpack(data: bytes) -> Tuning:
    *numbers, folding = _TUNING.unpack(data)
    fields = zip(Tuning.__dataclass_fields__, (*numbers, FOLDINGS[folding % len(FOLDINGS)]), strict=True)
    return Tuning(**dict(fields))


def _digest(*texts: str) -> bytes:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=_DIGEST).digest()
