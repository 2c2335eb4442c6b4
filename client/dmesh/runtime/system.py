"""Initialization and shutdown: the one place that changes the process-wide state (see `runtime.context`).

Names, arguments, defaults and the order of checks are those of TensorFlow's `tf.experimental.dtensor`; where
they differ, `docs/differences-from-tensorflow.md` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, SupportsIndex

from dmesh import native
from dmesh._lazy_imports import collector_paused
from dmesh._log import logger
from dmesh.collectives.api import World
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.local import LocalNetwork
from dmesh.collectives.communicator import Communicator
from dmesh.config import launchers
from dmesh.config.client import FoundVariables
from dmesh.config.settings import MOST_CPU_DEVICES, Settings, misspelled, read_backend
from dmesh.coordination.agent_source import AgentSource
from dmesh.coordination.members import Device, Member, Members, MemberState
from dmesh.coordination.process import this_process
from dmesh.devices.device import DEVICE_TYPES, LogicalDevices, detect_gpus, preferred_device_type
from dmesh.distribute.cluster_resolver.joined import FoundResolver
from dmesh.errors import (
    AlreadyInitializedError,
    BarrierError,
    ConfigurationError,
    CoordinationError,
    DeviceError,
    DMeshError,
    NotInitializedError,
)
from dmesh.runtime import context, exits, tracebacks
from dmesh.runtime.context import Context
from dmesh.runtime.membership import SHUTDOWN_BARRIER, SURVIVORS_BARRIER, Client
from dmesh.tpu.accelerator import TpuSystem
from dmesh.tpu.table import devices_of, exchange, topology_of, without_tpus
from dmesh.tpu.topology import Topology

if TYPE_CHECKING:
    from dmesh.coordination.agent import Agent
    from dmesh.distribute.cluster_resolver.base import ClusterResolver


def initialize_accelerator_system(
    device_type: str | None = None,
    enable_coordination_service: bool | None = True,
    num_logical_cpu_devices: int | None = None,
    experimental_reset_context: bool | None = False,
    *,
    backend: str | None = None,
    cluster_resolver: ClusterResolver | None = None,
    tpu: str | TpuSystem | None = None,
) -> str:
    """Initialize this process as a client: alone, or as one of the clients of a cluster.

    The clients come from `cluster_resolver`, else from `DTENSOR_JOBS`, else from the launcher that started
    this process with others: a Slurm step, Open MPI's mpirun, torchrun, a job in Kubernetes, or a
    system that sets `TF_CONFIG`. Without any of these, meshes can only use devices of this process (local
    mode). With one, this call connects to the other clients and returns when all of them have joined; every
    10 seconds it reports which are missing.

    Environment variables (all in `docs/configuration.md`):

    - `DTENSOR_JOBS`: comma-separated `HOST:PORT` of every client, equal in all of them.
    - `DTENSOR_CLIENT_ID`: index of this client in that list, default 0.
    - `DTENSOR_JOB_NAME`: job name in device names, default `localhost` in local mode and `worker` otherwise.
    - `DMESH_LAUNCHER`: which launcher to look for, default `auto`; `none` for none of them.
    - `DMESH_COORDINATOR`: `HOST:PORT` of a standalone coordination server. Without it, client 0 hosts one at
      its own `DTENSOR_JOBS` address.
    - `DMESH_BACKEND`: transport of arrays between clients: `tcp`, the default, or `mpi`.
    - `DMESH_INIT_TIMEOUT`: seconds to wait for the others, default 300.

    ```python
    dmesh.initialize_accelerator_system("CPU")
    mesh = dmesh.create_distributed_mesh([("batch", dmesh.num_global_devices("CPU"))])
    dmesh.shutdown_accelerator_system()
    ```

    Args:
        device_type: CPU, GPU or TPU, in any case; None for `preferred_device_type()`.
        enable_coordination_service: Discover the other clients and their devices through a coordination
            server. If False, peers connect by their `DTENSOR_JOBS` addresses alone, and exchange this
            themselves.
        num_logical_cpu_devices: How many logical CPU devices this client has. Default:
            `DMESH_NUM_CPU_DEVICES`, or 1; at least the number of accelerators if `device_type` is not CPU.
        experimental_reset_context: Initialize even if meshes exist already; these must not be used again.
        backend: `tcp` or `mpi`, with precedence over `DMESH_BACKEND`; the same for all clients. See
            `docs/backends.md`.
        cluster_resolver: Lists the clients, with precedence over `DTENSOR_JOBS`. See `docs/resolvers.md`.
        tpu: The TPU system whose cores are the clients' TPU devices, by its type, such as `v2-8`; the same
            for all clients. Default: what `TPU_ACCELERATOR_TYPE` describes. See `docs/tpu.md`.

    Returns:
        The device type, in upper case.

    Raises:
        AlreadyInitializedError: The system is initialized, or local devices are already in use.
        DeviceError: The device type is unknown or this machine has no such device.
        TopologyError: There is no such TPU system, or the clients cannot share it.
        ConfigurationError: An environment variable, or an answer of the resolver, is invalid.
        ArgumentTypeError: `cluster_resolver` is not a cluster resolver.
        ResolverError: The resolver's system does not exist or is not ready.
        MissingExtraError: The backend is `mpi`, but mpi4py or an MPI library is missing.
        NativeCoreError: `DMESH_NATIVE` is 1, but the native core cannot be used.
        AddressInUseError: This client's port is taken.
        ClientIdTakenError: Another process is this client already.
        JobMismatchError: The clients' job lists or names differ.
        CoordinatorUnavailableError: The coordination server does not answer.
        InitializationTimeoutError: Not all clients connected in time.
    """
    context.refuse_forked_child()
    fake = context.fake_process()
    if fake is not None:
        read_backend(fake.environ, backend)  # it must be one, but the clients are threads, with another one
        launchers.check_resolver(cluster_resolver)  # likewise
        return _initialize_fake(context.current(), device_type, num_logical_cpu_devices, tpu)
    tracebacks.install()
    if context.current_or_none() is not None:
        raise AlreadyInitializedError(
            "the accelerator system is already initialized; call dmesh.shutdown_accelerator_system() first"
        )
    if context.devices_in_use():
        if not experimental_reset_context:
            raise AlreadyInitializedError(
                "initialize_accelerator_system() was called after a mesh of this process's devices had "
                "been created. Call it before the first create_mesh(), or pass "
                "experimental_reset_context=True to discard that mesh"
            )
        logger.warning(
            "meshes made before initialize_accelerator_system() describe devices as they were then"
        )
        context.clear()
    if device_type is not None and not isinstance(device_type, str):
        raise DeviceError(f"device_type must be one of {', '.join(DEVICE_TYPES)}, got {device_type!r}")
    device_type = (_default_device_type(tpu) if device_type is None else device_type).upper()
    settings, found, resolver = launchers.load_settings(cluster_resolver, backend)
    if settings.client_id == 0:
        for variable, meant in misspelled(context.environment()).items():
            logger.warning("%s is set, but dmesh does not read it. Did you mean %s?", variable, meant)
    native.core()  # who insists on it hears now that it is missing, not in the first collective
    tpus = _tpu_devices(device_type, tpu, settings)
    logical_devices = _count_devices(device_type, num_logical_cpu_devices, settings, len(tpus))
    devices = _device_list(logical_devices, tpus)
    if settings.multi_client:
        _initialize_multi_client(
            settings, device_type, logical_devices, devices, bool(enable_coordination_service), found
        )
    else:
        _initialize_local(settings, device_type, logical_devices, devices, found)
    if resolver is not None:
        context.current().put(FoundResolver(resolver))
    return device_type


def add_tpu_system(tpu: str | TpuSystem | None = None) -> Topology:
    """Make the cores of a TPU system devices of the initialized system; all clients call it.

    If they are already, nothing changes.

    Args:
        tpu: As for `initialize_accelerator_system`.

    Returns:
        The topology of the TPU system.

    Raises:
        NotInitializedError: The system is not initialized.
        TpuNotFoundError: No TPU system is described.
        TopologyError: There is no such TPU system, or the clients cannot share it.
        CollectiveError: A client is lost, or does not call this.
    """
    state = context.current()
    topology = state.find(Topology)
    if topology is not None:
        return topology
    settings = state.get(Settings)
    own = devices_of(TpuSystem.find(tpu, context.environment()), settings.client_id, settings.num_clients)
    known = state.find(Members)
    communicator = state.get(Communicator)
    members = exchange(communicator, known or (_alone(settings),), own, settings.init_timeout)
    topology = topology_of(members)
    # Each device of an accelerator has a CPU device beside it.
    logical = state.get(LogicalDevices)
    cpus = max(logical.counts["CPU"], len(own))
    state.put(replace(logical, counts={**logical.counts, "CPU": cpus, "TPU": len(own)}))
    if known:
        _put_members(state, members)
    state.put(topology)
    return topology


def remove_tpu_system() -> None:
    """Take the cores of the TPU system away again, from this client's view; its CPU devices stay."""
    state = context.current()
    state.discard(Topology)
    logical = state.get(LogicalDevices)
    state.put(replace(logical, counts={**logical.counts, "TPU": 0}))
    _put_members(state, without_tpus(state.find(Members) or ()))


