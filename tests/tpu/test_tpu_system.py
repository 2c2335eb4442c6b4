"""TPU systems of clients: alone, in a fake cluster, in processes of their own; all see the same topology."""

import base64
import contextlib
import functools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.e2e.clients import free_ports, run_clients

import dmesh
from dmesh.coordination.members import Device, Member, MemberState, Process
from dmesh.devices.device import LogicalDevices
from dmesh.distribute.cluster_resolver import TPUClusterResolver
from dmesh.errors import (
    AlreadyInitializedError,
    ArgumentTypeError,
    ConfigurationError,
    DeviceError,
    PeerLostError,
    TopologyError,
    TpuNotFoundError,
)
from dmesh.runtime import context
from dmesh.testing import FakeCluster
from dmesh.tpu import TpuSystem
from dmesh.tpu.experimental import Topology, initialize_tpu_system, shutdown_tpu_system
from dmesh.tpu.table import devices_of, topology_of


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    if context.current_or_none() is not None:
        dmesh.shutdown_accelerator_system()
    context.clear()


@pytest.fixture
def v2(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v2-8")


class Resolver:
    """What a TPUClusterResolver is to `initialize_tpu_system`."""

    def __init__(self, accelerator_type=None):
        self.accelerator_type = accelerator_type
        self.topology = None

    def cluster_spec(self):
        raise AssertionError("who belongs to the cluster is not asked here")

    master = num_accelerators = cluster_spec

    def set_tpu_topology(self, serialized):
        self.topology = serialized


# One process ------------------------------------------------------------------------------------------------


def test_one_process_has_all_cores(v2):
    assert (dmesh.num_local_devices("TPU"), dmesh.preferred_device_type()) == (8, "TPU")
    topology = initialize_tpu_system()
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, 8)
    assert topology == TpuSystem.of("v2-8").topology()
    assert dmesh.num_local_devices("TPU") == dmesh.num_global_devices("TPU") == 8
    assert dmesh.num_local_devices("CPU") == 8  # each core has a CPU beside it
    assert dmesh.local_devices("TPU")[7].to_string() == "/job:localhost/replica:0/task:0/device:TPU:7"
    assert dmesh.create_mesh({"x": 8}, device_type="TPU").size == 8
    assert dmesh.create_distributed_mesh({"x": 2, "y": 4}, device_type="TPU").host_mesh().size == 8
    assert initialize_tpu_system() == topology  # nothing happens
    shutdown_tpu_system()
    assert context.current_or_none() is None


def test_dtensors_functions_do_the_same(v2):
    assert dmesh.initialize_tpu_system() == "TPU"  # an alias of initialize_accelerator_system
    assert context.find(Topology) == TpuSystem.of("v2-8").topology()
    dmesh.shutdown_tpu_system()
    assert dmesh.initialize_accelerator_system("tpu", num_logical_cpu_devices=9) == "TPU"
    assert (dmesh.num_local_devices("TPU"), dmesh.num_local_devices("CPU")) == (8, 9)


def test_arguments_describe_a_system_too():
    assert dmesh.initialize_accelerator_system(tpu="v5e-4") == "TPU"
    assert dmesh.num_local_devices("TPU") == 4
    dmesh.shutdown_accelerator_system()
    dmesh.initialize_accelerator_system("TPU", tpu=TpuSystem.of("v2-16", "4x2"))
    assert context.find(Topology).mesh_shape.tolist() == [4, 2, 1, 2]


def test_resolvers_know_the_type(v2):
    resolver = Resolver("v5litepod-4")
    topology = initialize_tpu_system(resolver)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 1]
    assert Topology(resolver.topology) == topology
    with pytest.raises(
        AlreadyInitializedError, match=r"system of shape \[2, 2, 1, 1\] is initialized, but .* v3-8"
    ):
        initialize_tpu_system(Resolver("v3-8"))
    shutdown_tpu_system(resolver)
    assert initialize_tpu_system(Resolver()).mesh_shape.tolist() == [2, 2, 1, 2]  # as the environment says


