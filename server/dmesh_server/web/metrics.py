"""`/metrics`, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from dmesh._version import __version__
from dmesh_server.core.errors import CoreError
from dmesh_server.core.views import Summary
from dmesh_server.runtime import Runtime
from dmesh_server.security.refusals import RefusalLog
from dmesh_server.telemetry.exposition import CONTENT_TYPE, Exposition, Snapshot
from dmesh_server.web.api.answers import refusals

PATH = "/metrics"
"""Path for Prometheus."""


def router(runtime: Runtime, logs: Iterable[RefusalLog]) -> APIRouter:
    """Return the resource.

    Args:
        runtime: Whose measures they are.
        logs: Where callers that are refused are noted.
    """
    routes = APIRouter(tags=["server"])
    listed = tuple(logs)

    def look() -> Snapshot:
        return Snapshot(
            now=runtime.now(),
            ready=runtime.readiness() is None,
            store_failed=runtime.store_failure is not None,
            clusters=_summaries(runtime),
            sessions=runtime.open_sessions,
            unanswered=runtime.unanswered,
            streams=runtime.event_log.feeds,
            events=runtime.event_log.counts,
            refusals=sum((log.counts for log in listed), Counter()),
        )

    exposition = Exposition(__version__, runtime.measures, look)

    @routes.get(PATH, response_class=PlainTextResponse, responses=refusals())
    async def metrics() -> Response:
        """Show what the server has measured, in Prometheus's text format."""
        return Response(exposition.render(), media_type=CONTENT_TYPE)

    return routes


def _summaries(runtime: Runtime) -> Iterator[Summary]:
    try:
        views = runtime.views
    except CoreError:  # it starts, or stops: there is nothing to see
        return
    for name in views.names():
        yield views.summary(name)
