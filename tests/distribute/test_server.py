"""`dmesh.distribute.Server`, as programs for TensorFlow's coordinator use it: a chief and workers."""

import pytest
from tests.e2e.clients import free_ports, run_clients

from dmesh.distribute import Server
from dmesh.errors import StrategyError, StrategyTypeError, StrategyValueError
from dmesh.train import ClusterSpec

SPEC = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SPEC,), StrategyValueError, "job_name must be one of chief, worker, ps, got None"),
        (
            (SPEC, "worker"),
            StrategyValueError,
            r"task_index must be one of \[0, 1\] in job 'worker', got None",
        ),
        ((SPEC, "worker", 2), StrategyValueError, "got 2"),
        ((SPEC, "ps", 0), StrategyValueError, "no task holds variables for others"),
        ((SPEC, "worker", 0, None, {}), StrategyTypeError, "config must be None"),
    ],
)
def test_what_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Server(*arguments)


def test_a_server_that_is_not_started():
    server = Server(ClusterSpec({"worker": ["h:2"]}), start=False)
    assert server.target == "grpc://h:2"
    with pytest.raises(StrategyError, match=r"call start\(\) first"):
        server.join()


PROGRAM = """
import os
import dmesh

def double(number):
    return 2 * number, dmesh.distribute.coordinator.experimental_get_current_worker_index()

ports = {ports}
spec = {{"chief": [f"127.0.0.1:{{ports[0]}}"], "worker": [f"127.0.0.1:{{port}}" for port in ports[1:]]}}
rank = int(os.environ["RANK_HERE"])
if rank > 0:
    server = dmesh.distribute.Server(spec, "worker", rank - 1)
    server.join()
    print("ends", server.target, flush=True)
else:
    dmesh.config.experimental_connect_to_cluster(dmesh.train.ClusterSpec(spec), "chief")
    with dmesh.distribute.coordinator.ClusterCoordinator() as coordinator:
        values = coordinator.fetch([coordinator.schedule(double, (n,)) for n in range(6)])
        indices = {{index for _, index in values}}
        print("values", [value for value, _ in values], indices <= {{0, 1}}, flush=True)
dmesh.shutdown_accelerator_system()
"""


def test_a_chief_and_workers():
    ports = free_ports(3)
    own = {rank: {"RANK_HERE": str(rank)} for rank in range(3)}
    with run_clients(3, PROGRAM.format(ports=ports), ports=ports, per_client=own) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
        assert clients[0].out.splitlines()[-1] == "values [0, 2, 4, 6, 8, 10] True"
        assert clients[2].out.splitlines()[-1] == f"ends grpc://127.0.0.1:{ports[2]}"
