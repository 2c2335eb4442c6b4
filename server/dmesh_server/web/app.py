"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from dmesh._version import __version__
from dmesh_server.core.effects import Clusters
from dmesh_server.core.errors import CoreError
from dmesh_server.core.events import ListClusters
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.web.gate import HttpGate
from dmesh_server.web.schemas import ClusterList, Status, view_cluster


def create_app(runtime: Runtime, host: str, access: Access | None = None) -> HttpGate:
    """Makes the application, behind its gate.

    Args:
        runtime: Who knows the state.
        host: Host that the server listens on; requests for other names are refused.
        access: Knows whose token may do what; None if nobody has to prove who they are.
    """
    app = FastAPI(
        title="dmesh coordination server",
        version=__version__,
        # The documentation pages load scripts from elsewhere; the description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )

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

    return HttpGate(app, host, access)
