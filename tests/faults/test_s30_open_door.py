"""Scenario 30: an unprotected server that others can reach starts only if that is spelled out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.e2e.clients import Process, free_ports
from tests.faults.secured import DEADLINE, Authority, ask, write_tokens

from dmesh.errors import ConfigurationError
from dmesh.security import tokens
from dmesh.security.certificates import IdentityFiles
from dmesh.security.tokens import TokenSource
from dmesh_server.embedded import start

pytestmark = pytest.mark.faults

NOBODYS_HOME = {"XDG_CONFIG_HOME": "/proc/nowhere"}
"""Where no token can be found, nor made."""

OPEN = ["0.0.0.0:0", "[::]:0"]


def serve(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dmesh", "serve", "--memory", *arguments]


@pytest.mark.parametrize("address", [*OPEN, "127.0.0.1:0"])
@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_standalone_without_a_token_does_not_start(address: str, flag: str) -> None:
    other = "--http" if flag == "--listen" else "--listen"
    done = subprocess.run(
        serve(flag, address, other, "127.0.0.1:0"), env={**os.environ, **NOBODYS_HOME},
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr


def test_insecure_is_spelled_out_and_said() -> None:
    server = Process(serve("--insecure", "--listen", "0.0.0.0:0", "--no-http"), NOBODYS_HOME)
    try:
        port = server.wait_for("dmesh-server ready").rpartition(":")[2]
        assert ask(f"127.0.0.1:{port}", None) is grpc.StatusCode.FAILED_PRECONDITION, "it got in"
        server.wait_for("insecure", where="err")
    finally:
        server.end()


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_a_token_in_clear_text_is_refused(tmp_path: Path, flag: str) -> None:
    other = "--http" if flag == "--listen" else "--listen"
    path = write_tokens(tmp_path / "t", tokens.generate())
    done = subprocess.run(
        serve(flag, "0.0.0.0:0", other, "127.0.0.1:0", "--token-file", str(path)), env=os.environ,
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "others on the network could read the token" in done.stderr
    assert "--tls-cert" in done.stderr
    assert "--insecure" in done.stderr


def test_a_token_in_clear_text_is_spelled_out_and_still_asked_for(tmp_path: Path) -> None:
    token = tokens.generate()
    path = write_tokens(tmp_path / "t", token)
    given = ("--insecure", "--token-file", str(path))
    server = Process(serve("--listen", "0.0.0.0:0", "--no-http", *given), {})
    try:
        port = server.wait_for("dmesh-server ready").rpartition(":")[2]
        assert ask(f"127.0.0.1:{port}", None) is grpc.StatusCode.UNAUTHENTICATED
        assert ask(f"127.0.0.1:{port}", token) is grpc.StatusCode.FAILED_PRECONDITION
        server.wait_for("unencrypted", where="err")
    finally:
        server.end()


def test_encrypted_it_starts(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path / "tls").issue("server")
    server = Process(
        serve("--listen", "0.0.0.0:0", "--no-http", "--tls-cert", str(cert), "--tls-key", str(key)), {}
    )
    try:
        server.wait_for("dmesh-server ready")
    finally:
        server.end()


@pytest.mark.parametrize("address", OPEN)
def test_embedded_without_protection_does_not_start(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="DMESH_INSECURE=1"):
        start(address)
    start(address, insecure=True).stop(0.1)
    token = TokenSource("test", value=tokens.generate())
    with pytest.raises(ConfigurationError, match=r"without TLS.*DMESH_TLS_CA.*DMESH_INSECURE=1"):
        start(address, tokens=token)
    start(address, tokens=token, insecure=True).stop(0.1)
    certificates = Authority(tmp_path / "tls")
    files = IdentityFiles(*certificates.issue("server"))
    start(address, tokens=token, certificates=(files, certificates.path)).stop(0.1)


@pytest.mark.parametrize(
    ("environ", "joins"),
    [
        ({}, False),
        ({"DMESH_INSECURE": "1"}, True),
        ({"DMESH_TOKEN": "a-token-of-this-test-0123456789"}, False),
        ({"DMESH_TOKEN": "a-token-of-this-test-0123456789", "DMESH_INSECURE": "1"}, True),
    ],
)
def test_client_0_that_hosts_the_server(tmp_path: Path, environ: dict[str, str], joins: bool) -> None:
    script = "import dmesh; dmesh.initialize_accelerator_system(); dmesh.shutdown_accelerator_system()"
    settings = {
        "DTENSOR_JOBS": f"127.0.0.1:{free_ports(1)[0]}",
        "DMESH_BIND_HOST": "0.0.0.0",
        "XDG_CONFIG_HOME": str(tmp_path),
        **environ,
    }
    client = Process([sys.executable, "-c", script], settings)
    try:
        code = client.wait()
    finally:
        client.end()
    assert (code == 0) is joins, client.err
    if not joins:
        assert "can be reached from other machines" in client.err
        assert ("DMESH_TLS_CA" if "DMESH_TOKEN" in environ else "DMESH_TOKEN") in client.err
