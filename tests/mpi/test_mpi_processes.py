"""The mpi backend between real processes, under whatever mpirun there is; run by `make mpi`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.cases import case, some_cases
from tests.mpi.launch import RANK, WORKER, Launch

pytestmark = pytest.mark.mpi

OVER_MPI = {"DMESH_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("environ", [OVER_MPI, {}], ids=["over MPI", "in shared memory"])
@pytest.mark.parametrize("server", ["inside", "none"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_operation(size, server, environ):
    with Launch(size, "operations", environ={**environ, "SERVER": server}) as launch:
        backend = "mpi" if environ else "shm"
        assert list(launch.answers().values()) == [{"backend": backend}] * size


@pytest.mark.parametrize("environ", [OVER_MPI, {}], ids=["over MPI", "in shared memory"])
def test_any_calls_give_what_numpy_gives(environ, tmp_path):
    cases = []

    @given(some_cases(6), st.none() | st.sampled_from(["reset", "agree", "shrink"]).flatmap(case))
    def collect(drawn, failing):
        cases.extend(drawn if failing is None else [*drawn, failing])

    collect()
    (path := tmp_path / "cases.json").write_text(json.dumps(cases))
    with Launch(4, "properties", environ={**environ, "CASES": str(path)}) as launch:
        backend = "mpi" if environ else "shm"
        assert list(launch.answers().values()) == [{"backend": backend, "cases": len(cases)}] * 4


def test_the_public_conformance_tests_pass():
    with Launch(3, "conformance", environ=OVER_MPI) as launch:
        assert list(launch.answers().values()) == [{"backend": "mpi", "operations": 10}] * 3


def test_arrays_of_many_pieces():
    with Launch(4, "large", environ=OVER_MPI) as launch:
        assert list(launch.answers().values()) == [{"backend": "mpi"}] * 4


@pytest.mark.parametrize("do", ["groups", "exchange", "forked"])
def test_groups_threads_and_children(do):
    with Launch(4, do, environ=OVER_MPI) as launch:
        assert list(launch.answers().values()) == [{"backend": "mpi"}] * 4


def test_the_programs_own_messages_are_its_own():
    with Launch(3, "beside", environ=OVER_MPI) as launch:
        assert list(launch.answers().values()) == [{"backend": "mpi"}] * 3


def test_a_second_life_in_the_same_processes():
    with Launch(3, "again", environ=OVER_MPI) as launch:
        assert list(launch.answers().values()) == [{"backend": "mpi"}] * 3


@pytest.mark.parametrize("do", ["idle", "waiting"])
def test_a_waiting_client_burns_no_core(do):
    with Launch(2, do, environ=OVER_MPI) as launch:
        shares = [told["share"] for told in launch.answers().values()]
        assert max(shares) < 0.02, shares


# Failures ---------------------------------------------------------------------------------------------------


def by_rank(launch: Launch) -> dict[int, dict]:
    return {int(name.split("-")[0]): told for name, told in launch.said().items()}


@pytest.mark.parametrize("environ", [OVER_MPI, {}], ids=["over MPI", "in shared memory"])
def test_a_mismatch_is_told_on_all_ranks(environ):
    with Launch(4, "mismatch", environ=environ) as launch:
        launch.process.wait()
        told = by_rank(launch)
        assert sorted(told) == [0, 1, 2, 3]
        for each in told.values():
            assert each["error"] == "CollectiveMismatchError"
            assert "rank 1 called all_reduce(sum, float64, shape (4,))" in each["message"]


def test_a_time_out_names_who_is_missing():
    with Launch(4, "missing", environ=OVER_MPI) as launch:
        launch.process.wait()
        told = by_rank(launch)
        assert told.pop(2) == {"error": None}
        for each in told.values():
            assert each["error"] == "CollectiveTimeoutError"
            assert each["missing"] == [2]
            assert each["seconds"] < 10


def test_a_skipped_call_is_told_on_all_ranks():
    with Launch(4, "skipped", environ=OVER_MPI) as launch:
        launch.process.wait()
        told = by_rank(launch)
        assert sorted(told) == [0, 1, 2, 3]
        for each in told.values():
            assert each["error"] == "CollectiveMismatchError"
            assert "rank 2 has not called it and never will" in each["message"]
            assert each["seconds"] < 10


def test_an_exception_on_one_client_reaches_all():
    with Launch(4, "raising", environ=OVER_MPI) as launch:
        launch.process.wait()
        told = by_rank(launch)
        assert told.pop(2) == {"error": None}
        assert "ZeroDivisionError: the learning rate" in launch.process.err
        for each in told.values():
            assert (each["error"], each["rank"]) == ("PeerLostError", 2)
            assert "ZeroDivisionError: the learning rate" in each["message"]


def test_a_killed_process_ends_the_whole_job():
    """MPI's doing, not ours; `docs/backends.md` says so."""
    with Launch(4, "killed", environ={**OVER_MPI, "VICTIM": "2"}) as launch:
        assert launch.process.wait(30) != 0


