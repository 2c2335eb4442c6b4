"""The `Mesh` value: what it can be asked, its strings, and what cannot be one."""

import copy
import pickle
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.mesh.meshes import devices, grid, meshes

from dmesh.devices.device import DeviceSpec
from dmesh.errors import MeshError
from dmesh.mesh import Mesh, MeshDimension

IDS = np.arange(4).reshape(2, 2)
D4 = devices(4)

# TensorFlow's own string of client 1 of two, with a 2x4 mesh.
CLIENT_1_OF_2X4 = (
    "m|x=2,y=4|0,1,2,3,4,5,6,7|4,5,6,7|/job:worker/replica:0/task:1/device:CPU:0,"
    "/job:worker/replica:0/task:1/device:CPU:1,/job:worker/replica:0/task:1/device:CPU:2,"
    "/job:worker/replica:0/task:1/device:CPU:3"
)
TPU_2X2 = (
    "|batch=2,x=2|0,1,2,3|0,1,2,3|/job:localhost/replica:0/task:0/device:TPU:0,"
    "/job:localhost/replica:0/task:0/device:TPU:1,/job:localhost/replica:0/task:0/device:TPU:2,"
    "/job:localhost/replica:0/task:0/device:TPU:3"
)
TPU_0, TPU_1 = (f"/job:localhost/replica:0/task:0/device:TPU:{i}" for i in range(2))


# Questions --------------------------------------------------------------------------------------------------


def test_questions():
    mesh = grid({"x": 2, "y": 4}, clients=2, client=1, name="m")
    assert (mesh.name, mesh.dim_names, mesh.size, mesh.shape(), mesh.strides) == (
        "m",
        ["x", "y"],
        8,
        [2, 4],
        [4, 1],
    )
    assert mesh["x"] == MeshDimension("x", 2) == ("x", 2)
    assert (mesh.dim_size("y"), mesh.contains_dim("y"), "y" in mesh, "z" in mesh) == (4, True, True, False)
    assert (mesh.device_type(), mesh.use_xla_spmd(), mesh.single_device) == ("CPU", False, "")
    assert not mesh.is_remote()
    assert not mesh.is_single_device()
    ids = mesh.global_device_ids()
    assert ids.dtype == np.int64
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.local_device_ids() == [4, 5, 6, 7]
    assert mesh.local_devices() == [f"/job:worker/replica:0/task:1/device:CPU:{i}" for i in range(4)]
    assert (mesh.num_local_devices(), mesh.global_devices(), mesh.min_global_device_id()) == (4, [], 0)
    assert mesh.local_device_locations() == [{"x": 1, "y": y} for y in range(4)]
    assert mesh.unravel_index() == {4 * x + y: {"x": x, "y": y} for x in range(2) for y in range(4)}


@pytest.mark.parametrize(
    ("shape", "strides"), [((8,), [1]), ((2, 4, 2), [8, 2, 1]), ((8, 16, 2, 4), [128, 8, 4, 1])]
)
def test_strides(shape, strides):
    mesh = grid(dict(zip("abcd", shape, strict=False)))
    assert mesh.strides == strides


def test_places():
    mesh = grid({"a": 2, "b": 4, "c": 2})
    for index, place in enumerate(np.ndindex(2, 4, 2)):
        assert tuple(mesh.coords(index)) == tuple(mesh.device_location(np.int64(index))) == place
    assert mesh.coords(0).dtype == np.int64


@pytest.mark.parametrize("index", [-1, 16, 99])
def test_places_that_do_not_exist(index):
    mesh = grid({"a": 2, "b": 4, "c": 2})
    for ask in (mesh.coords, mesh.device_location):
        with pytest.raises(
            MeshError, match=f"there is no position {index} in a mesh of 16 devices; they count from 0"
        ):
            ask(index)
    with pytest.raises(MeshError, match=r"a position in a mesh must be an integer, got 1\.0"):
        mesh.coords(1.0)


def test_dimensions_that_do_not_exist():
    mesh = grid({"x": 2, "y": 2}, name="m")
    for ask in (mesh.dim_size, mesh.__getitem__, mesh.group):
        with pytest.raises(ValueError, match="mesh 'm' has no dimension 'zz'; its dimensions are x, y"):
            ask("zz")
    with pytest.raises(MeshError, match="none: it is a mesh without dimensions"):
        Mesh.from_device(TPU_0)["x"]


