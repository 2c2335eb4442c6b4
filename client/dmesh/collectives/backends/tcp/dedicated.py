"""Dedicated connections of a group whose ranks share no memory, made in its first call.

Each member tells those before it in the group the numbers under which it expects them, for collectives and
for transfers, and all others the addresses of its host's interfaces at which it listens. The group's tuning
says how many connections each pair has; they are distributed over the routes between the two. Each member
dials all that come after it, and reports to all others whether that succeeded. The group gets dedicated
connections only if every member agrees.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import struct
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from dmesh._log import announce, logger
from dmesh.collectives.backends.base import Agreement, Exchange
from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.collectives.backends.tcp.connection import Connector
from dmesh.collectives.backends.tcp.routes import OFFER_SIZE, Route, find_routes, unpack
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.collectives.tuning import Tuning
from dmesh.coordination.waiting import take
from dmesh.native import Core, Endpoint
from dmesh.security.secure_socket import SecureSocket

PROTOCOL = 7
"""Version of the calls' format; see `client/native/core/tcp.h`. A group needs the same at all members."""
MOST_MEMBERS = 64
"""Largest group in which each member has a connection with every other one."""
_CONNECT_WITHIN = 10.0
"""Seconds in which all connections must be there."""
_CHECK_EVERY = 0.2
"""Seconds between checks for a failure of the group."""
_DISCARD = 64 * 1024
_MOST_DISCARDS = 256

Sockets = dict[int, list[Stream]]
"""Connections with each other member: for collectives; if any, for transfers, and one for their receipts."""

Wanted = tuple[int, Route | None]
"""Number under which a member expects a connection, and the route to take; None for no particular one."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Dedicated connections of a group."""

    sockets: Sockets
    tuning: Tuning
    agreement: Agreement

    def close(self) -> None:
        """Close the connections: the group does not use them."""
        for sockets in self.sockets.values():
            close_all(sockets)


def open_connections(
    exchange: Exchange, connector: Connector | None, tuning: Tuning, *, transfers: bool = True
) -> Waits[Connections | str]:
    """Connect the members of a group; return the connections, or why there are none.

    Must be called by all members, which all can use them. `transfers`: these get connections, too.
    """
    assert connector is not None
    ranks, position = exchange.ranks, exchange.position
    each = 2 * tuning.streams + 1 if transfers else tuning.streams
    offer = struct.Struct(f"!{each}I{OFFER_SIZE}s")
    numbers: dict[int, list[int]] = {}
    found: Sockets = {}
    try:
        for member in range(position):
            numbers[member] = [connector.expect(ranks[member]) for _ in range(each)]
        offers = yield from exchange.swap(
            [offer.pack(*numbers.get(member, [0] * each), connector.offer) for member in range(len(ranks))]
        )
        wanted: dict[int, list[Wanted]] = {}
        for member in range(position + 1, len(ranks)):
            *theirs, listening = offer.unpack(offers[member])
            routes = find_routes(connector.addresses, unpack(listening)) if connector.addresses else ()
            if routes:
                said = ", ".join(map(str, routes))
                logger.info("rank %d dials rank %d from %s", ranks[position], ranks[member], said)
            wanted[member] = [
                (number, routes[at % tuning.streams % len(routes)] if routes else None)
                for at, number in enumerate(theirs)
            ]
        refusal = yield from _dial(exchange, connector, wanted, found)
        agreement = yield from exchange.agree(not refusal)
        for member in tuple(numbers):
            # A dialer agrees once it has been let in, so its connections are here by then.
            found[member] = _claim(connector, numbers.pop(member))
        if not agreement.level:
            if refusal:
                announce(
                    f"rank {ranks[position]}: {refusal}. The group of {len(ranks)} ranks does without its "
                    "dedicated connections, which is slower, until it begins anew"
                )
            return refusal or f"rank {agreement.against} could not connect with all of the group"
        for member, sockets in found.items():
            if len(sockets) != each:
                raise AssertionError(f"rank {ranks[member]} says that it has connected, but has not")
        connected, found = Connections(found, tuning, agreement), {}
        return connected
    finally:
        for expected in numbers.values():
            close_all(_claim(connector, expected))
        for sockets in found.values():
            close_all(sockets)


def _claim(connector: Connector, expected: Iterable[int]) -> list[Stream]:
    """Return the connections that have come under some numbers, which are not expected any more."""
    return [sock for sock in map(connector.claim, expected) if sock is not None]


