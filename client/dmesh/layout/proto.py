"""A layout as a protocol buffer, and back; the bytes are those of TensorFlow's `LayoutProto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from dmesh.errors import LayoutError
from dmesh.layout.kinds import LayoutType
from dmesh.mesh import Mesh
from dmesh.v1 import layout_pb2

if TYPE_CHECKING:
    from dmesh.mesh.proto import Serializable

_CODES = {
    LayoutType.STATIC: layout_pb2.LayoutProto.LAYOUT_TYPE_STATIC,
    LayoutType.PARTED: layout_pb2.LayoutProto.LAYOUT_TYPE_PARTED,
    LayoutType.SINGLE_DEVICE: layout_pb2.LayoutProto.LAYOUT_TYPE_SINGLE_DEVICE,
}
# Older writers knew static layouts only, and had no field for the kind.
_KINDS = {layout_pb2.LayoutProto.LAYOUT_TYPE_UNSPECIFIED: LayoutType.STATIC} | {
    code: kind for kind, code in _CODES.items()
}


def write_layout(specs: Sequence[str], mesh: Mesh, kind: LayoutType) -> layout_pb2.LayoutProto:
    """Writes a layout as a message."""
    return layout_pb2.LayoutProto(
        sharding_specs=[layout_pb2.ShardingSpec(sharding_spec=spec) for spec in specs],
        mesh_config=mesh.as_proto(),
        type=_CODES[kind],
    )


def read_layout(proto: Serializable) -> tuple[list[str], Mesh, LayoutType]:
    """Reads the parts of a layout from a message.

    Raises:
        LayoutError: It is not a message of a layout, or of a kind that is not known here.
        MeshError: Its mesh is malformed.
    """
    try:
        message = layout_pb2.LayoutProto.FromString(proto.SerializeToString())
    except (AttributeError, TypeError, DecodeError) as error:
        raise LayoutError(f"expected a LayoutProto, got {type(proto).__name__}: {error}") from error
    kind = _KINDS.get(message.type)
    if kind is None:
        raise LayoutError(f"its type is {message.type}, which is none of those known here: 1, 2 and 3")
    specs = [spec.sharding_spec for spec in message.sharding_specs]
    return specs, Mesh.from_proto(message.mesh_config), kind
