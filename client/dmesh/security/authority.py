"""A private certificate authority in a directory. Needs `cryptography`, from the extra `security`."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dmesh.config.addresses import HOST_PATTERN
from dmesh.errors import ConfigurationError

CA = "ca"
"""File name of the authority, before the suffix."""

_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of machines differ a little."""


def create(directory: Path, days: int) -> x509.Certificate:
    """Makes an authority: `ca.pem` and `ca.key`.

    Args:
        directory: Where; made if it is not there.
        days: How long it is valid.

    Raises:
        ConfigurationError: There is one already, or the directory cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the directory {directory} cannot be created: {error.strerror}") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dmesh private CA")])
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(directory, CA, key, certificate)
    return certificate


def issue(directory: Path, name: str, hosts: Sequence[str], days: int) -> x509.Certificate:
    """Signs a certificate, for servers and clients alike: `NAME.pem` and `NAME.key`.

    Args:
        directory: Where the authority is, and where the files go.
        name: What the files are called, and the common name.
        hosts: Host names, IP addresses and URIs that it is for.
        days: How long it is valid; not longer than the authority's.

    Raises:
        ConfigurationError: A name cannot be one, there is no authority, or the files are there already.
    """
    if not 1 <= len(name) <= 64 or not HOST_PATTERN.fullmatch(name):
        raise ConfigurationError(
            f"--name {name!r} becomes a file name: expected 1 to 64 letters, digits, _ . -"
        )
    if name == CA:
        raise ConfigurationError(f"--name {name!r} is reserved for the CA; choose another one")
    if not hosts:
        raise ConfigurationError("--host is required: a certificate is for hosts, addresses or URIs")
    alternatives = [_alternative(host) for host in hosts]
    ca_key, ca = _read(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        _builder(subject, ca.subject, key, days, latest=ca.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(authority, critical=False)
    )
    certificate = builder.sign(ca_key, hashes.SHA256())
    _write(directory, name, key, certificate)
    return certificate


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if "://" in text and text.isascii() and text.isprintable() and " " not in text:
        return x509.UniformResourceIdentifier(text)
    if len(text) <= 253 and HOST_PATTERN.fullmatch(text.removeprefix("*.")):
        return x509.DNSName(text)
    raise ConfigurationError(f"--host {text!r} is neither a host name nor an IP address nor a URI")


def _read(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    cert_path, key_path = (directory / f"{CA}.{suffix}" for suffix in ("pem", "key"))
    try:
        ca = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigurationError(
            f"there is no CA in {directory} ({error.filename}: {error.strerror}); create one with "
            f"`dmesh certs init {directory}`"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{cert_path} and {key_path} are not a certificate and its key without a password"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or ca.public_key() != key.public_key():
        raise ConfigurationError(f"{key_path} is not the key to {cert_path}")
    if ca.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigurationError(
            f"the authority {cert_path} has expired on {ca.not_valid_after_utc:%Y-%m-%d}; make another one "
            "in a new directory"
        )
    return key, ca


def _write(
    directory: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    """Writes both files, or none."""
    files = {
        directory / f"{name}.key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        directory / f"{name}.pem": certificate.public_bytes(serialization.Encoding.PEM),
    }
    made: list[Path] = []
    try:
        for path, content in files.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            made.append(path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConfigurationError(
                f"{error.filename} already exists and is not overwritten; remove it or choose another name"
            ) from None
        raise ConfigurationError(
            f"{error.filename or directory} cannot be written: {error.strerror}"
        ) from error
