"""Start of one client: listener, embedded server, session, data plane, in that order.

Every step that can fail for a reason known locally (addresses, ports) comes before the first byte is sent.
What was started is stopped again, in reverse, if a later step fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dmesh import native
from dmesh._lazy_imports import collector_paused
from dmesh._log import logger
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.progress import CollectiveReports
from dmesh.collectives.trace import Trace
from dmesh.collectives.tuning import Tuning
from dmesh.collectives.tuning import find as find_tuning
from dmesh.config.addresses import join_address
from dmesh.config.settings import Settings, split_address
from dmesh.coordination.activity import TRACKER
from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy
from dmesh.coordination.credentials import ClientTls, Credentials
from dmesh.coordination.members import Device, Member, MemberState, Process
from dmesh.coordination.process import new_incarnation, this_process
from dmesh.coordination.server import HostedServer
from dmesh.coordination.task_choice import take_any
from dmesh.coordination.tracing import NO_TRACING
from dmesh.devices.device import DEVICE_TYPES
from dmesh.errors import (
    AddressInUseError,
    BarrierError,
    BarrierTimeoutError,
    ConfigurationError,
    CoordinatorUnavailableError,
    InitializationTimeoutError,
)
from dmesh.protocol import RESERVED_PREFIX
from dmesh.runtime.data_plane import DataPlane, address_in_use
from dmesh.runtime.membership import (
    LAST_WORDS,
    Client,
    ClientBarriers,
    barrier_record,
    hosts_server,
    leave_quietly,
    peers_of,
)
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource

if TYPE_CHECKING:
    from dmesh.telemetry.client import ClientTracing

INITIALIZE_BARRIER = f"{RESERVED_PREFIX}initialize"


def start_client(settings: Settings, devices: Sequence[Device], use_coordination: bool) -> Client:
    """Join the cluster that `settings` describe and wait until all its clients have.

    Args:
        settings: Multi-client settings.
        devices: This client's devices.
        use_coordination: Whether to discover the others through a coordination server, or to connect to the
            addresses in `DTENSOR_JOBS` alone.

    Raises:
        AddressInUseError: The port in this client's `DTENSOR_JOBS` entry is taken.
        ConfigurationError: The entry's host is not one of this machine's, the MPI launch does not fit, or a
            file that a setting names cannot be used.
        MissingExtraError: The backend needs what is not installed.
        InitializationTimeoutError: Not all clients came within `DMESH_INIT_TIMEOUT`.
        CoordinationError: The server refused this client, or another client failed meanwhile.
        CollectiveError: MPI failed.
    """
    tuning = find_tuning(settings.tuning)
    if settings.folding is not None:
        tuning = replace(tuning, folding=settings.folding)
    if settings.interfaces:  # each carries a stream
        tuning = replace(tuning, streams=max(tuning.streams, len(settings.interfaces)))
    with contextlib.ExitStack() as undo:
        coordinator = _coordinator(settings) if use_coordination else None
        tracing = _open_tracing(settings, coordinator) if settings.otel else None
        if tracing is not None:
            undo.callback(tracing.close)
        trace = None if settings.trace is None else Trace(settings.trace, settings.client_id)
        if trace is not None:
            undo.callback(trace.close)
        if use_coordination:
            client = _start_with_coordination(settings, devices, tuning, trace, tracing)
        else:
            client = _start_without_coordination(settings, devices, tuning)
            _begin_spans(client, tracing)
            # The same for all: they have exchanged these.
            run = ",".join(str(member.incarnation) for member in client.members)
            _begin_trace(client, trace, hashlib.blake2b(run.encode(), digest_size=8).hexdigest())
        undo.pop_all()
        return client


def _begin_trace(client: Client, trace: Trace | None, run: str) -> None:
    """Trace a client's calls from now on."""
    if trace is None:
        return
    process = this_process()
    trace.start(process.host, process.boot_id, run)
    client.trace = trace
    events = client.communicator.events
    events.add_reader(trace)
    if client.agent is not None:
        client.agent.set_barrier_listener(lambda arrival: events.publish(barrier_record(arrival)))


