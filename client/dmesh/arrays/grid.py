"""A client's view of a mesh: the owners of its devices, and this client's groups along its dimensions."""

from __future__ import annotations

import itertools
import math
import os
from contextlib import suppress
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from dmesh.config.host import own_cpus
from dmesh.devices.device import ThisClient, known_members, this_client
from dmesh.errors import MeshError, SharedMemoryError, UnshardableError
from dmesh.mesh import Mesh
from dmesh.mesh.ownership import owners
from dmesh.runtime import context

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator
    from dmesh.collectives.group import Group

RECYCLED = 1 << 20
"""Bytes from which mapping new pages takes longer than filling them."""
_DEVICES = ("CPU", "TPU")
"""Types of devices whose arrays are NumPy arrays."""
_known: WeakValueDictionary[tuple[Mesh, ThisClient], Grid] = WeakValueDictionary()
_lock = Lock()


class Line(NamedTuple):
    """Lines along some dimensions through a client's devices."""

    clients: tuple[int, ...]
    """Clients with devices on the lines, in order."""
    places: tuple[tuple[int, ...], ...]
    """Coordinates of the client's devices along these dimensions; the same on each line."""


class Grid:
    """One client's view of a mesh; made by `grid_of`, once for equal meshes.

    Args:
        mesh: The mesh.
        me: The client.

    Raises:
        MeshError: The owners of the mesh's devices are unknown, or the client has none of them.
        UnshardableError: The mesh has no dimensions, or its devices cannot hold NumPy arrays.
    """

    __slots__ = (
        "__dict__", "__weakref__", "client", "clients", "coords", "mesh", "names", "owners", "positions",
        "sizes",
    )  # fmt: skip

    def __init__(self, mesh: Mesh, me: ThisClient) -> None:
        if not isinstance(mesh, Mesh) or mesh.is_single_device() or mesh.size == 0:
            raise UnshardableError(
                f"a sharded array needs a mesh with dimensions, got {mesh!r:.200}. Use dmesh.create_mesh(), "
                "also for a single device"
            )
        if mesh.device_type() not in _DEVICES:
            raise UnshardableError(
                f"sharded arrays are in host memory, not on devices of type {mesh.device_type()}. Use "
                "mesh.host_mesh(), the mesh of the CPUs of the same hosts"
            )
        self.mesh = mesh
        self.names = tuple(mesh.dim_names)
        """Names of the dimensions."""
        self.sizes = tuple(mesh.shape())
        """Number of devices along each dimension."""
        self.owners = tuple(owners(mesh._fields))
        """Owner of each device, by position."""
        self.coords = tuple(itertools.product(*(range(size) for size in self.sizes)))
        """Coordinates of each device, by position."""
        self.client = me.client_id
        """This client."""
        self.clients = tuple(sorted(set(self.owners)))
        """All clients with devices in the mesh, in ascending order."""
        self.positions = tuple(at for at, owner in enumerate(self.owners) if owner == self.client)
        """Positions of this client's devices."""
        if not self.positions:
            raise MeshError(
                f"client {self.client} has no device in mesh {mesh.name!r}: only its clients, "
                f"{list(self.clients)}, can have arrays on it"
            )

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbors along each dimension, in positions."""
        return tuple(self.mesh.strides)

    @cached_property
    def threads(self) -> int:
        """Number of threads for this client's blocks, the caller's included.

        It is `OMP_NUM_THREADS`, which `dmesh run` sets; else the number of CPUs divided by the host's
        clients.
        """
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        cpus = len(own_cpus())
        hosts = {member.rank: (member.process.boot_id, member.process.host) for member in known_members()}
        beside = sum(host == hosts.get(self.client) for host in hosts.values())
        wanted = int(given) if given.isdecimal() and int(given) else cpus // max(1, beside)
        return max(1, min(wanted, cpus))

    def position(self, coords: tuple[int, ...]) -> int:
        """Return the position of the device at some coordinates."""
        return sum(at * stride for at, stride in zip(coords, self.strides, strict=True))

    @lru_cache(maxsize=64)  # noqa: B019 -- a grid is interned, and lives as long as arrays on it
    def lines(self, axes: tuple[int, ...]) -> dict[int, Line] | None:
        """Return the lines along some dimensions through each client's devices, by client.

        Lines along several dimensions are planes. None if no group fits all lines of each client, or if a
        client's devices have different coordinates on different lines. The result is the same on all clients.
        """
        lines: dict[tuple[int, ...], dict[int, list[tuple[int, ...]]]] = {}
        for coords, owner in zip(self.coords, self.owners, strict=True):
            line = tuple(at for axis, at in enumerate(coords) if axis not in axes)
            place = tuple(coords[axis] for axis in axes)
            lines.setdefault(line, {}).setdefault(owner, []).append(place)
        found: dict[int, set[Line]] = {}
        for along in lines.values():
            order = tuple(along)
            for owner, places in along.items():
                found.setdefault(owner, set()).add(Line(order, tuple(places)))
        if any(len(ways) > 1 for ways in found.values()):
            return None
        return {owner: next(iter(ways)) for owner, ways in found.items()}

    def group(self, axes: tuple[int, ...] | None = None) -> Group:
        """Return this client's group along some dimensions, or the group of all clients of the mesh.

        Raises:
            NotInitializedError: The mesh has devices of other clients, and the system is not initialized.
        """
        name, members = "*", self.clients
        if axes is not None:
            lines = self.lines(axes)
            assert lines is not None, "the plan chose another way"
            name, members = ",".join(self.names[axis] for axis in axes), lines[self.client].clients
        return _communicator().mesh_group(self.mesh.fingerprint, name, members)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array; the memory of large arrays is reused for later ones.

        That memory is shared with the other clients of the host, up to half of what this client may share.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= RECYCLED and len(self.clients) > 1:
            from dmesh.collectives.communicator import Communicator

            communicator = context.find(Communicator)  # None after the shutdown; local operations still work
            pool = None if communicator is None else communicator.pool
            if pool is not None and pool.has_spare(nbytes):
                with suppress(SharedMemoryError):
                    return pool.empty(shape, dtype)
        return np.empty(shape, dtype)


def _communicator() -> Communicator:
    from dmesh.collectives.communicator import Communicator  # large, and not needed by one client alone

    return context.current().get(Communicator)


def grid_of(mesh: Mesh) -> Grid:
    """Return this client's view of a mesh: the same object for equal meshes."""
    me = this_client()
    key = (mesh, me)
    found = _known.get(key)
    if found is None:
        made = Grid(mesh, me)
        with _lock:
            found = _known.setdefault(key, made)
    return found
