"""How a standalone server is set."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dmesh.certificates import IdentityFiles
from dmesh.errors import ConfigurationError
from dmesh_server.core.model import Limits
from dmesh_server.listening import Address
from dmesh_server.security.tls import TlsSettings

DEFAULT_LISTEN = "127.0.0.1:8470"
"""Where `dmesh serve` listens for clients if nothing else is said."""

DEFAULT_HTTP = "127.0.0.1:8471"
"""Where `dmesh serve` listens for operators if nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that can be set about a standalone server."""

    listen: Address = field(default_factory=lambda: Address.parse(DEFAULT_LISTEN, "--listen"))
    """Where clients connect (gRPC); port 0 for any free one."""
    http: Address | None = field(default_factory=lambda: Address.parse(DEFAULT_HTTP, "--http"))
    """Where operators look (HTTP); None for not at all."""
    data_dir: Path | None = None
    """Directory in which state is kept across restarts; None: in memory only."""
    insecure: bool = False
    """Ask nobody for a token, whatever address it is that the server listens on."""
    tls: TlsSettings | None = None
    """How connections are encrypted; None for not at all."""
    http_client_certs: bool = True
    """With `tls.client_ca`: ask for a client certificate on the HTTP side, too."""
    token_file: Path | None = None
    """File with the tokens that are accepted; None: what the environment says, or the default path."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on what clients may make the server keep, and the times that it keeps to."""
    health: bool = True
    """Offer the gRPC health service."""
    reflection: bool = False
    """Offer gRPC server reflection, with which tools list the services."""
    shutdown_grace: float = 2.0
    """Seconds that calls under way have to end when the server stops."""
    log_format: Literal["text", "json"] = "text"
    """How log lines look."""
    verbose: bool = False
    """Log what is of use when looking for a fault, too."""

    def __post_init__(self) -> None:
        if self.shutdown_grace < 0:
            raise ConfigurationError(f"the shutdown grace is {self.shutdown_grace} s; it cannot be negative")
        for address in (self.listen, self.http):
            if address is not None:
                address.resolve()  # a name that nobody knows is refused before anything is made or opened
        if self.insecure and self.token_file is not None:
            raise ConfigurationError(
                "--insecure (ask nobody for a token) and --token-file exclude each other"
            )

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> ServerSettings:
        """Reads the command line of `dmesh serve`: texts and switches, named like the flags.

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
                session_grace=_seconds("--session-grace", flags.session_grace, standard.session_grace),
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return cls(
            listen=Address.parse(DEFAULT_LISTEN if flags.listen is None else flags.listen, "--listen"),
            http=None
            if flags.no_http
            else Address.parse(DEFAULT_HTTP if flags.http is None else flags.http, "--http"),
            data_dir=None if flags.data_dir is None else Path(flags.data_dir),
            tls=_tls(flags),
            http_client_certs=not flags.http_no_client_certs,
            insecure=flags.insecure,
            token_file=None if flags.token_file is None else Path(flags.token_file),
            limits=limits,
            reflection=flags.reflection,
            shutdown_grace=_seconds("--shutdown-grace", flags.shutdown_grace, cls.shutdown_grace),
            log_format=flags.log_format,
            verbose=flags.verbose,
        )


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
