"""Asks a coordination server's REST interface, for what is only there."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from dmesh.cli.observing import DEFAULT_ADDRESS, named_coordinator
from dmesh.config.settings import split_address
from dmesh.coordination.credentials import ClientTls
from dmesh.errors import (
    AuthenticationError,
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    PermissionDeniedError,
)
from dmesh.security import tokens

DEFAULT_PORT = 8471
"""Default HTTP address of `dmesh serve`."""
_PATIENCE = 10.0
_MOST_BYTES = 16 << 20
_REFUSALS = {401: AuthenticationError, 403: PermissionDeniedError}


class Rest:
    """A server's REST interface. Shows it this process's token, and no other host; goes through no proxy.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT`.
        token: What it shows; empty for nothing.
        context: How `https` is encrypted; None for the system's authorities.

    Raises:
        ConfigurationError: The address is none.
    """

    def __init__(self, url: str, token: str = "", context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port == -1
            or parts.path not in ("", "/")
        ):
            raise ConfigurationError(f"{url!r} is not the HTTP address of a server: write http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._token = token
        self._context = context

    @classmethod
    def of(cls, given: str | None, environ: Mapping[str, str]) -> Rest:
        """Creates a client from the command line and the environment.

        Args:
            given: What the command line says; None for the default port of the coordinator's host.
            environ: The environment.

        Raises:
            ConfigurationError: An address, the token or a certificate cannot be used.
        """

        def text(name: str) -> str | None:
            return environ.get(f"DMESH_{name}", "").strip() or None

        tls = ClientTls.of(*(text(f"TLS_{name}") for name in ("CA", "CERT", "KEY", "SERVER_NAME")))
        if given is None:
            address = named_coordinator(None, environ) or DEFAULT_ADDRESS
            host, _ = split_address(address, "the coordinator's address")
            shown = f"[{host}]" if ":" in host else host
            given = f"{'https' if tls else 'http'}://{shown}:{DEFAULT_PORT}"
        source = tokens.find(text("TOKEN"), text("TOKEN_FILE"))
        return cls(given, source.read()[0].value if source else "", None if tls is None else _context(tls))

    def get(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Asks for a resource.

        Raises:
            CoordinatorUnavailableError: The server does not answer, or not as it should.
            CoordinationError: It refused.
        """
        return self.send("GET", f"{path}?{urlencode(parameters)}" if parameters else path)

    def send(self, method: str, target: str, body: object = None) -> dict[str, Any]:
        """Sends a request.

        Args:
            method: Of HTTP.
            target: Path and query.
            body: What is sent as JSON; None for nothing.

        Raises:
            CoordinatorUnavailableError: The server does not answer, or not as it should.
            CoordinationError: It refused.
        """
        headers = {"Accept": "application/json"}
        content = None
        if body is not None:
            content = json.dumps(body)
            headers["Content-Type"] = "application/json"
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=_PATIENCE, context=self._context)
            if self._secure
            else http.client.HTTPConnection(self._host, self._port, timeout=_PATIENCE)
        )
        try:
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise CoordinatorUnavailableError(
                f"{self.url} does not answer ({error}). Name the server's HTTP address with --http; a server "
                "inside client 0 has none"
            ) from error
        finally:
            connection.close()
        return self._read(status, answer, target.partition("?")[0])

    def _read(self, status: int, body: bytes, path: str) -> dict[str, Any]:
        found: object = None
        if len(body) <= _MOST_BYTES:
            try:
                found = json.loads(body)
            except ValueError:
                found = None
        if status == 200 and isinstance(found, dict):
            return found
        if status == 404 or not isinstance(found, dict):
            raise CoordinatorUnavailableError(
                f"the server at {self.url} has no {path} (status {status}): it is not a dmesh server, or "
                "an older version"
            )
        reason = found.get("status") or found.get("detail") or f"status {status}"
        raise _REFUSALS.get(status, CoordinationError)(f"{self.url} refused: {str(reason)[:1000]}")


def add_http(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names the server's HTTP address."""
    parser.add_argument(
        "--http",
        metavar="URL",
        help="HTTP address of the server (default: port 8471 of DMESH_COORDINATOR's host, or of this one)",
    )


def _context(tls: ClientTls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
        if tls.identity is not None:
            context.load_cert_chain(tls.identity.cert, tls.identity.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"DMESH_TLS_CA, _CERT or _KEY cannot be used: {error}") from error
    return context
