"""Scenario 24: no token, a wrong one, another server's, an expired or revoked one; none is ever shown.

Real servers as processes of their own.
"""

from __future__ import annotations

import os
import secrets
import stat
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from tests.faults.secured import DEADLINE, ask, serving, write_tokens
from tests.waiting import eventually

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import Credentials
from dmesh.coordination.retry import Patience
from dmesh.errors import AuthenticationError, ConfigurationError
from dmesh.security import tokens
from dmesh.security.tokens import Role, Token, TokenSource
from dmesh.v1 import common_pb2, coordination_pb2, coordination_pb2_grpc
from dmesh_server.security.access import Access
from dmesh_server.security.refusals import RefusalLog

pytestmark = pytest.mark.faults

ACCEPTED = grpc.StatusCode.FAILED_PRECONDITION
"""What asking for a cluster that nobody formed ends with, when the token is the server's."""
REFUSED = grpc.StatusCode.UNAUTHENTICATED


def join(address: str, source: TokenSource | None, index: int = 0, **options: object) -> Agent:
    identity = Identity.of_this_process("worker", index, {"worker": ("h:1", "h:2")})
    agent = Agent(address, identity, connect_timeout=DEADLINE, credentials=Credentials(source), **options)  # type: ignore[arg-type]
    agent.start()
    return agent


