"""The gRPC server: options, services, ports."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from dmesh.errors import AddressInUseError, MissingExtraError
from dmesh_server.listening import Address, bind
from dmesh_server.rpc import coordination, key_value, session_calls
from dmesh_server.rpc.connections import ConnectionGuard
from dmesh_server.rpc.coordination import CoordinationServicer
from dmesh_server.rpc.interceptors import IdentityGate, TokenGate
from dmesh_server.rpc.key_value import KeyValueServicer
from dmesh_server.rpc.session_input import SessionOpener
from dmesh_server.rpc.session_server import SessionServer
from dmesh_server.rpc.tracing import CallTracer
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.security.audit import AuditLog
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.refusals import RefusalLog
from dmesh_server.security.tls import ServerTls

if TYPE_CHECKING:
    from grpc_health.v1 import health

    from dmesh_server.telemetry.tracing import Traces

MAX_RESPONSE_BYTES = 64 << 20
"""Size of a response: the table of members of the largest cluster, or as many values as the core gives at a
time (`Limits.max_read_bytes`). Clients must accept as much."""

_SHORTEST_PING_MS = 50

OPTIONS: tuple[tuple[str, Any], ...] = (
    # Two servers on one port would share its connections silently.
    ("grpc.so_reuseport", 0),
    # gRPC drops calls at random once this many wait to be accepted (1000 by default), and all at the hard
    # limit (3000): a job of ten thousand clients that all call at once would lose some and hang.
    ("grpc.server.max_pending_requests", 65_536),
    ("grpc.server.max_pending_requests_hard_limit", 131_072),
    # Clients ping, too, every few seconds; by default a server takes that for abuse and hangs up.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    # A process whose interpreter was blocked answers and sends in a burst when it goes on; to close its
    # connection for that (GOAWAY, too_many_pings) would make it look dead just when it is back.
    ("grpc.http2.max_ping_strikes", 0),
    # gRPC lets a fast sender have tens of megabytes under way, even of requests refused for their size.
    # No request is larger than this by much.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 32 << 10),
)
"""Options of the gRPC server, with reasons."""


def ping_options(lease: float) -> tuple[tuple[str, Any], ...]:
    """Return the options of pings to clients: their interval and time-out, for a lease in seconds.

    gRPC's C code answers pings on threads of its own, also while a client's interpreter is blocked: a
    connection that answers them without heartbeats belongs to a live process. A process that does not answer
    is stopped or cut off, and its session ends 0.6 to 0.85 of a lease later: a client back within half a
    lease is not missed. It is the ping timeout that closes a connection; the keepalive timeout alone does
    not.
    """
    interval = max(_SHORTEST_PING_MS, round(lease * 1000 / 4))
    timeout = max(_SHORTEST_PING_MS, round(lease * 1000 * 0.6))
    return (
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.http2.min_time_between_pings_ms", min(interval, 1000) // 2),
    )


class RpcServer:
    """A listening gRPC server over a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        access: Access | None = None,
        tls: ServerTls | None = None,
        peer_limits: PeerLimits | None = None,
        session_port: int | None = 0,
        health: bool = False,
        reflection: bool = False,
        traces: Traces | None = None,
        audit_log: AuditLog | None = None,
    ) -> None:
        """Make a server that does not listen yet.

        Args:
            runtime: Answers the requests.
            access: Roles of the accepted tokens; None to accept callers without a token.
            tls: Encryption of connections; None for plaintext.
            peer_limits: Bounds on the use by peers; the defaults if None.
            session_port: Port for sessions with a connection of their own; 0 for any free port, None to have
                all sessions over gRPC.
            health: Offer `grpc.health.v1` (needs the server extra).
            reflection: Offer server reflection (needs the server extra).
            traces: Makes spans of calls; None for none.
            audit_log: Log of changes of keys by callers without a task; None for none.
        """
        self._runtime = runtime
        self.refusals = RefusalLog()
        """Log of refused certificates and closed connections."""
        gates: list[grpc.aio.ServerInterceptor] = []
        if tls is not None and tls.allowed:
            gates.append(IdentityGate(tls.allowed, self.refusals))
        bounds = peer_limits if peer_limits is not None else PeerLimits()
        self._guard: ConnectionGuard | None = None
        if access is not None:
            self._guard = ConnectionGuard(
                bounds.grpc_connections, bounds.unauthenticated_per_host, self.refusals
            )
            gates.append(TokenGate(access, self._guard))
        if traces is not None:
            gates.append(CallTracer(traces))
        self._credentials = None if tls is None else tls.credentials()
        options = (*OPTIONS, *bounds.options(), *ping_options(runtime.limits.lease))
        self._server = grpc.aio.server(interceptors=gates, options=options)
        self._tasks: set[asyncio.Task[None]] = set()
        self._guarding: asyncio.Task[None] | None = None
        opener = SessionOpener(runtime, bounds, traces)
        self._sessions = None if session_port is None else SessionServer(opener, bounds, tls)
        self._session_port = session_port
        self._coordination = CoordinationServicer(runtime, bounds, opener, self._sessions)
        coordination_handlers = self._coordination.handlers()
        key_value_handlers = KeyValueServicer(runtime, audit_log).handlers()
        session_calls.count(runtime.measures)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(coordination.SERVICE, coordination_handlers),
                grpc.method_handlers_generic_handler(key_value.SERVICE, key_value_handlers),
            )
        )
        self._services = [coordination.SERVICE, key_value.SERVICE]
        self._health = self._add_health() if health else None
        if reflection:
            self._add_reflection()

    async def start(self, address: Address) -> Address:
        """Listen, and return the address with the real port.

        Raises:
            AddressInUseError: The port is taken.
            ConfigurationError: The address is not this machine's.
        """
        port = address.port
        for ip in _usable_ips(address):
            port = self._listen(address, Address(ip, port))
        self._coordination.port = port
        if self._sessions is not None and self._session_port is not None:
            self._sessions.start(bind(Address(address.host, self._session_port)))
        await self._server.start()
        if self._guard is not None:
            self._guarding = asyncio.create_task(self._guard.run(port), name="dmesh-connections")
        if self._health is not None:
            self._runtime.add_readiness_listener(self._readiness_changed)
            await self._set_health()
        return Address(address.host, port)

    async def stop(self, grace: float) -> None:
        """Refuse new calls at once, and end calls under way after `grace` seconds."""
        if self._guarding is not None:
            self._guarding.cancel()
        if self._sessions is not None:
            self._sessions.withdraw()
        await self._server.stop(grace)
        if self._sessions is not None:
            await self._sessions.stop()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _listen(self, named: Address, address: Address) -> int:
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), self._credentials)
        except RuntimeError as error:
            raise AddressInUseError(f"cannot listen on {named}: {error}") from error
        if port == 0:
            raise AddressInUseError(f"cannot listen on {named}: gRPC could not open the port")
        return int(port)

    def _add_health(self) -> health.aio.HealthServicer:
        try:
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        except ImportError as error:
            raise _missing("the gRPC health service", "grpcio-health-checking") from error
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self._services.append(health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        return servicer

    def _add_reflection(self) -> None:
        try:
            from grpc_reflection.v1alpha import reflection
        except ImportError as error:
            raise _missing("gRPC reflection", "grpcio-reflection") from error
        reflection.enable_server_reflection([*self._services, reflection.SERVICE_NAME], self._server)

    def _readiness_changed(self) -> None:
        task = asyncio.get_running_loop().create_task(self._set_health())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self) -> None:
        from grpc_health.v1 import health_pb2

        assert self._health is not None
        serving = self._runtime.readiness() is None
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", coordination.SERVICE, key_value.SERVICE):
            await self._health.set(service, status)


def _usable_ips(address: Address) -> list[str]:
    """Find out whether the address can be listened on, for gRPC does not say why it cannot."""
    sockets = bind(address)
    ips = [str(listener.getsockname()[0]) for listener in sockets]
    for listener in sockets:
        listener.close()
    return ips


def _missing(what: str, package: str) -> MissingExtraError:
    return MissingExtraError(f"{what} needs the package {package}: pip install 'dmesh[server]'")
