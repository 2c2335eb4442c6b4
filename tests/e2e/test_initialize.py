"""`initialize_accelerator_system`: what works, and what each mistake is answered with."""

import os
import signal
import socket
import time

import grpc
import pytest
from tests.e2e.clients import DEADLINE, free_ports, run_clients, run_server
from tests.server.raw_client import Authorized, default_token

import dmesh.runtime.context
from dmesh.v1 import common_pb2, coordination_pb2, coordination_pb2_grpc

WORLD = """
import numpy as np, dmesh
assert dmesh.initialize_accelerator_system("cpu", num_logical_cpu_devices=2) == "CPU"
rank, size = dmesh.client_id(), dmesh.num_clients()
mesh = dmesh.create_distributed_mesh([("batch", size), ("model", 2)], mesh_name="m")
print("mesh", mesh.to_string())
print("world", dmesh.collectives.all_reduce(np.array([rank + 1.0])))
print("batch", dmesh.collectives.all_reduce(np.array([10.0 ** rank]), group=mesh.group("batch")))
print("devices", [str(device) for device in mesh.local_devices()], dmesh.num_global_devices("CPU"))
dmesh.barrier(mesh, "end", timeout_in_ms=60_000)
dmesh.coordination.key_value_set(f"done/{rank}", "yes")
assert dmesh.coordination.key_value_get(f"done/{(rank + 1) % size}", timeout=60) == b"yes"
dmesh.shutdown_accelerator_system()
print("bye")
"""

JOIN = """
import dmesh.runtime.context
try:
    dmesh.initialize_accelerator_system()
except Exception as error:
    print(type(error).__name__, "|", error)
else:
    print("joined")
    dmesh.shutdown_accelerator_system()
"""


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    if dmesh.runtime.context.current_or_none() is not None:
        dmesh.shutdown_accelerator_system()
    dmesh.runtime.context.clear()


def wait_for_member(address: str, cluster: str) -> None:
    """Waits until the server has a connected member of the cluster."""
    request = coordination_pb2.GetClusterStateRequest(caller=common_pb2.Caller(cluster=cluster))
    with grpc.insecure_channel(address) as channel:
        stub = coordination_pb2_grpc.CoordinationServiceStub(Authorized(channel, default_token()))
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            try:
                members = stub.GetClusterState(request, timeout=10).members
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                    raise
                members = []  # there is no such cluster yet
            if any(member.state == common_pb2.MEMBER_STATE_CONNECTED for member in members):
                return
            time.sleep(0.05)  # the server tells observers of arrivals only when they ask
    raise AssertionError("no member came")


# What works --------------------------------------------------------------------------------------------


def check_world(clients, size):
    devices = [f"/job:worker/replica:0/task:{rank}/device:CPU:{i}" for rank in range(size) for i in range(2)]
    for rank, client in clients.items():
        assert client.wait() == 0, client.err
        local = devices[2 * rank : 2 * rank + 2]
        ids = ",".join(str(i) for i in range(2 * size))
        assert f"mesh m|batch={size},model=2|{ids}|{2 * rank},{2 * rank + 1}|{','.join(local)}" in client.out
        assert f"world [{sum(range(1, size + 1)):.0f}.]" in client.out
        assert f"batch [{sum(10**r for r in range(size)):.0f}.]" in client.out
        assert f"devices {local} {2 * size}" in client.out
        assert client.out.endswith("bye")
        assert client.err == ""


def test_four_clients_with_two_devices_each():
    """The device order and strings are TensorFlow's."""
    with run_clients(4, WORLD) as clients:
        check_world(clients, 4)


def test_a_standalone_server():
    with run_server() as (server, address):
        with run_clients(3, WORLD, environ={"DMESH_COORDINATOR": address}) as clients:
            check_world(clients, 3)
        with run_clients(2, WORLD, environ={"DMESH_COORDINATOR": address}) as clients:
            check_world(clients, 2)  # the same cluster name again: a new generation of it
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_one_client_alone_is_multi_client_too():
    with run_clients(1, WORLD, environ={"DTENSOR_JOB_NAME": "worker"}) as clients:
        check_world(clients, 1)


def test_local_mode():
    assert dmesh.initialize_accelerator_system(num_logical_cpu_devices=4) == "CPU"
    mesh = dmesh.create_mesh([("x", 4)])
    assert mesh.local_devices() == [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]
    assert dmesh.collectives.all_reduce([1, 2]).tolist() == [1, 2]
    dmesh.coordination.key_value_set("a", b"1")
    assert dmesh.coordination.key_value_get("a") == b"1"
    dmesh.shutdown_accelerator_system()
    assert dmesh.initialize_accelerator_system(num_logical_cpu_devices=2) == "CPU"
    assert dmesh.num_local_devices("CPU") == 2


