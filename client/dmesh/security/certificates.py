"""Reads the files of a TLS identity and finds out, without a network, whether it can work.

Shared by clients, servers and peers. Needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmesh.errors import ConfigurationError

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """A certificate with its chain, and the key to it: PEM files."""

    cert: Path
    """The certificate, then those between it and the authority."""
    key: Path
    """The private key, not encrypted."""


@dataclass(frozen=True, slots=True)
class Validity:
    """From when to when a certificate is valid, and for whom."""

    begins: float
    """Unix time."""
    ends: float
    """Unix time."""
    names: tuple[str, ...]
    """Subject alternative names: `DNS:host`, `IP Address:10.0.0.1`, `URI:spiffe://...`."""

    def days_left(self, now: float) -> float:
        """Returns the days from the unix time `now` to the end."""
        return (self.ends - now) / _DAY

    def describe(self) -> str:
        """Says it in one line."""
        return f"valid {_day(self.begins)} to {_day(self.ends)} for {', '.join(self.names) or 'no name'}"


def read_pem(path: Path, what: str) -> bytes:
    """Reads a PEM file.

    Args:
        path: The file.
        what: How errors name it, such as `--tls-cert` or `DMESH_TLS_CA`.

    Raises:
        ConfigurationError: It cannot be read, or is not PEM. Never has the content.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{what} {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigurationError(f"{what} {path} is not a PEM file (-----BEGIN ...-----)")
    return content


def check_identity(files: IdentityFiles, what: str, ca: Path | None = None) -> Validity:
    """Finds out whether a certificate is valid now and its key fits, by a handshake with ourselves.

    Args:
        files: The certificate and its key.
        what: How errors name them, such as `--tls-cert and --tls-key`.
        ca: Authority that must have signed it; None if who did is for others to judge.

    Raises:
        ConfigurationError: It cannot work; says why.
    """
    cert = read_pem(files.cert, what)
    read_pem(files.key, what)
    server = server_context(files, what)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    try:
        if ca is not None:
            load_authority(client, ca, "the CA")
        else:  # the certificate itself is what is trusted
            client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            client.load_verify_locations(cadata=cert.decode("ascii"))
        info = handshake_in_memory(client, server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"{what}: the certificate {files.cert} cannot be used: {reason(error)}"
        ) from None
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"{what}: {files.cert} is not a usable certificate ({error})") from None
    alternatives: tuple[tuple[str, str], ...] = info.get("subjectAltName", ())
    return Validity(
        begins=ssl.cert_time_to_seconds(str(info["notBefore"])),
        ends=ssl.cert_time_to_seconds(str(info["notAfter"])),
        names=tuple(f"{kind}:{name}" for kind, name in alternatives),
    )


def server_context(files: IdentityFiles, what: str, client_ca: Path | None = None) -> ssl.SSLContext:
    """Returns an SSL context for a TLS server of Python's standard library; at least TLS 1.2.

    Args:
        files: The certificate and its key.
        what: How errors name them.
        client_ca: Authority of the clients' certificates; None: clients are not asked for one.

    Raises:
        ConfigurationError: The key does not fit the certificate, or a file is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_identity(context, files, what)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        load_authority(context, client_ca, "the client CA")
    return context


def load_identity(context: ssl.SSLContext, files: IdentityFiles, what: str) -> None:
    """Gives a context its certificate.

    Raises:
        ConfigurationError: The key does not fit the certificate, or a file is not what it should be.
    """

    def no_password() -> str:
        raise ConfigurationError(f"{what}: the key {files.key} is encrypted; give it without a password")

    try:
        context.load_cert_chain(files.cert, files.key, no_password)
    except OSError as error:  # an ssl.SSLError is one
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        detail = (
            f"the key {files.key} does not belong to the certificate {files.cert}"
            if mismatch
            else f"{files.cert} with {files.key} cannot be loaded ({_short(error)})"
        )
        raise ConfigurationError(f"{what}: {detail}") from None


def load_authority(context: ssl.SSLContext, path: Path, what: str) -> None:
    """Makes a context trust the authority in a PEM file.

    Raises:
        ConfigurationError: The file cannot be read or has no certificate.
    """
    content = read_pem(path, what)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"{what} {path} has no certificate ({_short(error)})") from None


def reason(error: ssl.SSLCertVerificationError) -> str:
    """Says in plain words why a certificate was not accepted."""
    words = error.verify_message
    if "expired" in words:
        return "it has expired"
    if "not yet valid" in words:
        return "it is not yet valid (or this machine's clock is wrong)"
    if "self-signed" in words or "self signed" in words:
        return "it is signed by itself or by an authority that is not trusted here (wrong CA)"
    if "issuer" in words or "unable to verify" in words:
        return "it is signed by an authority that is not trusted here (wrong CA)"
    if "doesn't match" in words or "mismatch" in words:
        return f"it is for another name: {words}"
    return words


def handshake_in_memory(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> dict[str, Any]:
    """Connects two contexts in memory; returns the server's certificate as the client sees it.

    Raises:
        ssl.SSLError: One of them does not accept the other.
        ValueError: The handshake does not end.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up)
    waiting = [client, server_context.wrap_bio(up, down, server_side=True)]
    for _ in range(10):
        for side in tuple(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                waiting.remove(side)
        if not waiting:
            return dict(client.getpeercert() or {})
    raise ValueError("the handshake does not end")


def _short(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _day(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
