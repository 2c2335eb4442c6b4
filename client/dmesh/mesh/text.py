"""A mesh as a string, and back, in TensorFlow's form.

    NAME|DIM=SIZE,...|GLOBAL IDS|LOCAL IDS|LOCAL DEVICES[|GLOBAL DEVICES][|use_xla_spmd]

A single device is its own name, and nothing at all is `empty_mesh`. `NAME|DIM=SIZE,...|*CPU` is short for a
mesh over devices of that type that one local client would have.
"""

from __future__ import annotations

import math
import re

from dmesh.devices.device import DeviceSpec
from dmesh.errors import DeviceError, MeshError
from dmesh.mesh.fields import MeshDimension, MeshFields, check_dimensions

EMPTY = "empty_mesh"
USE_XLA_SPMD = "use_xla_spmd"

_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_MOST_GENERATED = 1 << 16
"""The short form names a number that we would have to believe; a list of devices is as long as its text."""


def format_mesh(fields: MeshFields) -> str:
    """Writes a mesh as a string."""
    if fields.single_device is not None:
        return fields.single_device.to_string()
    if fields.empty:
        return EMPTY
    parts = [
        fields.name,
        ",".join(f"{dim.name}={dim.size}" for dim in fields.dims),
        ",".join(str(i) for i in range(fields.first_id, fields.first_id + fields.size)),
        ",".join(str(i) for i in fields.local_ids),
        ",".join(device.to_string() for device in fields.local_devices),
    ]
    if fields.global_devices:
        parts.append(",".join(device.to_string() for device in fields.global_devices))
    if fields.use_xla_spmd:
        parts.append(USE_XLA_SPMD)
    return "|".join(parts)


def parse_mesh(text: str) -> MeshFields:
    """Reads a mesh from a string.

    Raises:
        MeshError: The string is malformed, or what it says is not a valid mesh.
    """
    if not isinstance(text, str):
        raise MeshError(f"a mesh string must be a str, got {type(text).__name__}")
    if text == EMPTY:
        return MeshFields()
    try:
        return _parse(text).check()
    except (MeshError, DeviceError) as error:
        raise MeshError(f"cannot read the mesh string {text!r:.200}: {error}") from error


def _parse(text: str) -> MeshFields:
    parts = text.split("|")
    if len(parts) == 1:
        return MeshFields(single_device=DeviceSpec.from_string(text))
    if len(parts) not in (3, 5, 6, 7):
        raise MeshError(
            f"it has {len(parts)} parts between '|'; expected NAME|DIM=SIZE,...|GLOBAL IDS|LOCAL IDS|LOCAL "
            "DEVICES, with global devices and use_xla_spmd after them if need be, or one device"
        )
    name = parts[0]
    dims = tuple(_parse_dimension(part) for part in parts[1].split(","))
    check_dimensions(dims)
    size = math.prod(dim.size for dim in dims)
    if len(parts) == 3:
        return _generate(name, dims, size, parts[2])
    first_id = _parse_global_ids(parts[2], size)
    extra = parts[5:]
    if len(extra) == 1 and extra[0] == USE_XLA_SPMD:
        extra = ["", USE_XLA_SPMD]
    if len(extra) == 2 and extra[1] not in ("", USE_XLA_SPMD):
        raise MeshError(
            f"its last part is {extra[1]!r:.200}; only {USE_XLA_SPMD} can follow the global devices"
        )
    return MeshFields(
        name=name,
        dims=dims,
        first_id=first_id,
        local_ids=tuple(_parse_ids(parts[3], "local")),
        local_devices=_parse_devices(parts[4]),
        global_devices=_parse_devices(extra[0]) if extra else (),
        use_xla_spmd=extra[1:] == [USE_XLA_SPMD],
    )


def _parse_dimension(text: str) -> MeshDimension:
    name, equals, size = text.rpartition("=")
    if not equals or not _NUMBER.fullmatch(size):
        raise MeshError(f"the dimension {text!r:.200} is not of the form NAME=SIZE")
    return MeshDimension(name, int(size))


def _parse_ids(text: str, what: str) -> list[int]:
    pieces = text.split(",") if text else []
    for piece in pieces:
        if not _NUMBER.fullmatch(piece):
            raise MeshError(f"the {what} device id {piece!r:.200} is not a number")
    return [int(piece) for piece in pieces]


def _parse_global_ids(text: str, size: int) -> int:
    ids = _parse_ids(text, "global")
    if len(ids) != size:
        raise MeshError(f"it has {len(ids)} global device ids, but its dimensions make {size} devices")
    if ids != list(range(ids[0], ids[0] + size)):
        raise MeshError("its global device ids do not count up one by one")
    return ids[0]


def _parse_devices(text: str) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec.from_string(piece) for piece in text.split(",")) if text else ()


def _generate(name: str, dims: tuple[MeshDimension, ...], size: int, instruction: str) -> MeshFields:
    if not instruction.startswith("*"):
        raise MeshError(
            f"its third part is {instruction!r:.200}; expected a device type after a star, as in *CPU"
        )
    if size > _MOST_GENERATED:
        raise MeshError(f"the short form is for up to {_MOST_GENERATED} devices, this would have {size}")
    kind = instruction[1:]
    devices = tuple(DeviceSpec("localhost", None, 0, kind, index) for index in range(size))
    return MeshFields(name, dims, 0, tuple(range(size)), devices)
