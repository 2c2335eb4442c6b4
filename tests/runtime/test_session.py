"""A client as a `with` block and as a decorator; its place among the others; the barrier of all."""

from __future__ import annotations

import numpy as np
import pytest
from tests.e2e.clients import run_clients

import dmesh
from dmesh import errors
from dmesh.coordination.members import Member, Members, MemberState, Process
from dmesh.runtime import context, ranks
from dmesh.testing import FakeCluster


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMESH_LAUNCHER", "none")
    monkeypatch.delenv("DTENSOR_JOBS", raising=False)


def test_a_session_begins_and_ends_the_system() -> None:
    with dmesh.session("CPU", num_logical_cpu_devices=2) as me:
        assert (me.rank, me.size, me.local_rank, me.local_size, me.device_type) == (0, 1, 0, 1, "CPU")
        assert dmesh.num_local_devices("CPU") == 2
        assert repr(me) == "<dmesh.session: rank 0 of 1, CPU>"
    assert context.current_or_none() is None
    assert repr(me) == "<dmesh.session, not open>"


def test_a_session_ends_with_its_block_whatever_ends_that() -> None:
    with pytest.raises(KeyError, match="mine"), dmesh.session("CPU"):
        raise KeyError("mine")
    assert context.current_or_none() is None
    with dmesh.session("CPU"):
        dmesh.shutdown_accelerator_system()  # the program's own
    with pytest.raises(errors.AlreadyInitializedError), dmesh.session("CPU"), dmesh.session("CPU"):
        pass
    assert context.current_or_none() is None


def test_what_initialize_returns_is_as_it_was() -> None:
    assert dmesh.initialize_accelerator_system("cpu") == "CPU"
    dmesh.shutdown_accelerator_system()


def test_main_runs_a_function_within_a_session() -> None:
    @dmesh.main
    def work(first: int, *, second: int) -> tuple[int, bool]:
        """Adds."""
        return first + second, context.current_or_none() is not None

    @dmesh.main("CPU", num_logical_cpu_devices=3)
    def devices() -> int:
        return dmesh.num_local_devices("CPU")

    assert work(1, second=2) == (3, True)
    assert work(3, second=4) == (7, True)
    assert (work.__name__, work.__doc__) == ("work", "Adds.")
    assert devices() == 3
    assert context.current_or_none() is None


def test_threads_of_a_fake_cluster_have_sessions_and_places() -> None:
    with FakeCluster(3) as cluster:

        def program() -> tuple[int, ...]:
            with dmesh.session("CPU") as me:
                dmesh.barrier()
                dmesh.barrier(barrier_name="again", timeout_in_ms=60_000)
                total = int(dmesh.collectives.all_reduce(np.array([1]))[0])
                return me.rank, me.size, me.local_size, total

        assert [found[:2] for found in cluster.run(program)] == [(0, 3), (1, 3), (2, 3)]


def test_ranks_are_counted_per_host() -> None:
    hosts = ["a", "b", "a", "a", "b"]
    members = Members(
        Member("worker", rank, 1, MemberState.CONNECTED, Process(host=host))
        for rank, host in enumerate(hosts)
    )
    found = []
    for rank in range(5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            patch.setattr(ranks, "known_members", lambda: members)
            found.append((ranks.local_rank(), ranks.local_size()))
    assert found == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_places_are_known_before_the_system_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1,a:2,a:3")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "2")
    assert (dmesh.rank(), dmesh.size(), dmesh.local_rank(), dmesh.local_size()) == (2, 4, 1, 3)


def test_a_barrier_takes_a_mesh_or_nothing() -> None:
    with dmesh.session("CPU"):
        dmesh.barrier()
        with pytest.raises(errors.MeshError, match=r"A name goes into barrier_name="):
            dmesh.barrier("epoch")  # type: ignore[arg-type]


def test_packages_show_their_public_names_only() -> None:
    assert dir(dmesh) == sorted(dmesh.__all__)
    assert {"session", "main", "rank", "size", "local_rank", "local_size", "progress", "summary"} <= set(
        dir(dmesh)
    )
    assert set(dir(dmesh.collectives)) == {*dmesh.collectives.__all__, "backends"}
    assert all(hasattr(dmesh.collectives, name) for name in dir(dmesh.collectives))


def test_a_client_whose_block_raises_fails_the_others_at_once() -> None:
    """They neither wait for it at the shutdown nor for a time-out, and exit codes are as without a block."""
    script = """
import numpy as np, dmesh
with dmesh.session("CPU") as me:
    dmesh.barrier()
    dmesh.collectives.all_reduce(np.ones(2))
    if me.rank == 1:
        raise RuntimeError("out of luck")
    dmesh.collectives.all_reduce(np.ones(2))
"""
    with run_clients(3, script) as clients:
        assert [clients[rank].wait() for rank in range(3)] == [75, 1, 75]
        assert clients[1].err.count("RuntimeError: out of luck") == 1
        for rank in (0, 2):
            assert "PeerLostError: lost rank 1" in clients[rank].err
            assert "RuntimeError: out of luck" in clients[rank].err


def test_a_failed_session_may_be_followed_by_another() -> None:
    script = """
import sys, numpy as np, dmesh
for attempt in range(2):
    try:
        with dmesh.session("CPU"):
            dmesh.barrier()
            raise RuntimeError("again")
    except RuntimeError:
        pass
with dmesh.session("CPU"):
    print(dmesh.collectives.all_reduce(np.ones(1))[0], flush=True)
"""
    with run_clients(1, script) as clients:
        assert clients[0].wait() == 0, clients[0].err
        assert clients[0].out == "1.0"


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("3", 3)])
def test_an_exit_within_the_block_is_what_it_is_outside(code: str, status: int) -> None:
    script = f"""
import sys, dmesh
with dmesh.session("CPU") as me:
    dmesh.barrier()
    if me.rank == 1:
        sys.exit({code})
    if {code}:
        try:
            dmesh.barrier()
        except dmesh.errors.BarrierError as error:
            print(error, flush=True)
            raise SystemExit(0)
"""
    with run_clients(2, script) as clients:
        assert clients[1].wait() == status
        if status:
            assert clients[0].wait() == 0
            assert "exited with code 3" in clients[0].out