def test_first_start_makes_a_token_and_says_where(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = tmp_path / "dmesh" / "token"
    with serving("--memory", environ=environ) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert "token_file_made" in server.log
        assert str(path) in server.log
        [token] = tokens.read_file(path, "test")
        assert len(token.value) >= 43, "256 bits"
        assert ask(server.grpc, token.value) is ACCEPTED
        assert ask(server.grpc, None) is REFUSED
        assert token.value not in server.log
    before = path.read_text()
    with serving("--memory", environ=environ) as server:
        assert path.read_text() == before, "a second start takes what is there"
        assert "token_file_made" not in server.log
        assert ask(server.grpc, token.value) is ACCEPTED


def test_who_shows_no_accepted_token_is_refused(tmp_path: Path) -> None:
    good, expired, others = (tokens.generate() for _ in range(3))
    path = write_tokens(tmp_path / "t", good, f"{expired} name=old expires=2001-01-01", "# a comment")
    with serving("--memory", "--token-file", str(path)) as server:
        assert ask(server.grpc, good) is ACCEPTED
        for wrong in (None, "", others, good[:-1], good + "x", good.swapcase(), expired, "x" * 7000):
            assert ask(server.grpc, wrong) is REFUSED, wrong
        for path_ in ("/api/v1/clusters", "/openapi.json", "/nothing"):
            url = f"{server.http}{path_}"
            assert httpx.get(url, trust_env=False).status_code == 401
            for header in (f"Bearer {others}", f"Basic {good}", good, "Bearer", f"Bearer {expired}"):
                answer = httpx.get(url, headers={"Authorization": header}, trust_env=False)
                assert answer.status_code == 401, header
                assert answer.headers["www-authenticate"].startswith("Bearer")
        twice = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {others}")]
        assert httpx.get(f"{server.http}/api/v1/clusters", headers=twice, trust_env=False).status_code == 401
        right = {"Authorization": f"Bearer {good}"}
        assert httpx.get(f"{server.http}/api/v1/clusters", headers=right, trust_env=False).status_code == 200
        for open_to_all in ("/livez", "/readyz"):
            assert httpx.get(f"{server.http}{open_to_all}", trust_env=False).status_code == 200


def test_every_call_of_the_protocol_asks_for_a_token(tmp_path: Path) -> None:
    from dmesh.v1 import key_value_pb2

    path = write_tokens(tmp_path / "t", tokens.generate())
    with serving("--memory", "--token-file", str(path)) as server:
        services = [
            *coordination_pb2.DESCRIPTOR.services_by_name.values(),
            *key_value_pb2.DESCRIPTOR.services_by_name.values(),
        ]
        methods = [f"{service.full_name}/{method.name}" for service in services for method in service.methods]
        for method in [*methods, "no.such.Service/Method"]:
            # Each has a connection of its own: the server closes those of peers that it has refused.
            with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                # What is sent is no message: it must not even be looked at.
                call = channel.stream_stream(f"/{method}")
                with pytest.raises(grpc.RpcError) as caught:
                    next(call(iter([b"\xff\xff"]), timeout=DEADLINE))
                assert caught.value.code() is REFUSED, method  # type: ignore[attr-defined]


def test_a_flood_of_refusals_is_one_log_line(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t", tokens.generate())
    wrong = tokens.generate()
    with serving("--memory", "--token-file", str(path)) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            for _ in range(200):
                answer = ask(server.grpc, wrong, channel=channel)
                assert answer in (REFUSED, grpc.StatusCode.UNAVAILABLE)  # the connection was closed meanwhile
        lines = [line for line in server.log.splitlines() if " unauthenticated " in line]
        assert 1 <= len(lines) <= 3, "one per peer and interval of 10 s"
        assert tokens.fingerprint(wrong) in lines[0]
        assert wrong not in server.log


def test_refusals_are_counted_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RefusalLog(interval=10, most_peers=3, clock=lambda: now[0])
    caplog.set_level("DEBUG", "dmesh_server")
    for number in range(100):
        log.note("unauthenticated", f"10.0.0.{number}")
        log.note("unauthenticated", f"10.0.0.{number}")
    assert len(caplog.records) == 4, "three peers, and one line for all the others"
    now[0] = 11
    log.note("unauthenticated", "10.0.0.1")
    assert [record.getMessage() for record in caplog.records[4:]].count("unauthenticated") == 1
    assert any(
        getattr(record, "fields", {}).get("left_out") == 97 * 2 - 1 for record in caplog.records[4:]
    ), "nothing is lost count of"


def test_comparison_takes_the_same_time_whatever_is_shown() -> None:
    """Hashes are compared, so a token that is almost right is as far off as any other."""
    right = "A" * 43
    access = Access(TokenSource("test", value=right))
    shown = {"almost": "A" * 42 + "B", "nothing alike": "z" * 43}
    times: dict[str, list[int]] = {name: [] for name in shown}
    for _ in range(3000):
        for name, value in shown.items():
            started = time.perf_counter_ns()
            assert access.identify(f"Bearer {value}").token is None
            times[name].append(time.perf_counter_ns() - started)
    medians = [statistics.median(values) for values in times.values()]
    assert max(medians) < 1.5 * min(medians)


def test_a_revoked_token_ends_streams_and_a_new_one_brings_them_back(tmp_path: Path) -> None:
    old, new = tokens.generate(), tokens.generate()
    path = write_tokens(tmp_path / "server", f"{old} name=old")
    own = write_tokens(tmp_path / "client", old)
    with serving("--memory", "--token-file", str(path)) as server:
        agent = join(server.grpc, TokenSource("client", own))
        fixed = join(server.grpc, TokenSource("fixed", value=old), index=1, patience=Patience(give_up=2.0))
        agent.key_value_set("a", "1")
        generation = agent._session.generation
        write_tokens(path, f"{old} name=old", f"{new} name=new")  # both count
        write_tokens(own, new)  # the client changes over
        eventually(lambda: "tokens=2" in server.log, "reading the file again")
        assert agent.key_value_get("a") == b"1"
        write_tokens(path, f"{new} name=new")  # the old one goes
        eventually(lambda: "streams_revoked" in server.log, "the end of the streams")
        eventually(lambda: agent._session.generation > generation, "the session with the new token")
        assert agent.key_value_get("a") == b"1"
        with pytest.raises(AuthenticationError, match=tokens.fingerprint(old)):
            fixed.members()
        assert ask(server.grpc, old) is REFUSED
        fixed.close()
        agent.leave()
        for secret in (old, new):
            assert secret not in server.log


def test_a_token_file_that_breaks_changes_nothing(tmp_path: Path) -> None:
    good = tokens.generate()
    path = write_tokens(tmp_path / "t", good)
    with serving("--memory", "--token-file", str(path)) as server:
        write_tokens(path, "short")
        eventually(lambda: "tokens_not_reloaded" in server.log, "a word about it")
        assert ask(server.grpc, good) is ACCEPTED
        path.unlink()
        assert ask(server.grpc, good) is ACCEPTED


def test_clients_say_what_is_wrong_and_do_not_wait(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t", tokens.generate())
    wrong = tokens.generate()
    with serving("--memory", "--token-file", str(path)) as server:
        for source, words in (
            (None, "none came. Set DMESH_TOKEN"),
            (TokenSource("x", value=wrong), f"fingerprint {tokens.fingerprint(wrong)}"),
        ):
            started = time.monotonic()
            with pytest.raises(AuthenticationError, match=words) as caught:
                join(server.grpc, source)
            assert isinstance(caught.value, PermissionError)
            assert time.monotonic() - started < DEADLINE / 2
            assert wrong not in str(caught.value)


@pytest.mark.parametrize(
    "how", ["missing", "unreadable words", "empty", "directory", "too short", "two in a line"]
)
def test_a_named_file_that_cannot_be_used_is_fatal(tmp_path: Path, how: str) -> None:
    path = tmp_path / "token"
    secret = tokens.generate()
    match how:
        case "unreadable words":
            path.write_bytes(b"\xff\xfe" + secret.encode())
        case "empty":
            path.write_text("# nothing\n\n")
        case "directory":
            path.mkdir()
        case "too short":
            path.write_text("abc\n")
        case "two in a line":
            path.write_text(f"{secret} {tokens.generate()}\n")
    for arguments, environ in (
        (["--token-file", str(path)], {}),
        ([], {"DMESH_TOKEN_FILE": str(path)}),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http", *arguments],
            env={**os.environ, **environ}, capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert str(path) in done.stderr
        assert secret not in done.stderr
        assert "Traceback" not in done.stderr
    if how != "too short":
        with pytest.raises(ConfigurationError, match="token"):
            Credentials(tokens.find(None, str(path)))


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    default = tmp_path / "dmesh" / "token"
    assert tokens.find(None, None) is None
    tokens.create_file(default)
    named = write_tokens(tmp_path / "named", "n" * 20)
    assert tokens.find("v" * 20, str(named)).read()[0].value == "v" * 20  # type: ignore[union-attr]
    assert tokens.find(None, str(named)).read()[0].value == "n" * 20  # type: ignore[union-attr]
    assert tokens.find(None, None).path == default  # type: ignore[union-attr]
    default.unlink()
    default.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="cannot be read"):  # not: as if there were none
        tokens.find(None, None).read()  # type: ignore[union-attr]


def test_servers_that_start_at_once_make_one_file(tmp_path: Path) -> None:
    path = tmp_path / "d" / "token"
    threads = [threading.Thread(target=tokens.create_file, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens.read_file(path, "test")) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_no_repr_and_no_traceback_shows_a_token() -> None:
    secret = secrets.token_urlsafe(32)
    source = TokenSource("test", value=secret)
    access = Access(source)
    verdict = access.identify(f"Bearer {secret}")
    assert verdict.token == Token(secret, Role.WORKER)
    for thing in (source, Token(secret), verdict, access, access.__dict__["_source"], Credentials(source)):
        assert secret not in repr(thing)
    assert secret not in " ".join(access.describe())


def test_no_secret_in_output_or_in_the_state_shown(tmp_path: Path) -> None:
    token = tokens.generate()
    path = write_tokens(tmp_path / "t", f"{token} role=worker name=jobs")
    with serving("--memory", "--verbose", "--token-file", str(path)) as server:
        channel = grpc.insecure_channel(server.grpc)
        stub = coordination_pb2_grpc.CoordinationServiceStub(channel)
        caller = common_pb2.Caller(cluster="c", incarnation=7, task=common_pb2.Task(job="w", index=0))
        answer = stub.Register(
            coordination_pb2.RegisterRequest(
                caller=caller, request_id="r", jobs=[common_pb2.Job(name="w", addresses=["h:1"])]
            ),
            metadata=(("authorization", f"Bearer {token}"),),
            timeout=DEADLINE,
        )
        headers = {"Authorization": f"Bearer {token}"}
        shown = httpx.get(f"{server.http}/api/v1/clusters", headers=headers, trust_env=False).content
        channel.close()
        server.process.signal(15)
        assert server.process.wait() == 0
        everything = shown + server.log.encode() + server.process.out.encode()
        for secret in (token.encode(), answer.peer_secret, answer.peer_secret.hex().encode()):
            assert secret not in everything
