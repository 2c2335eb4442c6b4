"""Bounds on the connections, calls and bytes of one peer, and of all peers together."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

_RESERVE = 512
"""File descriptors kept for the store, the HTTP side and the process itself."""

_FEWEST_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Bounds on connections to the gRPC side."""

    connections: int = 0
    """Open connections in all, those included whose handshake is not over; 0: as many as the process may have
    file descriptors, less what it needs itself."""
    calls_per_connection: int = 4096
    """Calls under way on one connection. More wait at the client's end or are refused there, so that a client
    that floods the server with calls keeps mostly itself waiting."""
    request_bytes: int = 3 << 19
    """Size of one request or one message of a session: 1.5 MiB, a value of the largest size and its key."""
    messages_per_second: float = 5000.0
    """Messages of one session, on average over a second: beyond it, a session is read more slowly."""
    handshake_seconds: float = 10.0
    """Time from the connection to the end of its TLS handshake and its HTTP/2 preface."""
    idle_seconds: float = 10.0
    """Time that a connection may be open without a call; clients keep their session's call open."""
    unauthenticated_per_host: int = 64
    """Connections of one host without an accepted token, when less than a sixteenth of all connections is
    free. Those that wait for the server to read their first call do not count."""

    def __post_init__(self) -> None:
        for name in (
            "calls_per_connection",
            "request_bytes",
            "messages_per_second",
            "handshake_seconds",
            "idle_seconds",
            "unauthenticated_per_host",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.connections < 0:
            raise ValueError(f"connections must be positive, or 0 for as many as fit, not {self.connections}")

    @property
    def session_connections(self) -> int:
        """Connections of sessions in all: each is the second one of its client. More use streams."""
        return self.connections or _as_many_as_fit() // 4

    @property
    def grpc_connections(self) -> int:
        """Connections to the gRPC port in all."""
        return self.connections or _as_many_as_fit() - self.session_connections

    def options(self) -> tuple[tuple[str, Any], ...]:
        """Return the limits as options of a gRPC server."""
        return (
            ("grpc.max_allowed_incoming_connections", self.grpc_connections),
            ("grpc.max_concurrent_streams", self.calls_per_connection),
            ("grpc.max_receive_message_length", self.request_bytes),
            # By default a peer that connects and says nothing is kept for two minutes. The time in which it
            # acknowledges the server's settings is left alone: a host that starts thousands takes long.
            ("grpc.server_handshake_timeout_ms", round(self.handshake_seconds * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_seconds * 1000)),
        )


def _as_many_as_fit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(_FEWEST_CONNECTIONS, soft - _RESERVE)
