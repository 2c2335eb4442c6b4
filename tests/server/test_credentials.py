"""Credentials of task slots on the wire; no view of the server contains one."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from tests.coordination.conftest import identity
from tests.faults.secured import DEADLINE, serving, write_tokens
from tests.server.raw_client import PATIENCE, RawClient, refusal

from dmesh import protocol
from dmesh.cli import main
from dmesh.coordination.agent import Agent
from dmesh.coordination.credentials import Credentials
from dmesh.errors import PermissionDeniedError
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource
from dmesh.v1 import common_pb2, coordination_pb2, key_value_pb2

MakeClient = Callable[..., RawClient]


@pytest.mark.parametrize("size", [1, 15, 65, 1000])
async def test_a_credential_has_16_to_64_bytes(make_client: MakeClient, size: int) -> None:
    client = make_client()
    client.caller.credential = bytes(size)
    code, error = await refusal(client.register)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{size} bytes" in error.message


async def test_clients_of_this_version_register_with_one(make_client: MakeClient) -> None:
    client = make_client()
    client.caller.ClearField("credential")
    request = client.registration(protocol_version=protocol.VERSION)
    code, error = await refusal(lambda: client.coordination.Register(request, timeout=PATIENCE))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no credential" in error.message


async def test_an_incarnation_that_was_read_is_of_no_use(make_client: MakeClient) -> None:
    client, viewer = make_client(), make_client(None)
    stream = await client.join()
    asked = coordination_pb2.GetClusterStateRequest(caller=viewer.caller)
    state = await viewer.coordination.GetClusterState(asked, timeout=PATIENCE)
    stranger = make_client(0, incarnation=state.members[0].incarnation)
    for credential in (b"", b"another, by chance"):
        stranger.caller.credential = credential
        put = key_value_pb2.SetRequest(caller=stranger.caller, request_id="s", key="k", value=b"v")
        for attempt in (
            stranger.register,
            stranger.attach,
            stranger.leave,
            lambda put=put: stranger.key_value.Set(put, timeout=PATIENCE),
        ):
            code, error = await refusal(attempt)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert error.kind == common_pb2.ERROR_KIND_PERMISSION_DENIED
    await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    assert (await stream.read_kind("heartbeat_ack")).heartbeat_ack.sequence == 1, "its session goes on"


def test_no_view_contains_a_credential(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    token, data = tokens.generate(), tmp_path / "data"
    path = write_tokens(tmp_path / "tokens", f"{token} role=admin name=ops")
    source = TokenSource("the test", value=token)
    own = identity(0, 1)
    with serving("--data-dir", str(data), "--verbose", "--token-file", str(path)) as server:
        agent = Agent(server.grpc, own, connect_timeout=DEADLINE, credentials=Credentials(source))
        agent.start()
        agent.key_value_set("key", b"value")
        agent.barrier("b", timeout=DEADLINE)
        # Somebody who knows the incarnation has learned the credential's length, and guesses.
        other = identity(0, 1)
        stranger = Agent(
            server.grpc,
            replace(own, credential=other.credential),
            connect_timeout=2.0,
            credentials=Credentials(source),
        )
        with pytest.raises(PermissionDeniedError) as refused:
            stranger.start()
        shown = [str(refused.value), repr(own), repr(own.caller().task), repr(agent), repr(stranger.identity)]
        shown += _pages(server.http, token)
        monkeypatch.setenv("DMESH_TOKEN", token)
        assert main(["kv", "put", "other", "value", "--coordinator", server.grpc]) == 0
        for verb in ("status", "members", "why"):
            assert main([verb, "--json", "--coordinator", server.grpc]) == 0
        for verb in ("events", "audit"):
            assert main([verb, "--json", "--http", server.http]) == 0
        agent.report_error("ValueError: over")
        agent.close()
        shown += _pages(server.http, token)
        server.process.signal(15)
        assert server.process.wait() == 0
        shown += [server.log, server.process.out]
    captured = capsys.readouterr()
    assert '"set_key"' in captured.out, "the audit log is the server's"
    shown += [captured.out, captured.err, caplog.text]
    assert len(shown) > 40
    everything = "\n".join(shown).encode()
    assert f"{own.incarnation:016x}".encode() in everything, "what is identity is shown"
    for credential in (own.credential, other.credential):
        for form in (*_forms(credential), *_forms(hashlib.sha256(credential).digest())):
            assert form not in everything
    files = [file.read_bytes() for file in data.rglob("*") if file.is_file()]
    assert any(hashlib.sha256(own.credential).hexdigest().encode() in content for content in files)
    for form in _forms(own.credential):
        assert not [content for content in files if form in content]


def _forms(secret: bytes) -> list[bytes]:
    """Spellings in which bytes may have come into a text."""
    texts = [secret.hex(), secret.hex().upper(), repr(secret)[2:-1], ", ".join(map(str, secret))]
    texts += [encode(secret).decode().rstrip("=") for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    texts.append(str(common_pb2.Caller(credential=secret)).split('"')[1])
    return [secret, *(text.encode() for text in texts)]


def _pages(address: str, token: str) -> list[str]:
    """Whatever the server shows over HTTP."""
    with httpx.Client(
        base_url=address, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=DEADLINE
    ) as http:
        document = http.get("/openapi.json").json()
        values = {"cluster": "default", "job": "worker", "index": "0", "name": "b", "key": "key", "id": "x"}
        paths = [path.format_map(values) for path, kinds in document["paths"].items() if "get" in kinds]
        assert len(paths) >= 16
        answers = {path: http.get(path) for path in paths if not path.endswith("/stream")}
        assert answers["/api/v1/clusters/default/members/worker/0"].status_code == 200
        with http.stream("GET", "/api/v1/events/stream", params={"after": _start(answers)}) as stream:
            first = next(stream.iter_text())
    return [first, *(answer.text for answer in answers.values())]


def _start(answers: dict[str, httpx.Response]) -> str:
    """The cursor before the server's first event."""
    return answers["/api/v1/server"].json()["last_event"].split("-")[0] + "-0"
