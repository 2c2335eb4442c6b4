"""A mesh as a protocol buffer, and back; the bytes are those of TensorFlow's `MeshProto`."""

from __future__ import annotations

import math
from typing import Protocol

from google.protobuf.message import DecodeError

from dmesh.devices.device import DeviceSpec
from dmesh.errors import DeviceError, MeshError
from dmesh.mesh.fields import MeshDimension, MeshFields, check_dimensions
from dmesh.v1 import layout_pb2


class Serializable(Protocol):
    """A message that can write its bytes, be its class generated here or by TensorFlow."""

    def SerializeToString(self) -> bytes:
        """Returns the message's bytes."""


def write_mesh(fields: MeshFields) -> layout_pb2.MeshProto:
    """Writes a mesh as a message."""
    if fields.single_device is not None:
        return layout_pb2.MeshProto(single_device=fields.single_device.to_string())
    return layout_pb2.MeshProto(
        mesh_dimensions=[layout_pb2.MeshDimensionProto(name=dim.name, size=dim.size) for dim in fields.dims],
        global_device_ids=range(fields.first_id, fields.first_id + fields.size),
        name=fields.name,
        local_device_ids=fields.local_ids,
        local_devices=[device.to_string() for device in fields.local_devices],
        global_devices=[device.to_string() for device in fields.global_devices],
        use_xla_spmd=fields.use_xla_spmd,
    )


def read_mesh(proto: Serializable) -> MeshFields:
    """Reads a mesh from a message.

    Raises:
        MeshError: It is not a message of a mesh, or what it says is not a valid mesh.
    """
    try:
        message = layout_pb2.MeshProto.FromString(proto.SerializeToString())
    except (AttributeError, TypeError, DecodeError) as error:
        raise MeshError(f"expected a MeshProto, got {type(proto).__name__}: {error}") from error
    if message == layout_pb2.MeshProto():
        return MeshFields()
    try:
        return _read(message).check()
    except (MeshError, DeviceError) as error:
        raise MeshError(f"cannot read the mesh message of {message.name!r:.200}: {error}") from error


def _read(message: layout_pb2.MeshProto) -> MeshFields:
    if message.single_device:
        if message.mesh_dimensions:
            raise MeshError("it has both dimensions and a single device; a mesh has one of them")
        return MeshFields(single_device=DeviceSpec.from_string(message.single_device))
    dims = tuple(MeshDimension(dim.name, dim.size) for dim in message.mesh_dimensions)
    check_dimensions(dims)
    size = math.prod(dim.size for dim in dims)
    ids = message.global_device_ids
    if len(ids) != size:
        raise MeshError(f"it has {len(ids)} global device ids, but its dimensions make {size} devices")
    if ids[0] < 0 or list(ids) != list(range(ids[0], ids[0] + size)):
        raise MeshError("its global device ids do not count up one by one from 0 or more")
    return MeshFields(
        name=message.name,
        dims=dims,
        first_id=ids[0],
        local_ids=tuple(message.local_device_ids),
        local_devices=tuple(map(DeviceSpec.from_string, message.local_devices)),
        global_devices=tuple(map(DeviceSpec.from_string, message.global_devices)),
        use_xla_spmd=message.use_xla_spmd,
    )
