"""Clients that are told how many they are and where they meet, but not which of them each is."""

import contextlib
import sys

import pytest
from tests.e2e.clients import Process, run_server

import dmesh
from dmesh.errors import ConfigurationError

PROGRAM = """
import os, numpy as np, dmesh
from dmesh.config import client_id
dmesh.initialize_accelerator_system()
rank = dmesh.client_id()
assert os.environ.get("DTENSOR_CLIENT_ID", str(rank)) == str(rank)
mesh = dmesh.create_distributed_mesh([("batch", dmesh.num_clients())])
assert mesh.group("batch").rank == rank == client_id()
print("rank", rank, "jobs", len(dmesh.jobs()), "sum", dmesh.collectives.all_reduce(np.array(10.0**rank)))
dmesh.shutdown_accelerator_system()
"""


@contextlib.contextmanager
def run(count, address, *per_client, script=PROGRAM):
    """Starts as many clients as there are settings of their own."""
    environ = {"DMESH_COORDINATOR": address, "DMESH_NUM_CLIENTS": str(count)}
    clients = []
    try:
        for own in per_client:
            clients.append(Process([sys.executable, "-c", script], {**environ, **own}))
        yield clients
    finally:
        for client in clients:
            client.end()


def test_the_coordinator_says_who_is_who_and_again_for_the_next_job():
    with run_server() as (_, address):
        for _ in range(2):
            with run(4, address, {}, {}, {}, {}) as clients:
                codes = [client.wait() for client in clients]
                assert codes == [0] * 4, [client.err for client in clients]
                lines = [client.out for client in clients]
            assert sorted(lines) == [f"rank {rank} jobs 4 sum 1111.0" for rank in range(4)]


def test_who_knows_its_id_keeps_it_as_in_an_indexed_job():
    ids = [{"DTENSOR_CLIENT_ID": "1"}, {"DTENSOR_CLIENT_ID": "0"}]
    with run_server() as (_, address), run(2, address, *ids) as clients:
        assert [client.wait() for client in clients] == [0, 0], [client.err for client in clients]
        assert [client.out for client in clients] == [f"rank {rank} jobs 2 sum 11.0" for rank in (1, 0)]


def test_one_too_many_is_refused_and_the_others_go_on():
    script = PROGRAM.replace("print(", "print('here', flush=True); sys.stdin.read(); print(").replace(
        "import os,", "import os, sys,"
    )
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_NUM_CLIENTS": "1"}
        first = Process([sys.executable, "-c", script], environ, stdin=True)
        try:
            first.wait_for("here")
            with run(1, address, {}) as [second]:
                assert second.wait() != 0
                assert "ClientIdTakenError: all 1 task slots of job 'worker'" in second.err
            first.close_stdin()
            assert first.wait() == 0, first.err
        finally:
            first.end()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "DMESH_COORDINATOR is not set"),
        ({"DMESH_COORDINATOR": "nowhere"}, "DMESH_COORDINATOR is 'nowhere': it has no port"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1", "DMESH_NUM_CLIENTS": "0"}, "from 1 to 100000"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1", "DTENSOR_CLIENT_ID": "4"}, "from 0 to 3"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1", "DMESH_PORT_BASE": "70000"}, "DMESH_PORT_BASE"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1", "DMESH_BACKEND": "mpi"}, "in an MPI launch"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1", "TPU_ACCELERATOR_TYPE": "v2-32"}, "with TPU devices"),
    ],
)
def test_settings_that_cannot_work(monkeypatch, environ, message):
    for name, value in {"DMESH_NUM_CLIENTS": "4", **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        dmesh.initialize_accelerator_system()