def test_ids_may_start_anywhere():
    mesh = Mesh(["x"], np.array([4, 5]), [5], devices(1, task=1))
    assert (mesh.min_global_device_id(), mesh.global_device_ids().tolist()) == (4, [4, 5])
    assert mesh.local_device_locations() == [{"x": 1}]
    assert mesh.unravel_index() == {0: {"x": 0}, 1: {"x": 1}}
    assert mesh.to_string() == "|x=2|4,5|5|/job:worker/replica:0/task:1/device:CPU:0"


def test_a_remote_mesh():
    mesh = Mesh(["x"], np.arange(2), [], [], global_devices=devices(2, kind="GPU"))
    assert mesh.is_remote()
    assert (mesh.device_type(), mesh.local_devices(), len(mesh.global_devices())) == ("GPU", [], 2)
    text = "|x=2|0,1|||/job:worker/replica:0/task:0/device:GPU:0,/job:worker/replica:0/task:0/device:GPU:1"
    assert mesh.to_string() == text
    assert Mesh.from_string(text) == mesh


def test_a_single_device():
    mesh = Mesh.from_device("job:localhost/replica:0/task:0/TPU:0")
    assert mesh.is_single_device()
    assert mesh.single_device == mesh.to_string() == TPU_0
    assert (mesh.size, mesh.shape(), mesh.dim_names, mesh.device_type()) == (1, [], [], "TPU")
    assert (mesh.strides, mesh.local_devices(), mesh.is_remote()) == ([], [], False)
    assert Mesh.from_string(TPU_0) == Mesh.from_string("/job:localhost/replica:0/task:0/TPU:0") == mesh
    assert (
        Mesh.from_string("/job:localhost/task:0/device:CPU:0").single_device
        == "/job:localhost/task:0/device:CPU:0"
    )
    assert mesh.host_mesh().single_device == TPU_0.replace("TPU", "CPU")
    assert mesh.client_ranks() == (0,)


def test_the_empty_mesh():
    mesh = Mesh.from_string("empty_mesh")
    assert mesh.to_string() == "empty_mesh"
    assert (mesh.size, mesh.shape(), mesh.device_type(), mesh.global_device_ids().size) == (0, [], "", 0)
    assert mesh.unravel_index() == {}
    assert mesh.host_mesh() == mesh
    assert mesh.client_ranks() == ()


def test_the_host_mesh():
    gpus = grid({"x": 2, "y": 2}, clients=2, client=1, name="the name is not kept", kind="GPU")
    assert gpus.host_mesh() == grid({"x": 2, "y": 2}, clients=2, client=1)
    assert grid({"x": 4}, name="m").host_mesh() == grid({"x": 4})
    everybody = devices(1, 0, "GPU") + devices(1, 1, "GPU")
    listed = Mesh(["x"], np.arange(2), [1], everybody[1:], global_devices=everybody).host_mesh()
    assert listed.global_devices() == [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)]


def test_what_is_returned_is_the_callers():
    mesh = grid({"x": 2, "y": 2})
    before = mesh.to_string()
    mesh.dim_names.append("z")
    mesh.shape().clear()
    mesh.local_device_ids().clear()
    mesh.global_device_ids()[:] = 7
    assert mesh.to_string() == before
    ids, local = np.arange(2), [0, 1]
    mesh = Mesh(["x"], ids, local, devices(2))
    ids[:], local[:] = 9, [9, 9]
    assert mesh.local_device_ids() == mesh.global_device_ids().tolist() == [0, 1]
    with pytest.raises(AttributeError):
        mesh.name = "other"
    with pytest.raises(AttributeError):
        mesh.color = "blue"


def test_equality():
    mesh = grid({"x": 2, "y": 2}, name="m")
    assert mesh == grid({"x": 2, "y": 2}, name="m")
    others = [
        grid({"x": 2, "y": 2}),
        grid({"x": 4}, name="m"),
        grid({"y": 2, "x": 2}, name="m"),
        grid({"x": 2, "y": 2}, name="m", kind="GPU"),
        grid({"x": 2, "y": 2}, clients=2, name="m"),
    ]
    for other in [*others, mesh.to_string(), None]:
        assert mesh != other
    assert len({mesh, grid({"x": 2, "y": 2}, name="m"), *others}) == 6