def _dial(
    exchange: Exchange, connector: Connector, wanted: dict[int, list[Wanted]], found: Sockets
) -> Waits[str]:
    """Dial members under their numbers; return the problem, if any. Raises the group's failure."""
    ranks = exchange.ranks
    dials = [(member, *dial) for member, its in wanted.items() for dial in its]
    results: queue.SimpleQueue[tuple[int, Stream | None, str]] = queue.SimpleQueue()
    connected: dict[int, Stream] = {}  # by index of the dial
    refusal, given_up = "", False
    give_up_at = time.monotonic() + _CONNECT_WITHIN

    def dialed(index: int, sock: Stream | None, problem: str) -> None:
        results.put((index, sock, problem))
        if given_up:
            close_late()

    def close_late() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock = results.get_nowait()[1]
                if sock is not None:
                    sock.close()

    def arrived(seconds: float) -> bool:
        """Take the outcome of one dial; raise the group's failure."""
        nonlocal refusal
        try:
            index, sock, problem = take(results, min(seconds, _CHECK_EVERY))
        except queue.Empty:
            exchange.check()
            if time.monotonic() > give_up_at:
                late = next(ranks[member] for at, (member, *_) in enumerate(dials) if at not in connected)
                refusal = f"there is no connection with rank {late} after {_CONNECT_WITHIN:g} s"
            return bool(refusal)
        if sock is None:
            refusal = f"there is no connection with rank {ranks[dials[index][0]]}: {problem}"
        else:
            connected[index] = sock
        return True

    try:
        for index, (member, number, route) in enumerate(dials):
            connector.dial(ranks[member], number, partial(dialed, index), route)
        while len(connected) < len(dials) and not refusal:
            yield arrived
        if not refusal:
            for index, (member, *_) in enumerate(dials):
                found.setdefault(member, []).append(connected.pop(index))
    finally:
        given_up = True
        close_late()
        close_all(connected.values())
    return refusal


def close_all(sockets: Iterable[Stream]) -> None:
    """Close connections."""
    for sock in sockets:
        sock.close()


def discard_from(sockets: Iterable[Stream]) -> None:
    """Read and drop what has come on connections that are about to be closed, at most 16 MiB on each.

    Linux resets a connection that is closed with unread bytes, and a reset drops what this end has sent but
    the other end's kernel does not have yet.
    """
    for sock in sockets:
        with contextlib.suppress(OSError):  # the peer has closed or reset it, or there is nothing left
            sock.setblocking(False)
            for _ in range(_MOST_DISCARDS):
                if not sock.recv(_DISCARD):
                    break


def _leave(sockets: Iterable[Stream], process: int) -> None:
    if os.getpid() == process:  # a forked child would read what is sent to its parent
        discard_from(sockets)
    close_all(sockets)


class _HeldSockets:
    """Connections for transfers, and encrypted ones: closed when no endpoint holds them any more."""

    def __init__(self, sockets: Sockets) -> None:
        self.sockets = sockets
        used = list(itertools.chain(*sockets.values()))
        weakref.finalize(self, _leave, used, os.getpid()).atexit = False


class TcpEndpoints:
    """Opens the endpoints of a group with dedicated connections, which belong to them from now on."""

    def __init__(self, core: Core, position: int, found: Connections) -> None:
        self._core = core
        self._position = position
        self._tuning = tuning = found.tuning
        sockets, streams = found.sockets, tuning.streams
        self._transfers = _HeldSockets({member: its[streams:] for member, its in sockets.items()})
        members = len(sockets) + 1
        used = [sockets[member][:streams] if member != position else [] for member in range(members)]
        descriptors = itertools.chain(*([sock.fileno() for sock in its] or [-1] * streams for its in used))
        secure = _encrypted(itertools.chain(*used))
        try:
            self.collectives = core.Endpoint.over_sockets(
                list(descriptors), position, -1, tuning.piece, not secure, tuning.flat, streams, secure
            )
        except BaseException:
            close_all(itertools.chain(*used))
            raise
        if secure:
            self.collectives.keep_alive = _HeldSockets(dict(enumerate(used)))
        for sock in itertools.chain(*used):
            if not isinstance(sock, SecureSocket):
                sock.detach()  # the endpoint closes it

    def open_collectives(self) -> Endpoint:
        """Return this rank's endpoint for collectives."""
        return self.collectives

    def discard_transfers(self) -> None:
        """Drop the arrays that have come without a `recv`: this rank leaves. See `discard_from`."""
        discard_from(itertools.chain(*self._transfers.sockets.values()))

    def open_transfers(self, sender: int, receiver: int) -> Endpoint:
        """Open this rank's endpoint for transfers from one position to another, of which it is one."""
        other = receiver if sender == self._position else sender
        sockets = self._transfers.sockets[other]
        *theirs, receipts = (sock.fileno() for sock in sockets)
        mine = [-1] * len(theirs)
        ends = [*mine, *theirs] if sender == self._position else [*theirs, *mine]
        end = int(receiver == self._position)
        endpoint = self._core.Endpoint.over_sockets(
            ends, end, receipts, self._tuning.piece, False, 0, len(theirs), _encrypted(sockets)
        )
        endpoint.keep_alive = self._transfers
        return endpoint


def _encrypted(sockets: Iterable[Stream]) -> dict[int, SecureSocket]:
    return {sock.fileno(): sock for sock in sockets if isinstance(sock, SecureSocket)}