def _open_tracing(settings: Settings, coordinator: str | None) -> ClientTracing | None:
    """Return the maker of OpenTelemetry spans; None if the `OTEL_*` variables want none."""
    from dmesh.telemetry import open_provider

    provider = open_provider("DMESH_OTEL", "dmesh")
    if provider is None:
        return None
    from dmesh.telemetry.client import ClientTracing

    return ClientTracing(provider, settings.cluster, coordinator)


def _begin_spans(client: Client, tracing: ClientTracing | None) -> None:
    """Make spans of a client's calls from now on."""
    if tracing is None:
        return
    client.tracing = tracing
    tracing.identify(client.settings.client_id, client.settings.num_clients)
    client.communicator.events.add_reader(tracing.collectives())


def start_local_coordination(
    settings: Settings, devices: Sequence[Device]
) -> tuple[Agent, Callable[[], None]]:
    """Start a coordination server for this process alone and joins it, so that local scripts can use it too.

    Returns:
        The session, and what ends it and the server.
    """
    # Only this process knows the token, so no other process can join, not even one of the same user.
    own = TokenSource("this process", value=tokens.generate())
    server = _start_embedded_server("127.0.0.1:0", settings, own)
    with contextlib.ExitStack() as undo:
        undo.callback(server.stop, grace=0.5)
        identity = Identity(
            cluster=settings.cluster,
            job=settings.job_name,
            index=0,
            incarnation=new_incarnation(),
            jobs={settings.job_name: (server.address,)},
            process=this_process(),
            devices=tuple(devices),
            peer_addresses=(),
        )
        agent = Agent(
            server.address, identity, connect_timeout=settings.init_timeout, credentials=Credentials(own)
        )
        undo.callback(agent.close)
        agent.start()
        undo.callback(leave_quietly, agent, "", LAST_WORDS)
        end = undo.pop_all().close
    return agent, end


def start_coordinator(host: str, settings: Settings) -> HostedServer:
    """Start a coordination server in this process, for clients that name it in `DMESH_COORDINATOR`.

    Args:
        host: Which of this machine's addresses it listens on; the port is any free one.
        settings: They say which token opens it.

    Returns:
        The server; `address` says where it is, `stop` ends it, as does the end of the process.

    Raises:
        ConfigurationError: The host is not one of this machine's, or the token cannot be used.
    """
    source = tokens.find(settings.token, settings.token_file)
    tls = ClientTls.of(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)
    return _start_embedded_server(join_address(host, 0), settings, source, tls)


