"""Standalone servers with tokens and certificates, for the scenarios about who may come in."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography.x509.oid import ExtendedKeyUsageOID as _Usage  # noqa: F401 -- trustme asks for cryptography
from tests.e2e.clients import Process

from dmesh.v1 import common_pb2, coordination_pb2, coordination_pb2_grpc

DEADLINE = 60.0
"""Seconds after which a test has failed; nothing waits this long unless something is broken."""

HOST = "127.0.0.1"


@dataclass
class Served:
    """A running server."""

    process: Process
    grpc: str
    http: str

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self.process.err


@contextlib.contextmanager
def serving(*arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Runs `dmesh serve`; it is gone when the block ends."""
    import sys

    process = Process(
        [sys.executable, "-m", "dmesh", "serve", "--listen", f"{HOST}:0", "--http", f"{HOST}:0", *arguments],
        dict(environ or {}),
    )
    try:
        words = dict(word.split("=", 1) for word in process.wait_for("dmesh-server ready").split()[2:])
        yield Served(process, words["grpc"], words["http"])
    finally:
        process.end()


def write_tokens(path: Path, *lines: str) -> Path:
    """Replaces a token file, as an operator should: in one step."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.chmod(0o600)
    os.replace(new, path)
    return path


class Authority:
    """A certificate authority of the test, and files of what it signs."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str, *identities: str, days: tuple[float, float] = (-1, 30)) -> tuple[Path, Path]:
        """Signs a certificate, valid between two days counted from now; returns certificate and key.

        A name that is there already is replaced: first the key, then the certificate.
        """
        now = datetime.datetime.now(datetime.UTC)
        begins, ends = (now + datetime.timedelta(days=day) for day in days)
        leaf = self._ca.issue_cert(*(identities or (HOST,)), not_before=begins, not_after=ends)
        key, cert = self._directory / f"{name}.key", self._directory / f"{name}.pem"
        for path, blob in ((key, leaf.private_key_pem.bytes()), (cert, leaf.cert_chain_pems[0].bytes())):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(blob)
            os.replace(fresh, path)
        return cert, key


def ask(
    address: str,
    token: str | None,
    *,
    channel: grpc.Channel | None = None,
    method: str = "GetClusterState",
    cluster: str = "nothing",
) -> grpc.StatusCode:
    """Makes a call with a token; returns the status code.

    FAILED_PRECONDITION is that of a call that got through: nobody has formed the cluster that it asks for.
    """
    own = channel if channel is not None else grpc.insecure_channel(address)
    try:
        stub = coordination_pb2_grpc.CoordinationServiceStub(own)
        request_type = getattr(coordination_pb2, f"{method}Request")
        request = request_type(caller=common_pb2.Caller(cluster=cluster))
        metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        getattr(stub, method)(request, timeout=DEADLINE, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    finally:
        if channel is None:
            own.close()
    return grpc.StatusCode.OK