def _put_members(state: Context, members: tuple[Member, ...]) -> None:
    state.put(Members(members))
    client = state.find(Client)
    if client is not None:
        client.members = members


def shutdown_accelerator_system() -> None:
    """Leave the cluster cleanly and forget the system; it may be initialized again afterwards.

    In multi-client mode all clients must call it: they meet at a barrier for at most `DMESH_SHUTDOWN_TIMEOUT`
    seconds (default 60), then leave. This client has left even when an exception is raised. Survivors that
    have agreed to go on without lost clients (`dmesh.collectives.shrink`) meet without them.

    Raises:
        NotInitializedError: There is nothing to shut down.
        BarrierError: Not all clients came to the shutdown, or one of them, or the coordination server, was
            lost before.
        CollectiveError: Likewise, without a coordination service.
    """
    state = context.current_or_none()
    if state is None:
        raise NotInitializedError(
            "the accelerator system is not initialized; call dmesh.initialize_accelerator_system() first"
        )
    if context.fake_process() is not None:
        state.get(Communicator).world.barrier(timeout=state.get(Settings).shutdown_timeout)
        return  # who made the fake cluster closes it
    exits.uninstall()
    client = state.find(Client)
    if client is None:
        exits.end_alone(state)
        return
    try:
        _leave_together(client)
    finally:
        context.clear()


