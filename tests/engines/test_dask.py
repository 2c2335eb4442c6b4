"""`dmesh.launch` on the worker processes of a Dask cluster."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest
from tests.e2e.clients import Process
from tests.engines import programs
from tests.engines.clusters import ROOT, cluster
from tests.faults import network
from tests.waiting import eventually

import dmesh
from dmesh.errors import ArgumentTypeError, EngineError, PeerLostError, RankFailedError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
HOST = socket.gethostname()
PATIENCE = 300.0


@pytest.fixture(scope="module")
def scheduler():
    pytest.importorskip("distributed", reason="see `make engines`")
    with cluster("dask") as address:
        yield address


@pytest.fixture
def client(scheduler):
    """A client of 4 workers, also after a test has killed one."""
    import distributed

    with distributed.Client(scheduler) as client:
        client.wait_for_workers(4)
        yield client


def test_four_workers_reduce_an_array(client):
    workers = {info["pid"]: address for address, info in client.run(dask_process).items()}
    before = client.run(variables)
    found = dmesh.launch(programs.sums, (10,), {"offset": 1}, n=4, on=client)
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert {pid for _, pid, _ in found} == workers.keys()
    assert [total for _, _, total in found] == [[64, 4]] * 4
    assert client.run(variables) == before


def dask_process() -> dict[str, int]:
    return {"pid": os.getpid()}


def variables() -> list[str]:
    return [name for name in os.environ if name.startswith(("DMESH_", "DTENSOR_"))]


def test_a_future_of_the_cluster_is_an_argument(client):
    scale = client.submit(int, "7", pure=False)
    found = dmesh.launch(programs.sums, (scale,), n=2, on=client)
    assert [total for _, _, total in found] == [[7, 2]] * 2


def test_the_cause_is_raised_and_the_workers_can_be_used_again(client):
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.raises, (1,), n=4, on=client)
    error = caught.value
    assert isinstance(error.__cause__, ValueError)
    assert str(error).startswith(
        f"rank 1 on host {HOST} (pid {error.pid}) raised ValueError: the learning rate"
    )
    assert len(dmesh.launch(programs.sums, (1,), n=4, on=client)) == 4


def test_a_killed_worker_is_named(client):
    pids = {address: info["pid"] for address, info in client.run(dask_process).items()}
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.dies, (2,), n=4, on=client)
    error = caught.value
    address = next(address for address, pid in pids.items() if pid == error.pid)
    assert (error.rank, error.host) == (2, HOST)
    assert str(error).startswith(
        f"rank 2 on host {HOST} (pid {error.pid}) was lost: its process, the Dask worker {address}, is gone"
    )


def test_a_worker_that_the_nanny_has_started_again_takes_its_place(client):
    before = {info["pid"] for info in client.run(dask_process).values()}
    found = dmesh.launch(programs.recovers, (1,), n=4, on=client, max_restarts=1)
    assert [rejoined for rejoined, _, _ in found] == [False, True, False, False]
    assert [total for _, _, total in found] == [4, 4, 4, 4]
    assert found[1][1] not in before


def test_a_rank_that_computes_on_is_given_up_and_fails_at_its_next_call(client, tmp_path):
    with pytest.raises(RankFailedError, match=r"(?s)^rank 1 .*still running: rank 0"):
        dmesh.launch(programs.computes_on, (1, str(tmp_path)), n=2, on=client)
    (tmp_path / "go").touch()
    eventually((tmp_path / "0").exists)
    assert len(dmesh.launch(programs.sums, (1,), n=4, on=client)) == 4


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_workers_on_other_hosts_reach_the_server_where_this_host_is_in_their_network(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with network.Network(3) as hosts, contextlib.ExitStack() as stack:

        def start(host: network.Host, *command: str, **environ: str) -> Process:
            process = Process([*host.prefix, sys.executable, *command], environ, fresh=True)
            stack.callback(process.end)
            return process

        here, *others = hosts.hosts
        scheduler = start(
            here, "-m", "distributed.cli.dask_scheduler", "--host", here.address, "--no-dashboard"
        )
        scheduler.wait_for("Scheduler at:", "err")
        for host in others:
            where = "--host", host.address, "--nthreads", "1", "--no-nanny", "--no-dashboard"
            start(
                host,
                "-m",
                "distributed.cli.dask_worker",
                f"tcp://{here.address}:8786",
                *where,
                PYTHONPATH=ROOT,
            )
        refused = start(here, str(script), here.address, PYTHONPATH=ROOT)
        assert refused.wait(PATIENCE) == 1
        assert "ConfigurationError: ranks would run on other hosts" in refused.err
        done = start(here, str(script), here.address, PYTHONPATH=ROOT, DMESH_INSECURE="1")
        assert done.wait(PATIENCE) == 0, done.err
        assert done.out.splitlines() == [f"{here.address} 2"] * 2


SCRIPT = """
import sys
from distributed import Client
import dmesh
from tests.engines import programs
with Client(f"tcp://{sys.argv[1]}:8786") as client:
    client.wait_for_workers(2)
    for address, total in dmesh.launch(programs.meets, n=2, on=client):
        print(address.rpartition(":")[0], total)
"""


def test_too_few_workers_are_refused(client):
    with pytest.raises(EngineError, match=r"launch\(n=9\) needs 9 Dask workers .* has 4\. Start more"):
        dmesh.launch(programs.sums, (1,), n=9, on=client)


def test_workers_that_are_threads_are_refused():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0") as workers,
        workers.get_client() as client,
        pytest.raises(EngineError, match=r"the cluster has 0 \(and 2 in the process of another worker or of"),
    ):
        dmesh.launch(programs.sums, (1,), n=2, on=client)


async def test_an_asynchronous_client_is_refused(scheduler):
    import distributed

    async with distributed.Client(scheduler, asynchronous=True) as client:
        with pytest.raises(ArgumentTypeError, match="Create the client without asynchronous=True"):
            dmesh.launch(programs.sums, (1,), n=2, on=client)


def test_a_consequence_is_an_error_of_dmesh(client):
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.raises, (0,), n=2, on=client)
    assert [type(failure.__cause__) for failure in caught.value.failures] == [ValueError, PeerLostError]