def test_a_variable_that_is_misspelled_is_named(caplog, monkeypatch):
    monkeypatch.setenv("DMESH_COLLECTIVE_TIMOUT", "5")
    monkeypatch.setenv("DMESH_COORDINATOR_PORT", "tcp://10.0.0.3:8470")  # by Kubernetes, for a service
    monkeypatch.setenv("DMESH_JOB_OF_MINE", "1")
    dmesh.initialize_accelerator_system()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("DMESH_COLLECTIVE_TIMOUT is set, but dmesh does not read it")
    assert warning.endswith("Did you mean DMESH_COLLECTIVE_TIMEOUT?")


def test_aliases_are_the_same_function():
    assert dmesh.initialize_multi_client is dmesh.initialize_accelerator_system
    assert dmesh.initialize_tpu_system is dmesh.initialize_accelerator_system


def test_pathways_is_accepted_with_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("DTENSOR_USE_PARALLEL_EXECUTOR", "pw")
    assert dmesh.initialize_accelerator_system() == "CPU"
    assert "continuing with NumPy" in caplog.text


def test_without_a_coordinator_peers_connect_by_their_addresses():
    script = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system(enable_coordination_service=False)
mesh = dmesh.create_distributed_mesh([("x", dmesh.num_clients())])
print(dmesh.collectives.all_reduce(np.arange(3) + dmesh.client_id(), group=mesh.group("x")))
try:
    dmesh.coordination.members()
except dmesh.errors.NotInitializedError as error:
    print(error)
