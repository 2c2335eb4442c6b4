"""Hosts of a Slurm allocation, and the `srun` that starts an agent on one of them. No IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dmesh.distribute.cluster_resolver.hostlist import expand_hostlist, expand_tasks_per_node
from dmesh.errors import ConfigurationError
from dmesh.launcher.hosts import Host

OUTSIDE = """\
--slurm needs a Slurm allocation, and SLURM_JOB_NODELIST is not set here. Get one, for example with
  salloc --nodes=2 --ntasks-per-node=4 dmesh run --slurm train.py
or put the line `dmesh run --slurm train.py` into a batch script and submit it:
  sbatch --nodes=2 --ntasks-per-node=4 train.sh"""


def allocated_hosts(environment: Mapping[str, str], clients: int | None) -> tuple[Host, ...]:
    """Return the nodes of the allocation, with as many slots as it has tasks there.

    Args:
        environment: With the variables of the allocation.
        clients: Number of clients asked for: with more of them than tasks, a node's slots are its processors.

    Raises:
        ConfigurationError: This is no allocation, or its variables are malformed.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "").strip()
    if not nodes:
        raise ConfigurationError(OUTSIDE)
    names = expand_hostlist(nodes)
    found: tuple[Host, ...] = ()
    for variable in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
        text = environment.get(variable, "").strip()
        if not text:
            continue
        counts = expand_tasks_per_node(text)
        if len(counts) != len(names):
            raise ConfigurationError(
                f"{variable} is {text}, for {len(counts)} nodes, but SLURM_JOB_NODELIST has {len(names)}; "
                "leave both as Slurm sets them"
            )
        found = tuple(Host(name, count) for name, count in zip(names, counts, strict=True))
        if clients is None or clients <= sum(counts):
            break
    if not found:
        raise ConfigurationError("SLURM_TASKS_PER_NODE is not set; leave the variables as Slurm sets them")
    return found


def srun_command(host: Host, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one as a step of one task on a node.

    Args:
        host: The node.
        command: What is to run there.
    """
    return [
        "srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host.target}",
        "--overlap",  # with the step of the shell that this may be
        "--cpu-bind=none",  # the agent's clients share the node's processors
        "--kill-on-bad-exit=0", "--export=ALL", "--quiet", *command,
    ]  # fmt: skip
