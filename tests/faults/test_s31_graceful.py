"""Scenario 31: ends that are asked for: SIGTERM, Ctrl-C once and twice; nothing is left behind."""

from __future__ import annotations

import signal
import socket
import sys
import time

import psutil
import pytest
from tests.faults.processes import Spawned, eventually, results
from tests.processes import running_after

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def port_is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))  # no SO_REUSEADDR: nobody listens, for certain
        except OSError:
            # Closed connections linger in TIME_WAIT; a listener would refuse this bind, too.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
                sock.listen()
            except OSError:
                return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_drains_and_ends_with_0(number, make_server, make_cluster, figures):
    """Its clients are told, wait for its successor, and go on there."""
    server = make_server(http=True).start()
    clients = make_cluster(4, server.address)
    clients[0].do("agent.key_value_set('k', 'v')")
    waiting = clients[0].submit("agent.barrier('b', timeout=80)")
    getting = clients[1].submit("agent.key_value_get('later', 80)", thread=True)
    asked_at = time.monotonic()
    assert server.terminate(number) == 0
    took = time.monotonic() - asked_at
    figures.add(f"{number.name} to the server's end, 4 clients", took)
    assert took <= 10
    assert port_is_free(server.port)
    assert "Traceback" not in server.err
    server.start()
    results([waiting, *(client.submit("agent.barrier('b', timeout=80)") for client in clients[1:])])
    clients[2].do("agent.key_value_set('later', 'v')")
    results([getting])
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []


def test_a_second_signal_ends_the_server_at_once(make_server, make_client):
    server = make_server("--shutdown-grace", "60").start()
    client = make_client(0, 1, server.address).join()
    server.process.send(signal.SIGINT)
    eventually(lambda: "signal_received" in server.err, "the first signal to be noticed")
    server.process.send(signal.SIGINT)
    code = server.process.wait(10)
    assert code in (0, 128 + signal.SIGINT, -signal.SIGINT)
    # Nothing that was acknowledged is lost by it.
    server.start()
    assert client.do("agent.key_value_set('k', 'v')") >= 1


def test_a_worker_that_is_asked_to_end_is_gone_and_the_others_know(make_server, make_cluster, figures):
    server = make_server().start()
    clients = make_cluster(3, server.address, sdk=True)
    waiting = clients[0].submit("agent.barrier('b', timeout=80)", thread=True)
    asked_at = time.monotonic()
    clients[2].process.send(signal.SIGTERM)
    assert clients[2].process.wait(10) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    event = clients[1].wait_event("departed", rank=2)
    figures.add("SIGTERM of a worker to each other's notice", event["at"] - asked_at)
    assert waiting.exception(60) is not None


PROGRAM = """
import os, time, numpy as np, dmesh
dmesh.initialize_accelerator_system()
print("up", os.getpid(), flush=True)
while True:
    dmesh.collectives.all_reduce(np.ones(10))
    time.sleep(0.01)
"""


@pytest.fixture
def run(artefacts, tmp_path):
    """`dmesh run` of a program that never ends; yields it and its workers once they are up."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    made: list[Spawned] = []

    def start() -> tuple[Spawned, list[psutil.Process]]:
        run = Spawned(
            "run",
            [sys.executable, "-m", "dmesh", "run", "-n", "3", str(script)],
            artefacts / "run.log",
            {},
        )
        made.append(run)
        stream = run._process.stdout
        assert stream is not None
        pids = []
        while len(pids) < 3:
            line = stream.readline().decode()
            assert line, run.err
            if " up " in f" {line}":
                pids.append(int(line.split()[-1]))
        return run, [psutil.Process(pid) for pid in pids]

    yield start
    for process in made:
        process.kill()
        process._process.stdout.close()


@pytest.mark.parametrize(
    ("numbers", "codes", "within"),
    [
        ([signal.SIGTERM], {143, -15}, 15),
        ([signal.SIGINT], {130, -2}, 15),
        ([signal.SIGINT, signal.SIGINT], {130, -2, 137}, 10),
        ([signal.SIGKILL], {-9}, 10),
    ],
)
def test_no_worker_outlives_dmesh_run(numbers, codes, within, run):
    launcher, workers = run()
    for number in numbers:
        launcher.send(number)
        time.sleep(0.2 if len(numbers) > 1 else 0)  # two signals at once would be one
    assert launcher.wait(within) in codes
    alive = running_after(workers, timeout=15)
    assert not alive, f"orphans: {alive}"
