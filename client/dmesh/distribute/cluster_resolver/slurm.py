"""The tasks of a Slurm job step: what one `srun` has started."""

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
    """Values of the step's variables and of the arguments, at one moment."""

    spec: ClusterSpec
    task_type: str
    task_id: int
    local_index: int
    """Of this process, among the step's tasks on its host."""


class SlurmClusterResolver(ClusterResolver):
    """Reads the `SLURM_*` variables of a job step at every call.

    Tasks are numbered as Slurm does, and share their host's ports from `port_base` on. Jobs, in order of
    their names, take the tasks in that order.

    Args:
        jobs: How many tasks each job has; all of them are `worker` if None.
        port_base: Port of the first task on each host; the next ones follow.
        gpus_per_node: GPUs of each host; if None, what the step has here as Slurm says, or else what this
            process sees.
        gpus_per_task: GPUs of each task; if None, srun's `--gpus-per-task`, or else as many as there are for
            all. 0 for none.
        tasks_per_node: Tasks of each host, by host or the same number for all; as Slurm says if None.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to this task's share of the GPUs; it
            is left alone where it hides all GPUs, where tasks have none, and where it shows the task some of
            its host's already, as Slurm or a script has set it.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: This process is not in a job step, or the jobs do not fit its tasks or GPUs.
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
        # Once, because what this process sees is about to become its share.
        self._visible = _visible_gpus()
        on_host = _gpus_on_host() if gpus_per_node is None else None
        # Slurm's number is of this host, others are of any host: then the one with the most tasks decides.
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
            self._gpus_per_task = 0  # whoever hides all GPUs wants none, whatever the program asks for
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        self._allocate()  # says now what would be wrong later

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs and their tasks' addresses; gives this process its GPUs, if it is to.

        Raises:
            ResolverError: This process is not in a job step, or the jobs do not fit its tasks or GPUs.
            ConfigurationError: A variable is malformed.
        """
        allocation = self._allocate()
        # A process that sees some of its host's GPUs sees its own: Slurm has bound them to its task, or a
        # script has chosen them.
        bound = 0 < len(self._visible) < self._gpus_per_node
        if self._auto_set_gpu and self._gpus_per_task and not bound and context.fake_process() is None:
            first = allocation.local_index * self._gpus_per_task
            names = self._visible or [str(gpu) for gpu in range(self._gpus_per_node)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + self._gpus_per_task])
        return allocation.spec

    def get_task_info(self) -> tuple[str, int]:
        """Returns the job of this process, and its index within that job.

        Raises:
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        allocation = self._allocate()
        return allocation.task_type, allocation.task_id

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: What stands before `://` in the answer; the resolver's own if None.

        Raises:
            ClusterSpecError: There is no such task.
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        return self._master_or_own(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Returns how many GPUs each task has, whichever is meant; nothing if they have none."""
        del task_type, task_id, config_proto
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._allocate().task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process within its job."""
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
        """Returns how many tasks share the GPUs of a host."""
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
                f"GPUs on one host, but a host has {self._gpus_per_node}. Start fewer tasks a host, or pass "
                "gpus_per_task"
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
    """Returns a resolver for the step that this process is a task of; None if it is none of several.

    A shell of `salloc`, the script of `sbatch` and a step of one task are not a cluster.

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
    """Refuses to go on if Slurm has put this process somewhere else than the addresses say."""
    host, local = text("SLURMD_NODENAME"), integer("SLURM_LOCALID")
    if host is None or local is None or (host, local) == (hosts[place[0]], place[1]):
        return
    raise ResolverError(
        f"task {integer('SLURM_PROCID')} is number {local} on host {host}, but was expected as number "
        f"{place[1]} on {hosts[place[0]]}: the step is distributed in another way than "
        f"SLURM_DISTRIBUTION={text('SLURM_DISTRIBUTION') or 'block'} says. Use srun --distribution=block"
    )


def _gpus_on_host() -> int | None:
    """Returns how many GPUs of this host the step has, whichever of them its tasks see; None if unknown."""
    count = integer("SLURM_GPUS_ON_NODE")
    if count is None:
        listed = text("SLURM_STEP_GPUS") or text("SLURM_JOB_GPUS")
        return None if listed is None else len([gpu for gpu in listed.split(",") if gpu.strip()])
    return count


def _gpus_per_task() -> int | None:
    """Returns srun's `--gpus-per-task`, such as `2` or `volta:3,kepler:1`; None if it was not given.

    Raises:
        ConfigurationError: It is malformed.
    """
    asked = text("SLURM_GPUS_PER_TASK")
    if asked is None:
        return None
    counts = [entry.rpartition(":")[2].strip() for entry in asked.split(",")]
    if not all(count.isascii() and count.isdecimal() and len(count) < 10 for count in counts):
        raise ConfigurationError(
            f"SLURM_GPUS_PER_TASK is {shown(asked)}; expected numbers of GPUs, each perhaps with a type "
            "and a colon before it. Leave it as Slurm sets it"
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
