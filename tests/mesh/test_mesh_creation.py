"""`create_mesh`, `create_distributed_mesh` and the default mesh."""

import re
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mesh.meshes import grid

from dmesh.devices import device
from dmesh.devices.device import DeviceSpec
from dmesh.errors import DeviceError, MeshError, NotInitializedError
from dmesh.mesh import Mesh, create_distributed_mesh, create_mesh, default_mesh, get_default_mesh
from dmesh.runtime import context


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    monkeypatch.setattr(device, "detect_gpus", lambda: ())


def local_names(count, task=0, job="localhost", kind="CPU"):
    return [f"/job:{job}/replica:0/task:{task}/device:{kind}:{i}" for i in range(count)]


# create_mesh ------------------------------------------------------------------------------------------------


def test_all_local_devices_by_default(alone):
    alone(cpus=4)
    mesh = create_mesh()
    assert (mesh.name, mesh.dim_names, mesh.shape(), mesh.local_devices()) == ("", ["x"], [4], local_names(4))
    assert create_mesh({"x": -1}) == create_mesh([("x", -1)]) == create_mesh([["x", np.int32(4)]]) == mesh
    assert create_mesh(device_type="cpu") == mesh


def test_dimensions_and_names(alone):
    alone(cpus=4)
    mesh = create_mesh({"a": 2, "b": 2}, "m")
    assert mesh.to_string() == f"m|a=2,b=2|0,1,2,3|0,1,2,3|{','.join(local_names(4))}"
    assert create_mesh((("a", 2), ("b", 2)), mesh_name="m") == mesh


def test_chosen_devices(alone):
    alone(cpus=4, gpus=2)
    mesh = create_mesh([("x", 2)], devices=["CPU:3", DeviceSpec(device_type="CPU", device_index=1)])
    assert mesh.local_devices() == [local_names(4)[3], local_names(4)[1]]
    assert create_mesh(devices=["GPU:0", "gpu:1"]).local_devices() == local_names(2, kind="GPU")
    assert create_mesh(devices=("/job:localhost/task:0/CPU:1",)).local_devices() == local_names(2)[1:]
    assert create_mesh([("x", 2)], devices=["CPU:0", "CPU:0"]).size == 2


def test_a_clients_own_mesh_is_over_its_own_devices(join):
    join(2, cpus=[2, 2, 2])
    assert create_mesh().local_devices() == local_names(2, 2, "worker")
    assert create_mesh(devices=["CPU:0"]).local_devices() == local_names(1, 2, "worker")
    assert create_mesh().client_ranks() == (2,)