def test_clients():
    assert [grid({"x": 4, "y": 2}, 4, c).client_ranks() for c in range(4)] == [(0, 1, 2, 3)] * 4
    assert Mesh(["x"], np.arange(2), [0, 1], devices(2, task=3)).client_ranks() == (3,)
    everybody = devices(1, 5) + devices(1, 2)
    assert Mesh(["x"], np.arange(2), [1], everybody[1:], global_devices=everybody).client_ranks() == (2, 5)
    odd = Mesh(["x"], np.arange(4), [0, 1], devices(2, task=1))
    with pytest.raises(
        MeshError, match=r"does not tell which clients own its other devices.*in global_devices"
    ):
        odd.client_ranks()


def test_the_fingerprint_is_the_same_for_all_clients():
    views = [grid({"x": 4, "y": 2}, 4, c, name=f"as client {c} calls it") for c in range(4)]
    assert len({mesh.fingerprint for mesh in views}) == 1
    others = [grid({"x": 2, "y": 4}, 4), grid({"y": 4, "x": 2}, 4), grid({"x": 4, "y": 2}, 4, kind="GPU")]
    everybody = devices(4, 0) + devices(4, 1)
    others.append(Mesh(["x"], np.arange(8), list(range(4)), everybody[:4], global_devices=everybody))
    others.append(Mesh.from_device(TPU_0))
    assert len({mesh.fingerprint for mesh in [views[0], *others]}) == 6


# Strings ----------------------------------------------------------------------------------------------------


def test_tensorflows_strings():
    mesh = grid({"x": 2, "y": 4}, clients=2, client=1, name="m")
    assert mesh.to_string() == CLIENT_1_OF_2X4
    assert repr(mesh) == f"Mesh.from_string({CLIENT_1_OF_2X4})"
    assert Mesh.from_string(CLIENT_1_OF_2X4) == mesh
    assert Mesh.from_string(TPU_2X2).to_string() == TPU_2X2
    assert Mesh.from_string(TPU_2X2).device_type() == "TPU"


@pytest.mark.parametrize(
    "text",
    [
        f"|batch=2|0,1|0,1|{TPU_0},{TPU_1}|use_xla_spmd",
        f"|batch=2|0,1|0|{TPU_0}|{TPU_0},{TPU_1}|use_xla_spmd",
        f"|batch=2|0,1|0|{TPU_0}|{TPU_0},{TPU_1}",
        f"|batch=2|7,8|8|{TPU_1}",
        "|x=1|0|0|/job:localhost/task:0/device:CPU:0",
        "a name with spaces|x=1|0|0|/job:localhost/task:0/device:CPU:0",
    ],
)
def test_strings_are_kept_to_the_letter(text):
    mesh = Mesh.from_string(text)
    assert mesh.to_string() == text
    assert mesh.use_xla_spmd() == ("use_xla_spmd" in text)


def test_empty_parts_at_the_end_mean_nothing():
    assert Mesh.from_string(f"|x=1|0|0|{TPU_0}|") == Mesh.from_string(f"|x=1|0|0|{TPU_0}||")
    assert Mesh.from_string(f"|x=1|0|0|{TPU_0}||use_xla_spmd").use_xla_spmd()


