"""Events in pages that can be resumed; and errors, the latest first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field

from dmesh_server.event_log import Filter
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import NAME, Limit, answer, refusals
from dmesh_server.web.api.event_views import (
    CURSOR,
    EventView,
    cursor_of,
    event_filter,
    place,
    view_event,
    wanted,
)

EventCursor = Annotated[
    str | None,
    Query(pattern=CURSOR, description="`next` of the page before, or the `cursor` of an event; absent: all"),
]


class EventPage(BaseModel):
    """Some events."""

    events: list[EventView] = Field(description="the oldest first")
    next: str = Field(description="`after` of the next page; it can be asked for at any later time")
    more: bool = Field(description="true if there are more events already")
    gap: bool = Field(description="true if events between `after` and these have been dropped")


class ErrorPage(BaseModel):
    """The latest errors."""

    errors: list[EventView] = Field(description="the newest first")
    next: str | None = Field(description="`before` of the next page; null: these were all that is kept")


def router(runtime: Runtime) -> APIRouter:
    """Return the resources."""
    routes = APIRouter(tags=["events"])
    incarnation = runtime.server_incarnation

    @routes.get("/events", response_model=EventPage, responses=refusals())
    async def list_events(
        keep: Annotated[Filter, Depends(wanted)], limit: Limit = 100, after: EventCursor = None
    ) -> Response:
        """List events, oldest first; of a cluster, of some kinds, about a member.

        Remember `next` to go on later. Some ten thousand events are kept in memory: `gap` says that some were
        dropped since, or that the cursor is of an earlier start of the server.
        """
        number, restarted = place(after, incarnation)
        page = runtime.event_log.page(number, limit, keep)
        return answer(
            EventPage(
                events=[view_event(entry, incarnation) for entry in page.entries],
                next=cursor_of(incarnation, page.last),
                more=page.more,
                gap=restarted or page.lost > 0,
            )
        )

    @routes.get("/errors", response_model=ErrorPage, responses=refusals())
    async def list_errors(
        cluster: Annotated[str | None, Query(pattern=NAME, description="only events of this cluster")] = None,
        limit: Limit = 20,
        before: Annotated[
            str | None, Query(pattern=CURSOR, description="`next` of the page before; absent for the newest")
        ] = None,
    ) -> Response:
        """List the latest errors, newest first: members that were lost or failed, barriers, the store."""
        number, restarted = place(before, incarnation)
        keep = event_filter(cluster, severity="error")
        found = runtime.event_log.latest(
            0 if restarted or number is None else max(number, 1), limit + 1, keep
        )
        shown = found[:limit]
        return answer(
            ErrorPage(
                errors=[view_event(entry, incarnation) for entry in shown],
                next=cursor_of(incarnation, shown[-1].number) if len(found) > limit else None,
            )
        )

    return routes
