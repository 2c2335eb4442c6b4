"""TLS between peers: their certificates, connections encrypted with them, and explanations of failures.

TLS hides the data, and keeps out anybody without a certificate of the cluster's authority. It does not prove
which peer is talking: one authority may serve several clusters, and one certificate is often used by all
clients. The keyed handshake that runs inside does that (`handshake`): a peer is a process that knows the
secret of this run of the cluster. So host names are not compared with those in the certificates. They would
add nothing, and the addresses in a job list (NAT, containers, a second network) are often not among them. The
attack that they would prevent, a holder of a certificate of the same authority who sits between two peers and
passes their keyed handshake on, is prevented by putting the TLS connection's own binding into that handshake.
"""

from __future__ import annotations

import re
import socket
import ssl
from pathlib import Path
from typing import Final

from dmesh._log import logger
from dmesh.errors import ConfigurationError
from dmesh.security.certificates import (
    IdentityFiles,
    handshake_in_memory,
    load_authority,
    load_identity,
    read_pem,
    reason,
    server_context,
)
from dmesh.security.secure_socket import SecureSocket
from dmesh.security.watched_files import WatchedFiles

_IDENTITY: Final = "DMESH_TLS_CERT/DMESH_TLS_KEY"
_AUTHORITY: Final = "DMESH_TLS_CA"
_NAME: Final = re.compile(rb"rank-([0-9]{1,9})\.dmesh\.invalid")
_ALERTS: Final = {
    "UNKNOWN_CA": "it is signed by an authority that is not trusted there (wrong CA)",
    "CERTIFICATE_EXPIRED": "it has expired, or is not yet valid",
    "CERTIFICATE_REQUIRED": "none was shown",
    "CERTIFICATE_REVOKED": "it was revoked",
    "UNSUPPORTED_CERTIFICATE": "it is of a kind that is not accepted there",
    "BAD_CERTIFICATE": "it is not valid there",
    "CERTIFICATE_UNKNOWN": "it is not valid there",
}


Stream = socket.socket | SecureSocket
"""A connection with a peer, encrypted or not."""


class PeerTls:
    """TLS connections between peers, both of which show a certificate of the authority `ca`.

    Replaced files are read again for the next connection. Used by one thread at a time. It is a
    ConfigurationError if the certificate cannot be used in one of the two roles that every peer has.
    """

    def __init__(self, identity: IdentityFiles, ca: Path) -> None:
        self._identity, self._ca = identity, ca
        self._files = WatchedFiles((identity.cert, identity.key, ca))
        self._client, self._server = self._load()

    def dial(self, sock: socket.socket, rank: int) -> SecureSocket:
        """Encrypt a connection that this client, of rank `rank`, has made."""
        self._refresh()
        return SecureSocket(sock, self._client, server_side=False, server_name=f"rank-{rank}.dmesh.invalid")

    def accept(self, sock: socket.socket) -> SecureSocket:
        """Encrypt a connection that this client has accepted."""
        self._refresh()
        return SecureSocket(sock, self._server, server_side=True)

    def _refresh(self) -> None:
        if self._files.changed():
            try:
                self._client, self._server = self._load()
            except ConfigurationError as error:  # as while they are being replaced
                logger.warning("keeping the certificates read before: %s", error)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            read_pem(self._identity.cert, "DMESH_TLS_CERT")
            read_pem(self._identity.key, "DMESH_TLS_KEY")
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.minimum_version = ssl.TLSVersion.TLSv1_2
            client.check_hostname = False  # see this module's docstring
            load_identity(client, self._identity, _IDENTITY)
            load_authority(client, self._ca, _AUTHORITY)
            server = server_context(self._identity, _IDENTITY, self._ca)
        except OSError as error:
            raise ConfigurationError(f"the certificates for DMESH_PEER_TLS: {error}") from error
        for context in (client, server):
            # Every connection has keys of its own: nothing is resumed, renegotiated or compressed.
            context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        server.num_tickets = 0
        cert = self._identity.cert
        try:
            # With itself, so that a bad certificate is found before any peer finds it.
            handshake_in_memory(client, server)
        except ssl.SSLCertVerificationError as error:
            raise ConfigurationError(
                f"{_IDENTITY}: peers could not accept the certificate {cert}: {reason(error)}. With "
                "DMESH_PEER_TLS it must be signed by the authority in DMESH_TLS_CA, for servers and for "
                "clients"
            ) from None
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise ConfigurationError(f"{_IDENTITY}: {cert} is not usable ({why})") from None
        return client, server


def claimed_rank(start: bytes) -> int | None:
    """Return the rank that a dialer claims, unproven, in its first TLS message.

    It is only searched for, not parsed: the message is an outsider's, and the rank is used for nothing but to
    say which peer to ask.
    """
    found = _NAME.search(start)
    return None if found is None else int(found[1])


def explain(error: ssl.SSLError) -> str:
    """Return in plain words why TLS failed with the other side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be accepted: {reason(error)}"
    words = str(error.reason or error)
    if words == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it showed no certificate"
    _, alert, kind = words.partition("_ALERT_")
    if alert and kind in _ALERTS:
        return f"it does not accept this client's certificate: {_ALERTS[kind]}"
    return f"TLS failed ({words.replace('_', ' ').lower()})"
