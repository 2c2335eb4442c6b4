"""`dmesh.config.experimental_connect_to_cluster`: joining the cluster that a spec or a resolver describes."""

from __future__ import annotations

from dmesh._log import announce, logger
from dmesh.config.launchers import find_cluster
from dmesh.config.settings import Settings
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.simple import SimpleClusterResolver
from dmesh.errors import AlreadyInitializedError, ConfigurationError
from dmesh.runtime import context
from dmesh.runtime.system import initialize_accelerator_system
from dmesh.train import ClusterSpec

_LOCAL_MASTERS = ("", "local")


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: object = None,
) -> None:
    """Join a cluster: initializes the accelerator system with the clients that it has.

    Every client runs the program, and each has to say which of them it is: by the resolver, or by `job_name`
    and `task_index`. Nothing happens if the resolver's master is local, or if this process has joined that
    cluster already.

    Args:
        cluster_spec_or_resolver: The cluster.
        job_name: Job of this process, if it is one of the cluster's jobs; otherwise the resolver says.
        task_index: Index of this process within that job.
        protocol: `grpc` or None; there is no other.
        make_master_device_default: Whether the resolver's master must be one of the cluster's tasks. Devices
            have no default here.
        cluster_device_filters: None; every client sees every device.

    Raises:
        ConfigurationError: An argument is not usable, or it is not known which client this is.
        AlreadyInitializedError: This process has initialized the accelerator system with another cluster.
        DMeshError: The resolver's own errors, and those of `initialize_accelerator_system`.
    """
    if isinstance(cluster_spec_or_resolver, ClusterResolver):
        master = cluster_spec_or_resolver.master()
        spec = cluster_spec_or_resolver.cluster_spec()
        if master in _LOCAL_MASTERS:
            tasks = sum(map(spec.num_tasks, spec.jobs))
            if tasks > 1 and context.current_or_none() is None:
                announce(
                    f"{type(cluster_spec_or_resolver).__name__} has a cluster of {tasks} tasks, but its "
                    f"master is {master!r}, so this process runs alone; set master to the address of a task"
                )
            return
    elif isinstance(cluster_spec_or_resolver, ClusterSpec):
        master, spec = None, cluster_spec_or_resolver
    else:
        raise ConfigurationError(
            "cluster_spec_or_resolver must be a dmesh.train.ClusterSpec or a ClusterResolver, got "
            f"{type(cluster_spec_or_resolver).__name__}"
        )
    if cluster_device_filters is not None:
        raise ConfigurationError(
            "cluster_device_filters is not supported: every client sees every device. Leave it out"
        )
    if protocol not in (None, "", "grpc"):
        raise ConfigurationError(f"protocol is {protocol!r:.200}; expected grpc or None")
    if make_master_device_default and master is not None and not _is_task(master, spec):
        raise ConfigurationError(
            f"the resolver's master, {master}, is not a task of its cluster, {spec}. Correct one of them, or "
            "pass make_master_device_default=False"
        )
    if job_name in spec.jobs:
        resolver: ClusterResolver = SimpleClusterResolver(spec, task_type=job_name, task_id=task_index)
    elif isinstance(cluster_spec_or_resolver, ClusterResolver):
        resolver = cluster_spec_or_resolver
    else:
        raise ConfigurationError(
            f"this process is in no job of the cluster: job_name is {job_name!r}, its jobs are "
            f"{', '.join(map(repr, spec.jobs)) or 'none'}. Pass job_name and task_index: every client "
            "runs the program; there is no controller outside of the cluster"
        )
    state = context.current_or_none()
    if state is None:
        initialize_accelerator_system(cluster_resolver=resolver)
        return
    found, settings = find_cluster(resolver), state.get(Settings)
    if found is not None and (found.jobs, found.client_id) != (settings.jobs, settings.client_id):
        raise AlreadyInitializedError(
            f"this process is client {settings.client_id} of {settings.num_clients} already, in "
            "another cluster; call dmesh.shutdown_accelerator_system() first, or do not initialize the "
            "system before"
        )
    logger.info("this process has joined the cluster already")


def _is_task(master: str, spec: ClusterSpec) -> bool:
    address = master.rpartition("://")[2]
    return any(address == task for job in spec.jobs for task in spec.job_tasks(job))
