"""Registered backends: a program's own, which its groups use before all others.

A client registers a backend by name. A group gets these backends, and no native endpoint, only if all its
members have registered the same ones in the same order; they compare that in the group's first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dmesh.collectives.backends.base import Backend, Call, Operation, Stream
from dmesh.collectives.request import Buffers, Request


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

factories: dict[str, Factory] = {}
"""Backends that this client has registered, by name."""


def register(name: str, factory: Factory) -> None:
    """Let all groups that are used from now on have a backend, if all their members register it.

    Args:
        name: Its name, the same on all clients.
        factory: Makes a group's backend.

    Raises:
        ValueError: A backend of this name is registered already, or the name is empty.
    """
    if not name or name in factories:
        raise ValueError(f"the name of a backend must be new and not empty, not {name!r}")
    factories[name] = factory


def unregister(name: str) -> None:
    """Take back a registration; groups that have the backend keep it.

    Raises:
        KeyError: No backend of this name is registered.
    """
    del factories[name]


class CollectivesOnly(Backend):
    """A backend that is given a group's collectives of NumPy arrays alone, without blocks of other lengths.

    A pair of ranks may begin its transfers while the group still chooses its backends, so these go over
    messages.
    """

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.capabilities = backend.capabilities
        self._backend = backend

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """See `Backend.supports`."""
        is_collective = stream.pair is None and request.device is None and not request.messages_only
        return is_collective and request.blocks is None and self._backend.supports(request, stream, sequence)

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """See `Backend.start`."""
        return self._backend.start(request, buffers, call)

    def close(self, *, orderly: bool) -> None:
        """See `Backend.close`."""
        self._backend.close(orderly=orderly)