def test_resolvers_of_this_machine_leave_the_shape_to_the_environment(monkeypatch):
    """A type of an unusual size needs its shape; nobody but the environment has it."""
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-24")
    monkeypatch.setenv("TPU_TOPOLOGY", "2x2x3")
    resolver = TPUClusterResolver("local")
    assert resolver.num_accelerators() == {"TPU": 24}
    topology = initialize_tpu_system(resolver)
    assert topology.mesh_shape.tolist() == [2, 2, 3, 2]
    shutdown_tpu_system(resolver)
    assert initialize_tpu_system() == topology


def test_fewer_cpu_devices_in_the_environment_than_cores_are_too_few(monkeypatch, v2):
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "1")
    assert initialize_tpu_system().num_tpus_per_task == 8
    assert dmesh.num_local_devices("CPU") == 8, "the greater number, as in TensorFlow"
    shutdown_tpu_system()
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "10")
    assert dmesh.initialize_accelerator_system("TPU") == "TPU"
    assert dmesh.num_local_devices("CPU") == 10
    dmesh.shutdown_accelerator_system()
    with pytest.raises(DeviceError, match="num_logical_cpu_devices=4 is less than the number of TPU devices"):
        dmesh.initialize_accelerator_system("TPU", num_logical_cpu_devices=4)


def test_a_system_that_is_initialized_gets_tpu_devices(v2):
    dmesh.initialize_accelerator_system("CPU")
    assert (dmesh.num_local_devices("TPU"), dmesh.num_local_devices("CPU")) == (0, 1)
    assert initialize_tpu_system().num_tpus_per_task == 8
    assert (dmesh.num_local_devices("TPU"), dmesh.num_local_devices("CPU")) == (8, 8)
    shutdown_tpu_system()
    assert (dmesh.num_local_devices("TPU"), context.find(LogicalDevices).type) == (0, "CPU")
    with pytest.raises(TpuNotFoundError, match="no TPU system is initialized"):
        shutdown_tpu_system()
    assert initialize_tpu_system(Resolver("v5e-4")).num_tpus_per_task == 4


def test_what_cannot_be_initialized(monkeypatch):
    for call in (initialize_tpu_system, functools.partial(dmesh.initialize_accelerator_system, "TPU")):
        with pytest.raises(TpuNotFoundError, match="this machine has no TPU") as caught:
            call()
        assert isinstance(caught.value, DeviceError)
        assert isinstance(caught.value, RuntimeError)
    for resolver in ("v2-8", object()):
        for call in (initialize_tpu_system, shutdown_tpu_system):
            with pytest.raises(ArgumentTypeError, match="cluster_resolver must be a cluster resolver"):
                call(resolver)
    with pytest.raises(
        TopologyError, match="Resolver found a TPU that is not usable: 'v99-8' is not a known"
    ):
        initialize_tpu_system(Resolver("v99-8"))
    with pytest.raises(TpuNotFoundError, match="no TPU system is initialized; call"):
        shutdown_tpu_system()
    with pytest.raises(DeviceError, match="tpu='v2-8' is for device_type='TPU', but device_type is 'CPU'"):
        dmesh.initialize_accelerator_system("CPU", tpu="v2-8")
    with pytest.raises(DeviceError, match="unknown device type 'FPGA'"):
        dmesh.initialize_accelerator_system("FPGA", tpu="v2-8")
    with pytest.raises(DeviceError, match="num_logical_cpu_devices=4 is less than the number of TPU devices"):
        dmesh.initialize_accelerator_system("TPU", num_logical_cpu_devices=4, tpu="v2-8")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-32")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c,d")
    with pytest.raises(TopologyError, match="lists 4 hosts, but there is 1 client"):
        initialize_tpu_system()
    monkeypatch.setenv("TPU_WORKER_ID", "9")
    with pytest.raises(ConfigurationError, match="TPU_WORKER_ID is '9'"):
        initialize_tpu_system()
    assert context.current_or_none() is None


# Clients in threads -----------------------------------------------------------------------------------------


