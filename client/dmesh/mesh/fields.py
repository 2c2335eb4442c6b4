"""Fields of a mesh, and their validation.

Every way to a mesh (constructor, string, creation functions) comes through `MeshFields.check`, so that there
is no mesh in the program for which one of these rules does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dmesh.devices.device import DeviceSpec
from dmesh.errors import MeshError

RESERVED_NAMES = frozenset({"unsharded", "match", "any", "scalar"})
"""Forbidden names of dimensions: a layout could not tell them from its own words."""

_FORBIDDEN = "|,="
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 1000


class MeshDimension(NamedTuple):
    """One dimension of a mesh."""

    name: str
    """Name, as used by layouts and groups."""
    size: int
    """Number of devices along it."""


@dataclass(frozen=True, slots=True)
class MeshFields:
    """The parts of a mesh. Two meshes are equal if all their parts are."""

    name: str = ""
    """Name of the mesh, for people."""
    dims: tuple[MeshDimension, ...] = ()
    """The dimensions, outermost first."""
    first_id: int = 0
    """Global id of the first device; the others count on from it, row by row."""
    local_ids: tuple[int, ...] = ()
    """Global ids of this client's devices."""
    local_devices: tuple[DeviceSpec, ...] = ()
    """This client's devices, in the order of `local_ids`."""
    global_devices: tuple[DeviceSpec, ...] = ()
    """All devices by global id, or empty if they are not listed."""
    use_xla_spmd: bool = False
    """TensorFlow's choice of a compiler pass on TPUs; kept, without effect here."""
    single_device: DeviceSpec | None = None
    """The only device of a mesh without dimensions."""

    @property
    def empty(self) -> bool:
        """True for the mesh of nothing at all."""
        return not self.dims and self.single_device is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(dim.size for dim in self.dims)

    @property
    def size(self) -> int:
        """Number of devices."""
        return 0 if self.empty else math.prod(self.shape)

    @property
    def device_type(self) -> str:
        """Type of the devices; empty if there are none."""
        devices = self.local_devices or self.global_devices
        spec = self.single_device or (devices[0] if devices else DeviceSpec())
        return spec.device_type or ""

    def check(self) -> MeshFields:
        """Returns these fields if they make a valid mesh.

        Raises:
            MeshError: They do not; the message says which rule is broken.
        """
        if self.single_device is not None:
            _check_complete([self.single_device])
            return self
        _check_name(self.name)
        check_dimensions(self.dims)
        self._check_local_devices()
        self._check_types()
        self._check_global_devices()
        return self

    def _check_local_devices(self) -> None:
        if not self.local_devices and not self.global_devices:
            raise MeshError(
                "a mesh needs devices: list those of this client, or all of them as global_devices"
            )
        distinct = set(self.local_devices)
        # A client may give its one CPU several places; any other device has one place.
        if len(distinct) != len(self.local_devices) and not (
            len(distinct) == 1 and self.local_devices[0].device_type == "CPU"
        ):
            raise MeshError(
                f"the local devices {_listed(_repeated(self.local_devices))} are listed more than once"
            )
        if len(self.local_ids) != len(self.local_devices):
            raise MeshError(
                f"there are {len(self.local_ids)} local device ids for {len(self.local_devices)} local "
                "devices; give each device its id"
            )
        if len(self.local_ids) > self.size:
            raise MeshError(
                f"there are {len(self.local_ids)} local devices, but only {self.size} in the whole mesh"
            )
        strangers = [i for i in self.local_ids if not self.first_id <= i < self.first_id + self.size]
        if strangers or len(set(self.local_ids)) != len(self.local_ids):
            raise MeshError(
                f"the local device ids {_listed(self.local_ids)} must be different ids of the mesh, which "
                f"has {self.first_id} to {self.first_id + self.size - 1}"
            )
        if self.local_ids and self.size % len(self.local_ids):
            raise MeshError(
                f"this client has {len(self.local_ids)} of the mesh's {self.size} devices, which is not an "
                "equal share; every client of a mesh must have the same number of devices"
            )

    def _check_types(self) -> None:
        devices = self.local_devices + self.global_devices
        _check_complete(devices)
        types = sorted({str(device.device_type) for device in devices})
        if len(types) > 1:
            raise MeshError(f"the devices of a mesh must have one type, these have {', '.join(types)}")
        if self.use_xla_spmd and types != ["TPU"]:
            raise MeshError(
                f"use_xla_spmd=True is for TPU meshes; this one has {types[0]} devices. Leave it out"
            )

    def _check_global_devices(self) -> None:
        if not self.global_devices:
            return
        if len(self.global_devices) != self.size:
            raise MeshError(
                f"there are {len(self.global_devices)} global devices for {self.size} places in the mesh; "
                "list one for each"
            )
        for device_id, device in zip(self.local_ids, self.local_devices, strict=True):
            listed = self.global_devices[device_id - self.first_id]
            if listed != device:
                raise MeshError(
                    f"device {device_id} is {device} among the local devices and {listed} among the global "
                    "ones; the two lists must agree"
                )


def check_dimensions(dims: Sequence[tuple[str, int]]) -> None:
    """Refuses dimensions that a mesh cannot have.

    Raises:
        MeshError: There are none or too many, a name cannot be written or is there twice, or a size is not
            positive.
    """
    if not 1 <= len(dims) <= _MOST_DIMENSIONS:
        raise MeshError(f"a mesh has 1 to {_MOST_DIMENSIONS} dimensions, got {len(dims)}")
    names: set[str] = set()
    for name, size in dims:
        if not isinstance(name, str) or not _writable(name) or not name:
            raise MeshError(
                f"{name!r:.200} is not a valid name of a mesh dimension; use a word without spaces and "
                "without "
                f"{_FORBIDDEN!r}"
            )
        if name in RESERVED_NAMES:
            raise MeshError(
                f"{name!r} is reserved in layouts and cannot name a mesh dimension; use another name"
            )
        if name in names:
            raise MeshError(f"the mesh dimension {name!r} is listed twice; give each dimension its own name")
        names.add(name)
        if size < 1:
            raise MeshError(f"the mesh dimension {name!r} has size {size}; a size is 1 or more")


def _writable(name: str) -> bool:
    return (
        len(name) <= _LONGEST_NAME
        and name.isprintable()
        and not any(c in _FORBIDDEN or c.isspace() for c in name)
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable() or "|" in name:
        raise MeshError(
            f"{name!r:.200} is not a valid name of a mesh; use printable characters other than '|'"
        )


def _check_complete(devices: Sequence[DeviceSpec]) -> None:
    for device in devices:
        if device.device_type is None:
            raise MeshError(f"the device {device.to_string()!r} has no device type; write it as in CPU:0")
        if device.job is None or device.task is None or device.device_index is None:
            raise MeshError(
                f"the device {device.to_string()!r} is not named in full; write it as in "
                "/job:worker/replica:0/task:0/device:CPU:0, or let create_mesh() do so"
            )


def _repeated(devices: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    seen: set[DeviceSpec] = set()
    return [device for device in devices if device in seen or seen.add(device)]  # type: ignore[func-returns-value]


def _listed(values: Sequence[object]) -> str:
    """Lists values for a message, the first few of many."""
    text = ", ".join(str(value) for value in values[:8])
    return f"[{text}, ... {len(values)} in all]" if len(values) > 8 else f"[{text}]"
