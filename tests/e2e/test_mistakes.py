"""The typical mistakes, under `dmesh run`: what the user reads fits on the screen, and says what to do."""

import re
import signal
import sys

import pytest
from tests.e2e.clients import Process

BEGIN = """
import os, signal, time, dmesh
import numpy as np

def main():
    dmesh.collectives.all_reduce(np.ones(3))
    values = np.ones(4)
    if dmesh.client_id() == 1:
        {mistake}
    total = dmesh.collectives.all_reduce(values, timeout={timeout})

dmesh.initialize_accelerator_system()
main()
dmesh.shutdown_accelerator_system()
"""
MISTAKES = {
    "another shape": "values = np.ones(5)",
    "an exception": "raise ValueError('the learning rate is negative')",
    "a forgotten call": "time.sleep(100)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


def run(tmp_path, mistake, environ=None):
    """Returns exit code and lines of standard error."""
    path = tmp_path / "train.py"
    path.write_text(BEGIN.format(mistake=MISTAKES[mistake], timeout=1 if "forgotten" in mistake else 60))
    options = ["-n", "3", "--timeout-after-failure", "6"]  # the machine may be busy
    launch = Process([sys.executable, "-m", "dmesh", "run", *options, str(path)], environ or {})
    try:
        return launch.wait(), launch.err.splitlines()
    finally:
        launch.end()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_prints_at_most_15_lines(tmp_path, mistake):
    code, lines = run(tmp_path, mistake)
    err = "\n".join(lines)
    assert code == (128 + signal.SIGKILL if mistake == "killed" else 1)
    assert len(lines) <= 15, err
    assert "/collectives/" not in err
    (failed,) = [line for line in lines if line.startswith("dmesh run: FAILED")]
    if mistake == "another shape":
        assert "FAILED: ranks 0-2 on host" in failed
        assert err.count("rank 1 called all_reduce(sum, float64, shape (5,))") == 4
        assert "all_reduce(sum, float64, shape (4,))" in err
    elif mistake == "an exception":
        assert "FAILED: rank 1 on host" in failed
        assert re.search(r"\[1\]   File .*train.py\", line 9, in main", err)
        assert re.search(r"the others followed: ranks 0, 2 ended with exit code 75: PeerLostError", err)
    elif mistake == "a forgotten call":
        assert "FAILED: ranks 0, 2 on host" in failed
        assert "has not called #2" in err
        assert re.search(r"the others followed: rank 1 \(pid \d+\) was ended by dmesh run \(SIGTERM\)", err)
    else:
        assert re.search(r"FAILED: rank 1 on host \S+ \(pid \d+\) was killed by SIGKILL", failed)
        assert re.search(r"the others followed: ranks 0, 2 ended with exit code 75: PeerLostError", err)


def test_an_error_of_the_initialization_is_folded_too(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import dmesh\ndmesh.initialize_accelerator_system('ABACUS')\n")
    process = Process([sys.executable, str(path)], {}, fresh=True)
    try:
        assert process.wait() == 1
        assert len(process.err.splitlines()) == 4, process.err
        assert "DeviceError: unknown device type 'ABACUS'" in process.err
    finally:
        process.end()


def test_an_exception_keeps_its_frames_and_a_programs_own_hook_gets_them(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, traceback, dmesh\n"
        "def hook(kind, error, trace):\n"
        "    print(len(traceback.extract_tb(trace)), flush=True)\n"
        "sys.excepthook = hook\n"
        "dmesh.initialize_accelerator_system()\n"
        "dmesh.collectives.all_reduce([[1], []])\n"
    )
    process = Process([sys.executable, str(path)], {}, fresh=True)
    try:
        assert process.wait() == 1
        assert int(process.out) > 2
        assert process.err == ""
    finally:
        process.end()


def test_the_frames_of_dmesh_are_shown_on_request(tmp_path):
    _, lines = run(tmp_path, "another shape", {"DMESH_TRACEBACK": "full"})
    assert sum("/collectives/api.py" in line for line in lines) >= 3
    assert sum(line.endswith("Traceback (most recent call last):") for line in lines) >= 3
