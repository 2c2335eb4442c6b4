"""Settings of a standalone server."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from dmesh.errors import ConfigurationError
from dmesh.security.certificates import IdentityFiles
from dmesh_server.core.model import Limits
from dmesh_server.listening import Address
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.setup import refuse_exposure
from dmesh_server.security.tls import TlsSettings

DEFAULT_LISTEN = "127.0.0.1:8470"
"""Default address on which `dmesh serve` listens for clients."""

_AROUND_A_VALUE = 16 << 10
_LARGEST_REQUEST = (1 << 31) - 1
_MOST = 10_000_000
_SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB)?", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?", re.ASCII)
_UNITS = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}

DEFAULT_HTTP = "127.0.0.1:8471"
"""Default address on which `dmesh serve` listens for operators."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as people are shown it."""

    name: str
    """Its name, with dots."""
    value: str
    """Its value; never a secret."""
    origin: str
    """Origin: a flag or the default."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that can be set about a standalone server."""

    listen: Address = field(default_factory=lambda: Address.parse(DEFAULT_LISTEN, "--listen"))
    """Address for clients (gRPC); port 0 for any free one."""
    http: Address | None = field(default_factory=lambda: Address.parse(DEFAULT_HTTP, "--http"))
    """Address for operators (HTTP); None for no HTTP."""
    session_port: int | None = 0
    """Port for sessions' own connections on the host of `listen`; 0 for any free port, None to have all
    sessions over gRPC."""
    data_dir: Path | None = None
    """Directory in which state is kept across restarts; None: in memory only."""
    insecure: bool = False
    """Accept callers without a token, on any address."""
    tls: TlsSettings | None = None
    """Encryption of connections; None for plaintext."""
    http_client_certs: bool = True
    """With `tls.client_ca`: ask for a client certificate on the HTTP side, too."""
    peer_limits: PeerLimits = field(default_factory=PeerLimits)
    """Bounds on each peer's use of the gRPC side."""
    http_connections: int = 512
    """Open connections to the HTTP side in all."""
    http_connections_per_host: int = 64
    """Open connections to the HTTP side from one host."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names under which browsers reach the HTTP side: of its DNS entry, or of a proxy before it."""
    token_file: Path | None = None
    """File with the accepted tokens; None for the environment's token, or the default path."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on the memory that clients can make the server use, and the server's times."""
    health: bool = True
    """Offer the gRPC health service."""
    reflection: bool = False
    """Offer gRPC server reflection, with which tools list the services."""
    shutdown_grace: float = 2.0
    """Seconds that calls under way have to end when the server stops."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""
    verbose: bool = False
    """Log details for debugging as well."""
    open_metrics: bool = False
    """Let `/metrics` be read without a token."""
    otel: bool = False
    """Make OpenTelemetry spans; where they go is said by the `OTEL_*` variables."""
    given: frozenset[str] = frozenset()
    """Flags that the command line has, by the names of `argparse`."""

    def __post_init__(self) -> None:
        if self.shutdown_grace < 0:
            raise ConfigurationError(f"the shutdown grace is {self.shutdown_grace} s; it cannot be negative")
        for address in (self.listen, self.http):
            if address is not None:
                address.resolve()  # an unknown name is refused before anything is created or opened
                if self.tls is None and not self.insecure:
                    refuse_exposure(
                        address,
                        "without --tls-cert and --tls-key",
                        "Encrypt it (see `dmesh certs`), or pass --insecure if you trust everyone on this "
                        "network.",
                        tokens=True,
                    )

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> ServerSettings:
        """Read the command line of `dmesh serve`: texts and switches, named like the flags.

        Raises:
            ConfigurationError: One of them cannot work.
        """
        if flags.no_http and flags.http is not None:
            raise ConfigurationError("--http and --no-http exclude each other")
        standard = Limits()
        lease = _seconds("--lease", flags.lease, standard.lease)
        # The proportion that the defaults have, so that one lost heartbeat is not a lost client.
        interval = lease * standard.heartbeat_interval / standard.lease
        try:
            limits = Limits(
                lease=lease,
                heartbeat_interval=_seconds("--heartbeat-interval", flags.heartbeat_interval, interval),
                max_clusters=_count("--max-clusters", flags.max_clusters, standard.max_clusters),
                max_tasks=_count("--max-tasks", flags.max_tasks, standard.max_tasks),
                max_key_bytes=_size("--max-key-size", flags.max_key_size, standard.max_key_bytes),
                max_value_bytes=_size("--max-value-size", flags.max_value_size, standard.max_value_bytes),
                max_store_bytes=_size("--max-store-size", flags.max_store_size, standard.max_store_bytes),
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return cls(
            listen=Address.parse(DEFAULT_LISTEN if flags.listen is None else flags.listen, "--listen"),
            http=None
            if flags.no_http
            else Address.parse(DEFAULT_HTTP if flags.http is None else flags.http, "--http"),
            session_port=_session_port(flags.session_port),
            data_dir=None if flags.data_dir is None else Path(flags.data_dir),
            tls=_tls(flags),
            peer_limits=_peer_limits(flags, limits),
            http_connections=_count(
                "--max-http-connections", flags.max_http_connections, cls.http_connections
            ),
            http_connections_per_host=_count(
                "--max-http-connections-per-host",
                flags.max_http_connections_per_host,
                cls.http_connections_per_host,
            ),
            http_client_certs=not flags.http_no_client_certs,
            allowed_hosts=tuple(_host_name(name) for name in flags.allowed_host or ()),
            insecure=flags.insecure,
            token_file=None if flags.token_file is None else Path(flags.token_file),
            limits=limits,
            reflection=flags.reflection,
            shutdown_grace=_seconds("--shutdown-grace", flags.shutdown_grace, cls.shutdown_grace),
            log_format=flags.log_format,
            verbose=flags.verbose,
            open_metrics=flags.open_metrics,
            otel=flags.otel,
            given=frozenset(
                name for name in _FLAGS.values() if getattr(flags, name, None) not in (None, False, "text")
            ),
        )

    def describe(self) -> list[Setting]:
        """Return all settings with their origins."""
        found = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("limits", "peer_limits"):
                for inner in fields(value):
                    name = f"{one.name}.{inner.name}"
                    found.append(self._setting(name, getattr(value, inner.name)))
            elif one.name == "tls":
                found.append(self._setting("tls", "off" if value is None else "on"))
            elif isinstance(value, tuple):
                found.append(self._setting(one.name, " ".join(value) or None))
            elif one.name != "given":
                found.append(self._setting(one.name, value))
        return found

    def _setting(self, name: str, value: object) -> Setting:
        flag = _FLAGS.get(name)
        origin = f"--{flag.replace('_', '-')}" if flag in self.given and flag is not None else "default"
        return Setting(name, "none" if value is None else str(value), origin)


_FLAGS = {
    "listen": "listen", "http": "http", "session_port": "session_port", "data_dir": "data_dir",
    "insecure": "insecure", "tls": "tls_cert", "http_client_certs": "http_no_client_certs",
    "http_connections": "max_http_connections", "http_connections_per_host": "max_http_connections_per_host",
    "allowed_hosts": "allowed_host", "token_file": "token_file", "reflection": "reflection",
    "shutdown_grace": "shutdown_grace",
    "log_format": "log_format", "verbose": "verbose", "open_metrics": "open_metrics", "otel": "otel",
    "limits.lease": "lease", "limits.heartbeat_interval": "heartbeat_interval",
    "limits.max_clusters": "max_clusters",
    "limits.max_tasks": "max_tasks", "limits.max_key_bytes": "max_key_size",
    "limits.max_value_bytes": "max_value_size", "limits.max_store_bytes": "max_store_size",
    "peer_limits.connections": "max_connections",
    "peer_limits.calls_per_connection": "max_calls_per_connection",
    "peer_limits.unauthenticated_per_host": "max_unauthenticated_per_host",
    "peer_limits.request_bytes": "max_request_size", "peer_limits.messages_per_second": "max_message_rate",
}  # fmt: skip
"""Flag of each setting, by the names of `argparse`."""


def _session_port(text: str | None) -> int | None:
    if text is None:
        return ServerSettings.session_port
    if text == "off":
        return None
    if not (text.isascii() and text.isdigit()) or int(text[:6]) > 65535:
        raise ConfigurationError(f"--session-port is {text!r}; expected a port, 0 for any free one, or off")
    return int(text)


def _host_name(text: str) -> str:
    if not _HOST_NAME.fullmatch(text):
        raise ConfigurationError(
            f"--allowed-host is {text!r}; expected a host name without a port, such as dmesh.example.org"
        )
    return text.lower()


def _tls(flags: argparse.Namespace) -> TlsSettings | None:
    if flags.tls_cert is None and flags.tls_key is None:
        if flags.tls_client_ca is not None or flags.tls_allow:
            raise ConfigurationError("--tls-client-ca and --tls-allow need --tls-cert and --tls-key")
        return None
    if flags.tls_cert is None or flags.tls_key is None:
        raise ConfigurationError("--tls-cert and --tls-key belong together: give both")
    return TlsSettings(
        IdentityFiles(Path(flags.tls_cert), Path(flags.tls_key)),
        None if flags.tls_client_ca is None else Path(flags.tls_client_ca),
        tuple(flags.tls_allow or ()),
    )


def _peer_limits(flags: argparse.Namespace, limits: Limits) -> PeerLimits:
    standard = PeerLimits()
    # A value of the allowed size must fit, with its key and the message around it.
    least = limits.max_value_bytes + limits.max_key_bytes + _AROUND_A_VALUE
    size = _size("--max-request-size", flags.max_request_size, max(standard.request_bytes, least))
    if size < least:
        raise ConfigurationError(
            f"--max-request-size is {flags.max_request_size!r}; a value of --max-value-size with its key "
            f"needs {least} bytes"
        )
    if size > _LARGEST_REQUEST:
        raise ConfigurationError(f"a request of {size} bytes is more than gRPC carries ({_LARGEST_REQUEST})")
    return PeerLimits(
        connections=_count("--max-connections", flags.max_connections, standard.connections),
        calls_per_connection=_count(
            "--max-calls-per-connection", flags.max_calls_per_connection, standard.calls_per_connection
        ),
        request_bytes=size,
        unauthenticated_per_host=_count(
            "--max-unauthenticated-per-host",
            flags.max_unauthenticated_per_host,
            standard.unauthenticated_per_host,
        ),
        messages_per_second=_count(
            "--max-message-rate", flags.max_message_rate, round(standard.messages_per_second)
        ),
    )


def _count(flag: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:10]) <= _MOST:
        raise ConfigurationError(f"{flag} is {text!r}; expected a whole number from 1 to {_MOST}")
    return int(text)


def _size(flag: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    found = _SIZE.fullmatch(text)
    size = int(found[1]) << _UNITS[found[2] or ""] if found else 0
    if not 1 <= size <= 1 << 40:
        raise ConfigurationError(
            f"{flag} is {text!r}; expected a number of bytes, or of KiB, MiB or GiB, such as 256MiB"
        )
    return size


def _seconds(flag: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise ConfigurationError(f"{flag} is {text!r}; expected a number of seconds")
    return value
