"""Scenario 40: tokens bound to clusters, with quotas; one tenant at its quota, the others unharmed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from tests.faults.figures import Figures
from tests.faults.secured import DEADLINE, Served, ask, serving, write_tokens
from tests.waiting import eventually

from dmesh.cli import main
from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import Credentials
from dmesh.coordination.retry import Patience
from dmesh.errors import AuthenticationError, LimitExceededError, PermissionDeniedError
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource

pytestmark = pytest.mark.faults

ADMIN = tokens.generate()


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token file of the server; this process is its operator."""
    path = write_tokens(tmp_path / "tokens", f"{ADMIN} role=admin name=ops")
    monkeypatch.setenv("DMESH_TOKEN", ADMIN)
    return path


@pytest.fixture
def server(tmp_path: Path, admin: Path) -> Iterator[Served]:
    with serving("--data-dir", str(tmp_path / "data"), "--token-file", str(admin)) as running:
        yield running


def create(server: Served, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    """Issues a token as an operator does."""
    assert main(["token", "create", "--http", server.http, "--json", *flags]) == 0
    made: dict[str, object] = json.loads(capsys.readouterr().out)
    return made


def join(
    server: Served, token: object, cluster: str, index: int = 0, size: int = 1, give_up: float = DEADLINE
) -> Agent:
    addresses = tuple(f"h:{number}" for number in range(1, size + 1))
    agent = Agent(
        server.grpc, Identity.of_this_process("worker", index, {"worker": addresses}, cluster=cluster),
        connect_timeout=DEADLINE, patience=Patience(give_up=give_up),
        credentials=Credentials(TokenSource("test", value=str(token))),
    )  # fmt: skip
    agent.start()
    return agent


def test_a_token_is_issued_listed_and_revoked(server: Served, tmp_path: Path, capsys) -> None:
    flags = ("--cluster", "train", "--role", "worker", "--name", "team-a", "--ttl", "30d", "--max-keys", "9")
    made = create(server, capsys, *flags)
    secret = str(made["token"])
    assert (made["role"], made["clusters"], made["durable"]) == ("worker", ["train"], True)
    assert 29 * 86400 < float(made["expires"]) - time.time() < 31 * 86400  # type: ignore[arg-type]
    assert main(["token", "list", "--http", server.http, "--json"]) == 0
    out = capsys.readouterr().out
    assert secret not in out
    [listed] = json.loads(out)
    assert (listed["id"], listed["name"], listed["quotas"]["keys"]) == (made["id"], "team-a", 9)
    agent = join(server, secret, "train", give_up=2.0)
    agent.key_value_set("k", "1")
    assert main(["token", "revoke", "--http", server.http, str(made["id"])]) == 0
    eventually(lambda: "streams_revoked" in server.log, "the end of its streams")
    with pytest.raises(AuthenticationError):
        agent.members()
    agent.close()
    assert main(["token", "revoke", "--http", server.http, str(made["id"])]) == 3
    capsys.readouterr()
    assert main(["audit", "--http", server.http, "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["action"], one["outcome"]) for one in entries if one["action"] != "unauthenticated"] == [
        ("create_token", "done"), ("revoke_token", "done"), ("revoke_token", "unknown"),
    ]  # fmt: skip
    assert all("(ops)" in one["who"] for one in entries[:1])
    kept = b"".join(path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file())
    for shown in (secret, secret.split("_", 2)[2], ADMIN):
        assert shown.encode() not in kept
        assert shown not in server.log


def test_a_token_is_good_for_its_clusters_only(server: Served, capsys) -> None:
    own = str(create(server, capsys, "--cluster", "a", "--role", "admin")["token"])
    other = join(server, ADMIN, "b")
    with pytest.raises(PermissionDeniedError, match="bound to cluster a"):
        join(server, own, "b")
    assert ask(server.grpc, own, cluster="b") is grpc.StatusCode.PERMISSION_DENIED
    assert ask(server.grpc, own, cluster="a") is grpc.StatusCode.FAILED_PRECONDITION
    agent = join(server, own, "a")
    with httpx.Client(
        base_url=server.http, headers={"Authorization": f"Bearer {own}"}, trust_env=False
    ) as tenant:
        assert [one["name"] for one in tenant.get("/api/v1/clusters").json()["clusters"]] == ["a"]
        page = tenant.get("/").text
        assert "<bdi>a</bdi>" in page
        assert "<bdi>b</bdi>" not in page
        for path, status in (
            ("/api/v1/clusters/a", 200), ("/api/v1/clusters/b", 403), ("/api/v1/clusters/b/value?key=k", 403),
            ("/api/v1/events?cluster=a", 200), ("/api/v1/events?cluster=b", 403), ("/api/v1/events", 403),
            ("/api/v1/events/stream?cluster=b", 403), ("/api/v1/errors?cluster=b", 403),
            ("/api/v1/clusters/%62", 403), ("/metrics", 403), ("/api/v1/tokens", 403), ("/api/v1/audit", 403),
        ):  # fmt: skip
            assert tenant.get(path).status_code == status, path
        evict = f"/api/v1/clusters/b/members/worker/0?incarnation={'0' * 16}"
        assert tenant.delete(evict).status_code == 403
        assert tenant.post("/api/v1/tokens", json={}).status_code == 403
    agent.leave()
    other.leave()


@pytest.mark.alone
def test_one_tenant_at_its_quota_and_the_others_unharmed(server: Served, capsys, figures: Figures) -> None:
    quotas = ("--max-clusters", "1", "--max-tasks", "3", "--max-keys", "20", "--max-bytes", "64KiB",
              "--max-calls-per-second", "200")  # fmt: skip
    greedy = create(server, capsys, "--name", "greedy", *quotas)["token"]
    modest = create(server, capsys, "--name", "modest")["token"]
    tenant, neighbour = join(server, greedy, "g", size=2), join(server, modest, "n")
    stop, waits, refused = threading.Event(), list[float](), dict[str, int]()

    def flood() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                tenant.key_value_set(f"key-{number}", bytes(4096), allow_overwrite=True)
            except LimitExceededError as error:
                quota = str(error).partition("quota `")[2].partition("`")[0]
                refused[quota] = refused.get(quota, 0) + 1

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 5
    while time.monotonic() < until:
        began = time.monotonic()
        neighbour.key_value_set("k", bytes(4096), allow_overwrite=True)
        waits.append(time.monotonic() - began)
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert refused["calls_per_second"] > 0
    assert refused.get("bytes", 0) + refused.get("keys", 0) > 0
    time.sleep(1.1)  # its calls of a second are its own again
    assert len(tenant.key_value_list("key-")) <= 20
    waits.sort()
    assert waits[int(len(waits) * 0.99)] < 1.0
    with pytest.raises(LimitExceededError, match="quota `clusters`"):
        join(server, greedy, "g2")
    tenant.leave()
    with pytest.raises(LimitExceededError, match="quota `tasks`"):
        join(server, greedy, "g3", size=4)
    neighbour.leave()
    figures.add("refused calls of the tenant at its quota", sum(refused.values()), "")
    figures.add("a neighbour's set meanwhile", waits)


def test_what_a_tenant_holds_is_known_after_a_restart(tmp_path: Path, admin: Path, capsys) -> None:
    data = ("--data-dir", str(tmp_path / "data"), "--token-file", str(admin), "--lease", "60")
    with serving(*data) as server:
        token = create(server, capsys, "--max-keys", "2", "--max-clusters", "1")["token"]
        agent = join(server, token, "g", give_up=1.0)
        agent.key_value_set("a", "1")
        agent.key_value_set("b", "1")
    agent.close()
    with serving(*data) as server:
        with pytest.raises(LimitExceededError, match="quota `clusters`"):
            join(server, token, "h")
        observer = ("--http", server.http)
        assert main(["token", "list", *observer]) == 0
        assert "keys=2" in capsys.readouterr().out