def test_the_short_form():
    mesh = Mesh.from_string("m|x=2,y=1|*GPU")
    assert mesh.to_string() == (
        "m|x=2,y=1|0,1|0,1|/job:localhost/task:0/device:GPU:0,/job:localhost/task:0/device:GPU:1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo", "cannot read the mesh string 'foo': cannot read 'foo' in the device name"),
        ("", "the device '' has no device type"),
        ("CPU:0", "the device '/device:CPU:0' is not named in full"),
        ("|", "it has 2 parts between '|'; expected NAME|DIM=SIZE"),
        ("|x=1|0|0", "it has 4 parts between '|'"),
        (f"|x=1|0|0|{TPU_0}|||", "it has 8 parts between '|'"),
        (f"|x|0|0|{TPU_0}", "the dimension 'x' is not of the form NAME=SIZE"),
        (f"||0|0|{TPU_0}", "the dimension '' is not of the form NAME=SIZE"),
        (f"|x=|0|0|{TPU_0}", "the dimension 'x=' is not of the form NAME=SIZE"),
        (f"|x=-1|0|0|{TPU_0}", "the dimension 'x=-1' is not of the form NAME=SIZE"),
        (f"|x=1.0|0|0|{TPU_0}", "the dimension 'x=1.0' is not of the form"),
        (f"|x=\u0661|0|0|{TPU_0}", "is not of the form"),
        (f"|x={'9' * 5000}|0|0|{TPU_0}", "is not of the form"),
        (f"|x=0|0|0|{TPU_0}", "the mesh dimension 'x' has size 0; a size is 1 or more"),
        (f"|=1|0|0|{TPU_0}", "'' is not a valid name of a mesh dimension"),
        (f"|a=b=1|0|0|{TPU_0}", "'a=b' is not a valid name of a mesh dimension"),
        (f"|x=1,x=1|0|0|{TPU_0}", "the mesh dimension 'x' is listed twice"),
        (
            f"|unsharded=1|0|0|{TPU_0}",
            "'unsharded' is reserved in layouts and cannot name a mesh dimension",
        ),
        (f"|match=1|0|0|{TPU_0}", "'match' is reserved in layouts and cannot name a mesh dimension"),
        (f"|x y=1|0|0|{TPU_0}", "'x y' is not a valid name of a mesh dimension"),
        (f"a\nb|x=1|0|0|{TPU_0}", "is not a valid name of a mesh; use printable characters"),
        (f"|x=1||0|{TPU_0}", "it has 0 global device ids, but its dimensions make 1 devices"),
        (f"|x=1|0,1|0|{TPU_0}", "it has 2 global device ids, but its dimensions make 1 devices"),
        (f"|x=2|1,0|0|{TPU_0}", "its global device ids do not count up one by one"),
        (f"|x=2|0,2|0|{TPU_0}", "its global device ids do not count up one by one"),
        (f"|x=1|a|0|{TPU_0}", "the global device id 'a' is not a number"),
        (f"|x=1|0|-1|{TPU_0}", "the local device id '-1' is not a number"),
        (f"|x=1|0|1|{TPU_0}", "the local device ids [1] must be different ids of the mesh, which has 0 to 0"),
        (f"|x=2|0,1|0,0|{TPU_0},{TPU_1}", "the local device ids [0, 0] must be different ids"),
        (f"|x=2|0,1|0,1|{TPU_0}", "there are 2 local device ids for 1 local devices"),
        (f"|x=1|0|0,1|{TPU_0},{TPU_1}", "there are 2 local devices, but only 1 in the whole mesh"),
        (f"|x=2|0,1|0,1|{TPU_0},{TPU_0}", f"the local devices [{TPU_0}] are listed more than once"),
        ("|x=1|0||", "a mesh needs devices: list those of this client, or all of them as global_devices"),
        ("|x=1|0|0|foo", "cannot read 'foo' in the device name"),
        ("|x=1|0|0|CPU:0", "is not named in full; write it as in /job:worker/replica:0/task:0/device:CPU:0"),
        ("|x=1|0|0|/job:a/task:0", "the device '/job:a/task:0' has no device type"),
        (f"|x=2|0,1|0,1|{TPU_0},", "the device '' has no device type"),
        (
            f"|x=3|0,1,2|0,1|{TPU_0},{TPU_1}",
            "this client has 2 of the mesh's 3 devices, which is not an equal share",
        ),
        (
            f"|x=2|0,1|0,1|{TPU_0},{TPU_0.replace('TPU', 'GPU')}",
            "the devices of a mesh must have one type, these have GPU, TPU",
        ),
        (
            f"|x=2|0,1|0|{TPU_0}|{TPU_0}",
            "there are 1 global devices for 2 places in the mesh; list one for each",
        ),
        (
            f"|x=2|0,1|0|{TPU_0}|{TPU_1},{TPU_0}",
            f"device 0 is {TPU_0} among the local devices and {TPU_1} among the global ones",
        ),
        (
            "|x=1|0|0|/job:a/task:0/device:CPU:0|use_xla_spmd",
            "use_xla_spmd=True is for TPU meshes; this one has CPU",
        ),
        (f"|x=1|0|0|{TPU_0}|{TPU_0}|use_gpu", "its last part is 'use_gpu'; only use_xla_spmd can follow"),
        ("|x=1|CPU", "its third part is 'CPU'; expected a device type after a star, as in *CPU"),
        ("|x=1|2*CPU", "its third part is '2*CPU'"),
        ("|x=1|*", "'' is not a device type"),
        ("|x=1000000|*CPU", "the short form is for up to 65536 devices, this would have 1000000"),
        (
            f"|{','.join(f'd{i}=999999999' for i in range(60))}|*CPU",
            "the short form is for up to 65536 devices",
        ),
        (f"|{','.join(f'd{i}=1' for i in range(65))}|*CPU", "a mesh has 1 to 64 dimensions, got 65"),
    ],
)
def test_malformed_strings(text, message):
    with pytest.raises(MeshError, match=re.escape(message)) as caught:
        Mesh.from_string(text)
    assert str(caught.value).startswith(f"cannot read the mesh string {text!r:.200}")
    assert len(str(caught.value)) < 1000