def test_before_initialization(monkeypatch):
    assert not context.devices_in_use()
    with pytest.raises(MeshError):
        create_mesh([("x", 3)])
    assert not context.devices_in_use()
    assert create_mesh().local_devices() == local_names(1)
    assert context.devices_in_use(), "so that initialization can tell that it comes too late"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ([("x", 5)],),
            MeshError,
            "a mesh of shape (x=5) needs 5 devices, but 4 are available: /job:localhost/replica:0/",
        ),
        (
            ([("x", 5)],),
            MeshError,
            "initialize_accelerator_system(num_logical_cpu_devices=5) makes more CPU devices",
        ),
        (({"x": 2, "y": 3},), MeshError, "a mesh of shape (x=2, y=3) needs 6 devices, but 4 are available"),
        (({"x": -1, "y": 4},), MeshError, "the mesh dimension 'x' has size -1; a size is 1 or more"),
        (([("x", 0)],), MeshError, "the mesh dimension 'x' has size 0"),
        (([("x", -2)],), MeshError, "the mesh dimension 'x' has size -2"),
        (([("x", 4.0)],), MeshError, "the mesh dimension 'x' has size 4.0; expected an integer"),
        (([("x", True)],), MeshError, "the mesh dimension 'x' has size True; expected an integer"),
        (([("x", "4")],), MeshError, "the mesh dimension 'x' has size '4'; expected an integer"),
        (([("x", 2), ("x", 2)],), MeshError, "the mesh dimension 'x' is listed twice"),
        (
            ([("unsharded", 4)],),
            MeshError,
            "'unsharded' is reserved in layouts and cannot name a mesh dimension",
        ),
        (([("", 4)],), MeshError, "'' is not a valid name of a mesh dimension"),
        (
            ([],),
            MeshError,
            'mesh_dims is empty; a mesh needs a dimension: write them as [("batch", 4), ("model", 2)]',
        ),
        (({},), MeshError, "mesh_dims is empty"),
        (("x",), MeshError, "mesh_dims must be pairs of name and size, got 'x'"),
        ((4,), MeshError, "mesh_dims must be pairs of name and size, got 4"),
        ((["x", "y"],), MeshError, "'x' in mesh_dims is not a pair of name and size"),
        (([("x", 2, 2)],), MeshError, "('x', 2, 2) in mesh_dims is not a pair"),
        (([(2, "x")],), MeshError, "(2, 'x') in mesh_dims is not a pair"),
        ((None, 7), MeshError, "7 is not a valid name of a mesh"),
        ((None, "", []), MeshError, "devices must be a list of devices, such as ['CPU:0', 'CPU:1'], got []"),
        ((None, "", "CPU:0"), MeshError, "devices must be a list of devices"),
        ((None, "", [0]), MeshError, "devices must be a list of DeviceSpec or device names, got 0 in it"),
        (
            (None, "", ["CPU"]),
            MeshError,
            "'/device:CPU:*' in devices does not name one device; write it as in CPU:0",
        ),
        ((None, "", ["/task:0"]), MeshError, "'/task:0' in devices does not name one device"),
        ((None, "", ["what"]), DeviceError, "cannot read 'what' in the device name 'what'"),
        (
            (None, "", ["CPU:77"]),
            DeviceError,
            "/device:CPU:77 in devices does not exist: this client has CPU:0 to CPU:3",
        ),
        (
            (None, "", ["CPU:77"]),
            DeviceError,
            "initialize it with num_logical_cpu_devices=78 to have that one",
        ),
        (
            (None, "", ["GPU:0"]),
            DeviceError,
            "/device:GPU:0 in devices does not exist: this client has no GPU devices",
        ),
        (
            (None, "", ["/task:1/CPU:0"]),
            MeshError,
            "/task:1/device:CPU:0 in devices is not a device of this client",
        ),
        (
            (None, "", ["/job:a/CPU:0"]),
            MeshError,
            "which is /job:localhost/replica:0/task:0; leave out that part",
        ),
        (
            (None, "", ["CPU:0"], "GPU"),
            MeshError,
            "/device:CPU:0 in devices is not a GPU, but device_type requires one",
        ),
        (
            (None, "", ["CPU:0"], "FPGA"),
            DeviceError,
            "device type 'FPGA' is not known; expected one of CPU, GPU, TPU",
        ),
        ((None, "", None, "FPGA"), DeviceError, "device type 'FPGA' is not known"),
        ((None, "", None, ""), DeviceError, "device type '' is not known"),
        ((None, "", None, "GPU"), DeviceError, "this client has no GPU devices; use device_type='CPU'"),
        ((None, "", None, "TPU"), DeviceError, "this client has no TPU devices"),
        (
            (None, "", None, None, True),
            MeshError,
            "use_xla_spmd=True is for TPU meshes; this one has CPU devices",
        ),
    ],
)
def test_what_create_mesh_refuses(alone, arguments, kind, message):
    alone(cpus=4)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        create_mesh(*arguments)
    assert isinstance(caught.value, ValueError)


def test_mixed_types(alone):
    alone(cpus=1, gpus=1)
    with pytest.raises(MeshError, match="the devices of a mesh must have one type, these have CPU, GPU"):
        create_mesh(devices=["CPU:0", "GPU:0"])


