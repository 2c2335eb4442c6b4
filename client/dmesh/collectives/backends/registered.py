"""Registered backends: a program's own, which its groups use before all others.

A client registers a backend by name. In a group's first call the members compare the names that they have
registered; the group gets these backends, and no native endpoint, only if all members have registered the
same ones in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from dmesh._log import logger
from dmesh.collectives.backends.base import Backend, Call, Operation
from dmesh.collectives.backends.tcp.exchange import Waits, exchange
from dmesh.collectives.backends.tcp.transport import Channel
from dmesh.collectives.request import Buffers, Request
from dmesh.collectives.stream import Stream


@dataclass(frozen=True, slots=True)
class Membership:
    """A client's place in a group, as a factory of backends gets it."""

    group: int
    """The group's id, the same on all members."""
    generation: int
    """Number of the generation; the backend is used in this one alone."""
    ranks: tuple[int, ...]
    """Client ids of the members, by position."""
    position: int
    """This client's position."""


Factory = Callable[[Membership], Backend]
"""Makes a group's backend on one of its members, without waiting for the others."""

_factories: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Let all groups that are used from now on have a backend, if all their members register it.

    Args:
        name: Its name, the same on all clients.
        factory: Makes a group's backend.

    Raises:
        ValueError: A backend of this name is registered already, or the name is empty.
    """
    if not name or name in _factories:
        raise ValueError(f"the name of a backend must be new and not empty, not {name!r}")
    _factories[name] = factory


def unregister(name: str) -> None:
    """Take back a registration; groups that have the backend keep it.

    Raises:
        KeyError: No backend of this name is registered.
    """
    del _factories[name]


def any_registered() -> bool:
    """Return whether this client has registered a backend."""
    return bool(_factories)


def agree(channel: Channel, membership: Membership, label: str, step: int) -> Waits[tuple[Backend, ...]]:
    """Compare what the members of a group have registered, and make its backends; all members must call this.

    Args:
        channel: Channel of the group's first call.
        membership: This client's place in the group.
        label: The group's name for people.
        step: Step number of the messages.
    """
    factories = dict(_factories)
    mine = hashlib.blake2b("\0".join(factories).encode(), digest_size=16).digest()
    ranks = membership.ranks
    found = yield from exchange(channel, ranks, membership.position, step, [mine] * len(ranks))
    others = [rank for rank, theirs in zip(ranks, found, strict=True) if theirs != found[0]]
    if others:
        logger.warning(
            "%s uses no registered backend: rank %d and rank %d have registered different ones; here: %s",
            label, ranks[0], others[0], ", ".join(factories) or "none",
        )  # fmt: skip
        return ()
    return tuple(CollectivesOnly(factory(membership)) for factory in factories.values())


class CollectivesOnly(Backend):
    """A backend that is given a group's collectives alone.

    A pair of ranks may begin its transfers while the group still chooses its backends, so these go over
    messages.

    Args:
        backend: Carries the calls out.
    """

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.capabilities = backend.capabilities
        self._backend = backend

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether it is a collective of NumPy arrays that the backend carries out."""
        if stream.pair is not None or request.device is not None:
            return False
        return self._backend.supports(request, stream, sequence)

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin a call; see `Backend.start`."""
        return self._backend.start(request, buffers, call)

    def close(self, *, orderly: bool) -> None:
        """Let go of what the backend holds; see `Backend.close`."""
        self._backend.close(orderly=orderly)