def test_strings_that_are_none():
    for text in (None, b"|x=1|*CPU", 7):
        with pytest.raises(MeshError, match=f"a mesh string must be a str, got {type(text).__name__}"):
            Mesh.from_string(text)
    with pytest.raises(MeshError, match="device: cannot read 'x' in the device name"):
        Mesh.from_device("x")
    with pytest.raises(MeshError, match="device must be DeviceSpec or device names, got int"):
        Mesh.from_device(7)


# The constructor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (["x"], [0, 1], [0, 1], D4[:2]),
            "global_device_ids must be a NumPy array, got list; numpy.arange(n)",
        ),
        ((["x"], np.zeros(0, int), [], []), "global_device_ids must not be empty"),
        ((["x"], np.array([0.0, 1.0]), [0, 1], D4[:2]), "must be an array of integers, got float64"),
        (
            (["x"], np.array([0, 2]), [0, 2], D4[:2]),
            "must count up one by one, row by row, from 0 or more; got [0 2]",
        ),
        ((["x"], np.array([1, 0]), [0, 1], D4[:2]), "must count up one by one"),
        ((["x", "y"], IDS.T, [0, 1, 2, 3], D4), "must count up one by one"),
        ((None, np.arange(2), [0, 1], D4[:2]), "dim_names must be a list of names, got NoneType"),
        ((["x"], np.array([2**64 - 1], np.uint64), [0], D4[:1]), "must count up one by one, row by row"),
        ((["x"], np.array([-1, 0]), [-1, 0], D4[:2]), "must count up one by one, row by row, from 0 or more"),
        (
            (["x"], IDS, [0, 1, 2, 3], D4),
            "there are 1 dimension names, ['x'], for the 2 dimensions of global_device_",
        ),
        (([], np.array(0), [0], D4[:1]), "a mesh has 1 to 64 dimensions, got 0"),
        ((["x", "x"], IDS, [0, 1, 2, 3], D4), "the mesh dimension 'x' is listed twice"),
        ((["x", 3], IDS, [0, 1, 2, 3], D4), "3 is not a valid name of a mesh dimension"),
        (
            (["x", "match"], IDS, [0, 1, 2, 3], D4),
            "'match' is reserved in layouts and cannot name a mesh dimension",
        ),
        ((["x"], np.arange(2), (0, 1), D4[:2]), "local_device_ids must be a list of integers, got tuple"),
        ((["x"], np.arange(2), ["0", 1], D4[:2]), "a local device id must be an integer, got '0'"),
        (
            (["x"], np.arange(2), [0, 1], tuple(D4[:2])),
            "local_devices must be a list of DeviceSpec or of device names",
        ),
        ((["x"], np.arange(2), [0, 1], [1, 2]), "local_devices must be DeviceSpec or device names, got int"),
        ((["x"], np.arange(2), [0, 1], ["a", "b"]), "local_devices: cannot read 'a' in the device name 'a'"),
        ((["x"], np.arange(1), [0], D4[:1], "", (1,)), "global_devices must be a list of DeviceSpec"),
        ((["x"], np.arange(2), [], []), "a mesh needs devices"),
        ((["x"], np.arange(2), [0, 1], devices(1, kind="GPU") * 2), "are listed more than once"),
        ((["x", "y"], IDS, [0, 1, 2, 3], D4[:2] * 2), "are listed more than once"),
        (
            (["x"], np.arange(2), [0], D4[:2]),
            "there are 1 local device ids for 2 local devices; give each device its",
        ),
        ((["x"], np.arange(2), [0, 1, 2], D4[:3]), "there are 3 local devices, but only 2 in the whole mesh"),
        (
            (["x"], np.arange(2), [0, 2], D4[:2]),
            "the local device ids [0, 2] must be different ids of the mesh",
        ),
        ((["x"], np.arange(1), [0], [DeviceSpec("a", 0, 0)]), "has no device type; write it as in CPU:0"),
        ((["x"], np.arange(1), [0], ["CPU:0"]), "is not named in full"),
        ((["x"], np.arange(1), [0], ["/job:a/task:0/CPU:*"]), "is not named in full"),
        (
            (["x"], np.arange(2), [0, 1], devices(1) + devices(1, kind="GPU")),
            "the devices of a mesh must have one type, these have CPU, GPU",
        ),
        (
            (["x"], np.arange(1), [0], D4[:1], "m", None, True),
            "use_xla_spmd=True is for TPU meshes; this one has CPU",
        ),
        ((["x"], np.arange(1), [0], D4[:1], "a|b"), "'a|b' is not a valid name of a mesh"),
        ((["x"], np.arange(1), [0], D4[:1], None), "None is not a valid name of a mesh"),
    ],
)
def test_what_cannot_be_a_mesh(arguments, message):
    with pytest.raises(MeshError, match=re.escape(message)):
        Mesh(*arguments)