dmesh.barrier(mesh)
dmesh.shutdown_accelerator_system()
"""
    with run_clients(3, script) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert "[3 6 9]" in client.out
            assert "enable_coordination_service=False" in client.out


# Mistakes that one process can see by itself -----------------------------------------------------------


def test_called_twice():
    dmesh.initialize_accelerator_system()
    with pytest.raises(
        dmesh.errors.AlreadyInitializedError, match=r"already initialized; call dmesh\.shutdown"
    ):
        dmesh.initialize_accelerator_system()


def test_called_too_late():
    dmesh.create_mesh([("x", 1)])
    with pytest.raises(ValueError, match=r"was called after a mesh.*experimental_reset_context=True"):
        dmesh.initialize_accelerator_system()
    assert dmesh.initialize_accelerator_system(experimental_reset_context=True) == "CPU"


def test_shut_down_without_initializing():
    with pytest.raises(
        dmesh.errors.NotInitializedError, match=r"call dmesh\.initialize_accelerator_system\(\)"
    ):
        dmesh.shutdown_accelerator_system()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_type": "FPGA"}, "unknown device type 'FPGA'; it must be one of CPU, GPU, TPU"),
        ({"device_type": ""}, "unknown device type ''"),
        ({"device_type": 5}, "device_type must be one of CPU, GPU, TPU, got 5"),
        ({"device_type": "TPU"}, "this machine has no TPU"),
        ({"num_logical_cpu_devices": 0}, "must be an integer from 1 to 65536, got 0"),
        ({"num_logical_cpu_devices": 2.5}, r"must be an integer from 1 to 65536, got 2\.5"),
        ({"num_logical_cpu_devices": 10**6}, "must be an integer from 1 to 65536, got 1000000"),
    ],
)
def test_devices_that_do_not_exist(arguments, message):
    with pytest.raises(dmesh.errors.DeviceError, match=message):
        dmesh.initialize_accelerator_system(**arguments)
    assert dmesh.runtime.context.current_or_none() is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DTENSOR_JOBS": "a:1,b"}, r"DTENSOR_JOBS.*'b'"),
        ({"DTENSOR_JOBS": "a:1,b:x"}, r"DTENSOR_JOBS.*'b:x'"),
        ({"DTENSOR_JOBS": "a:0"}, r"DTENSOR_JOBS.*port.*1.*65535"),
        ({"DTENSOR_JOBS": "a:99999"}, r"DTENSOR_JOBS.*99999"),
        ({"DTENSOR_JOBS": "a:1,a:1"}, r"DTENSOR_JOBS.*a:1.*(twice|duplicate|more than once)"),
        ({"DTENSOR_JOBS": "a:1,b:1", "DTENSOR_CLIENT_ID": "2"}, r"DTENSOR_CLIENT_ID.*2"),
        ({"DTENSOR_JOBS": "a:1,b:1", "DTENSOR_CLIENT_ID": "-1"}, r"DTENSOR_CLIENT_ID.*-1"),
        ({"DTENSOR_JOBS": "a:1,b:1", "DTENSOR_CLIENT_ID": "one"}, r"DTENSOR_CLIENT_ID.*'one'"),
        ({"DTENSOR_JOBS": "a:1,b:1", "DMESH_COORDINATOR": "nowhere"}, r"DMESH_COORDINATOR.*nowhere"),
        ({"DMESH_INIT_TIMEOUT": "soon"}, r"DMESH_INIT_TIMEOUT.*soon"),
        ({"DMESH_NUM_CPU_DEVICES": "-2"}, r"DMESH_NUM_CPU_DEVICES.*-2"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch, environ, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dmesh.errors.ConfigurationError, match=message):
        dmesh.initialize_accelerator_system()
    assert dmesh.runtime.context.current_or_none() is None


def test_own_port_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("DTENSOR_JOBS", f"127.0.0.1:{port},127.0.0.1:{free_ports(1)[0]}")
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*taken by .*\(pid {os.getpid()}\)"):
            dmesh.initialize_accelerator_system()
        monkeypatch.setenv("DMESH_COORDINATOR", "127.0.0.1:1")
        with pytest.raises(dmesh.errors.AddressInUseError, match=r"same DTENSOR_CLIENT_ID"):
            dmesh.initialize_accelerator_system()
    assert dmesh.runtime.context.current_or_none() is None


def test_own_host_is_another_machine(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "192.0.2.1:1234,127.0.0.1:1235")  # a documentation address: nobody's
    monkeypatch.setenv("DMESH_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(
        dmesh.errors.ConfigurationError, match=r"this machine does not have that address.*DMESH_BIND_HOST"
    ):
        dmesh.initialize_accelerator_system()


def test_a_coordinator_that_does_not_answer(monkeypatch):
    with socket.socket() as deaf:  # bound, not listening: refuses
        deaf.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DTENSOR_JOBS", f"127.0.0.1:{free_ports(1)[0]}")
        monkeypatch.setenv("DMESH_COORDINATOR", f"127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("DMESH_INIT_TIMEOUT", "1")
        with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{deaf.getsockname()[1]}"):
            dmesh.initialize_accelerator_system()
    assert dmesh.runtime.context.current_or_none() is None


# Mistakes that take two --------------------------------------------------------------------------------


def test_a_client_that_never_comes():
    with run_clients(3, JOIN, only=(0, 2), environ={"DMESH_INIT_TIMEOUT": "3"}) as clients:
        for client in clients.values():
            assert client.wait() == 0
            assert client.out.startswith("InitializationTimeoutError | not all of the 3 clients"), client.out
            assert "/job:worker/task:1" in client.out
            assert "/job:worker/task:2" not in client.out


def test_the_client_that_hosts_the_server_never_comes():
    with run_clients(2, JOIN, only=(1,), environ={"DMESH_INIT_TIMEOUT": "2"}) as clients:
        assert clients[1].wait() == 0
        assert clients[1].out.startswith("InitializationTimeoutError | client 0 (/job:worker/task:0)"), (
            clients[1].out
        )


def test_a_client_that_never_comes_without_a_coordinator():
    script = JOIN.replace("system()", "system(enable_coordination_service=False)", 1)
    with run_clients(3, script, only=(0, 2), environ={"DMESH_INIT_TIMEOUT": "3"}) as clients:
        for client in clients.values():
            assert client.wait() == 0
            assert client.out.startswith("InitializationTimeoutError"), client.out
            assert "/job:worker/task:1" in client.out


def test_a_client_id_that_is_taken():
    """The holder stays; whoever comes second is told at once who holds the id."""
    ports = free_ports(2)
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_CLUSTER": "taken"}
        with run_clients(2, JOIN, only=(0,), ports=ports, environ=environ) as holder:
            wait_for_member(address, "taken")
            # On another loopback address, or it would already fail to listen.
            intruder_environ = {**environ, "DMESH_BIND_HOST": "127.0.0.2"}
            with run_clients(2, JOIN, only=(0,), ports=ports, environ=intruder_environ) as intruder:
                line = intruder[0].wait_for("ClientIdTakenError")
                assert "/job:worker/task:0" in line
                assert f"pid {holder[0].pid}" in line
            with run_clients(2, JOIN, only=(1,), ports=ports, environ=environ) as other:
                assert other[1].wait() == holder[0].wait() == 0
                assert other[1].out == holder[0].out == "joined"


def test_job_lists_that_differ():
    """The first to come decides; who differs is told at once, and nobody else is disturbed."""
    ports = free_ports(2)
    longer = ",".join(f"127.0.0.1:{port}" for port in [*ports, *free_ports(1)])
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_CLUSTER": "lists"}
        with run_clients(2, JOIN, only=(0,), ports=ports, environ=environ) as right:
            wait_for_member(address, "lists")
            with run_clients(
                2, JOIN, only=(1,), ports=ports, environ={**environ, "DTENSOR_JOBS": longer}
            ) as wrong:
                line = wrong[1].wait_for("JobMismatchError")
                assert "2" in line
                assert "3" in line
                assert wrong[1].wait() == 0
            named = {**environ, "DTENSOR_JOB_NAME": "trainer"}
            with run_clients(2, JOIN, only=(1,), ports=ports, environ=named) as wrong:
                line = wrong[1].wait_for("JobMismatchError")
                assert "trainer" in line
                assert "worker" in line
                assert wrong[1].wait() == 0
            with run_clients(2, JOIN, only=(1,), ports=ports, environ=environ) as other:
                assert other[1].wait() == right[0].wait() == 0
                assert other[1].out == right[0].out == "joined"


def test_the_wait_says_who_is_missing_and_ends_on_control_c():
    with run_clients(3, "import dmesh; dmesh.initialize_accelerator_system()", only=(0,)) as clients:
        line = clients[0].wait_for("waiting", where="err")
        assert "/job:worker/task:1" in line
        assert "/job:worker/task:2" in line
        clients[0].signal(signal.SIGINT)
        assert clients[0].wait(20) != 0
        assert "KeyboardInterrupt" in clients[0].err


@pytest.mark.parametrize("coordination", [True, False])
def test_clients_with_different_devices_are_refused_by_name(coordination):
    script = f"""
