"""The audit log, for operators."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.security.tokens import Role
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.security.audit import AuditLog, Record
from dmesh_server.web.api.answers import TEXT, Limit, answer, asker, refusals
from dmesh_server.web.gate import has_role, remote_of, token_of


class AuditRow(BaseModel):
    """An entry of the audit log."""

    number: int = Field(description="grows by one with each entry, also across restarts")
    time: float = Field(description="unix time")
    who: str = Field(description="token's fingerprint, name and id, as far as it has them; never the token")
    remote: str = Field(description="host that the request came from")
    action: str = Field(description="such as `evict_member`, `create_token` or `unauthenticated`")
    target: str = Field(description="object of the action")
    outcome: str = Field(description="`done`, `refused`, or the kind of error")
    detail: str = Field(description="anything else worth knowing, such as a reason")


class AuditPage(BaseModel):
    """Some entries of the audit log."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "entries": [
                        {
                            "number": 17, "time": 1790000000.5, "who": "token 0f3a9b11 (ops)",
                            "remote": "10.0.0.9", "action": "evict_member",
                            "target": "train: /job:worker/task:2 (incarnation 00000000000000ff)",
                            "outcome": "done", "detail": "stuck for an hour",
                        }
                    ],
                    "next": None,
                }
            ]
        }
    )  # fmt: skip

    entries: list[AuditRow] = Field(description="the newest first")
    next: int | None = Field(description="`before` of the next page; null: these were all that is kept")


def record(request: Request, action: str, target: str) -> contextlib.AbstractAsyncContextManager[Record]:
    """Add an entry about what the block does; see `AuditLog.record`.

    Args:
        request: Request of the operator.
        action: Name of the action.
        target: Object of the action.
    """
    log: AuditLog = request.app.state.audit
    return log.record(action, who=asker(request), remote=remote_of(request.scope), target=target)


def router(log: AuditLog) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["server"])

    @routes.get("/audit", response_model=AuditPage, responses=refusals())
    async def list_audit(
        request: Request,
        limit: Limit = 100,
        before: Annotated[
            int | None, Query(ge=1, lt=1 << 63, description="only entries before the one with this number")
        ] = None,
        action: Annotated[
            str | None, Query(max_length=100, pattern=TEXT, description="only entries of this action")
        ] = None,
        who: Annotated[
            str | None,
            Query(max_length=200, pattern=TEXT, description="only entries of this fingerprint, name or id"),
        ] = None,
    ) -> Response:
        """Show who did what, the newest entries first. Needs the role `admin`, of all clusters."""
        token = token_of(request.scope)
        if not has_role(request.scope, Role.ADMIN) or (token is not None and token.clusters):
            raise CoreError(
                ErrorKind.PERMISSION_DENIED, "the audit log is for operators (admin) of all clusters"
            )
        found = await log.latest(limit + 1, before=before, action=action, who=who)
        return answer(
            AuditPage(
                entries=[AuditRow(**asdict(entry)) for entry in found[:limit]],
                next=found[limit - 1].number if len(found) > limit else None,
            )
        )

    return routes