def view():
    """What a client sees of the TPU system."""
    topology = initialize_tpu_system()
    return (
        topology.serialized(),
        dmesh.num_local_devices("TPU"),
        dmesh.num_global_devices("TPU"),
        [str(device) for device in dmesh.local_devices("TPU", for_client_id=1)],
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_clients_share_the_cores(size):
    topology = TpuSystem.of("v2-8").topology(size)
    with FakeCluster(size, environ={"TPU_ACCELERATOR_TYPE": "v2-8"}) as cluster:
        views = cluster.run(view)
        tables = cluster.run(lambda: topology_of(dmesh.coordination.members()))
    share = 8 // size
    names = [f"/job:worker/replica:0/task:1/device:TPU:{i}" for i in range(share)]
    assert views == [(topology.serialized(), share, 8, names)] * size
    assert tables == [topology] * size  # what the coordination service was told


def test_clients_tell_each_other_of_cores_that_they_did_not_register():
    def program():
        dmesh.initialize_accelerator_system("TPU", tpu="v2-8")
        return view()

    with FakeCluster(2) as cluster:
        views = cluster.run(program)
    assert [Topology(seen[0]) for seen in views] == [TpuSystem.of("v2-8").topology(2)] * 2
    assert [seen[1:3] for seen in views] == [(4, 8)] * 2


def test_tpu_devices_can_be_given_back():
    def program():
        dmesh.initialize_accelerator_system()
        initialize_tpu_system(Resolver("v2-8"))
        shutdown_tpu_system()
        return dmesh.num_local_devices("TPU"), dmesh.num_global_devices("TPU")

    with FakeCluster(2) as cluster:
        assert cluster.run(program) == [(0, 0)] * 2


def test_clients_on_the_hosts_of_a_tpu_know_which_host_is_theirs():
    """The numbers of the workers need not be those of the clients."""

    def program():
        worker = str(1 - dmesh.client_id())
        environ = {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": worker}
        dmesh.initialize_accelerator_system(tpu=TpuSystem.from_environment(environ))
        return initialize_tpu_system()

    with FakeCluster(2) as cluster:
        one, other = cluster.run(program)
    assert one == other
    assert (
        one.device_coordinates.tolist() == TpuSystem.of("v4-16").topology().device_coordinates[::-1].tolist()
    )


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (
            ["v2-8", "v3-32"],
            r"the clients have different numbers of TPU devices \(/job:worker/task:0 4, .* 16\)",
        ),
        (
            ["v5e-8", "v2-8"],
            r"task:1 .* has 4 TPU devices of a system of shape \[2, 2, 1, 2\], but .*\[2, 4, 1, 1\]",
        ),
    ],
)
def test_clients_that_mean_different_systems(kinds, words):
    def program():
        dmesh.initialize_accelerator_system(tpu=kinds[dmesh.client_id()])

    with FakeCluster(2) as cluster:
        errors = cluster.run(program, check=False)
    assert any(isinstance(error, TopologyError) for error in errors)
    for error in errors:  # who has not seen it itself hears why the other client is gone
        assert isinstance(error, TopologyError | PeerLostError)
        assert re.search(words, str(error))


def test_clients_that_are_on_the_same_host():
    environ = {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}
    with pytest.raises(TopologyError, match=r"device 0 of task 0 and device 0 of task 1 both have"):
        FakeCluster(2, environ=environ)


# The table of devices ---------------------------------------------------------------------------------------


def member(index, *devices):
    return Member("worker", index, 1, MemberState.CONNECTED, Process("host", 9), devices)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ((), r"task:1 \(host host, pid 9\) has no TPU devices, but .*task:0.* has 4 TPU devices"),
        ((Device("TPU", 0),), "does not say where its device TPU:0 is: it describes it as ''"),
        ((Device("TPU", 0, "v2-8 core 1,1,1 of 2x2"),), "does not say where its device TPU:0 is"),
        ((Device("TPU", 1, "v2-8 core 0,0,0,0 of 2x2x1x2"),), "does not say where its device TPU:1 is"),
        (
            (Device("TPU", 0, "a core 0,0,0,0 of 2x2x1x2"), Device("TPU", 1, "a core 0,0,0,0 of 2x2x2x2")),
            "has cores of 2 TPU systems",
        ),
    ],
)
def test_tables_that_make_no_system(devices, words):
    with pytest.raises(TopologyError, match=words):
        topology_of([member(0, *devices_of(TpuSystem.of("v2-8"), 0, 2)), member(1, *devices)])


@given(st.text(max_size=60) | st.from_regex(r"\Av2 core [0-9,]{1,20} of [0-9x]{1,20}\Z"))
def test_any_description_is_read_or_refused(description):
    with contextlib.suppress(TopologyError):
        assert topology_of([member(0, Device("TPU", 0, description))]).num_tpus_per_task == 1