import dmesh, numpy as np
count = np.int64(2 + dmesh.client_id())
dmesh.initialize_accelerator_system(None, {coordination}, count)
assert dmesh.num_global_devices("CPU") == 5
try:
    dmesh.create_distributed_mesh([("x", 5)])
except dmesh.errors.MeshError as error:
    print(error)
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert "/job:worker/task:1" in client.out
            assert "num_logical_cpu_devices" in client.out


# Meeting on a mesh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"barrier_name": 5}, "barrier_name must be a string of 1 to 200 characters, got 5"),
        ({"barrier_name": "x" * 201}, "barrier_name must be a string"),
        ({"timeout_in_ms": 0}, "timeout_in_ms must be a positive number, got 0"),
        ({"timeout_in_ms": "a"}, "timeout_in_ms must be a positive number, got 'a'"),
    ],
)
def test_barriers_that_make_no_sense(arguments, message):
    dmesh.initialize_accelerator_system()
    with pytest.raises(dmesh.errors.ConfigurationError, match=message):
        dmesh.barrier(dmesh.create_mesh([("x", 1)]), **arguments)


@pytest.mark.parametrize("coordination", [True, False])
def test_a_barrier_that_timed_out_may_be_used_again(coordination):
    """Names tell barriers apart, and each use stands for itself, with and without a coordination service."""
    script = f"""
import dmesh.runtime.context
dmesh.initialize_accelerator_system(enable_coordination_service={coordination})
mesh = dmesh.create_distributed_mesh([("x", 2)])
mine = "left" if dmesh.client_id() == 0 else "right"
try:
    dmesh.barrier(mesh, mine, timeout_in_ms=500)
except TimeoutError as error:
    print(error)
dmesh.barrier(mesh, "together", timeout_in_ms=60_000)
dmesh.barrier(mesh, "together", timeout_in_ms=60_000)
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script) as clients:
        for rank, client in clients.items():
            assert client.wait() == 0, client.err
            assert ("left", "right")[rank] in client.out


def test_the_names_of_dmesh_itself_are_refused():
    dmesh.initialize_accelerator_system()
    for call in (dmesh.coordination.barrier, dmesh.coordination.cancel_barrier):
        with pytest.raises(dmesh.errors.ConfigurationError, match="dmesh/shutdown"):
            call("dmesh/shutdown")


def test_a_forked_child_is_told_that_it_cannot_take_part():
    script = """
import os, dmesh
dmesh.initialize_accelerator_system()
child = os.fork()
if child == 0:
    for call in (dmesh.coordination.members, dmesh.collectives.barrier, dmesh.initialize_accelerator_system):
        try:
            call()
        except dmesh.errors.NotInitializedError as error:
            print("child:", error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
dmesh.collectives.barrier()
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script, environ={"PYTHONWARNINGS": "ignore"}) as clients:
        for rank, client in clients.items():
            assert client.wait() == 0, client.err
            assert client.out.count(f"child: this process was forked from client {rank}") == 3
            assert "spawn" in client.out


def test_forked_children_end_as_they_would_without_a_coordinator_in_the_process():
    script = """
import os, sys, dmesh, numpy as np
dmesh.initialize_accelerator_system()
codes = set()
for _ in range(4):
    dmesh.collectives.all_reduce(np.ones(1))
    if not (child := os.fork()):
        sys.exit(7)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert codes == {7}, codes
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script, environ={"PYTHONWARNINGS": "ignore"}) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert "fork" not in client.err  # gRPC tells of each, with its own handlers of forks
