"""`dmesh run --slurm` in allocations of a real Slurm: Debian's, with two slurmd on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines.packages import require
from tests.engines.slurm import PACKAGES, slurm
from tests.engines.test_ssh import REDUCE, STAYS
from tests.launch.launching import DMESH, Launch
from tests.launch.test_run import pids
from tests.processes import running_after

pytestmark = pytest.mark.engines
ALLOCATE = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require(PACKAGES)
    if os.geteuid() != 0:
        pytest.skip("runs Slurm's daemons, as root only")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    with slurm(folder) as environment:
        yield environment


@pytest.fixture
def run(cluster: dict[str, str], tmp_path: Path) -> Iterator:
    """Starts `dmesh run --slurm` in an allocation of two nodes with two tasks each."""
    started: list[Launch] = []

    def launch(*args: str, stdin: int = subprocess.DEVNULL) -> Launch:
        command = [*ALLOCATE, *DMESH, "run", "--slurm", *args]
        process = subprocess.Popen(
            command, env=cluster, cwd=tmp_path, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(Launch(process))
        return started[-1]

    yield launch
    for one in started:
        one.close()


def test_four_clients_on_two_nodes_reduce(run, script) -> None:
    source = REDUCE + "    print('node', os.environ['SLURMD_NODENAME'], os.environ['LOCAL_RANK'])\n"
    one = run(script(source))
    assert one.wait() == 0, one.err
    for rank in range(4):
        assert any(line.startswith(f"[{rank}] pid=") and "sum [4. 6.]" in line for line in one.out)
        assert f"[{rank}] node node{rank // 2 + 1} {rank % 2}" in one.out
        assert f"[{rank}] tls True token 64" in one.out


def test_a_killed_client_is_named_with_node_and_pid(run, script) -> None:
    one = run(script(STAYS))
    victim = next(line for line in one.expect("pid=", 4) if line.startswith("[3] "))
    [pid] = pids([victim])
    os.kill(pid, signal.SIGKILL)
    assert one.wait() == 137
    assert any(f"FAILED: rank 3 on host node2 (pid {pid}) was killed by SIGKILL" in line for line in one.err)
    assert any("the others followed: ranks 0-2" in line for line in one.err)


def test_a_killed_launcher_leaves_nothing(run, script) -> None:
    one = run(script(STAYS))
    started = pids(one.expect("pid=", 4))
    [launcher] = psutil.Process(one.process.pid).children()
    launcher.kill()
    assert not running_after(started)


def test_a_killed_srun_is_a_lost_node(run, script) -> None:
    one = run(script(STAYS))
    started = pids(one.expect("pid=", 4))
    family = psutil.Process(one.process.pid).children(recursive=True)
    [srun] = [
        each for each in family
        if each.name() == "srun" and "--nodelist=node2" in each.cmdline() and each.parent().name() != "srun"
    ]  # fmt: skip
    os.killpg(srun.pid, signal.SIGKILL)
    assert one.wait() == 255
    assert any("FAILED: ranks 2-3 on host node2 were lost with the connection" in line for line in one.err)
    assert not running_after(started)


def test_a_batch_script_and_a_cancelled_job(cluster, script, tmp_path: Path) -> None:
    path = script(STAYS)
    batch = tmp_path / "batch.sh"
    quoted = " ".join(f"'{word}'" for word in DMESH)
    batch.write_text(f"#!/bin/sh\nexec {quoted} run --slurm -n 3 {path} >{tmp_path}/log 2>&1\n")
    log = tmp_path / "log"
    log.touch()
    submit = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", str(batch)]
    job = subprocess.run(submit, env=cluster, cwd=tmp_path, capture_output=True, text=True, check=True)
    follow = subprocess.Popen(["tail", "--follow", str(log)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reader = Launch(follow)
    try:
        lines = reader.expect("pid=", 3)
        assert all("sum [3. 3.]" in line for line in lines)
        subprocess.run(["scancel", job.stdout.strip()], env=cluster, check=True)
        assert not running_after(pids(lines))
    finally:
        reader.close()


def test_standard_input_goes_to_rank_0(run, script, tmp_path: Path) -> None:
    data = b"line\n" * 100_000
    (tmp_path / "data").write_bytes(data)
    with (tmp_path / "data").open("rb") as file:
        one = run(script("import sys; print(len(sys.stdin.read()))"), stdin=file.fileno())
        assert one.wait() == 0, one.err
    assert sorted(one.out) == [f"[0] {len(data)}", "[1] 0", "[2] 0", "[3] 0"]
