"""One training script, unchanged, under every launcher: each says in its own way who belongs together."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.distribute.launches import open_mpi, slurm_task, tf_config, torchrun
from tests.e2e.clients import DEADLINE, Process, free_ports, run_server

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "digits_softmax.py")
TRAINING = [SCRIPT, "--epochs", "2"]

HELLO = """
import numpy as np, dmesh
before = (dmesh.client_id(), dmesh.num_clients())
dmesh.initialize_accelerator_system("CPU")
assert (dmesh.client_id(), dmesh.num_clients()) == before
print("sum", dmesh.collectives.all_reduce(np.array(10.0 ** dmesh.client_id())))
print("jobs", " ".join(dmesh.jobs()), dmesh.full_job_name())
dmesh.shutdown_accelerator_system()
"""


RESOLVED = """
import json, dmesh
dmesh.initialize_accelerator_system("CPU")
resolver = dmesh.distribute.MultiWorkerMirroredStrategy().cluster_resolver
task = resolver.task_type, resolver.task_id
print(json.dumps([task, resolver.cluster_spec().as_dict(), resolver.cluster_spec().task_address(*task)]))
dmesh.shutdown_accelerator_system()
"""


@contextlib.contextmanager
def started(arguments: list[str], *environments: Mapping[str, str]) -> Iterator[list[Process]]:
    """Starts a process in each environment; none is left when the block ends."""
    processes: list[Process] = []
    try:
        for environ in environments:
            patience = {"DMESH_INIT_TIMEOUT": str(DEADLINE)}
            processes.append(Process([sys.executable, *arguments], {**patience, **environ}))
        yield processes
    finally:
        for process in processes:
            process.end()


def check_training(out: str, clients: int = 2) -> None:
    """Refuses an output that is not that of a training of all clients together."""
    assert f"{clients} clients share 1437 images" in out
    assert "equals the single-process run to 1e-6: yes" in out


def ran_together(arguments: list[str], *environments: Mapping[str, str]) -> list[str]:
    """Runs a process in each environment; returns what they said."""
    with started(arguments, *environments) as processes:
        codes = [process.wait() for process in processes]
        assert codes == [0] * len(codes), "\n".join(process.err for process in processes)
        return [process.out for process in processes]


def slurm_step() -> list[dict[str, str]]:
    """Returns what srun sets for two tasks on this host."""
    job = random.randrange(1, 1 << 30)
    return [
        slurm_task(rank, nodes="localhost", tasks="2", num_tasks=2, node="localhost", local=rank, job=job)
        for rank in range(2)
    ]


def torchrun_workers() -> list[dict[str, str]]:
    """Returns what torchrun sets for two workers on this host."""
    [port] = free_ports(1)
    return [torchrun(rank, 2, port=port) for rank in range(2)]


def tf_config_tasks() -> list[dict[str, str]]:
    """Returns what a chief and a worker are told by `TF_CONFIG`."""
    chief, worker = free_ports(2)
    cluster = {"chief": [f"127.0.0.1:{chief}"], "worker": [f"127.0.0.1:{worker}"]}
    return [{"TF_CONFIG": tf_config(cluster, {"type": job, "index": 0})} for job in cluster]


ENVIRONMENTS = {"slurm": slurm_step, "torchrun": torchrun_workers, "tf_config": tf_config_tasks}
"""What makes the environments of two processes of each launcher that only sets variables. What Kubernetes
sets belongs here, too."""


def test_the_script_starts_under_dmesh_run():
    run = subprocess.run(
        [sys.executable, "-m", "dmesh", "run", "-n", "2", *TRAINING],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    check_training(run.stdout)


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_the_script_starts_in_the_environment_of(launcher):
    check_training(ran_together(TRAINING, *ENVIRONMENTS[launcher]())[0])


def listed_tasks() -> list[dict[str, str]]:
    """Returns what `dmesh run` sets for two clients."""
    jobs = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    return [{"DTENSOR_JOBS": jobs, "DTENSOR_CLIENT_ID": str(rank)} for rank in range(2)]


def tasks_of_two_hosts() -> list[dict[str, str]]:
    """Returns what mpirun sets for a process of each of two hosts: two loopback addresses stand for them."""
    base = str(free_ports(1)[0])
    return [
        {**open_mpi(rank, 2, 0, 1), "DMESH_PORT_BASE": base, "DMESH_BIND_HOST": f"127.0.0.{rank + 1}"}
        for rank in range(2)
    ]


@pytest.mark.parametrize("make", [listed_tasks, tasks_of_two_hosts, *ENVIRONMENTS.values()])
def test_a_strategy_knows_its_task_and_its_cluster(make):
    outputs = ran_together(["-c", RESOLVED], *make())
    tasks, clusters, masters = zip(*map(json.loads, outputs), strict=True)
    led = make is tf_config_tasks
    assert tasks == ((["chief", 0] if led else ["worker", 0]), ["worker", 0 if led else 1])
    assert clusters[0] == clusters[1]
    assert {job: len(addresses) for job, addresses in clusters[0].items()} == (
        {"chief": 1, "worker": 1} if led else {"worker": 2}
    )
    for (job, index), master in zip(tasks, masters, strict=True):
        assert master == clusters[0][job][index]


@pytest.mark.mpi
@pytest.mark.parametrize("environ", [{}, {"DMESH_BACKEND": "mpi"}], ids=["tcp", "mpi"])
def test_the_script_starts_under_mpirun(environ):
    mpirun = shutil.which("mpirun")
    assert mpirun is not None, "there is no mpirun: see `make mpi`"
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip(f"this is not Open MPI's mpirun: {version.splitlines()[0]}")
    run = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *TRAINING],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    check_training(run.stdout)


@pytest.mark.slow
def test_the_script_starts_under_srun():
    """Where there is a Slurm; elsewhere its variables have to do."""
    if shutil.which("srun") is None:
        pytest.skip("there is no srun")
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60, check=False)
    if ping.returncode != 0:
        pytest.skip(f"srun is installed, but no Slurm answers: {(ping.stdout + ping.stderr).strip()[-200:]}")
    run = subprocess.run(
        ["srun", "--immediate=10", "-n", "2", sys.executable, *TRAINING],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    check_training(run.stdout)


@pytest.mark.parametrize("variables", [open_mpi, torchrun], ids=["mpirun", "torchrun"])
def test_hosts_that_do_not_know_each_other_meet_at_the_first(variables):
    """Two loopback addresses stand for two hosts: each process is the only one of its own."""
    base = free_ports(1)[0]
    outputs = ran_together(
        ["-c", HELLO],
        *(
            {
                **variables(rank, 2, 0, 1),
                "DMESH_BIND_HOST": f"127.0.0.{rank + 1}",
                "DMESH_PORT_BASE": str(base),
            }
            for rank in range(2)
        ),
    )
    for rank, out in enumerate(outputs):
        assert "sum 11.0" in out
        jobs = out.split("jobs ")[1].split()
        assert jobs == [f"127.0.0.1:{base}", f"127.0.0.2:{base}", f"worker/replica:0/task:{rank}"]


def test_a_shell_of_an_allocation_runs_alone():
    [out] = ran_together(["-c", HELLO], {**slurm_task(0, nodes="n1", tasks="1", num_tasks=1)})
    assert "sum 1.0" in out
    assert "localhost/replica:0/task:0" in out


def test_hosts_that_do_not_know_each_other_meet_at_a_server():
    """Rank 0 need not be on the host of mpirun then."""
    with run_server() as (_, address):
        variables = {"DMESH_COORDINATOR": address, "DMESH_CLUSTER": "mpirun",
                     "DMESH_PORT_BASE": str(free_ports(1)[0]),
                     "OMPI_MCA_orte_hnp_uri": "1.0;tcp://198.51.100.1:5"}  # fmt: skip
        outputs = ran_together(["-c", HELLO], *({**open_mpi(rank, 2, 0, 1), **variables,
                               "DMESH_BIND_HOST": f"127.0.0.{rank + 1}"} for rank in range(2)))  # fmt: skip
    assert ["sum 11.0" in out for out in outputs] == [True, True]
