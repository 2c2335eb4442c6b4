"""`create_tpu_mesh`: TensorFlow's orders, neighbours on the torus, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tpu.systems import system

import dmesh
from dmesh.config.settings import Settings
from dmesh.devices.device import LogicalDevices
from dmesh.errors import MeshError, NotInitializedError
from dmesh.runtime import context
from dmesh.runtime.context import Context
from dmesh.testing import FakeCluster
from dmesh.tpu import TpuSystem
from dmesh.tpu.rings import chip_ring, core_ring
from dmesh.tpu.topology import Topology

CASES = json.loads((Path(__file__).parent / "tpu_meshes.json").read_text())
"""Orders of cores that TensorFlow's `create_tpu_mesh` comes to."""


@pytest.fixture(autouse=True)
def _no_context():
    context.clear()
    yield
    context.clear()


def become(topology, client=0):
    """Makes this process a client of a TPU system."""
    jobs = tuple(f"host{task}:1" for task in range(topology.num_tasks))
    devices = {"CPU": topology.num_tpus_per_task, "GPU": 0, "TPU": topology.num_tpus_per_task}
    settings = Settings(jobs=jobs, client_id=client, job_name="worker")
    context.install(Context(client, settings, LogicalDevices("TPU", devices), topology))
    return topology


def cores_of(mesh, topology):
    """The coordinates of the mesh's devices, in its order."""
    specs = [dmesh.DeviceSpec.from_string(name) for name in mesh.global_devices()]
    return [topology.device_coordinates[spec.task, spec.device_index].tolist() for spec in specs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['accelerator_type']}-{case['ring_size']}")
def test_orders_are_tensorflows(case):
    topology = become(TpuSystem.of(case["accelerator_type"]).topology())
    cores, size = len(case["cores"]), case["ring_size"]
    mesh = dmesh.create_tpu_mesh(
        ["batch", "model"],
        [cores // size, size],
        "m",
        ring_axes=case["ring_axes"],
        ring_bounds=case["ring_bounds"],
        can_split_host_across_rings=case["can_split"],
        build_ring_across_rings=case["across"],
        rotate_ring_across_rings=case["rotate"],
    )
    assert cores_of(mesh, topology) == case["cores"]


@pytest.mark.parametrize("kind", ["v2-8", "v2-32", "v4-16", "v5litepod-16", "v6e-32"])
def test_every_device_is_there_once_and_each_client_knows_its_own(kind):
    topology = TpuSystem.of(kind).topology()
    size = TpuSystem.of(kind).num_cores
    meshes = []
    for client in range(topology.num_tasks):
        become(topology, client)
        mesh = dmesh.create_tpu_mesh(["x", "y"], [2, size // 2], "m", build_ring_across_rings=True)
        assert mesh.device_type() == "TPU"
        assert mesh.shape() == [2, size // 2]
        named = dict(zip(mesh.local_device_ids(), mesh.local_devices(), strict=True))
        assert list(named.values()) == [
            f"/job:worker/replica:0/task:{client}/device:TPU:{device}"
            for device in range(topology.num_tpus_per_task)
        ]
        assert all(mesh.global_devices()[index] == name for index, name in named.items())
        meshes.append(mesh)
    assert len({tuple(mesh.global_devices()) for mesh in meshes}) == 1
    assert len(set(meshes[0].global_devices())) == size
    own = [index for mesh in meshes for index in mesh.local_device_ids()]
    assert sorted(own) == list(range(size))


def distance(one, other, shape):
    """Steps between two cores on a torus of this shape; the cores of a chip are at the same place."""
    return sum(min(abs(a - b), n - abs(a - b)) for a, b, n in zip(one[:3], other[:3], shape[:3], strict=True))


even = st.sampled_from([2, 4, 6])


@given(st.tuples(even, even, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])), st.booleans())
def test_neighbours_of_a_ring_are_neighbours_of_the_torus(shape, rotate):
    cores = np.indices(shape).reshape(4, -1).T
    ring = cores[core_ring(cores, rotate=rotate and shape[2] == 1)].tolist()
    assert sorted(ring) == cores.tolist()
    steps = [distance(one, other, shape) for one, other in zip(ring, ring[1:] + ring[:1], strict=True)]
    assert max(steps) == 1


@given(st.tuples(*[st.sampled_from([1, 2, 4, 6])] * 3))
def test_neighbours_of_a_ring_of_chips_are_neighbours_of_the_torus(shape):
    ring = chip_ring(shape)
    assert sorted(ring) == [tuple(place) for place in np.indices(shape).reshape(3, -1).T.tolist()]
    assert all(distance(a, b, shape) <= 1 for a, b in zip(ring, ring[1:] + ring[:1], strict=True))


def test_a_grid_with_an_odd_side_comes_row_by_row(caplog):
    assert chip_ring([2, 3, 1]) == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0)]
    assert "there is no ring of chips through [2, 3, 1]" in caplog.text
    assert chip_ring([1, 3, 1]) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]


