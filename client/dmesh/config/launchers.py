"""The cluster of this process if `DTENSOR_JOBS` does not describe it.

A cluster resolver passed by the program has priority, then `DTENSOR_JOBS`, then the first launcher detected
in the environment. `DMESH_LAUNCHER` names a launcher, or `none`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dmesh._log import logger
from dmesh.config.addresses import join_address, shown, unknown_address
from dmesh.config.settings import Settings, read_client_id, read_job_name, read_jobs, read_num_clients
from dmesh.distribute.cluster_resolver import variables
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.launched import own_host
from dmesh.errors import ArgumentTypeError, ConfigurationError, DMeshError
from dmesh.runtime import context
from dmesh.train import ClusterSpec

LAUNCHERS: Mapping[str, tuple[str, str]] = {
    "torchelastic": ("TORCHELASTIC_RUN_ID", "torchrun"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    "tfconfig": ("TF_CONFIG", "TF_CONFIG"),
    "slurm": ("SLURM_STEP_NUM_TASKS", "a Slurm step"),
    "kubernetes": ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
}
"""Launchers in the order of detection, innermost first: mpirun and torchrun may run in a Slurm step and
inherit its variables, and `TF_CONFIG` may be set there on purpose. The key is the name of a module in
`distribute.cluster_resolver`, the value a variable that the launcher always sets, and a description for
messages. The module's function `detected` returns a resolver, or None if this process was started alone."""

_ASIDE = ("ps", "evaluator", "coordinator")
"""TensorFlow's jobs whose tasks are not clients."""
_LEADERS = ("chief", "master")
"""TensorFlow's jobs whose only task is the first worker."""


