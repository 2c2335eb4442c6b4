"""Groups of the running cluster: the world, and groups of some of its clients."""

from __future__ import annotations

from collections.abc import Iterable

from dmesh.collectives.api import ProcessGroup, resolve
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.runtime import context


def world() -> Group:
    """Return the group of all clients, on which collectives work that are given no other.

    Raises:
        NotInitializedError: The system has not been initialized.
    """
    return context.current().get(Communicator).world


def group_or_world(group: ProcessGroup | None) -> Group:
    """Return the group that a function was given, or the world; see `api.resolve`."""
    found = resolve(group)
    assert isinstance(found, Group)
    return found


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Make a group of some clients. All of them must do so, and nobody else.

    Members do not talk to each other here. A group of the same ranks and name that is made again is another
    group; all members must make them in the same order.

    Args:
        ranks: Client ids, in the order of their positions in the group; this client's must be among them.
        name: For messages, and to tell apart groups of the same ranks.

    Raises:
        CollectiveValueError: A rank does not exist, is named twice, or this client's is missing.
        NotInitializedError: The system has not been initialized.
    """
    return context.current().get(Communicator).new_group(ranks, name)