def test_tables_have_other_devices_too():
    members = [
        member(task, Device("CPU", 0), *devices_of(TpuSystem.of("v2-8"), task, 2), Device("GPU", 0))
        for task in (0, 1)
    ]
    assert topology_of(members) == TpuSystem.of("v2-8").topology(2)


# Clients in processes of their own --------------------------------------------------------------------------

CLIENT = """
import base64, sys, numpy as np, dmesh
if "{mode}" == "later":
    dmesh.initialize_accelerator_system("CPU")
elif "{mode}" == "without coordination":
    dmesh.initialize_accelerator_system(enable_coordination_service=False)
topology = dmesh.tpu.experimental.initialize_tpu_system()
print("topology", base64.b64encode(topology.serialized()).decode())
print("devices", dmesh.num_local_devices("TPU"), *map(dmesh.num_global_devices, ["TPU", "CPU"]))
mesh = dmesh.create_tpu_mesh(["data", "model"], [2, 4], "m", can_split_host_across_rings=False)
total = dmesh.collectives.all_reduce(np.array([1.0]), group=mesh.group("data"))
print("mine", mesh.local_device_ids(), total)
dmesh.tpu.experimental.shutdown_tpu_system()
if "{mode}" == "later":
    assert dmesh.num_global_devices("TPU") == 0
    dmesh.shutdown_accelerator_system()
print("bye")
"""


@pytest.mark.parametrize("mode", ["at once", "later", "without coordination"])
def test_processes_share_the_cores(mode):
    environ = {"TPU_ACCELERATOR_TYPE": "v2-8", "DMESH_TOKEN": "0123456789abcdef0123456789abcdef"}
    with run_clients(2, CLIENT.replace("{mode}", mode), environ=environ) as clients:
        outputs = []
        for client in clients.values():
            assert client.wait() == 0, client.err
            outputs.append(client.out.splitlines())
    for rank, (topology, devices, mine, bye) in enumerate(outputs):
        assert Topology(base64.b64decode(topology.split()[1])) == TpuSystem.of("v2-8").topology(2)
        assert devices == "devices 4 8 8"
        assert mine == f"mine {np.arange(4 * rank, 4 * rank + 4).tolist()} [2.]"
        assert bye == "bye"


CONNECTED = """
import os, dmesh
class Resolver(dmesh.distribute.cluster_resolver.SimpleClusterResolver):
    accelerator_type = "v2-8"
jobs = os.environ["JOBS"].split(",")
spec = dmesh.train.ClusterSpec({"worker": jobs})
resolver = Resolver(spec, master=jobs[0], task_type="worker", task_id=int(os.environ["TASK"]))
dmesh.config.experimental_connect_to_cluster(resolver)
topology = dmesh.tpu.experimental.initialize_tpu_system(resolver)
print(topology, dmesh.num_global_devices("TPU"), dmesh.client_id())
dmesh.tpu.experimental.shutdown_tpu_system(resolver)
dmesh.shutdown_accelerator_system()
"""


@pytest.mark.slow
def test_processes_that_are_connected_by_a_resolver():
    jobs = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    tasks = {
        task: {"JOBS": jobs, "TASK": str(task), "DTENSOR_JOBS": "", "DTENSOR_CLIENT_ID": ""}
        for task in (0, 1)
    }
    with run_clients(2, CONNECTED, per_client=tasks) as clients:
        for task, client in clients.items():
            assert client.wait() == 0, client.err
            assert client.out == (
                f"<Topology of 2 tasks with 4 devices each, mesh_shape=[2, 2, 1, 2]> 8 {task}"
            )


DISAGREEING = """
import os, dmesh
os.environ["TPU_ACCELERATOR_TYPE"] = "v2-8" if dmesh.client_id() == 0 else "v5e-8"
try:
    dmesh.initialize_accelerator_system("TPU")
except dmesh.errors.TopologyError as error:
    print("TopologyError", error)
print(dmesh.runtime.context.current_or_none())
"""


@pytest.mark.slow
def test_processes_that_mean_different_systems_part_again():
    with run_clients(2, DISAGREEING) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            error, state = client.out.splitlines()
            assert "task:1" in error
            assert "TPU devices of a system of shape [2, 4, 1, 1], but" in error
            assert state == "None"