def _initialize_fake(
    state: Context, device_type: str | None, num_cpus: int | None, tpu: str | TpuSystem | None
) -> str:
    """Initialize a thread of a `dmesh.testing.FakeCluster` as if it were a process."""
    wanted = (device_type or ("TPU" if tpu is not None else state.get(LogicalDevices).type)).upper()
    if wanted == "TPU":
        add_tpu_system(tpu)
    logical = state.get(LogicalDevices)
    if not logical.counts.get(wanted) or num_cpus not in (None, logical.counts["CPU"]):
        raise DeviceError(
            f"this FakeCluster has {logical.counts['CPU']} {logical.type} devices a client; "
            f"the program wants {'the default number' if num_cpus is None else num_cpus} of {wanted}. "
            "FakeCluster(num_cpu_devices=...) sets the number"
        )
    state.get(Communicator).world.barrier(timeout=state.get(Settings).init_timeout)
    return wanted


def _leave_together(client: Client) -> None:
    timeout = client.settings.shutdown_timeout
    patience = 0.0
    client.leaving = True
    try:
        if client.agent is not None and client.communicator.goes_on:
            client.agent.alive_barrier(SURVIVORS_BARRIER, timeout=timeout)
        elif client.agent is not None:
            client.agent.barrier(SHUTDOWN_BARRIER, timeout=timeout)
        else:
            client.communicator.world.barrier(timeout=timeout)
        patience = timeout  # all clients are about to leave
    except BarrierError:
        raise
    except CoordinationError as error:
        raise BarrierError(f"the shutdown was not clean: {error}", error.members) from error
    finally:
        client.leave(patience=patience)


def _default_device_type(tpu: object) -> str:
    """Return the default device type; the clients are not known yet."""
    described = tpu is not None or TpuSystem.from_environment(context.environment()) is not None
    return "TPU" if described else preferred_device_type()


def _tpu_devices(device_type: str, tpu: str | TpuSystem | None, settings: Settings) -> tuple[Device, ...]:
    """Return this client's cores of the TPU system; none if the program does not want any."""
    if device_type not in DEVICE_TYPES:
        raise DeviceError(f"unknown device type {device_type!r}; it must be one of {', '.join(DEVICE_TYPES)}")
    if device_type == "TPU":
        system = TpuSystem.find(tpu, context.environment())
        return devices_of(system, settings.client_id, settings.num_clients)
    if tpu is not None:
        raise DeviceError(f"tpu={tpu!r:.200} is for device_type='TPU', but device_type is {device_type!r}")
    return ()


def _count_devices(
    device_type: str, num_cpus: int | None, settings: Settings, num_tpus: int
) -> Mapping[str, int]:
    """Return how many logical devices of each type this client will have."""
    asked = None if num_cpus is None else _checked_count(num_cpus)
    usual = settings.num_cpu_devices or 1
    accelerators = {"GPU": len(detect_gpus()), "TPU": num_tpus}
    if device_type == "CPU":
        return {"CPU": asked or usual, **accelerators}
    count = accelerators[device_type]
    if count == 0:
        raise DeviceError(
            f"device_type={device_type} was requested, but this machine has no {device_type}; use "
            "device_type='CPU', or None for the available devices"
        )
    if asked is not None and asked < count:
        raise DeviceError(
            f"num_logical_cpu_devices={asked} is less than the number of {device_type} devices "
            f"({count}); each "
            "of them needs a CPU device beside it"
        )
    return {"CPU": asked or max(usual, count), **accelerators}


