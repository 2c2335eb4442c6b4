"""Scenario 25: the right token with the wrong role."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest
from tests.faults.secured import DEADLINE, ask, serving, write_tokens

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import Credentials
from dmesh.errors import PermissionDeniedError
from dmesh.security import tokens
from dmesh.security.tokens import Role, TokenSource
from dmesh.v1 import coordination_pb2, key_value_pb2
from dmesh_server.security.roles import RPC_ROLES, role_for_http, role_for_rpc

pytestmark = pytest.mark.faults


def test_who_may_do_what_and_the_audit_line(tmp_path: Path) -> None:
    viewer, worker, admin = (tokens.generate() for _ in range(3))
    path = write_tokens(
        tmp_path / "t",
        f"{worker} role=worker name=jobs",
        f"{viewer} role=viewer name=wall-display",
        f"{admin} role=admin",
    )
    with serving("--memory", "--token-file", str(path)) as server:
        for token in (viewer, worker, admin):
            assert (
                ask(server.grpc, token) is grpc.StatusCode.FAILED_PRECONDITION
            )  # may look: there is no such cluster
        for method in ("Register", "Leave", "ReportError", "CancelBarrier"):
            assert ask(server.grpc, viewer, method=method) is grpc.StatusCode.PERMISSION_DENIED
            assert ask(server.grpc, worker, method=method) not in (
                grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED,
            )  # fmt: skip
        identity = Identity.of_this_process("worker", 0, {"worker": ("h:1",)})
        agent = Agent(
            server.grpc, identity, connect_timeout=DEADLINE,
            credentials=Credentials(TokenSource("test", value=viewer)),
        )  # fmt: skip
        with pytest.raises(PermissionDeniedError, match=r"has the role viewer.*needs worker"):
            agent.start()
        agent.close()
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for token, status in ((viewer, 403), (worker, 403), (admin, 405)):
                answer = httpx.request(
                    method, f"{server.http}/api/v1/clusters", trust_env=False,
                    headers={"Authorization": f"Bearer {token}"},
                )  # fmt: skip
                assert answer.status_code == status, (method, token)
        lines = [line for line in server.log.splitlines() if " permission_denied " in line]
        [audit] = [line for line in lines if "/dmesh.v1.CoordinationService/ReportError" in line]
        for part in (
            "name=wall-display",
            f"token={tokens.fingerprint(viewer)}",
            "needed=worker",
            "127.0.0.1",
        ):
            assert part in audit
        assert any("POST /api/v1/clusters" in line and "name=jobs" in line for line in lines)
        for token in (viewer, worker, admin):
            assert token not in server.log


def test_every_call_has_a_role() -> None:
    services = [
        *coordination_pb2.DESCRIPTOR.services_by_name.values(),
        *key_value_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    listed = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert listed <= set(RPC_ROLES)
    assert {method for method in RPC_ROLES if method.startswith("/dmesh.")} == listed


def test_what_is_not_listed_needs_the_greatest_role() -> None:
    assert role_for_rpc("/dmesh.v1.CoordinationService/SomethingNew") is Role.ADMIN
    assert role_for_rpc("/dmesh.v1.CoordinationService/register") is Role.ADMIN
    for method in ("POST", "DELETE", "TRACE", "get", ""):
        assert role_for_http(method, "/livez") is Role.ADMIN
    assert role_for_http("GET", "/livez/") is Role.VIEWER
    assert role_for_http("GET", "/livez/../api") is Role.VIEWER


@pytest.mark.parametrize(
    ("origin", "welcome"),
    [
        ("http://evil.example", False),
        ("null", False),
        ("http://127.0.0.1:1", False),
        ("http://[", False),
        ("javascript:alert(1)", False),
        ("SELF", True),
        (None, True),
    ],
)
def test_pages_of_other_origins_are_refused_even_with_a_token(
    tmp_path: Path, origin: str | None, welcome: bool
) -> None:
    token = tokens.generate()
    path = write_tokens(tmp_path / "t", token)
    with serving("--memory", "--token-file", str(path)) as server:
        headers = {"Authorization": f"Bearer {token}"}
        if origin is not None:
            headers["Origin"] = server.http if origin == "SELF" else origin
        answer = httpx.get(f"{server.http}/api/v1/clusters", headers=headers, trust_env=False)
        assert answer.status_code == (200 if welcome else 403)
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
