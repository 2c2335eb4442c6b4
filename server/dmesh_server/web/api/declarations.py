"""Declared clusters: jobs, timeouts and policies that are fixed before the first client registers."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.declarations import Declaration
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import DeclareCluster, WithdrawCluster
from dmesh_server.core.model import Caller, ClusterSettings, Limits, RestartPolicy
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import AS_INTEGER, ClusterName, Name, Operation, answer, asker, refusals
from dmesh_server.web.api.operations import operate
from dmesh_server.web.gate import covers

_LIMITS = Limits()
_Policy = Literal["FAIL_FAST", "REJOIN"]
_Count = Annotated[int, Field(ge=1, lt=1 << 31), AS_INTEGER]


class DeclarationBody(BaseModel):
    """A cluster to declare."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"jobs": {"worker": 8}, "restart_policy": "REJOIN", "lease": 30}]},
    )

    jobs: dict[Name, _Count] = Field(
        min_length=1,
        max_length=1000,
        description="number of tasks of each job",
        json_schema_extra={"additionalProperties": False},
    )
    restart_policy: _Policy | None = Field(default=None, description="null: as the first client wishes")
    heartbeat_interval: float | None = Field(
        default=None,
        ge=_LIMITS.min_heartbeat_interval,
        le=_LIMITS.max_lease,
        description="seconds between two heartbeats of a client; null: as the first one wishes",
    )
    lease: float | None = Field(
        default=None,
        ge=_LIMITS.min_lease,
        le=_LIMITS.max_lease,
        description="silence after which a member is blocked or lost, seconds; null: as the first client "
        "wishes",
    )
    stuck_after: float | None = Field(
        default=None,
        le=_LIMITS.max_lease * 24,
        allow_inf_nan=False,
        description="seconds for which others wait for a member before it is asked about it; negative: "
        "never; null: as the first client wishes",
    )


class DeclarationView(DeclarationBody):
    """A declared cluster."""

    cluster: str = Field(description="its name")


class DeclarationList(BaseModel):
    """The declared clusters."""

    declarations: list[DeclarationView] = Field(description="sorted by name")


def router(runtime: Runtime) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["clusters"])

    @routes.get("/declarations", response_model=DeclarationList, responses=refusals())
    async def list_declarations(request: Request) -> Response:
        """List the declared clusters, whether or not they run."""
        names = [name for name in runtime.declarations.names() if covers(request.scope, name)]
        return answer(DeclarationList(declarations=[_view(runtime, name) for name in names]))

    @routes.get("/clusters/{cluster}/declaration", response_model=DeclarationView, responses=refusals(404))
    async def show_declaration(cluster: ClusterName) -> Response:
        """Show how a cluster is declared."""
        return answer(_view(runtime, cluster))

    @routes.put(
        "/clusters/{cluster}/declaration",
        response_model=Operation,
        responses=refusals(404, 409),
    )
    async def declare_cluster(request: Request, cluster: ClusterName, wanted: DeclarationBody) -> Response:
        """Fixes the jobs and settings of a cluster for its generations to come. Needs the role `admin`."""
        settings = ClusterSettings(
            RestartPolicy[wanted.restart_policy] if wanted.restart_policy else None,
            wanted.heartbeat_interval or 0.0,
            wanted.lease or 0.0,
            wanted.stuck_after or 0.0,
        )
        tasks = tuple(sorted(wanted.jobs.items()))
        event = DeclareCluster(runtime.next_number(), Caller(cluster), asker(request), tasks, settings)
        target = ", ".join(f"{job}={count}" for job, count in tasks)[:200]
        try:
            return answer(await operate(runtime, request, event, "declare_cluster", target))
        except CoreError as refusal:
            if refusal.kind not in (ErrorKind.INVALID_ARGUMENT, ErrorKind.LIMIT_EXCEEDED):
                raise
            # Well formed, but more than this server allows, or a lease that is no longer than its interval.
            raise CoreError(ErrorKind.SPEC_MISMATCH, refusal.message) from refusal

    @routes.delete("/clusters/{cluster}/declaration", response_model=Operation, responses=refusals(404))
    async def withdraw_cluster(request: Request, cluster: ClusterName) -> Response:
        """Take a declaration back; a cluster that runs goes on. Needs the role `admin`."""
        event = WithdrawCluster(runtime.next_number(), Caller(cluster), asker(request))
        return answer(await operate(runtime, request, event, "withdraw_cluster", cluster))

    return routes


def _view(runtime: Runtime, name: str) -> DeclarationView:
    declaration: Declaration | None = runtime.declarations.find(name)
    if declaration is None:
        raise CoreError(ErrorKind.NOT_REGISTERED, f"no cluster {name!r} is declared on this server")
    settings = declaration.settings
    return DeclarationView(
        cluster=name,
        jobs=dict(declaration.tasks),
        restart_policy=cast(_Policy, settings.restart_policy.name) if settings.restart_policy else None,
        heartbeat_interval=settings.heartbeat_interval or None,
        lease=settings.lease or None,
        stuck_after=settings.stuck_after or None,
    )