def _checked_count(num_cpus: object) -> int:
    problem = f"num_logical_cpu_devices must be an integer from 1 to {MOST_CPU_DEVICES}, got {num_cpus!r}"
    if isinstance(num_cpus, bool) or not isinstance(num_cpus, SupportsIndex):
        raise DeviceError(problem)
    if not 1 <= operator.index(num_cpus) <= MOST_CPU_DEVICES:
        raise DeviceError(problem)
    return operator.index(num_cpus)


def _device_list(logical_devices: Mapping[str, int], tpus: tuple[Device, ...]) -> tuple[Device, ...]:
    plain = (kind for kind in DEVICE_TYPES if kind != "TPU")
    return (*(Device(kind, index) for kind in plain for index in range(logical_devices[kind])), *tpus)


def _alone(settings: Settings, devices: tuple[Device, ...] = ()) -> Member:
    """Return this process as the only client."""
    return Member(settings.job_name, 0, 0, MemberState.CONNECTED, this_process(), devices)


def _initialize_local(
    settings: Settings,
    device_type: str,
    logical_devices: Mapping[str, int],
    devices: tuple[Device, ...],
    found: Mapping[str, str],
) -> None:
    if settings.coordinator is not None:
        logger.warning(
            "DMESH_COORDINATOR=%s is ignored: DTENSOR_JOBS is not set, so this process runs alone",
            settings.coordinator,
        )
    myself = Peer(0, (), 0, f"/job:{settings.job_name}/task:0 (this process)")

    def start() -> tuple[Agent, Callable[[], None]]:
        from dmesh.runtime.bootstrap import start_local_coordination

        return start_local_coordination(settings, devices)

    source = AgentSource(start=start)
    communicator = Communicator(
        0,
        [myself],
        LocalNetwork(1).transport(0),
        timeout=settings.collective_timeout,
        store=source.open,
    )
    context.install(
        Context(
            0,
            settings,
            LogicalDevices(device_type, logical_devices),
            FoundVariables(found),
            topology_of([_alone(settings, devices)]) if device_type == "TPU" else None,
            communicator,
            World(communicator.world),
            source,
        )
    )


def _initialize_multi_client(
    settings: Settings,
    device_type: str,
    logical_devices: Mapping[str, int],
    devices: tuple[Device, ...],
    use_coordination: bool,
    found: Mapping[str, str],
) -> None:
    if settings.own_address is not None and not use_coordination:
        raise ConfigurationError(
            f"enable_coordination_service is False, but {settings.origins['jobs']} has no addresses of all "
            "clients. Leave the argument out, so that the coordination service finds them, or set "
            "DTENSOR_JOBS to HOST:PORT of every client"
        )
    if settings.takes_any_task and (device_type == "TPU" or settings.backend == "mpi"):
        what = "with TPU devices" if device_type == "TPU" else "in an MPI launch"
        raise ConfigurationError(
            f"DTENSOR_CLIENT_ID is not set, and {what} the coordinator cannot choose it. Give each client "
            "its own DTENSOR_CLIENT_ID"
        )
    with collector_paused():  # programs that run alone do without these modules, and without gRPC
        from dmesh.runtime.bootstrap import start_client
    try:
        client = start_client(settings, devices, use_coordination)
        settings = client.settings
    except ConfigurationError as error:
        if settings.own_address is None or not isinstance(error.__cause__, OSError):
            raise  # it is not the address that does not do
        raise type(error)(
            f"{error} The address is from {settings.origins['jobs']}, which does not know for certain where "
            "all clients are: give a cluster resolver the coordinator's, or set DMESH_COORDINATOR"
        ) from error
    topology = None
    if device_type == "TPU":
        try:
            if client.agent is None:  # no server has the clients' cores in its table
                own = [device for device in devices if device.type == "TPU"]
                client.members = exchange(client.communicator, client.members, own, settings.init_timeout)
            topology = topology_of(client.members)
        except DMeshError as error:
            client.leave(f"{type(error).__name__}: {error}"[:1000])
            raise
    context.install(
        Context(
            settings.client_id,
            settings,
            LogicalDevices(device_type, logical_devices),
            FoundVariables(_with_addresses(found, client)),
            Members(client.members),
            topology,
            client.communicator,
            World(client.communicator.world),
            None if client.agent is None else AgentSource(client.agent),
            client,
        )
    )
    exits.install()


def _with_addresses(found: Mapping[str, str], client: Client) -> Mapping[str, str]:
    """Add the clients' addresses and this one's id to the variables of a launcher that lacked them."""
    settings = client.settings
    if settings.own_address is None:
        return found
    addresses = [member.peer_addresses[0] for member in client.members]
    if settings.coordinator is None:
        addresses[0] = settings.jobs[0]  # where it hosts the server
    return {**found, "DTENSOR_JOBS": ",".join(addresses), "DTENSOR_CLIENT_ID": str(settings.client_id)}
