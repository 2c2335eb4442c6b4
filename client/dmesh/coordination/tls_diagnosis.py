"""Finds out why an encrypted connection does not come about, by a handshake of our own.

gRPC says little: a server that does not accept a client's certificate only closes the connection, and so does
one that expects TLS from a client that speaks none.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from dmesh.config.addresses import split_address
from dmesh.coordination.credentials import ClientTls
from dmesh.errors import ConfigurationError
from dmesh.security.certificates import check_identity, reason

_TIMEOUT = 3.0

_ASKS = "it asks for a client certificate: set DMESH_TLS_CERT and DMESH_TLS_KEY"
_OTHER_VERSION = "it speaks no version of TLS that this process may use (1.2 or 1.3)"


def diagnose(address: str, tls: ClientTls | None) -> str | None:
    """Try to connect like gRPC, and describe the problem with TLS.

    Args:
        address: HOST:PORT of the coordinator.
        tls: How this process is set; None for unencrypted.

    Returns:
        The problem and what to do; None if it is not TLS, or not known.
    """
    with contextlib.suppress(ConfigurationError, OSError):
        host, port = split_address(address, "the coordinator's address")
        if tls is None:
            return _expects_tls(host, port)
        return _try(host, port, tls)
    return None


def _expects_tls(host: str, port: int) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), _TIMEOUT) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=host):
                pass
        except (ssl.SSLError, ConnectionError, TimeoutError):
            return None
    return "it expects TLS: set DMESH_TLS_CA to the authority that signed its certificate"


def _try(host: str, port: int, tls: ClientTls) -> str | None:
    context = tls.context()
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), _TIMEOUT) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=tls.server_name or host) as connection:
                # A server that takes us begins to speak HTTP/2. One that does not like our certificate only
                # hangs up: with TLS 1.3 it sees it when our side of the handshake is over already.
                return None if connection.recv(1) else _refused(tls)
        except ssl.SSLCertVerificationError as error:
            return (
                f"its certificate is not accepted: {reason(error)}. Correct the server's certificate, "
                "DMESH_TLS_CA or DMESH_TLS_SERVER_NAME"
            )
        except (ssl.SSLEOFError, ConnectionError):
            return _refused(tls)
        except ssl.SSLError as error:
            text = (error.reason or str(error)).upper()
            if "PROTOCOL_VERSION" in text:
                return _OTHER_VERSION
            if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text or "HTTP_REQUEST" in text:
                return "it does not speak TLS: unset DMESH_TLS_CA, or start it with --tls-cert and --tls-key"
            return _refused(tls) if "ALERT" in text else None
        except TimeoutError:
            return None


def _refused(tls: ClientTls) -> str:
    """Say what may be wrong with our own certificate: a server that refuses it does not tell."""
    if tls.identity is None:
        return _ASKS
    what = "it refuses this process's certificate"
    try:
        check_identity(tls.identity, "DMESH_TLS_CERT/DMESH_TLS_KEY", tls.ca)
    except ConfigurationError as error:
        return f"{what}: {error}"
    return f"{what} (DMESH_TLS_CERT): its authority is not the one that is trusted there (wrong CA)"
