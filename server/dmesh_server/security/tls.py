"""TLS of the server's two ports: certificates, reloaded when they change, and the allowed client names."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dmesh.errors import ConfigurationError
from dmesh.security.certificates import IdentityFiles, Validity, check_identity, read_pem, server_context
from dmesh.security.watched_files import WatchedFiles
from dmesh_server.telemetry import logs

_WARN_DAYS = 7.0


@dataclass(frozen=True)
class TlsSettings:
    """Encryption of a server's connections."""

    files: IdentityFiles
    """The server's certificate and key."""
    client_ca: Path | None = None
    """Authority of the clients' certificates; None: clients are not asked for one."""
    allowed: tuple[str, ...] = ()
    """Names of the authority's clients that may come in: full names (DNS, URI or IP) in their
    certificates, or prefixes that end in `/`, such as `spiffe://example.org/dmesh/`. Empty for all of
    them."""
    names: tuple[str, str] = ("--tls-cert/--tls-key", "--tls-client-ca")
    """Names of the files in errors."""

    def __post_init__(self) -> None:
        if self.allowed and self.client_ca is None:
            raise ConfigurationError(
                "--tls-allow names clients by their certificates, so it needs --tls-client-ca"
            )
        for name in self.allowed:
            scheme, separator, rest = name.partition("://")
            if not name or (separator and "/" not in rest):
                # `spiffe://example.org` as a prefix would let `spiffe://example.org.evil/` in.
                raise ConfigurationError(
                    f"--tls-allow {name!r} is neither a full name nor a prefix of names; expected a full "
                    f"name, or a prefix that ends in a slash, such as {scheme or 'spiffe'}://"
                    f"{rest or 'example.org'}/"
                )


class ServerTls:
    """Server side of TLS. New connections use a replaced certificate at once."""

    def __init__(self, settings: TlsSettings, wall_clock: Callable[[], float] = time.time) -> None:
        """Read the files.

        Args:
            settings: Names of the files.
            wall_clock: Unix time.

        Raises:
            ConfigurationError: One of them cannot be used, or the certificate is not valid now.
        """
        self._settings = settings
        self._wall_clock = wall_clock
        paths = [
            settings.files.cert,
            settings.files.key,
            *([settings.client_ca] if settings.client_ca else []),
        ]
        self._files = WatchedFiles(paths, interval=0.0)
        self._loaded = _load(settings)
        self._notify()

    @property
    def allowed(self) -> tuple[str, ...]:
        """Names of the allowed clients; empty for every client with a certificate."""
        return self._settings.allowed

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port: TLS 1.2 or 1.3, gRPC's default."""
        seen = self._loaded.configuration

        def latest() -> grpc.ServerCertificateConfiguration | None:
            # Asked at every handshake, on threads of gRPC's; None is: as before.
            nonlocal seen
            current = self._loaded.configuration
            if current is seen:
                return None
            seen = current
            return current

        return grpc.dynamic_ssl_server_credentials(
            seen,
            latest,  # type: ignore[arg-type] # None is what gRPC documents
            require_client_authentication=self._settings.client_ca is not None,
        )

    def context(self, *, ask_for_certificates: bool = True) -> ssl.SSLContext:
        """Return the TLS context of an HTTP port.

        Args:
            ask_for_certificates: Ask clients for their certificates, if there is an authority for them.
        """
        files, ca = self._settings.files, self._settings.client_ca
        first = server_context(files, self._settings.names[0], ca if ask_for_certificates else None)

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            # Called when a handshake begins, with or without a name: the moment to take the latest one.
            loaded = self._loaded
            connection.context = loaded.asking if ask_for_certificates else loaded.open

        first.sni_callback = renew
        return first

    def refresh(self) -> None:
        """Read the files again if they have changed. Files that cannot be used change nothing."""
        if not self._files.changed():
            return
        try:
            self._loaded = _load(self._settings)
        except ConfigurationError as error:
            logs.error("certificates_not_reloaded", reason=error)
        else:
            self._notify()

    def _notify(self) -> None:
        left = self._loaded.validity.days_left(self._wall_clock())
        log = logs.warning if left < _WARN_DAYS else logs.info
        log(
            "certificate_loaded",
            file=self._settings.files.cert,
            certificate=self._loaded.validity.describe(),
            days_left=round(left, 1),
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Content of the files when they were last read."""

    configuration: grpc.ServerCertificateConfiguration
    asking: ssl.SSLContext
    open: ssl.SSLContext
    validity: Validity


def _load(settings: TlsSettings) -> _Loaded:
    what, what_ca = settings.names
    validity = check_identity(settings.files, what)
    ca = read_pem(settings.client_ca, what_ca) if settings.client_ca is not None else None
    pair = (read_pem(settings.files.key, what), read_pem(settings.files.cert, what))
    return _Loaded(
        grpc.ssl_server_certificate_configuration([pair], ca),
        server_context(settings.files, what, settings.client_ca),
        server_context(settings.files, what),
        validity,
    )


def is_allowed(names: Iterable[str], allowed: Iterable[str]) -> bool:
    """Return whether one of a certificate's names is allowed: in full, or by a prefix that ends in `/`."""
    patterns = tuple(allowed)
    return any(
        name == pattern or (pattern.endswith("/") and name.startswith(pattern))
        for name in names
        for pattern in patterns
    )


def names_in(peer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the alternative names in a result of `SSLObject.getpeercert`."""
    return tuple(str(name) for _, name in peer.get("subjectAltName", ()))