def _start_with_coordination(
    settings: Settings,
    devices: Sequence[Device],
    tuning: Tuning,
    trace: Trace | None,
    tracing: ClientTracing | None,
) -> Client:
    spans = tracing or NO_TRACING
    deadline = time.monotonic() + settings.init_timeout
    host, port = split_address(settings.address, f"entry {settings.client_id} of DTENSOR_JOBS", any_port=True)
    hosts_it = hosts_server(settings, settings.client_id)
    source = tokens.find(settings.token, settings.token_file)
    tls = ClientTls.of(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)
    credentials = Credentials(source, tls)  # reads the files: what is wrong with them is said before anything
    with contextlib.ExitStack() as undo:
        data_plane = DataPlane(settings, (settings.data_port or 0) if hosts_it else port, deadline)
        undo.callback(data_plane.close)
        server = None
        if hosts_it:
            where = join_address(settings.bind_host or host, port)
            server = _start_embedded_server(where, settings, source, tls, tracing)
            undo.callback(server.stop, grace=0.5)
        where = _coordinator(settings)
        identity = Identity(
            cluster=settings.cluster,
            job=settings.job_name,
            index=settings.client_id,
            incarnation=new_incarnation(),
            jobs={settings.job_name: settings.jobs},
            process=this_process(),
            devices=tuple(devices),
            peer_addresses=(data_plane.address,),
            settings=_cluster_settings(settings),
        )
        if settings.takes_any_task:
            identity = take_any(
                where,
                identity,
                connect_timeout=settings.init_timeout,
                credentials=credentials,
                tracing=spans,
            )
            logger.info("the coordinator at %s made this process client %d", where, identity.index)
            settings = replace(settings, client_id=identity.index, takes_any_task=False)
        if tracing is not None:
            tracing.identify(settings.client_id, settings.num_clients)
        agent = Agent(
            where,
            identity,
            connect_timeout=settings.init_timeout,
            credentials=credentials,
            tracing=spans,
        )
        undo.callback(agent.close)
        try:
            agent.start()
        except CoordinatorUnavailableError as error:
            if settings.coordinator is not None:
                raise
            raise InitializationTimeoutError(
                f"client 0 (/job:{settings.job_name}/task:0), which hosts the coordination server, did "
                f"not register within {settings.init_timeout:g} s: {error} {_advice(settings)}"
            ) from error
        undo.callback(leave_quietly, agent, "gave up during initialization", LAST_WORDS)
        client = Client(settings, agent, server)
        agent.set_world_barrier_listener(client.on_world_barrier)
        if not agent.rejoined:  # else the others run already; the next barrier connects them
            _await_everybody(agent, settings, deadline)
        client.members = agent.members()
        transport = data_plane.transport(
            settings.client_id,
            agent.identity.incarnation,
            lambda: agent.peer_secret,
            agent.cluster_incarnation.to_bytes(8, "big"),
        )
        client.communicator = _communicator(
            client, transport, peers_of(client.members), tuning, data_plane.mpi
        )
        _begin_trace(client, trace, f"{agent.cluster_incarnation:016x}")
        _begin_spans(client, tracing)
        client.communicator.events.add_source(
            lambda most: list(map(barrier_record, agent.past_barriers(most)))
        )
        agent.add_report_source(CollectiveReports(client.communicator))
        agent.add_departure_listener(client.on_departure)
        agent.add_failure_listener(client.on_session_failure)
        if settings.coordinator is None and not hosts_it:
            client.communicator.watch(0)  # the coordination server dies with it, and cannot report the loss
        undo.pop_all()
        return client


def _start_without_coordination(settings: Settings, devices: Sequence[Device], tuning: Tuning) -> Client:
    deadline = time.monotonic() + settings.init_timeout
    _, port = split_address(settings.address, f"entry {settings.client_id} of DTENSOR_JOBS")
    jobs = f"{settings.cluster}\n{settings.job_name}\n{','.join(settings.jobs)}".encode()
    # Without a server to generate a secret, the token proves membership; the job list identifies the job.
    secret = hashlib.blake2b(jobs, key=_key(settings), digest_size=32).digest()
    peers = [
        Peer(rank, (address,), 0, f"/job:{settings.job_name}/task:{rank} ({address})")
        for rank, address in enumerate(settings.jobs)
    ]
    with contextlib.ExitStack() as undo:
        data_plane = DataPlane(settings, port, deadline)
        undo.callback(data_plane.close)
        transport = data_plane.transport(
            settings.client_id, 0, lambda: secret, hashlib.blake2b(jobs, digest_size=8).digest()
        )
        client = Client(settings)
        client.communicator = _communicator(client, transport, peers, tuning, data_plane.mpi)
        undo.callback(client.communicator.close, linger=0.0)
        client.communicator.connect_all(max(deadline - time.monotonic(), 0.001))
        client.members = _introduce(client, devices)
        undo.pop_all()
        return client


def _introduce(client: Client, devices: Sequence[Device]) -> tuple[Member, ...]:
    """Exchange all clients' processes and devices, as the coordination server would have done."""
    settings, process = client.settings, this_process()
    counts = [sum(device.type == kind for device in devices) for kind in DEVICE_TYPES]
    table = client.communicator.world.all_gather(
        np.array([new_incarnation(), process.pid, *counts], np.uint64), timeout=settings.init_timeout
    )
    return tuple(
        Member(
            job=settings.job_name,
            index=rank,
            incarnation=incarnation,
            state=MemberState.CONNECTED,
            process=Process(host=address.rpartition(":")[0], pid=pid),
            devices=tuple(
                Device(kind, index)
                for kind, count in zip(DEVICE_TYPES, counts, strict=True)
                for index in range(count)
            ),
            peer_addresses=(address,),
        )
        for rank, (address, (incarnation, pid, *counts)) in enumerate(
            zip(settings.jobs, table.tolist(), strict=True)
        )
    )


