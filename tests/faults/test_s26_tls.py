"""Scenario 26: certificates that must not be accepted, and their replacement under running streams.

Real servers and real clients. Every refusal says which of the reasons it was.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.faults.secured import DEADLINE, HOST, Authority, serving

from dmesh.cli import main
from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import ClientTls, Credentials
from dmesh.coordination.tls_diagnosis import diagnose
from dmesh.errors import AuthenticationError, ConfigurationError
from dmesh.security import tokens
from dmesh.security.certificates import IdentityFiles
from dmesh.security.tokens import TokenSource
from dmesh_server.embedded import EmbeddedServer, start
from dmesh_server.security import tls as server_tls

pytestmark = pytest.mark.faults

Server = Callable[..., EmbeddedServer]
TOKEN = tokens.generate()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def files(pair: tuple[Path, Path]) -> IdentityFiles:
    return IdentityFiles(*pair)


def join(address: str, tls: ClientTls | None, index: int = 0, size: int = 1) -> Agent:
    identity = Identity.of_this_process(
        "worker", index, {"worker": tuple(f"h:{i}" for i in range(1, size + 1))}
    )
    agent = Agent(
        address,
        identity,
        connect_timeout=DEADLINE,
        credentials=Credentials(TokenSource("test", value=TOKEN), tls),
    )
    agent.start()
    return agent


def refused(address: str, tls: ClientTls | None) -> str:
    """Tries to join; must fail at once (not when the time to join runs out); returns the message."""
    started = time.monotonic()
    with pytest.raises(AuthenticationError) as caught:
        join(address, tls).close()
    assert time.monotonic() - started < DEADLINE / 2
    return str(caught.value)


@pytest.fixture
def served():
    """Starts servers on an encrypted port."""
    started: list[EmbeddedServer] = []

    def make(pair: tuple[Path, Path], ca: Path) -> EmbeddedServer:
        started.append(
            start(f"{HOST}:0", tokens=TokenSource("test", value=TOKEN), certificates=(files(pair), ca))
        )
        return started[-1]

    yield make
    for server in started:
        server.stop(0.1)


def test_both_sides_certified(authority: Authority, served: Server) -> None:
    server = served(authority.issue("server"), authority.path)
    agent = join(
        server.address, ClientTls(authority.path, files(authority.issue("worker", "worker.example")))
    )
    agent.key_value_set("a", b"1")
    assert agent.key_value_get("a") == b"1"
    agent.leave()


@pytest.mark.parametrize(
    ("identities", "days", "words"),
    [
        ((HOST,), (-9, -1), "has expired"),
        ((HOST,), (1, 9), "not yet valid"),
        (("other.example",), (-1, 9), "another name"),
    ],
)
def test_server_certificate_that_a_client_refuses(
    authority: Authority, served: Server, monkeypatch: pytest.MonkeyPatch, identities, days, words
) -> None:
    # A server of ours would not start with the first two; somebody else's would.
    validity = server_tls.check_identity(files(authority.issue("good")), "test")
    monkeypatch.setattr(server_tls, "check_identity", lambda *_: validity)
    server = served(authority.issue("server", *identities, days=days), authority.path)
    own = ClientTls(authority.path, files(authority.issue("worker")))
    assert words in refused(server.address, own)


def test_server_certificate_of_another_authority(
    authority: Authority, served: Server, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    server = served(other.issue("server"), authority.path)
    assert "wrong CA" in refused(server.address, ClientTls(authority.path, files(authority.issue("worker"))))


@pytest.mark.parametrize("which", ["expired", "not yet valid", "wrong CA", "missing"])
def test_client_certificate_that_the_server_refuses(
    authority: Authority, served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    server = served(authority.issue("server"), authority.path)
    if which == "missing":
        assert "asks for a client certificate" in refused(server.address, ClientTls(authority.path))
        return
    days = {"expired": (-9, -1), "not yet valid": (1, 9)}.get(which, (-1, 9))
    signer = Authority(tmp_path / "other") if which == "wrong CA" else authority
    identity = files(signer.issue("worker", "worker.example", days=days))
    if which != "wrong CA":
        with pytest.raises(ConfigurationError, match=which):  # it is not even tried with
            join(server.address, ClientTls(authority.path, identity))
        monkeypatch.setattr("dmesh.coordination.credentials.check_identity", lambda *_: None)
    assert which in refused(server.address, ClientTls(authority.path, identity))


def test_one_side_encrypts_and_the_other_does_not(authority: Authority, served: Server) -> None:
    encrypted = served(authority.issue("server"), authority.path)
    assert "expects TLS: set DMESH_TLS_CA" in refused(encrypted.address, None)
    plain = start(f"{HOST}:0", tokens=TokenSource("test", value=TOKEN))
    try:
        assert "does not speak TLS: unset DMESH_TLS_CA" in refused(plain.address, ClientTls(authority.path))
    finally:
        plain.stop(0.1)


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_old_versions_of_tls_are_refused(authority: Authority, tmp_path: Path, port: str) -> None:
    cert, key = authority.issue("server")
    with serving("--memory", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        host, number = (server.grpc if port == "grpc" else server.http.removeprefix("https://")).split(":")
        for version, accepted in (
            (ssl.TLSVersion.TLSv1_1, False),
            (ssl.TLSVersion.TLSv1_2, True),
            (ssl.TLSVersion.TLSv1_3, True),
        ):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(authority.path)
            context.set_ciphers("ALL:@SECLEVEL=0")  # or our own library would refuse TLS 1.1 before they can
            context.set_alpn_protocols(["h2"] if port == "grpc" else ["http/1.1"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that 1.1 is old is the point
                context.minimum_version = context.maximum_version = version
            with socket.create_connection((host, int(number)), DEADLINE) as raw:
                if accepted:
                    context.wrap_socket(raw, server_hostname=host).close()
                    continue
                with pytest.raises((ssl.SSLError, ConnectionError)):  # some only hang up
                    context.wrap_socket(raw, server_hostname=host)


def test_identities_are_names_in_full_or_directories(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    assert main(["certs", "init", str(directory)]) == 0
    certified = lambda name, host: _certified(directory, name, host)  # noqa: E731
    cert, key = certified("server", HOST)
    ca = directory / "ca.pem"
    allow = ("--tls-allow", "spiffe://x/dmesh/", "--tls-allow", "operator.example")
    with serving(
        "--memory", "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca),
        *allow, environ={"DMESH_TOKEN": TOKEN},
    ) as server:  # fmt: skip
        for number, (name, welcome) in enumerate(
            [
                ("spiffe://x/dmesh/worker-0", True),
                ("operator.example", True),
                ("spiffe://x.evil/dmesh/worker-0", False),
                ("spiffe://x/dmeshed/worker-0", False),
                ("spiffe://x/other", False),
                ("operator.example.evil", False),
            ]
        ):
            pair = certified(f"client{number}", name)
            tls = ClientTls(ca, files(pair))
            if welcome:
                join(server.grpc, tls).leave()
            else:
                with pytest.raises(AuthenticationError, match="--tls-allow"):
                    join(server.grpc, tls)
            context = ssl.create_default_context(cafile=str(ca))
            context.load_cert_chain(*pair)
            with httpx.Client(verify=context, trust_env=False, timeout=DEADLINE) as http:
                if welcome:
                    assert http.get(f"{server.http}/livez").status_code == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        http.get(f"{server.http}/livez")
        assert "certificate_refused" in server.log
        assert "spiffe://x.evil/dmesh/worker-0" in server.log


def _certified(directory: Path, name: str, host: str) -> tuple[Path, Path]:
    assert main(["certs", "issue", str(directory), "--name", name, "--host", host]) == 0
    return directory / f"{name}.pem", directory / f"{name}.key"


@pytest.mark.parametrize("name", ["spiffe://x", "https://host", ""])
def test_a_prefix_without_its_slash_is_refused(authority: Authority, name: str) -> None:
    with pytest.raises(ConfigurationError, match="a prefix that ends in a slash"):
        server_tls.TlsSettings(files(authority.issue("server")), authority.path, (name,))


def test_certificates_are_replaced_under_running_streams(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    worker = authority.issue("worker", "worker.example")
    own = ClientTls(authority.path, files(worker))
    with serving(
        "--memory", "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.path),
        environ={"DMESH_TOKEN": TOKEN},
    ) as server:  # fmt: skip
        agent = join(server.grpc, own)
        generation = agent._session.generation
        stop, written, failures = threading.Event(), [], []

        def write() -> None:
            while not stop.is_set():
                try:
                    agent.key_value_set("counter", str(len(written)), allow_overwrite=True)
                    written.append(None)
                except Exception as error:  # noqa: BLE001
                    failures.append(error)
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            first = serial(server.grpc, authority)
            for number in range(3):
                before = len(written)
                authority.issue("server")
                authority.issue("worker", "worker.example")
                deadline = time.monotonic() + DEADLINE
                while (second := serial(server.grpc, authority)) == first:
                    assert time.monotonic() < deadline, "the new certificate was never shown"
                    time.sleep(0.05)
                first = second
                while len(written) < before + 50:
                    assert not failures, failures
                    assert time.monotonic() < deadline, f"no traffic after replacement {number}"
                    time.sleep(0.01)
        finally:
            stop.set()
            writer.join(DEADLINE)
        assert not failures
        assert agent._session.generation == generation, "the session's stream was never broken"
        # Replaced by something that cannot work: the one before stays, and the log says so.
        cert.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
        deadline = time.monotonic() + DEADLINE
        while "certificates_not_reloaded" not in server.log:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert serial(server.grpc, authority) == first
        agent.leave()


def serial(address: str, authority: Authority) -> str:
    """Returns the serial number of the certificate that a new connection is shown."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=str(authority.path))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), DEADLINE) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        return str(connection.getpeercert()["serialNumber"])


