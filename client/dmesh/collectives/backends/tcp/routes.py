"""Routes between two hosts with several network interfaces: pairs of addresses, one of each host.

The members of a group tell each other at which addresses they listen for dedicated connections, one for each
interface. The dialing member pairs its own with those of the other that are in the same network, and
distributes the streams of a connection over the pairs.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from socket import socket

from dmesh.config.addresses import join_address
from dmesh.config.interfaces import MOST_INTERFACES, Address

_FIELDS = struct.Struct("!B16sBH")  # version of the IP address or 0, address, length of prefix, port
OFFER_SIZE = MOST_INTERFACES * _FIELDS.size
"""Bytes of the addresses of a member."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """Address of an interface at which this client listens."""

    address: Address
    port: int
    listener: socket | None = field(default=None, compare=False)
    """Listener at this address alone; None if the client's own listener is bound to it, too."""


@dataclass(frozen=True, slots=True)
class Route:
    """Way from one host to another."""

    source: str
    """IP address of this host."""
    target: str
    """HOST:PORT at which the peer listens."""

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


def pack(addresses: Sequence[LocalAddress]) -> bytes:
    """Return the addresses as they are sent to a peer."""
    packed = [
        _FIELDS.pack(mine.address.version, mine.address.packed, mine.address.network.prefixlen, mine.port)
        for mine in addresses[:MOST_INTERFACES]
    ]
    return b"".join(packed).ljust(OFFER_SIZE, b"\0")


def unpack(offer: bytes) -> tuple[LocalAddress, ...]:
    """Return the addresses of a peer; those that are none are left out."""
    found = []
    for version, packed, prefix, port in _FIELDS.iter_unpack(offer):
        if version == 4 and prefix <= 32 and port:
            found.append(LocalAddress(ipaddress.IPv4Interface((packed[:4], prefix)), port))
        elif version == 6 and prefix <= 128 and port:
            found.append(LocalAddress(ipaddress.IPv6Interface((packed, prefix)), port))
    return tuple(found)


def find_routes(own: Sequence[LocalAddress], theirs: Sequence[LocalAddress]) -> tuple[Route, ...]:
    """Return the routes to a peer, in the order of this host's interfaces; none if both are on one host.

    If several interfaces are in one network, each is used, the first with the peer's first.
    """
    routes: list[Route] = []
    if {mine.address.ip for mine in own} & {its.address.ip for its in theirs}:
        return ()
    for network in dict.fromkeys(mine.address.network for mine in own):
        near = [str(mine.address.ip) for mine in own if mine.address.network == network]
        far = [
            join_address(str(its.address.ip), its.port) for its in theirs if its.address.network == network
        ]
        if far:
            pairs = max(len(near), len(far))
            routes += [Route(near[at % len(near)], far[at % len(far)]) for at in range(pairs)]
    return tuple(routes)
