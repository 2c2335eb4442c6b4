"""`dmesh run` with the real SDK: the examples as a user starts them, and what a killed worker looks like."""

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.e2e.clients import Process, run_server

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples" / "digits_softmax.py")
HELLO = str(ROOT / "examples" / "hello_mesh.py")
HEAT = str(ROOT / "examples" / "heat_halo.py")


def dmesh_run(*arguments: str) -> Process:
    return Process([sys.executable, "-m", "dmesh", "run", *arguments], {})


def check_digits(run: Process) -> None:
    assert run.wait() == 0, run.err
    assert "equals the single-process run to 1e-6: yes" in run.out
    accuracy = re.search(r"accuracy\D*(\d+\.\d+)", run.out.splitlines()[-2] + run.out.splitlines()[-1])
    assert accuracy is not None, run.out
    value = float(accuracy.group(1))
    assert (value if value <= 1 else value / 100) > 0.9
    assert re.search(r"^\[0\] epoch", run.out, re.M), "a progress line per epoch"


def test_the_demo_trains_on_real_data():
    check_digits(dmesh_run("-n", "4", DIGITS))


def test_the_same_demo_against_a_standalone_server():
    with run_server() as (_, address):
        check_digits(dmesh_run("-n", "3", "--coordinator", address, DIGITS))


def test_the_demo_in_a_single_process():
    run = Process([sys.executable, DIGITS], {})
    assert run.wait() == 0, run.err
    assert "equals the single-process run to 1e-6: yes" in run.out


def test_hello_mesh():
    run = dmesh_run("-n", "4", "--cpu-devices", "2", HELLO)
    assert run.wait() == 0, run.err
    for rank in range(4):
        assert f"/job:worker/replica:0/task:{rank}/device:CPU:0" in run.out
    assert len(Path(HELLO).read_text().splitlines()) <= 32


@pytest.mark.parametrize("points", ["1000", "12"], ids=["parts of 250 points", "parts of 3 points"])
def test_the_halo_exchange_is_what_one_process_computes(points: str):
    run = dmesh_run("-n", "4", HEAT, "--points", points)
    assert run.wait() == 0, run.err
    assert f"500 steps of {points} points by 4 clients" in run.out
    assert "equals the single-process run: yes" in run.out


def test_a_killed_worker_is_what_dmesh_run_reports_first():
    with run_server() as (_, address):
        run = dmesh_run("-n", "4", "--coordinator", address, DIGITS, "--epochs", "100000")
        run.wait_for("epoch")
        clients = {
            process.environ()["DTENSOR_CLIENT_ID"]: process
            for process in psutil.Process(run.pid).children(recursive=True)
            if "DTENSOR_CLIENT_ID" in process.environ()
        }
        clients["2"].send_signal(signal.SIGKILL)
        assert run.wait() == 128 + signal.SIGKILL
        for rank in (0, 1, 3):
            assert re.search(
                rf"^\[{rank}\] dmesh\.errors\.PeerLostError: .*/job:worker/task:2", run.err, re.M
            ), run.err
        failed = [line for line in run.err.splitlines() if line.startswith("dmesh run: FAILED")]
        assert len(failed) == 1
        assert "rank 2 on host" in failed[0]
        assert "SIGKILL" in failed[0]
        assert not [process for process in clients.values() if process.is_running()]
