"""Resolver of the tasks of a Slurm job step, started by one `srun`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from dmesh.config.addresses import join_address, shown
from dmesh.devices.detection import detect_gpus
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.hostlist import expand_hostlist, expand_tasks_per_node
from dmesh.distribute.cluster_resolver.placement import place_tasks
from dmesh.distribute.cluster_resolver.variables import (
    checked_port_base,
    integer,
    port_base,
    required_integer,
    required_text,
    text,
)
from dmesh.errors import ArgumentTypeError, ConfigurationError, ResolverError
from dmesh.runtime import context
from dmesh.train import ClusterSpec

PLACE = "a Slurm step (srun)"


@dataclass(frozen=True)
class _Allocation:
    """Tasks, addresses and GPUs of the step, computed from its variables and the arguments."""

    spec: ClusterSpec
    task_type: str
    task_id: int
    local_index: int
    """Index of this process among the step's tasks on its host."""


class SlurmClusterResolver(ClusterResolver):
    """Reads the `SLURM_*` variables of a job step at every call.

    Tasks have Slurm's numbers, and ports from `port_base` on, in order on each host. The jobs, sorted by
    name, get the tasks in that order.

    Args:
        jobs: Number of tasks of each job; None for a single job, `worker`.
        port_base: Port of the first task on each host; the other tasks have the following ports.
        gpus_per_node: Number of GPUs of each host; None for the step's GPUs on this host according to Slurm,
            or else for the GPUs that this process sees.
        gpus_per_task: Number of GPUs of each task; 0 for none. None for srun's `--gpus-per-task`, or else for
            an equal share of the host's.
        tasks_per_node: Number of tasks of each host, by host or one number for all; None for Slurm's.
        auto_set_gpu: Whether `cluster_spec` set `CUDA_VISIBLE_DEVICES` to this task's share of the GPUs. It
            does not if tasks have no GPUs, or if the variable already hides some or all of the host's GPUs,
            set by Slurm or by a script.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: This process is not in a job step, or the jobs do not match its tasks or GPUs.
        ConfigurationError: An argument or a variable is malformed.
        ArgumentTypeError: An argument is of another type.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        required_integer("SLURM_PROCID", PLACE)
        self._jobs = None if jobs is None else _counts(jobs, "jobs")
        self._port_base = port_base
        self._tasks_per_node: int | dict[str, int] | None
        if isinstance(tasks_per_node, Mapping):
            self._tasks_per_node = _counts(tasks_per_node, "tasks_per_node")
        else:
            self._tasks_per_node = (
                None if tasks_per_node is None else _count(tasks_per_node, "tasks_per_node")
            )
        # Count the GPUs once, because CUDA_VISIBLE_DEVICES will be set to this task's share.
        self._visible = _visible_gpus()
        on_host = _gpus_on_host() if gpus_per_node is None else None
        # Slurm's number is for this host. Other numbers are for all hosts, so the one with the most tasks
        # decides.
        self._only_here = on_host is not None
        if gpus_per_node is not None:
            self._gpus_per_node = _count(gpus_per_node, "gpus_per_node")
        else:
            self._gpus_per_node = len(self._visible) if on_host is None else on_host
        if gpus_per_task is not None:
            self._gpus_per_task = _count(gpus_per_task, "gpus_per_task")
        elif (asked := _gpus_per_task()) is not None:
            self._gpus_per_task = asked
        else:
            self._gpus_per_task = self._gpus_per_node // max(self._sharing(self._tasks_by_host()), 1)
            if self._visible:
                self._gpus_per_task = min(self._gpus_per_task, len(self._visible))
        if not self._visible and context.environment().get("CUDA_VISIBLE_DEVICES") is not None:
            self._gpus_per_task = 0  # all GPUs are hidden on purpose, whatever the program asks for
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        self._allocate()  # raises errors now instead of later

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and their tasks' addresses; set `CUDA_VISIBLE_DEVICES` if `auto_set_gpu` is True.

        Raises:
            ResolverError: This process is not in a job step, or the jobs do not match its tasks or GPUs.
            ConfigurationError: A variable is malformed.
        """
        allocation = self._allocate()
        # If this process sees only some of the host's GPUs, Slurm has bound them to its task, or a script has
        # chosen them.
        bound = 0 < len(self._visible) < self._gpus_per_node
        if self._auto_set_gpu and self._gpus_per_task and not bound and context.fake_process() is None:
            first = allocation.local_index * self._gpus_per_task
            names = self._visible or [str(gpu) for gpu in range(self._gpus_per_node)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + self._gpus_per_task])
        return allocation.spec

    def get_task_info(self) -> tuple[str, int]:
        """Return the job of this process, and its index in the job.

        Raises:
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        allocation = self._allocate()
        return allocation.task_type, allocation.task_id

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Raises:
            ClusterSpecError: The task does not exist.
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        return self._master_or_own(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of GPUs of each task, for every task; empty if they have none."""
        del task_type, task_id, config_proto
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    @property
    def task_type(self) -> str | None:
        """Job of this process."""
        return self._allocate().task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process within its job."""
        return self._allocate().task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _tasks_by_host(self) -> dict[str, int]:
        if isinstance(self._tasks_per_node, dict):
            return self._tasks_per_node
        hosts = expand_hostlist(required_text("SLURM_STEP_NODELIST", PLACE))
        if len(set(hosts)) < len(hosts):
            twice = next(host for host in hosts if hosts.count(host) > 1)
            raise ConfigurationError(
                f"SLURM_STEP_NODELIST has {twice} more than once; leave it as srun sets it"
            )
        if self._tasks_per_node is not None:
            return dict.fromkeys(hosts, self._tasks_per_node)
        counts = expand_tasks_per_node(required_text("SLURM_STEP_TASKS_PER_NODE", PLACE))
        if len(counts) != len(hosts):
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE is for {len(counts)} hosts, but SLURM_STEP_NODELIST has "
                f"{len(hosts)}; leave both as srun sets them"
            )
        return dict(zip(hosts, counts, strict=True))

    def _sharing(self, tasks: Mapping[str, int]) -> int:
        """Return the number of tasks that share the GPUs of a host."""
        busiest = max(tasks.values(), default=0)
        return tasks.get(text("SLURMD_NODENAME") or "", busiest) if self._only_here else busiest

    def _allocate(self) -> _Allocation:
        rank = required_integer("SLURM_PROCID", PLACE)
        tasks = self._tasks_by_host()
        jobs = self._jobs or {"worker": required_integer("SLURM_STEP_NUM_TASKS", PLACE)}
        busiest, assigned, requested = max(tasks.values(), default=0), sum(tasks.values()), sum(jobs.values())
        sharing = self._sharing(tasks)
        if sharing * self._gpus_per_task > self._gpus_per_node:
            raise ResolverError(
                f"{sharing} tasks with {self._gpus_per_task} GPUs each need {sharing * self._gpus_per_task} "
                f"GPUs on one host, but a host has {self._gpus_per_node}. Start fewer tasks per host, or "
                "pass gpus_per_task"
            )
        if requested != assigned:
            raise ResolverError(
                f"the jobs {jobs} have {requested} tasks, but {assigned} were assigned: {_shown(tasks)}. "
                "Make the two equal, by jobs=... or srun's -n"
            )
        if rank >= assigned:
            raise ResolverError(
                f"SLURM_PROCID is {rank}, but the step has {assigned} tasks, 0 to {assigned - 1}: "
                f"{_shown(tasks)}"
            )
        base = checked_port_base(self._port_base, busiest, "port_base")
        explicit = self._tasks_per_node is not None
        distribution = None if explicit else text("SLURM_DISTRIBUTION")
        places = place_tasks(list(tasks.values()), distribution, integer("SLURM_DIST_PLANESIZE"))
        hosts = list(tasks)
        addresses = [join_address(hosts[node], base + local) for node, local in places]
        if not explicit:
            _check_place(places[rank], hosts)
        cluster: dict[str, list[str]] = {}
        task_type, task_id, start = "", 0, 0
        for job, count in sorted(jobs.items()):
            cluster[job] = addresses[start : start + count]
            if start <= rank < start + count:
                task_type, task_id = job, rank - start
            start += count
        return _Allocation(ClusterSpec(cluster), task_type, task_id, places[rank][1])


def detected() -> SlurmClusterResolver | None:
    """Return a resolver for this process's step; None if the step has no other task.

    It returns None in a shell of `salloc`, in the script of `sbatch`, and in a step of one task.

    Raises:
        ConfigurationError: A variable of the step is malformed.
        ResolverError: A variable of the step is missing.
    """
    if (integer("SLURM_STEP_NUM_TASKS") or 0) < 2 or text("SLURM_PROCID") is None:
        return None
    step = f"slurm {text('SLURM_JOB_ID')}.{text('SLURM_STEP_ID')}"
    counts = expand_tasks_per_node(required_text("SLURM_STEP_TASKS_PER_NODE", PLACE))
    return SlurmClusterResolver(port_base=port_base(step, max(counts)), gpus_per_task=0, auto_set_gpu=False)


def _check_place(place: tuple[int, int], hosts: list[str]) -> None:
    """Raise ResolverError if Slurm started this process on another host than the computed one."""
    host, local = text("SLURMD_NODENAME"), integer("SLURM_LOCALID")
    if host is None or local is None or (host, local) == (hosts[place[0]], place[1]):
        return
    raise ResolverError(
        f"task {integer('SLURM_PROCID')} is number {local} on host {host}, expected number {place[1]} "
        f"on {hosts[place[0]]} from "
        f"SLURM_DISTRIBUTION={text('SLURM_DISTRIBUTION') or 'block'}. Use srun --distribution=block"
    )


def _gpus_on_host() -> int | None:
    """Return the number of GPUs that the step has on this host, visible or not; None if unknown."""
    count = integer("SLURM_GPUS_ON_NODE")
    if count is None:
        listed = text("SLURM_STEP_GPUS") or text("SLURM_JOB_GPUS")
        return None if listed is None else len([gpu for gpu in listed.split(",") if gpu.strip()])
    return count


def _gpus_per_task() -> int | None:
    """Return srun's `--gpus-per-task`, such as `2` or `volta:3,kepler:1`; None if it was not given.

    Raises:
        ConfigurationError: The variable is malformed.
    """
    asked = text("SLURM_GPUS_PER_TASK")
    if asked is None:
        return None
    counts = [entry.rpartition(":")[2].strip() for entry in asked.split(",")]
    if not all(count.isascii() and count.isdecimal() and len(count) < 10 for count in counts):
        raise ConfigurationError(
            f"SLURM_GPUS_PER_TASK is {shown(asked)}; expected numbers of GPUs, each optionally after a type "
            "and a colon. Leave it as Slurm sets it"
        )
    return sum(map(int, counts))


def _visible_gpus() -> list[str]:
    """Returns the names of the GPUs that this process sees: up to the first one that is none, as for CUDA."""
    visible = context.environment().get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(gpu.index) for gpu in detect_gpus()]
    names = (name.strip() for name in visible.split(","))
    return list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))


def _counts(counts: object, what: str) -> dict[str, int]:
    if not isinstance(counts, Mapping) or not all(isinstance(name, str) for name in counts):
        raise ArgumentTypeError(f"{what} must be a dict from names to numbers, got {counts!r:.200}")
    return {name: _count(count, f"{what}[{name!r}]") for name, count in counts.items()}


def _count(count: object, what: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(f"{what} must be an int, got {count!r:.200}")
    if count < 0:
        raise ConfigurationError(f"{what} is {count}; expected a number from 0")
    return count


def _shown(tasks: Mapping[str, int]) -> str:
    first = ", ".join(f"{count} on {host}" for host, count in list(tasks.items())[:8])
    return f"{first}, ..." if len(tasks) > 8 else first