def test_a_ring_of_model_parallel_neighbours():
    topology = become(TpuSystem.of("v2-32").topology())
    mesh = dmesh.create_tpu_mesh(["batch", "model"], [4, 8], "m", can_split_host_across_rings=False,
                                 ring_bounds=[2, 2, 1, 2])  # fmt: skip
    owners = [name.split("/")[3] for name in mesh.global_devices()]
    assert [len(set(owners[first : first + 8])) for first in range(0, 32, 8)] == [1, 1, 1, 1]
    assert cores_of(mesh, topology)[:8] == [
        [0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1], [0, 1, 0, 0],
        [0, 1, 0, 1],
    ]  # fmt: skip


def test_rings_over_leading_dimensions_and_over_none():
    topology = become(TpuSystem.of("v2-8").topology())
    row = dmesh.create_tpu_mesh(["x"], [8], "", ring_dims=1)
    assert cores_of(row, topology) == cores_of(
        dmesh.create_tpu_mesh(["x", "y"], [2, 4], "", ring_dims=2), topology
    )
    single = dmesh.create_tpu_mesh(["x"], [8], "")  # all but the first dimension: rings of one device
    assert cores_of(single, topology) == topology.device_coordinates.reshape(-1, 4).tolist()


def test_clients_make_the_same_mesh_and_find_each_other():
    def program():
        dmesh.tpu.experimental.initialize_tpu_system()
        mesh = dmesh.create_tpu_mesh(["data", "model"], [2, 4], "m", can_split_host_across_rings=False)
        total = dmesh.collectives.all_reduce(np.array([dmesh.client_id() + 1]), group=mesh.group("data"))
        return mesh.local_device_ids(), mesh.global_devices(), int(total[0])

    with FakeCluster(2, environ={"TPU_ACCELERATOR_TYPE": "v2-8"}) as cluster:
        (own, devices, total), (others, same, again) = cluster.run(program)
    assert (own, others) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert devices == same
    assert total == again == 3


def test_a_name_is_that_of_one_mesh():
    """As in TensorFlow, whose devices know the cores of a mesh by its name."""
    become(TpuSystem.of("v2-8").topology())
    dmesh.create_tpu_mesh(["x", "y"], [2, 4], "m")
    with pytest.raises(MeshError, match="there is a TPU mesh 'm' already; give this one another") as caught:
        dmesh.create_tpu_mesh(["x"], [8], "m")
    assert isinstance(caught.value, ValueError)
    dmesh.create_tpu_mesh(["x"], [8], "n")
    for _ in range(2):
        dmesh.create_tpu_mesh(["x"], [8], "")
    become(TpuSystem.of("v2-8").topology())
    assert dmesh.create_tpu_mesh(["x"], [8], "m").name == "m", "of another system"


