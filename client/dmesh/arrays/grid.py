"""A client's view of a mesh: who holds which device, and with whom this client talks along its dimensions."""

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
"""Bytes from which on fresh pages cost more than what they are filled with."""
_DEVICES = ("CPU", "TPU")
"""Types of devices whose arrays are NumPy's."""
_known: WeakValueDictionary[tuple[Mesh, ThisClient], Grid] = WeakValueDictionary()
_lock = Lock()


class Line(NamedTuple):
    """Lines along some dimensions through a client's devices."""

    clients: tuple[int, ...]
    """Clients that have devices on them, in their order."""
    places: tuple[tuple[int, ...], ...]
    """Coordinates, along these dimensions, of the client's devices on each of them."""


class Grid:
    """A mesh with what follows from it for one client; made by `grid_of`, once for equal meshes.

    Args:
        mesh: The mesh.
        me: This client.

    Raises:
        MeshError: The mesh does not say whose its devices are, or none of them is this client's.
        UnshardableError: The mesh has no dimensions, or devices of a type that holds no NumPy arrays.
    """

    __slots__ = (
        "__dict__", "__weakref__", "client", "clients", "coords", "mesh", "names", "owners", "positions",
        "sizes",
    )  # fmt: skip

    def __init__(self, mesh: Mesh, me: ThisClient) -> None:
        if not isinstance(mesh, Mesh) or mesh.is_single_device() or mesh.size == 0:
            raise UnshardableError(
                f"a sharded array needs a mesh with dimensions, got {mesh!r:.200}; dmesh.create_mesh() "
                "makes one "
                "of a single device, too"
            )
        if mesh.device_type() not in _DEVICES:
            raise UnshardableError(
                "sharded arrays lie in the memory of hosts, not on devices of type "
                f"{mesh.device_type()}: use "
                "mesh.host_mesh(), whose devices are the CPUs beside them"
            )
        self.mesh = mesh
        self.names = tuple(mesh.dim_names)
        """Names of the dimensions."""
        self.sizes = tuple(mesh.shape())
        """Number of devices along each dimension."""
        self.owners = tuple(owners(mesh._fields))
        """Client that holds each device, by position."""
        self.coords = tuple(itertools.product(*(range(size) for size in self.sizes)))
        """Coordinates of each device, by position."""
        self.client = me.client_id
        """This client."""
        self.clients = tuple(sorted(set(self.owners)))
        """All clients that hold devices, in ascending order."""
        self.positions = tuple(at for at, owner in enumerate(self.owners) if owner == self.client)
        """Positions of this client's devices."""
        if not self.positions:
            raise MeshError(
                f"client {self.client} has no device in mesh {mesh.name!r}, whose clients are "
                f"{list(self.clients)}; only they can have arrays on it"
            )

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbors along each dimension, in positions."""
        return tuple(self.mesh.strides)

    @cached_property
    def threads(self) -> int:
        """Number of threads for the blocks of this client, the caller's included.

        `OMP_NUM_THREADS` if it is set, as `dmesh run` does, else the CPUs divided by the host's clients.
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

        Lines of several dimensions are planes. None if they cut clients unequally: then there is no group for
        all of a client's lines, or its devices lie at other places on one line than on the next. All clients
        come to the same answer.
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
        """Return the group of the lines along some dimensions, or of all clients of the mesh.

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
        """Return an array with arbitrary contents; memory of large ones is kept for later ones.

        It is shared with the other clients of the host, at most half of what this client may share.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= RECYCLED and len(self.clients) > 1:
            from dmesh.collectives.communicator import Communicator

            communicator = context.find(Communicator)  # none after the shutdown: local work goes on
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