def test_the_one_cpu_of_a_client_may_have_several_places():
    mesh = Mesh(["x"], np.arange(2), [0, 1], devices(1) * 2)
    assert mesh.local_devices() == ["/job:worker/replica:0/task:0/device:CPU:0"] * 2
    assert Mesh.from_string(mesh.to_string()) == mesh


def test_names_of_devices_are_accepted_in_place_of_specs():
    assert Mesh(["x"], np.arange(2), [0, 1], [str(spec) for spec in D4[:2]]) == grid({"x": 2})
    assert Mesh("x", np.arange(2, dtype=np.uint8), [np.int64(0), 1], D4[:2]) == grid({"x": 2})


def test_a_tpu_mesh_keeps_the_flag():
    mesh = Mesh(["x"], np.arange(1), [0], devices(1, kind="TPU"), use_xla_spmd=True)
    assert mesh.use_xla_spmd()


# Laws -------------------------------------------------------------------------------------------------------


@given(meshes())
def test_round_trips(mesh):
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == copy.copy(mesh) == copy.deepcopy(mesh) == mesh
    assert hash(Mesh.from_string(mesh.to_string())) == hash(mesh)


@given(meshes())
def test_places_and_ids_agree(mesh):
    shape = tuple(mesh.shape())
    ids = mesh.global_device_ids()
    for offset, location in mesh.unravel_index().items():
        place = tuple(location[name] for name in mesh.dim_names)
        assert ids[place] - mesh.min_global_device_id() == offset == np.ravel_multi_index(place, shape)
        assert tuple(mesh.coords(offset)) == place
        assert np.dot(place, mesh.strides) == offset
    for device_id, location in zip(mesh.local_device_ids(), mesh.local_device_locations(), strict=True):
        assert ids[tuple(location.values())] == device_id


pieces = st.sampled_from(
    [
        "|",
        "|",
        "|",
        ",",
        "=",
        "x",
        "y",
        "x=2",
        "x=1",
        "0",
        "1",
        "0,1",
        "*CPU",
        "use_xla_spmd",
        TPU_0,
        TPU_1,
        "empty_mesh",
        "",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(pieces, max_size=14).map("".join)))
@example(f"|x|0|0|{TPU_0}")
def test_any_text_is_a_mesh_or_a_mesh_error(text):
    try:
        mesh = Mesh.from_string(text)
    except MeshError:
        return
    assert Mesh.from_string(mesh.to_string()) == mesh
