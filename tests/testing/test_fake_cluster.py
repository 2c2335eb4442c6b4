"""Ordinary programs run unchanged as all clients of a fake cluster."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dmesh
from dmesh.errors import (
    BarrierError,
    BarrierTimeoutError,
    ConfigurationError,
    DeviceError,
    NotInitializedError,
    PeerLostError,
)
from dmesh.testing import FakeCluster, RankHangsError, RankKilledError


def ordinary_program(scale: float) -> tuple[int, int, float, str]:
    dmesh.initialize_accelerator_system()
    mesh = dmesh.create_distributed_mesh([("batch", dmesh.num_clients())])
    total = dmesh.collectives.all_reduce(np.array(scale * dmesh.client_id()), group=mesh.group("batch"))
    dmesh.barrier(mesh, "end")
    dmesh.shutdown_accelerator_system()
    return dmesh.client_id(), dmesh.num_clients(), float(total), dmesh.full_job_name()


def test_a_program_runs_as_every_client() -> None:
    with FakeCluster(4) as cluster:
        results = cluster.run(ordinary_program, 2.0)
    assert results == [(rank, 4, 12.0, f"worker/replica:0/task:{rank}") for rank in range(4)]


def test_nothing_of_it_is_left_in_the_test() -> None:
    before = set(threading.enumerate())  # other tests of this process may have left theirs
    with FakeCluster(2) as cluster:
        cluster.run(ordinary_program, 1.0)
        with pytest.raises(NotInitializedError):
            dmesh.collectives.world()
        assert dmesh.num_clients() == 1
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("dmesh-")]


def test_coordination_is_the_real_thing() -> None:
    def program() -> tuple[int, list[str]]:
        if dmesh.client_id() == 0:
            dmesh.coordination.key_value_set("seed", "17")
        seed = int(dmesh.coordination.key_value_get("seed", timeout=30))
        dmesh.coordination.barrier("read", timeout=30)
        return seed, [member.task for member in dmesh.coordination.members()]

    with FakeCluster(3, job_name="trainer") as cluster:
        results = cluster.run(program)
        assert results == [(17, [f"/job:trainer/task:{rank}" for rank in range(3)])] * 3
        # The clients are there for the next program, too.
        assert cluster.run(lambda: dmesh.coordination.key_value_try_get("seed")) == [b"17"] * 3


def test_devices_and_environment_are_each_clients_own() -> None:
    def program() -> tuple[int, int, list[str]]:
        dmesh.initialize_accelerator_system(num_logical_cpu_devices=2)
        names = [str(spec) for spec in dmesh.local_devices("CPU")]
        return dmesh.num_local_devices("CPU"), dmesh.num_global_devices("CPU"), names

    with FakeCluster(2, num_cpu_devices=2) as cluster:
        results = cluster.run(program)
        assert [result[:2] for result in results] == [(2, 4), (2, 4)]
        assert "task:1/device:CPU:1" in results[1][2][1]
        with pytest.raises(DeviceError, match="num_cpu_devices"):
            cluster.run(lambda: dmesh.initialize_accelerator_system(num_logical_cpu_devices=3))


def test_the_first_exception_is_raised_and_the_others_are_told() -> None:
    def program() -> None:
        if dmesh.client_id() == 2:
            raise ZeroDivisionError("the learning rate")
        dmesh.collectives.all_reduce(np.ones(3))

    with FakeCluster(4) as cluster, pytest.raises(ZeroDivisionError, match="learning rate") as caught:
        cluster.run(program)
    assert "raised by rank 2" in caught.value.__notes__[0]
    with FakeCluster(4) as cluster:
        outcomes = cluster.run(program, check=False)
        for rank in (0, 1, 3):
            assert isinstance(outcomes[rank], PeerLostError)
            assert outcomes[rank].rank == 2
            assert "learning rate" in str(outcomes[rank])
        with pytest.raises(ConfigurationError, match="dead"):
            cluster.run(program, ranks=[2])


def test_a_killed_rank_is_lost_to_collectives_and_barriers() -> None:
    ready = threading.Barrier(4)

    def program() -> str:
        dmesh.coordination.barrier("all here", timeout=30)
        ready.wait(30)
        with pytest.raises(PeerLostError):
            dmesh.collectives.all_reduce(np.ones(3))
        try:
            dmesh.coordination.barrier("again", timeout=30)
        except BarrierError as error:
            return error.members[0].task
        return "passed"

    def victim() -> None:
        dmesh.coordination.barrier("all here", timeout=30)
        ready.wait(30)
        killed.wait(30)
        dmesh.collectives.barrier()

    killed = threading.Event()
    with FakeCluster(3) as cluster:

        def kill() -> None:
            ready.wait(30)
            cluster.kill(1)
            killed.set()

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = cluster.run(lambda: (victim if dmesh.client_id() == 1 else program)())
        killer.join(30)
    assert isinstance(outcomes[1], RankKilledError)
    assert [outcomes[0], outcomes[2]] == ["/job:worker/task:1"] * 2


def test_held_messages_wait_until_they_are_released() -> None:
    with FakeCluster(2) as cluster:
        cluster.hold(0, 1)

        def program() -> str:
            try:
                dmesh.collectives.barrier(timeout=0.2)
            except TimeoutError:
                return "late"
            return "passed"

        assert "late" in cluster.run(program)
        cluster.release(0, 1)


def test_a_program_that_hangs_is_named_with_its_stack() -> None:
    def program() -> None:
        if dmesh.client_id() == 1:
            dmesh.collectives.recv(np.zeros(1), 0)

    with FakeCluster(2) as cluster, pytest.raises(RankHangsError) as caught:
        cluster.run(program, limit=0.5)
    assert "rank 1 of 2" in str(caught.value)
    assert "in program" in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dmesh-fake")]


def test_a_barrier_timeout_names_the_rank_that_does_not_come() -> None:
    def program() -> str:
        if dmesh.client_id() == 0:
            return ""
        with pytest.raises(BarrierTimeoutError) as caught:
            dmesh.coordination.barrier("b", timeout=0.3)
        return ",".join(member.task for member in caught.value.members)

    with FakeCluster(2) as cluster:
        assert cluster.run(program) == ["", "/job:worker/task:0"]


@pytest.mark.parametrize("size", [0, True, "2", 5000])
def test_bad_sizes_are_refused(size) -> None:
    with pytest.raises(ConfigurationError, match="size"):
        FakeCluster(size)


def test_unknown_and_dead_ranks_are_refused() -> None:
    with FakeCluster(2) as cluster:
        with pytest.raises(ConfigurationError, match="no rank 2"):
            cluster.kill(2)
        cluster.kill(1)
        with pytest.raises(ConfigurationError, match="dead"):
            cluster.kill(1)
        with pytest.raises(ConfigurationError, match="twice"):
            cluster.run(print, ranks=[0, 0])
    with pytest.raises(ConfigurationError, match="closed"):
        cluster.run(print)