# create_distributed_mesh ------------------------------------------------------------------------------------


def test_four_clients_with_two_devices_each(join):
    """The order of devices and the strings are TensorFlow's."""
    for client in range(4):
        join(client, cpus=[2, 2, 2, 2])
        mesh = create_distributed_mesh([("batch", 4), ("model", 2)])
        assert mesh.to_string() == (
            f"|batch=4,model=2|0,1,2,3,4,5,6,7|{2 * client},{2 * client + 1}|"
            f"/job:worker/replica:0/task:{client}/device:CPU:0,/job:worker/replica:0/task:{client}/device:CPU:1"
        )
        assert mesh.local_device_locations() == [{"batch": client, "model": 0}, {"batch": client, "model": 1}]
        assert mesh.client_ranks() == (0, 1, 2, 3)
        assert create_distributed_mesh({"batch": 4, "model": 2}, device_type="cpu") == mesh


def test_client_1_of_two_with_four_devices_each(join):
    join(1, cpus=[4, 4])
    assert create_distributed_mesh([("x", 2), ("y", 4)], mesh_name="m") == grid({"x": 2, "y": 4}, 2, 1, "m")


def test_local_mode_is_a_cluster_of_one(alone):
    alone(cpus=2)
    assert create_distributed_mesh([("x", 2)]) == create_mesh([("x", 2)])


def test_fewer_local_devices(join):
    join(1, cpus=[4, 2, 3])
    mesh = create_distributed_mesh([("x", 6)], local_devices=["CPU:1", "CPU:0"])
    assert mesh.local_device_ids() == [2, 3]
    assert mesh.local_devices() == local_names(2, 1, "worker")[::-1]


def test_gpus(join):
    join(0, cpus=[1, 1], gpus=[2, 2])
    assert create_distributed_mesh([("x", 4)], device_type="gpu").local_devices() == local_names(
        2, 0, "worker", "GPU"
    )


def test_it_needs_an_initialized_system():
    with pytest.raises(
        NotInitializedError, match=r"call dmesh\.initialize_accelerator_system\(\) before create_dist"
    ):
        create_distributed_mesh([("x", 1)])
    with pytest.raises(MeshError, match="mesh_dims is empty"):
        create_distributed_mesh([])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            [2, 4],
            "different numbers of CPU devices (/job:worker/task:0 has 2; /job:worker/task:1 has 4), but",
        ),
        (
            [2, 4],
            "initialize every client with the same num_logical_cpu_devices, such as 4, or use the first 2 of",
        ),
        ([2, 4], "the first 2 of each with local_devices=['CPU:0', 'CPU:1']"),
        (
            [3, 3, 3, 3, 1],
            "(/job:worker/task:0 to task:3 have 3; /job:worker/task:4 has 1)",
        ),
        (
            [8, 8, 8, 6, 6, 8],
            "(/job:worker/task:0 to task:2 have 8; /job:worker/task:3 to task:4 have 6; /job:worker/task:5",
        ),
        ([8, 6], "local_devices=[CPU:0, ..., CPU:5]"),
    ],
)
def test_clients_with_different_devices_are_refused_by_name(join, counts, message):
    for client in range(len(counts)):
        join(client, cpus=counts)
        with pytest.raises(MeshError, match=re.escape(message)):
            create_distributed_mesh([("x", sum(counts))])


def test_clients_with_too_few_devices_are_refused_by_name(join):
    join(0, cpus=[4, 1, 4])
    with pytest.raises(
        MeshError, match=r"/job:worker/task:0 has 4; /job:worker/task:1 has 1; /job:worker/task:2 has"
    ):
        create_distributed_mesh([("x", 6)], local_devices=["CPU:0", "CPU:1"])