def test_http_certificates_are_replaced_too(authority: Authority) -> None:
    cert, key = authority.issue("server")
    with serving("--memory", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        address = server.http.removeprefix("https://")
        first = http_serial(address, authority)
        authority.issue("server")
        deadline = time.monotonic() + DEADLINE
        while http_serial(address, authority) == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def http_serial(address: str, authority: Authority) -> str:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=str(authority.path))
    with (
        socket.create_connection((host, int(port)), DEADLINE) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        return str(connection.getpeercert()["serialNumber"])


def test_a_server_does_not_start_with_what_cannot_work(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    _, other_key = authority.issue("other")
    expired = authority.issue("expired", days=(-9, -1))
    for pair, words in (
        ((cert, other_key), "does not belong to"),
        (expired, "has expired"),
        (authority.issue("early", days=(1, 9)), "not yet valid"),
        ((tmp_path / "nothing.pem", key), "No such file"),
        ((key, cert), "not a usable certificate|cannot be loaded"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            server_tls.ServerTls(server_tls.TlsSettings(files(pair)))


def test_diagnosis_of_a_server_that_is_well_finds_nothing(authority: Authority, served: Server) -> None:
    server = served(authority.issue("server"), authority.path)
    assert diagnose(server.address, ClientTls(authority.path, files(authority.issue("worker")))) is None
    assert diagnose("127.0.0.1:1", ClientTls(authority.path)) is None
