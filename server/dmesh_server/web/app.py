"""The HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.requests import ClientDisconnect

from dmesh._version import __version__
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.event_log import KINDS, ROUTINE, Filter
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.security.audit import AuditLog
from dmesh_server.security.refusals import RefusalLog
from dmesh_server.security.shedding import LoadShedder
from dmesh_server.telemetry import logs
from dmesh_server.web import metrics
from dmesh_server.web.api import (
    audit,
    barriers,
    clusters,
    collectives,
    declarations,
    events,
    keys,
    members,
    progress,
    series,
    server,
    tasks,
    tokens,
    topology,
    why,
)
from dmesh_server.web.api.answers import core_refused, known_parameters_only, malformed, unreadable
from dmesh_server.web.api.answers import refusals as refused
from dmesh_server.web.api.event_views import CURSOR, place, wanted
from dmesh_server.web.api.events import EventCursor
from dmesh_server.web.api.server import Facts
from dmesh_server.web.event_stream import EventStream
from dmesh_server.web.gate import HttpGate, covers, port_of, remote_of
from dmesh_server.web.logins import LoginCodes, Logins, cookie_name
from dmesh_server.web.overview import MOST_STREAMS, Overview
from dmesh_server.web.pacer import Pacer, Steps
from dmesh_server.web.pages import entered_page, login_page, status_page
from dmesh_server.web.schemas import Status
from dmesh_server.web.series import Recorder

_STATIC = Path(__file__).parent / "static"
_BEARER = HTTPBearer(auto_error=False, description="a token of the server; the gate in front asks for it")
"""For the documentation: the gate has judged the token already."""
_MAX_FORM = 16_384
"""Bytes of a login form."""
_WALL_SECONDS = 30 * 86400.0
"""Seconds until a wall screen must log in again."""
_FORM_SECONDS = 10.0
"""Seconds until the form must have arrived: its sender has not shown a token yet."""


def create_app(
    runtime: Runtime,
    host: str,
    access: Access | None = None,
    *,
    facts: Facts | None = None,
    refusals: Sequence[RefusalLog] = (),
    open_metrics: bool = False,
    allowed_hosts: Sequence[str] = (),
    shedder: LoadShedder | None = None,
    audit_log: AuditLog | None = None,
    codes: LoginCodes | None = None,
) -> HttpGate:
    """Make the application, behind its gate.

    Args:
        runtime: The server's state.
        host: Host that the server listens on; requests for other names are refused.
        access: Roles of the accepted tokens; None to accept callers without a token.
        facts: Facts about the server that the runtime does not know.
        refusals: Log of callers that were refused elsewhere.
        open_metrics: Let `/metrics` be read without a token.
        allowed_hosts: Other names of the server: of its DNS entry, or of a proxy before it.
        shedder: Bounds requests without a token; one with the defaults if None.
        audit_log: Log of what operators do; kept in memory if None.
        codes: One-time codes with which browsers may log in; none if None.
    """
    app = FastAPI(
        title="dmesh coordination server",
        version=__version__,
        # The documentation pages load scripts from elsewhere; the description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    audit_log = audit_log if audit_log is not None else AuditLog(None)
    app.state.audit = audit_log
    logins, pacer, wall_codes = Logins(runtime.now), Pacer(), LoginCodes(runtime.now)
    app.mount("/static", StaticFiles(directory=_STATIC))

    @app.get("/livez")
    async def livez() -> Status:
        """Answer as long as the server's event loop turns."""
        return Status(status="ok")

    @app.get("/readyz", responses={503: {"model": Status}})
    async def readyz(response: Response) -> Status:
        """Answer 200 if the server can do its work, else 503 with the reason."""
        reason = runtime.readiness()
        if reason is not None:
            response.status_code = 503
        return Status(status=reason or "ok")

    @app.get("/", response_class=HTMLResponse)
    async def page(request: Request) -> str:
        """Show the clusters to a person."""
        came_by_login = logins.token(request.headers.get("cookie"), port_of(request.scope)) is not None
        return await status_page(
            runtime.views,
            Steps(pacer),
            incarnation=runtime.server_incarnation,
            now=runtime.now(),
            can_log_out=came_by_login,
            after=request.query_params.get("after", ""),
            covers=partial(covers, request.scope),
        )

    @app.get("/login", response_class=HTMLResponse)
    async def ask_for_token(request: Request) -> Response:
        """Ask a person for a token, unless the link has a one-time code."""
        if access is None:
            return RedirectResponse("/", 303)
        code = request.query_params.get("code", "")
        if not code:
            return HTMLResponse(login_page())
        token, lifetime, start = None if codes is None else codes.redeem(code), logins.lifetime, "/"
        if token is None:
            token, lifetime, start = wall_codes.redeem(code), _WALL_SECONDS, "/#/wall"
        if token is None:
            access.refusals.note(
                "unauthenticated", remote_of(request.scope), method="GET /login", reason="login code not open"
            )  # fmt: skip
            return HTMLResponse(login_page("The link was used already, or is too old."), 401)
        logs.info("login_link_used", host=remote_of(request.scope))
        # Not a redirect: after a click in another site's page, browsers would not show the cookie there.
        return admitted(request, token, HTMLResponse(entered_page(start)), lifetime)

    @app.post("/login", response_class=HTMLResponse)
    async def log_in(request: Request) -> Response:
        """Give a browser a cookie for a token; it is good for looking at pages only."""
        if access is None:
            return RedirectResponse("/", 303)
        # A pasted line of the token file has role and name behind the token.
        token = next(iter((await _form_field(request, "token")).split()), "")
        verdict = access.identify(f"Bearer {token}")
        if verdict.token is None:
            access.refusals.note(
                "unauthenticated", remote_of(request.scope), method="POST /login",
                fingerprint=verdict.shown or None, reason="token not accepted",
            )  # fmt: skip
            return HTMLResponse(login_page(verdict.problem), 401)
        return admitted(request, verdict.token.value, RedirectResponse("/", 303), logins.lifetime)

    def admitted(request: Request, token: str, answer: Response, lifetime: float) -> Response:
        """Return the answer, with a cookie that stands for the token."""
        answer.set_cookie(
            cookie_name(port_of(request.scope)), logins.enter(token, lifetime), max_age=int(lifetime),
            httponly=True, samesite="strict", secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    @app.post("/logout")
    async def log_out(request: Request) -> Response:
        """Forget a browser."""
        logins.leave(request.headers.get("cookie"), port_of(request.scope))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(cookie_name(port_of(request.scope)))
        return answer

    checks = [Security(_BEARER), Depends(known_parameters_only)]
    overview, recorder = Overview(runtime), Recorder(runtime, pacer)
    for resource in (
        clusters.router(runtime),
        declarations.router(runtime),
        why.router(runtime, pacer),
        members.router(runtime),
        tasks.router(runtime, pacer),
        topology.router(runtime, pacer),
        barriers.router(runtime),
        collectives.router(runtime, pacer),
        progress.router(runtime, pacer),
        series.router(runtime, recorder),
        keys.router(runtime),
        events.router(runtime),
        _stream(runtime, overview, access),
        server.router(runtime, facts or Facts()),
        tokens.router(access, wall_codes),
        audit.router(audit_log),
    ):
        app.include_router(resource, prefix="/api/v1", dependencies=checks)
    refused_by = refusals if access is None else (access.refusals, *refusals)
    app.include_router(metrics.router(runtime, refused_by), dependencies=checks)
    app.add_exception_handler(CoreError, core_refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(400, unreadable)
    return HttpGate(
        app,
        [host, *allowed_hosts],
        access,
        logins,
        pacer,
        shedder or LoadShedder(runtime.now),
        recorder,
        frozenset({metrics.PATH} if open_metrics else ()),
    )


def _stream(runtime: Runtime, overview: Overview, access: Access | None) -> APIRouter:
    routes = APIRouter(tags=["events"])

    @routes.get(
        "/events/stream",
        response_class=StreamingResponse,
        responses=refused()
        | {
            200: {
                "description": "events, without end",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    )
    async def stream_events(
        keep: Annotated[Filter, Depends(wanted)],
        after: EventCursor = None,
        last_event_id: Annotated[
            str | None, Header(pattern=CURSOR, description="id of the last event that the reader received")
        ] = None,
    ) -> Response:
        """Stream events as they happen (server-sent events), and the clusters whose numbers change.

        Passed barriers are left out unless `kind` asks for them. A returning reader gives its position with
        `Last-Event-ID`, or `after`, and first gets the events since then.
        """
        if overview.full:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"{MOST_STREAMS} readers follow the event stream, which is the limit",
            )
        _ = runtime.views  # a server that stops says so now
        number, restarted = place(last_event_id or after, runtime.server_incarnation)
        if keep.kinds is None:
            keep = replace(keep, kinds=frozenset(KINDS) - {ROUTINE})
        return EventStream(runtime, overview, access, keep, number, restarted)

    return routes


async def _form_field(request: Request, name: str) -> str:
    """Return a field of a posted form; empty if it is not there, or the form is not fit."""
    body = b""
    try:
        async with asyncio.timeout(_FORM_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_FORM:
                    return ""
    except (TimeoutError, ClientDisconnect):
        return ""
    fields = parse_qs(body.decode("ascii", errors="replace"))
    return fields.get(name, [""])[0]