GOOD = {"mesh_dim_names": ["x", "y"], "mesh_shape": [2, 4], "mesh_name": "m"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ring_dims": 3}, "ring_dims is 3; a mesh of 2 dimensions has rings over -2 to 2 of them"),
        ({"ring_dims": -3}, "ring_dims is -3"),
        ({"ring_dims": "all"}, "ring_dims is 'all'"),
        ({"ring_axes": ["x", "y", "z"]}, "ring_axes has 3 entries"),
        ({"ring_axes": ["x", "y", "z", "w"]}, "expected core, x, y and z, each once"),
        ({"ring_axes": ["x", "y", "z", "z"]}, "expected core, x, y and z, each once"),
        ({"ring_bounds": [2, 2, 1]}, r"ring_bounds has 3 entries, \[2, 2, 1\]; expected 4"),
        ({"ring_bounds": [2, 4, 1, 2]}, r"ring_bounds is \[2, 4, 1, 2\], more than the TPU system's shape"),
        ({"ring_bounds": [2, 0, 1, 2]}, "does not divide the TPU system's shape"),
        ({"ring_bounds": ["2", 2, 1, 2]}, "ring_bounds is .*; expected integers"),
        ({"mesh_shape": [2, 2]}, r"a mesh of shape \[2, 2\] has 4 devices, but the TPU system .* has 8"),
        ({"mesh_shape": []}, r"mesh_shape is \[\]; expected integers"),
        ({"mesh_shape": 8}, "mesh_shape is 8; expected integers"),
        ({"mesh_shape": [8]}, "dimension"),
        ({"mesh_dim_names": ["x", "x"]}, "listed twice"),
        (
            {"mesh_shape": [4, 2], "can_split_host_across_rings": False},
            "a ring of 2 devices is too small for can_split_host_across_rings=False: a client has 4 devices",
        ),
        (
            {"ring_bounds": [1, 2, 1, 2], "can_split_host_across_rings": False},
            r"ring_bounds \[1, 2, 1, 2\] is less than the block \[2, 1, 1, 2\]",
        ),
    ],
)  # fmt: skip
def test_what_is_no_tpu_mesh(change, words):
    become(TpuSystem.of("v2-8").topology(2))
    dmesh.create_tpu_mesh(**GOOD)
    with pytest.raises(MeshError, match=words):
        dmesh.create_tpu_mesh(**GOOD | change)


def test_systems_without_such_meshes():
    with pytest.raises(NotInitializedError, match="there is no TPU system: call"):
        dmesh.create_tpu_mesh(**GOOD)
    with pytest.raises(MeshError, match="ring_dims is 3"):  # is said first
        dmesh.create_tpu_mesh(**GOOD, ring_dims=3)
    become(
        Topology(
            mesh_shape=[2, 1, 1, 4], device_coordinates=[[[x, 0, 0, c] for x in (0, 1) for c in range(4)]]
        )
    )
    with pytest.raises(MeshError, match="a chip has 1 or 2 cores"):
        dmesh.create_tpu_mesh(**GOOD)
    become(Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]))
    with pytest.raises(MeshError, match="has 2; a TPU mesh is over all of them"):
        dmesh.create_tpu_mesh(**GOOD)
    become(Topology(mesh_shape=[4, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [2, 0, 0, 0]],
                                                                 [[1, 0, 0, 0], [3, 0, 0, 0]]]))  # fmt: skip
    with pytest.raises(MeshError, match="needs clients whose devices are blocks of equal shape"):
        dmesh.create_tpu_mesh(["x", "y"], [2, 2], "", can_split_host_across_rings=False)
    become(system([6, 2, 1, 2]))
    with pytest.raises(
        MeshError, match=r"ring_bounds \[3, 2, 1, 2\] is not a multiple of the block \[2, 2, 1, 2\]"
    ):
        dmesh.create_tpu_mesh(
            ["x", "y"], [2, 12], "", ring_bounds=[3, 2, 1, 2], can_split_host_across_rings=False
        )
