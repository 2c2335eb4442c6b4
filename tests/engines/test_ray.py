"""`dmesh.launch` on a Ray cluster of two nodes."""

from __future__ import annotations

import os
import socket

import pytest
from tests.engines import programs
from tests.engines.clusters import RAY_LOOPBACK, cluster

import dmesh
from dmesh.errors import ConfigurationError, EngineError, RankFailedError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of two CPUs each, to which this process is connected."""
    ray = pytest.importorskip("ray", reason="see `make engines`")
    with cluster("ray") as address:
        ray.init(address=address, _node_ip_address=RAY_LOOPBACK, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def test_a_process_that_is_connected_to_no_cluster_is_told_so():
    pytest.importorskip("ray")
    with pytest.raises(ConfigurationError, match=r"Call ray.init\(\) before dmesh.launch"):
        dmesh.launch(programs.sums, (1,), n=2, on="ray")


def test_four_actors_on_two_nodes_reduce_an_array(nodes):
    found = dmesh.launch(programs.sums, (10,), {"offset": 1}, n=4, on="ray")
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert len({pid for _, pid, _ in found} | {os.getpid()}) == 5
    assert [total for _, _, total in found] == [[64, 4]] * 4


def test_the_cause_is_raised(nodes):
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.raises, (1,), n=4, on="ray")
    error = caught.value
    assert isinstance(error.__cause__, ValueError)
    assert str(error).startswith(
        f"rank 1 on host {HOST} (pid {error.pid}) raised ValueError: the learning rate"
    )


def test_a_killed_actor_is_named(nodes):
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.dies, (2,), n=4, on="ray")
    error = caught.value
    assert (error.rank, error.host) == (2, HOST)
    assert str(error).startswith(
        f"rank 2 on host {HOST} (pid {error.pid}) was lost: its process, a Ray actor, is gone"
    )


def test_an_actor_that_is_started_again_takes_its_place(nodes):
    found = dmesh.launch(programs.recovers, (1,), n=4, on="ray", max_restarts=1)
    assert [rejoined for rejoined, _, _ in found] == [False, True, False, False]
    assert [total for _, _, total in found] == [4, 4, 4, 4]


def test_too_few_processors_are_refused(nodes):
    with pytest.raises(EngineError, match=r"launch\(n=9\) needs one CPU for each rank, but .* has 4\."):
        dmesh.launch(programs.sums, (1,), n=9, on="ray")


def test_a_cluster_without_room_is_refused_and_keeps_nothing(nodes, monkeypatch):
    import ray

    holder = ray.remote(num_cpus=2)(programs.Holder).remote()
    ray.get(holder.hold.remote())
    monkeypatch.setenv("DMESH_INIT_TIMEOUT", "1")
    with pytest.raises(EngineError, match=r"could not place 4 ranks at once within 1 s"):
        dmesh.launch(programs.sums, (1,), n=4, on="ray")
    ray.kill(holder)
    monkeypatch.delenv("DMESH_INIT_TIMEOUT")
    assert len(dmesh.launch(programs.sums, (1,), n=4, on="ray")) == 4
