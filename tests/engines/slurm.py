"""A Slurm cluster of the test's own: munge, a controller and two nodes, all of them on this machine.

The nodes are daemons with names and ports of their own (Debian builds slurmd for several on one machine), and
their address is the loopback's for both. Everything is in one directory and ends with the test.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.engines.packages import find

from dmesh.launcher.ports import reserve_ports

PACKAGES = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "salloc": "slurm-wlm"}
_PATIENCE = 90.0
_CONFIGURATION = """\
ClusterName=dmesh
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=2
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=test Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Runs a cluster; yields the environment with which its commands find it.

    Args:
        folder: For everything that it writes; others must be able to go through it, for munge's socket.
    """
    with reserve_ports(3) as reservation, contextlib.ExitStack() as stack:
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, ports=reservation.ports))
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log",
                 "pid-file": "munge.pid", "seed-file": "munge.seed"}  # fmt: skip
        munge = [f"--{option}={folder / name}" for option, name in files.items()]
        _run(stack, ["munged", "--foreground", "--force", *munge], environment, folder)
        _wait(lambda: (folder / "munge.socket").exists(), "munged", folder)
        _run(stack, ["slurmctld", "-D", "-c"], environment, folder)
        for node in ("node1", "node2"):
            _run(stack, ["slurmd", "-D", "-N", node], environment, folder)
        _wait(lambda: _idle(environment) == 2, "two idle nodes", folder)
        yield environment


def _run(stack: contextlib.ExitStack, command: list[str], environment: dict[str, str], folder: Path) -> None:
    program = find(command[0])
    output = stack.enter_context((folder / "output.log").open("ab"))
    process = subprocess.Popen(
        [program, *command[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return len(done.stdout.split())


def _wait(is_so, what: str, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise TimeoutError(f"Slurm has not started, waiting for {what}: {logs}")
        time.sleep(0.1)