def _key(settings: Settings) -> bytes:
    token = settings.token
    if token is None:
        logger.warning(
            "without a coordination service and DMESH_TOKEN, every process that knows DTENSOR_JOBS can join"
        )
    return hashlib.blake2b((token or "").encode(), digest_size=32).digest()


def _communicator(
    client: Client, transport: Transport, peers: Sequence[Peer], tuning: Tuning, mpi: MpiWorld | None
) -> Communicator:
    settings, agent = client.settings, client.agent
    communicator = Communicator(
        settings.client_id,
        peers,
        transport,
        timeout=settings.collective_timeout,
        on_gone=client.on_gone,
        stuck_after=(agent.cluster_settings.stuck_after or 0.0) if agent is not None else 0.0,
        joined=agent.joined_epoch if agent is not None and agent.rejoined else 0,
        shared_memory=SharedMemoryRegistry(settings.shared_memory << 20, native.core()),
        tuning=tuning,
        mpi=mpi,
        store=None if agent is None else lambda: agent,
    )
    TRACKER.watch(communicator.events)
    if agent is not None:
        communicator.events.on_waiting = agent.report_waiting
        communicator.barriers = ClientBarriers(agent)
    return communicator


def _await_everybody(agent: Agent, settings: Settings, deadline: float) -> None:
    """Wait until every client is here; all of them pass, or none."""
    try:
        agent.barrier(INITIALIZE_BARRIER, timeout=max(deadline - time.monotonic(), 0.001))
    except BarrierTimeoutError as error:
        missing = ", ".join(member.describe() for member in error.members)
        raise InitializationTimeoutError(
            f"not all of the {settings.num_clients} clients registered within {settings.init_timeout:g} s; "
            f"missing: {missing or 'unknown'}. {_advice(settings)}",
            error.members,
        ) from error
    except BarrierError as error:
        raise type(error)(f"initialization failed: {error}", error.members) from error


def _coordinator(settings: Settings) -> str:
    """Return the address of the coordination server: one of its own, or that in client 0."""
    return settings.coordinator or settings.jobs[0]


def _advice(settings: Settings) -> str:
    where = _coordinator(settings)
    return (
        "Check that each client was started with the same DTENSOR_JOBS, DMESH_COORDINATOR and "
        f"enable_coordination_service, and can reach {where}; DMESH_INIT_TIMEOUT sets the limit."
    )


def _cluster_settings(settings: Settings) -> ClusterSettings:
    policy = settings.restart_policy
    return ClusterSettings(
        restart_policy=None if policy is None else RestartPolicy(policy),
        heartbeat_interval=settings.heartbeat_interval,
        lease=settings.lease,
        stuck_after=settings.stuck_after,
    )


def _start_embedded_server(
    listen: str,
    settings: Settings,
    source: TokenSource | None,
    tls: ClientTls | None = None,
    tracing: ClientTracing | None = None,
) -> HostedServer:
    # The one place where the client needs the server's code: only the client that hosts it pays for the
    # import.
    with collector_paused():
        from dmesh_server.embedded import start

    certificates = None
    if tls is not None:
        if tls.identity is None:
            raise ConfigurationError(
                "DMESH_TLS_CA is set, so client 0, which hosts the coordination server, needs its own "
                "certificate: set DMESH_TLS_CERT and DMESH_TLS_KEY"
            )
        certificates = (tls.identity, tls.ca)
    try:
        return start(
            listen,
            tokens=source,
            certificates=certificates,
            insecure=settings.insecure,
            traces=None if tracing is None else tracing.provider,
        )
    except AddressInUseError as error:
        raise address_in_use(listen, settings) from error