def test_clients_without_gpus_are_refused_by_name(join):
    join(0, cpus=[1, 1], gpus=[2, 0])
    message = r"numbers of GPU devices \(/job:worker/task:0 has 2; /job:worker/task:1 has 0\).*start"
    with pytest.raises(MeshError, match=message):
        create_distributed_mesh([("x", 4)], device_type="GPU")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ([("x", 3)],),
            MeshError,
            "(x=3) has 3 devices, but 8 CPU devices are available (4 per client * 2 clients = 8); choose",
        ),
        (([("x", 4), ("y", 3)],), MeshError, "or initialize every client with num_logical_cpu_devices=6"),
        (([("x", 10**12), ("y", 10**12)],), MeshError, "has 1000000000000000000000000 devices"),
        (
            ([("x", 3)], "", ["CPU:0"]),
            MeshError,
            "(1 per client * 2 clients = 2); choose sizes whose product is 2",
        ),
        (([("x", -1)],), MeshError, "the mesh dimension 'x' has size -1"),
        (([("x", 8)], "", [], "TPU"), MeshError, "local_devices must be left out for TPU meshes"),
        (([("x", 8)], "", None, "tpu"), DeviceError, "this client has no TPU devices"),
        (([("x", 8)], "", None, "FPGA"), DeviceError, "device type 'FPGA' is not known"),
        (([("x", 8)], "", ["CPU:0"], "GPU"), MeshError, "is not a GPU, but device_type requires one"),
        (([("x", 8)], "", ["CPU:4"]), DeviceError, "/device:CPU:4 in local_devices does not exist"),
        (([("x", 8)], "", ["/task:1/CPU:0"]), MeshError, "in local_devices is not a device of this client"),
        (([("x", 8)], "", None, None, True), MeshError, "use_xla_spmd=True is for TPU meshes"),
    ],
)
def test_what_create_distributed_mesh_refuses(join, arguments, kind, message):
    join(0, cpus=[4, 4])
    with pytest.raises(kind, match=re.escape(message)):
        create_distributed_mesh(*arguments)


def test_without_a_coordination_service_clients_are_taken_to_be_equal(join):
    join(1, cpus=[2, 2], known=False)
    assert create_distributed_mesh([("x", 4)]).local_device_ids() == [2, 3]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_clients_views_make_one_whole(join, data):
    clients = data.draw(st.integers(1, 6))
    share = data.draw(st.integers(1, 6))
    rows = data.draw(st.sampled_from([n for n in range(1, clients * share + 1) if clients * share % n == 0]))
    dims = [("rows", rows), ("columns", clients * share // rows)]
    views = []
    for client in range(clients):
        join(client, cpus=[share] * clients)
        views.append(create_distributed_mesh(dims))
    assert [i for view in views for i in view.local_device_ids()] == list(range(clients * share))
    assert len({view.fingerprint for view in views}) == 1
    assert {view.client_ranks() for view in views} == {tuple(range(clients))}
    for view in views:
        assert Mesh.from_string(view.to_string()) == view


# The default mesh -------------------------------------------------------------------------------------------


def test_the_default_mesh_is_set_inside_of_its_block():
    outer, inner = grid({"x": 1}), grid({"y": 1})
    assert get_default_mesh() is None
    with default_mesh(outer) as entered:
        assert entered is outer is get_default_mesh()
        with default_mesh(inner):
            assert get_default_mesh() is inner
        assert get_default_mesh() is outer
    assert get_default_mesh() is None


def test_an_exception_does_not_leak_the_default_mesh():
    with pytest.raises(ZeroDivisionError), default_mesh(grid({"x": 1})):
        raise ZeroDivisionError
    assert get_default_mesh() is None


def test_the_default_mesh_is_the_threads_own():
    seen = []
    with default_mesh(grid({"x": 1})):
        thread = threading.Thread(target=lambda: seen.append(get_default_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("wrong", ["mesh", None, 1])
def test_the_default_mesh_must_be_one(wrong):
    with pytest.raises(MeshError, match=rf"default_mesh\(\) needs a Mesh, got {type(wrong).__name__}"):
        default_mesh(wrong)