@dataclass(frozen=True)
class FoundCluster:
    """A cluster that this process belongs to."""

    jobs: tuple[str, ...]
    """Address of every client; a placeholder (`unknown_address`) for unknown ones."""
    client_id: int
    """Index of this process among them."""
    job_name: str
    """Name of their job."""
    source: str
    """Origin of this description, for messages."""
    own_address: str | None = None
    """This client's address, if it is not in `jobs`."""
    takes_any_task: bool = False
    """True if the coordinator chooses this client's id; `client_id` is then ignored."""

    reason: str = ""
    """Why it was detected, if the program passed no resolver; `DTENSOR_JOB_NAME` may then rename the job."""
    resolver: ClusterResolver | None = None
    """The resolver that found it; None if there was none."""

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the equivalent `DTENSOR_*` variables, which override those of `environ`."""
        named = environ.get("DTENSOR_JOB_NAME", "").strip() if self.reason else ""
        return {
            "DTENSOR_JOBS": ",".join(self.jobs),
            "DTENSOR_CLIENT_ID": str(self.client_id),
            "DTENSOR_JOB_NAME": named or self.job_name,
        }


def find_cluster(resolver: ClusterResolver | None) -> FoundCluster | None:
    """Return the cluster that this process joins; None for that of `DTENSOR_JOBS`, or for no cluster.

    Args:
        resolver: Cluster resolver passed by the program.

    Raises:
        ArgumentTypeError: `resolver` is not a ClusterResolver.
        ConfigurationError: The resolver or the launcher does not describe a cluster of clients.
        DMeshError: An error of the resolver.
    """
    if resolver is None:
        found = detect()
        if found is not None and found.takes_any_task:
            logger.info(
                "%s: this is one of %d clients; the coordinator assigns the task slot",
                found.reason,
                len(found.jobs),
            )
        elif found is not None:
            logger.info(
                "%s: this is client %d of %d, started by %s (DMESH_LAUNCHER=none to run alone)",
                found.reason, found.client_id, len(found.jobs), found.source,
            )  # fmt: skip
        return found
    check_resolver(resolver)
    found = _cluster_of(resolver, type(resolver).__name__)
    logger.info(
        "according to %s, this is %s%s",
        type(resolver).__name__,
        "a single process" if found is None else f"client {found.client_id} of {len(found.jobs)}",
        "; DTENSOR_JOBS is ignored" if context.environment().get("DTENSOR_JOBS", "").strip() else "",
    )
    return found


def check_resolver(resolver: object) -> None:
    """Raise an error unless an argument is a cluster resolver or None.

    Raises:
        ArgumentTypeError: The argument has another type.
    """
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise ArgumentTypeError(
            f"cluster_resolver must be a dmesh.distribute.cluster_resolver.ClusterResolver, got "
            f"{type(resolver).__name__}"
        )


def detect() -> FoundCluster | None:
    """Return the cluster of the launcher that started this process; None if there is none.

    `DTENSOR_JOBS` and `DMESH_LAUNCHER=none` switch the detection off.

    Raises:
        ConfigurationError: `DMESH_LAUNCHER` is malformed, or the launcher's variables do not describe a
            cluster.
        ResolverError: The launcher named by `DMESH_LAUNCHER` did not start this process, or a variable is
            missing.
    """
    environ = context.environment()
    if environ.get("DTENSOR_JOBS", "").strip():
        return None
    counted = _of_a_number(environ)
    if counted is not None:
        return counted
    wanted = environ.get("DMESH_LAUNCHER", "").strip().lower() or "auto"
    if wanted not in ("auto", "none", *LAUNCHERS):
        raise ConfigurationError(
            f"DMESH_LAUNCHER is {shown(wanted)}; expected the launcher of this process: auto, none or one of "
            f"{', '.join(LAUNCHERS)}. Unset it for the default, auto"
        )
    for name, (sign, title) in LAUNCHERS.items():
        if wanted != name and (wanted != "auto" or not environ.get(sign, "").strip()):
            continue
        reason = f"{sign} is set" if wanted == "auto" else f"DMESH_LAUNCHER is {wanted}"
        try:
            resolver = importlib.import_module(f"dmesh.distribute.cluster_resolver.{name}").detected()
            aside = resolver is not None and resolver.task_type in _ASIDE
            found = None if resolver is None or aside else _cluster_of(resolver, title)
        except DMeshError as error:
            raise type(error)(
                f"{error}. dmesh looked for this launcher because {reason}; set DMESH_LAUNCHER=none to run "
                "alone, or DTENSOR_JOBS to HOST:PORT of every client"
            ) from error
        if found is not None and len(found.jobs) > 1:
            return replace(found, reason=reason)
        logger.debug("%s, but this process is not one of several started by %s", reason, title)
        if wanted == "auto" and resolver is not None:
            return None  # this process runs alone, whatever an outer launcher's variables say
    if wanted not in ("auto", "none"):
        sign, title = LAUNCHERS[wanted]
        raise ConfigurationError(
            f"DMESH_LAUNCHER is {wanted}, but {title} did not start this process as one of several: "
            f"{sign} is {shown(environ.get(sign, ''))}. Start it there, or unset DMESH_LAUNCHER"
        )
    return None


def _of_a_number(environ: Mapping[str, str]) -> FoundCluster | None:
    """Return the cluster of `DMESH_NUM_CLIENTS` clients, which meet at a coordinator; None if it is not set.

    Raises:
        ConfigurationError: `DMESH_NUM_CLIENTS`, `DTENSOR_CLIENT_ID` or `DMESH_PORT_BASE` is malformed, or
            there is no coordinator.
        ResolverError: This host has no route to the coordinator.
    """
    count = read_num_clients(environ)
    if count is None:
        return None
    coordinator = Settings.load({"DMESH_COORDINATOR": environ.get("DMESH_COORDINATOR", "")}).coordinator
    if coordinator is None:
        raise ConfigurationError(
            f"DMESH_NUM_CLIENTS is {count}, but DMESH_COORDINATOR is not set: clients that do not know "
            "each other's addresses find each other through it. Set it to HOST:PORT of a coordination "
            "server, or set "
            "DTENSOR_JOBS to HOST:PORT of every client instead"
        )
    port = variables.integer("DMESH_PORT_BASE") or 0
    if port:
        variables.checked_port_base(port, 1, "DMESH_PORT_BASE")
    return FoundCluster(
        tuple(unknown_address(index) for index in range(count)),
        read_client_id(environ, count),
        environ.get("DTENSOR_JOB_NAME", "").strip() or "worker",
        "DMESH_NUM_CLIENTS",
        join_address(own_host(coordinator), port),
        takes_any_task=not environ.get("DTENSOR_CLIENT_ID", "").strip(),
        reason="DMESH_NUM_CLIENTS is set",
    )


def load_settings(
    resolver: ClusterResolver | None, backend: object
) -> tuple[Settings, Mapping[str, str], ClusterResolver | None]:
    """Read and check the settings of this process, with the cluster that it joins.

    Args:
        resolver: Cluster resolver passed by the program; overrides `DTENSOR_JOBS` and launchers.
        backend: Overrides `DMESH_BACKEND`, if it is not None.

    Returns:
        The settings; the `DTENSOR_*` variables that override the environment; and their resolver, the
        program's or the launcher's.

    Raises:
        DMeshError: See `find_cluster` and `Settings.load`.
    """
    environ = context.environment()
    found = find_cluster(resolver)
    if found is None:
        alone = {} if resolver is None else {"DTENSOR_JOBS": "", "DTENSOR_CLIENT_ID": ""}
        return Settings.load({**environ, **alone}, backend=backend), alone, resolver
    instead = found.variables(environ)
    try:
        read_client_id(instead, len(read_jobs(instead)))
        read_job_name(instead, multi_client=True)
    except ConfigurationError as error:
        raise type(error)(
            f"{error}. The value comes from {found.source}, not from the environment"
        ) from error
    settings = Settings.load({**environ, **instead}, backend=backend)
    origins = {**settings.origins, **dict.fromkeys(("jobs", "client_id", "job_name"), found.source)}
    settings = replace(
        settings, own_address=found.own_address, takes_any_task=found.takes_any_task, origins=origins
    )
    return settings, instead, found.resolver


def _cluster_of(resolver: ClusterResolver, source: str) -> FoundCluster | None:
    spec = resolver.cluster_spec()
    jobs = [job for job in spec.jobs if spec.num_tasks(job)]
    if not jobs:
        return None
    clients = _client_jobs(jobs, source)
    job_name = clients[-1]
    task_type = resolver.task_type or job_name
    if task_type not in clients:
        raise ConfigurationError(
            f"according to {source}, this is a task of job {task_type!r}, but only tasks of "
            f"{' and '.join(map(repr, clients))} are clients. Do not initialize the system in other tasks"
        )
    total = resolver.num_processes
    if total is None:
        addresses = _all_addresses(spec, clients, source)
        start = sum(spec.num_tasks(job) for job in clients[: clients.index(task_type)])
        task = _task_id(resolver, spec.num_tasks(task_type), len(addresses), source)
        return FoundCluster(tuple(addresses), start + task, job_name, source, resolver=resolver)
    task = _task_id(resolver, total, total, source)
    # The list must be the same in all clients, so it leaves out addresses that only some of them know.
    listed = [unknown_address(index) for index in range(total)]
    if not context.environment().get("DMESH_COORDINATOR", "").strip():
        listed[0] = spec.task_address(job_name, 0)
    own_address = spec.task_address(job_name, task)
    return FoundCluster(tuple(listed), task, job_name, source, own_address, resolver=resolver)


def _client_jobs(jobs: list[str], source: str) -> list[str]:
    """Return the jobs whose tasks are clients, in order; the last one is the job name of all clients."""
    if len(jobs) == 1:
        return jobs
    taking_part = [job for job in jobs if job not in _ASIDE]
    if len(taking_part) == 1:
        return taking_part
    leaders = [job for job in taking_part if job in _LEADERS]
    if len(taking_part) == 2 and len(leaders) == 1 and "worker" in taking_part:
        return [*leaders, "worker"]
    raise ConfigurationError(
        f"{source} has the jobs {', '.join(map(repr, jobs))}, but clients must be tasks of one job, or of a "
        "chief and workers. Pass a resolver with one job"
    )


def _all_addresses(spec: ClusterSpec, jobs: list[str], source: str) -> list[str]:
    addresses = []
    for job in jobs:
        for index, address in enumerate(spec.job_tasks(job)):
            if address is None:
                raise ConfigurationError(
                    f"{source} has no address of task {index} of job {job!r}; every client needs one"
                )
            addresses.append(address)
    return addresses


def _task_id(resolver: ClusterResolver, of_job: int, of_all: int, source: str) -> int:
    task = resolver.task_id
    if task is None:
        chosen = context.environment().get("DTENSOR_CLIENT_ID", "").strip()
        if chosen.isascii() and chosen.isdecimal() and len(chosen) < 10:
            task = int(chosen)
        elif of_all == 1:
            task = 0
        else:
            raise ConfigurationError(
                f"{source} does not determine which of the {of_all} clients this process is. Set task_id of "
                "the resolver, or DTENSOR_CLIENT_ID"
            )
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < of_job:
        raise ConfigurationError(
            f"according to {source}, this process is task {task!r:.200} of {of_job}; expected an integer "
            f"from 0 to {of_job - 1}"
        )
    return task
