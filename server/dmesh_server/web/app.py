"""The HTTP application."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from dmesh._version import __version__
from dmesh_server.core.effects import Clusters
from dmesh_server.core.errors import CoreError
from dmesh_server.core.events import ListClusters
from dmesh_server.runtime import Runtime
from dmesh_server.web.schemas import ClusterList, Status, view_cluster


def create_app(runtime: Runtime, host: str) -> FastAPI:
    """Makes the application.

    Args:
        runtime: Who knows the state.
        host: Host that the server listens on; requests for other names are refused.
    """
    app = FastAPI(
        title="dmesh coordination server",
        version=__version__,
        # The documentation pages load scripts from elsewhere; the description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )

    @app.middleware("http")
    async def check_host(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        # A web page whose name was pointed at this machine (DNS rebinding) must not read what is here.
        if not _is_own_name(request.headers.get("host", ""), host):
            return JSONResponse(
                {"status": "the Host header does not name this server; use its IP address or localhost"}, 421
            )
        return await proceed(request)

    @app.get("/livez")
    async def livez() -> Status:
        """Answers as long as the server's event loop turns."""
        return Status(status="ok")

    @app.get("/readyz", responses={503: {"model": Status}})
    async def readyz(response: Response) -> Status:
        """Answers 200 if the server can do its work, else 503 with the reason."""
        reason = runtime.readiness()
        if reason is not None:
            response.status_code = 503
        return Status(status=reason or "ok")

    @app.get("/api/v1/clusters")
    async def clusters() -> ClusterList:
        """Returns all clusters with their members, vacant seats and barriers under way."""
        answer = await runtime.request(ListClusters(runtime.next_number()), Clusters)
        now = runtime.now()
        return ClusterList(
            server_incarnation=f"{runtime.server_incarnation:016x}",
            clusters=[view_cluster(state, now) for state in answer.clusters],
        )

    @app.exception_handler(CoreError)
    async def refused(request: Request, error: CoreError) -> Response:
        return JSONResponse({"status": str(error)}, status_code=503)

    return app


def _is_own_name(header: str, host: str) -> bool:
    """Tells whether a Host header names the server by an IP address or a name that it was started with."""
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    if name.lower() in {"localhost", host.lower()}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
