"""Peers that encrypt what they send each other, with certificates that `dmesh certs` has made."""

import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.e2e.clients import Process, free_ports, run_clients

from dmesh import native
from dmesh.cli import main

COMPUTE = """
import os
import numpy as np, dmesh
from dmesh.collectives.communicator import Communicator
dmesh.initialize_accelerator_system(enable_coordination_service=os.environ.get("SERVER") != "none")
rank, size = dmesh.client_id(), dmesh.num_clients()
for count in (1, 10_000, 1_000_000):
    total = dmesh.collectives.all_reduce(np.arange(count) * (rank + 1.0))
    assert total.tobytes() == (np.arange(count) * float(size * (size + 1) // 2)).tobytes()
transport = dmesh.runtime.context.current().get(Communicator).transport
kinds = {type(link._socket).__name__ for link in transport._connections}
print("sockets", sorted(kinds), dmesh.collectives.world().current.backends[0].name, flush=True)
dmesh.shutdown_accelerator_system()
print("bye", flush=True)
"""

WAIT = """
import numpy as np, dmesh
from dmesh.collectives.communicator import Communicator
dmesh.initialize_accelerator_system()
dmesh.collectives.all_reduce(np.ones(3))
print("in", flush=True)
try:
    dmesh.collectives.all_reduce(np.ones(3)) if dmesh.client_id() else input()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""

JOIN = """
import numpy as np, os, dmesh
try:
    dmesh.initialize_accelerator_system(enable_coordination_service=os.environ.get("SERVER") != "none")
    dmesh.collectives.all_reduce(np.ones(3))
    print("joined", flush=True)
except Exception as error:
    print(type(error).__name__, "|", error, flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "tls"
    assert main(["certs", "init", str(directory)]) == 0
    for rank in range(2):
        assert main(["certs", "issue", str(directory), "--name", f"w{rank}", "--host", "127.0.0.1"]) == 0
    return directory


def environ(tls: Path, rank: int) -> dict[str, str]:
    return {
        "DMESH_PEER_TLS": "1",
        "DMESH_TLS_CA": str(tls / "ca.pem"),
        "DMESH_TLS_CERT": str(tls / f"w{rank}.pem"),
        "DMESH_TLS_KEY": str(tls / f"w{rank}.key"),
    }


@pytest.mark.parametrize(("server", "memory", "backend"), [("inside", "", "shm"), ("none", "0", "tcp")])
def test_dmesh_run_with_certificates_of_dmesh_certs(tls, tmp_path, server, memory, backend):
    script = tmp_path / "compute.py"
    script.write_text(COMPUTE)
    run = Process(
        [sys.executable, "-m", "dmesh", "run", "-n", "2", str(script)],
        {**environ(tls, 0), "SERVER": server, "DMESH_SHARED_MEMORY": memory},
    )
    assert run.wait() == 0, run.err
    for rank in range(2):
        assert f"[{rank}] sockets ['SecureSocket'] {backend if native.core() else 'messages'}" in run.out
        assert f"[{rank}] bye" in run.out


def test_without_the_setting_nothing_is_encrypted_as_before(tls, tmp_path):
    script = tmp_path / "compute.py"
    script.write_text(COMPUTE)
    run = Process(
        [sys.executable, "-m", "dmesh", "run", "-n", "2", str(script)],
        {**environ(tls, 0), "DMESH_PEER_TLS": ""},
    )
    assert run.wait() == 0, run.err
    assert run.out.count("sockets ['socket']") == 2


def test_a_killed_peer_is_noticed(tls):
    with run_clients(
        2,
        WAIT,
        environ={"DMESH_TOKEN": "t" * 32},
        per_client={r: environ(tls, r) for r in range(2)},
        stdin=True,
    ) as clients:
        for client in clients.values():
            client.wait_for("in")
        clients[0].signal(signal.SIGKILL)
        clients[1].wait_for("PeerLostError", timeout=30)


@pytest.mark.parametrize("server", ["inside", "none"])
@pytest.mark.parametrize("plain", [0, 1])
def test_one_client_without_the_setting_is_an_error_that_names_it(tls, plain, server):
    per_client = {rank: environ(tls, rank) for rank in range(2)}
    per_client[plain]["DMESH_PEER_TLS"] = "0"
    common = {"DMESH_TOKEN": "t" * 32, "SERVER": server}
    with run_clients(2, JOIN, environ=common, per_client=per_client) as clients:
        said = {rank: client.wait_for("Error", timeout=30) for rank, client in clients.items()}
        for client in clients.values():
            client.wait()
    told = [
        rank
        for rank, client in clients.items()
        if "DMESH_PEER_TLS must be the same for all clients" in said[rank] + client.err
        and f"task:{1 - rank}" in said[rank] + client.err
    ]
    assert told == [0, 1], (said, {rank: client.err for rank, client in clients.items()})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"DMESH_TLS_CERT": "", "DMESH_TLS_KEY": ""}, "DMESH_TLS_CERT and DMESH_TLS_KEY are not set"),
        ({"DMESH_TLS_CERT": "/nowhere/cert.pem"}, "/nowhere/cert.pem cannot be read"),
        ({"DMESH_TLS_CA": "/nowhere/ca.pem"}, "/nowhere/ca.pem cannot be read"),
    ],
    ids=["none", "no such certificate", "no such authority"],
)
@pytest.mark.parametrize("server", ["inside", "none"])
def test_a_configuration_that_cannot_work_is_refused_before_anything_is_opened(tls, change, problem, server):
    taken = free_ports(2)
    variables = {**environ(tls, 0), **change, "DMESH_TOKEN": "t" * 32, "SERVER": server}
    # A listener on the client's own port: were anything opened before, it would be an AddressInUseError.
    with (
        socket.create_server(("127.0.0.1", taken[0])),
        run_clients(2, JOIN, environ=variables, only=(0,), ports=taken) as clients,
    ):
        line = clients[0].wait_for("Error")
    assert line.startswith("ConfigurationError"), line
    assert problem in line