@pytest.mark.parametrize("victim", [0, 2], ids=["with the coordination service", "without"])
def test_a_killed_process_is_named_where_mpi_lets_the_others_live(victim):
    """Open MPI may be told to; then the coordination service notices, or its absence does."""
    environ = {**OVER_MPI, "VICTIM": str(victim)}
    with Launch(4, "killed", environ=environ, outlives=True) as launch:
        launch.process.wait(90)
        told = by_rank(launch)
        assert sorted(told) == sorted({0, 1, 2, 3} - {victim}), launch.process.err
        for each in told.values():
            assert (each["error"], each["rank"]) == ("PeerLostError", victim), told
            assert each["seconds"] < 5


def stopped(launch: Launch) -> int:
    """Stops the process that says its pid, soon after."""
    deadline = time.monotonic() + 60
    while not (victims := [told["pid"] for told in launch.said().values() if "pid" in told]):
        assert time.monotonic() < deadline
        assert psutil.pid_exists(launch.process.pid)
        time.sleep(0.01)  # for what no event tells
    time.sleep(0.2)
    os.kill(victims[0], signal.SIGSTOP)
    return victims[0]


def test_a_process_killed_in_the_middle_of_large_arrays_is_named_at_once():
    """No call waits for MPI, which would wait for ever."""
    with Launch(3, "killed_midway", environ=OVER_MPI, outlives=True) as launch:
        victim = stopped(launch)
        time.sleep(0.5)  # all pieces that can move have done so
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        launch.process.wait(60)
        told = by_rank(launch)
        for rank in (0, 2):
            assert (told[rank]["error"], told[rank]["rank"]) == ("PeerLostError", 1), told
            assert told[rank]["at"] - killed_at < 3, told
            assert told[rank]["share"] < 0.05, told


def test_a_stopped_process_makes_nobody_wait_for_ever():
    """Stopped in the middle of large arrays: the others' call ends in time, and MPI spares their arrays."""
    with Launch(3, "frozen", environ=OVER_MPI) as launch:
        victim = stopped(launch)
        stopped_at = time.monotonic()
        while sum(rank != 1 for rank in by_rank(launch)) < 2:
            assert time.monotonic() < stopped_at + 8  # 3 of the call
            time.sleep(0.05)
        told = by_rank(launch)
        os.kill(victim, signal.SIGCONT)
        launch.process.wait()
        for rank in (0, 2):
            assert told[rank]["error"] == "CollectiveTimeoutError", told
            assert told[rank]["missing"] == [1]
            assert by_rank(launch)[rank]["untouched"], launch.process.err
        assert by_rank(launch)[1]["error"] in ("CollectiveTimeoutError", "PeerLostError", "CollectiveError")


# Launches that cannot work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [2, 4])
def test_another_number_of_processes_than_of_clients(jobs):
    with Launch(3, "refused", jobs=jobs, ids=f"DTENSOR_CLIENT_ID=$(({RANK} % 2))") as launch:
        for told in launch.answers().values():
            assert told["error"] == "ConfigurationError"
            assert f"DTENSOR_JOBS has {jobs} entries" in told["message"]
            assert "mpirun has started 3 processes" in told["message"]


def test_client_ids_that_nobody_has_set():
    with Launch(3, "refused", ids="") as launch:
        answers = launch.answers()
        assert len(answers) == 3
        for told in answers.values():
            assert told["error"] == "ConfigurationError"
            assert "DTENSOR_CLIENT_ID is 0 (the default) at the MPI ranks 0, 1, 2" in told["message"]


def test_an_mpi_for_one_thread():
    with Launch(2, "funneled") as launch:
        for told in launch.answers().values():
            assert told["error"] == "ConfigurationError"
            assert "needs MPI_THREAD_MULTIPLE" in told["message"]
            assert "MPI_THREAD_FUNNELED" in told["message"]


def test_a_client_that_mpirun_did_not_start(tmp_path):
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))
    }
    environ |= {"DTENSOR_JOBS": "127.0.0.1:20001,127.0.0.1:20002", "DMESH_BACKEND": "mpi"}
    environ["PYTHONPATH"] = str(WORKER.parents[2])
    subprocess.run([sys.executable, WORKER, "refused", tmp_path], env=environ, check=True, timeout=60)
    [answer] = tmp_path.glob("*.json")
    assert "it was not started by mpirun" in answer.read_text()
