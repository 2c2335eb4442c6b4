"""Meshes and layouts as protocol buffers: TensorFlow's bytes, and what cannot be read."""

import functools
import re

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from tests.mesh.meshes import grid, layouts, meshes

from dmesh.errors import LayoutError, MeshError
from dmesh.layout import UNSHARDED, Layout, LayoutType
from dmesh.mesh import Mesh
from dmesh.v1 import layout_pb2

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
MESH = grid({"x": 2, "y": 2}, clients=2, client=1, name="m")


@functools.cache
def tensorflow(name):
    """A message class with the field numbers and types of TensorFlow 2.21's file, in its package."""
    file = descriptor_pb2.FileDescriptorProto(
        name="layout_of_tensorflow.proto", package="tensorflow.dtensor", syntax="proto3"
    )
    int64, text, flag, message, enum = 3, 9, 8, 11, 14
    kind = ".tensorflow.dtensor.LayoutProto.LayoutType"
    tables = {
        "ShardingSpec": [("sharding_spec", 2, 1, text, "")],
        "MeshDimensionProto": [("name", 1, 1, text, ""), ("size", 2, 1, int64, "")],
        "MeshProto": [
            ("mesh_dimensions", 1, 3, message, ".tensorflow.dtensor.MeshDimensionProto"),
            ("global_device_ids", 2, 3, int64, ""),
            ("name", 3, 1, text, ""),
            ("local_device_ids", 4, 3, int64, ""),
            ("local_devices", 5, 3, text, ""),
            ("global_devices", 6, 3, text, ""),
            ("use_xla_spmd", 7, 1, flag, ""),
            ("single_device", 8, 1, text, ""),
        ],
        "LayoutProto": [
            ("sharding_specs", 1, 3, message, ".tensorflow.dtensor.ShardingSpec"),
            ("mesh_config", 2, 1, message, ".tensorflow.dtensor.MeshProto"),
            ("type", 3, 1, enum, kind),
        ],
    }
    for title, fields in tables.items():
        entry = file.message_type.add(name=title)
        for field, number, label, kind_of_field, type_name in fields:
            entry.field.add(
                name=field, number=number, label=label, type=kind_of_field, type_name=type_name or None
            )
    kinds = file.message_type[-1].enum_type.add(name="LayoutType")
    for number, word in enumerate(["UNKNOWN", "STATIC", "PARTED", "SINGLE_DEVICE"]):
        kinds.value.add(name=word, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.dtensor.{name}"))


@given(meshes())
def test_round_trip_of_meshes_through_tensorflows_messages(mesh):
    theirs = tensorflow("MeshProto").FromString(mesh.as_proto().SerializeToString())
    assert Mesh.from_proto(proto=theirs) == Mesh.from_proto(mesh.as_proto()) == mesh
    assert list(theirs.global_device_ids) == mesh.global_device_ids().ravel().tolist()
    assert [(dim.name, dim.size) for dim in theirs.mesh_dimensions] == list(
        zip(mesh.dim_names, mesh.shape(), strict=True)
    )
    assert (list(theirs.local_device_ids), list(theirs.local_devices)) == (
        mesh.local_device_ids(),
        mesh.local_devices(),
    )
    assert (theirs.name, theirs.use_xla_spmd) == (mesh.name, mesh.use_xla_spmd())


@given(layouts())
def test_round_trip_of_layouts_through_tensorflows_messages(layout):
    theirs = tensorflow("LayoutProto").FromString(layout.as_proto().SerializeToString())
    assert Layout.from_proto(layout_proto=theirs) == Layout.from_proto(layout.as_proto()) == layout
    assert [spec.sharding_spec for spec in theirs.sharding_specs] == layout.sharding_specs
    assert theirs.type == {LayoutType.STATIC: 1, LayoutType.PARTED: 2}[layout.type]


def test_a_single_device_and_the_empty_mesh():
    mesh, layout = Mesh.from_device(DEVICE), Layout.from_device(DEVICE)
    assert mesh.as_proto() == layout_pb2.MeshProto(single_device=DEVICE)
    assert Mesh.from_proto(mesh.as_proto()) == mesh
    assert layout.as_proto().type == layout_pb2.LayoutProto.LAYOUT_TYPE_SINGLE_DEVICE
    assert Layout.from_proto(layout.as_proto()) == layout
    assert Mesh.from_proto(layout_pb2.MeshProto()) == Mesh.from_string("empty_mesh")
    assert Mesh.from_string("empty_mesh").as_proto() == layout_pb2.MeshProto()


def test_a_layout_of_a_writer_that_knew_static_ones_only():
    layout = Layout(["x", UNSHARDED], MESH)
    message = layout.as_proto()
    message.ClearField("type")
    assert Layout.from_proto(message) == layout


def changed(**fields):
    message = MESH.as_proto()
    for name, value in fields.items():
        message.ClearField(name)
        message.MergeFrom(layout_pb2.MeshProto(**{name: value}))
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("a string", "expected a MeshProto, got str"),
        (
            layout_pb2.LayoutProto(sharding_specs=[{}], mesh_config=MESH.as_proto()),
            "expected a MeshProto|cannot",
        ),
        (changed(global_device_ids=[0, 1, 2]), "3 global device ids, but its dimensions make 4 devices"),
        (changed(global_device_ids=[0, 2, 1, 3]), "do not count up one by one"),
        (changed(global_device_ids=[-1, 0, 1, 2]), "do not count up one by one"),
        (changed(single_device=DEVICE), "both dimensions and a single device"),
        (changed(local_devices=["nonsense"]), "cannot read the mesh message of 'm': "),
        (changed(mesh_dimensions=[{"name": "x", "size": -4}]), "has size -4"),
        (changed(mesh_dimensions=[]), "a mesh has 1 to 64 dimensions, got 0"),
        (layout_pb2.MeshProto(name="only"), "a mesh has 1 to 64 dimensions, got 0"),
    ],
)
def test_messages_that_are_not_a_mesh(message, says):
    with pytest.raises(MeshError, match=says):
        Mesh.from_proto(message)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"bytes", "cannot read the layout message: expected a LayoutProto, got bytes"),
        ({"type": 7}, "its type is 7, which is none of those known here: 1, 2 and 3"),
        ({"type": 3}, "the layout of a single device has no sharding specs"),
        ({"sharding_specs": [{"sharding_spec": "z"}]}, "'z' is not a dimension of the mesh"),
        ({"mesh_config": changed(local_devices=["nonsense"])}, "cannot read the mesh message of 'm': "),
    ],
)
def test_messages_that_are_not_a_layout(message, says):
    if isinstance(message, dict):
        layout = {"sharding_specs": [{"sharding_spec": "x"}], "mesh_config": MESH.as_proto(), "type": 1}
        message = layout_pb2.LayoutProto(**(layout | message))
    with pytest.raises(LayoutError, match=re.escape(says)):
        Layout.from_proto(message)
