"""Events as readers see them, and the filters in readers' requests."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from dmesh_server.core import messages
from dmesh_server.core.log_events import (
    BarrierEnded,
    ClusterEnded,
    ClusterFormed,
    LivenessReported,
    MemberDeparted,
    MemberJoined,
)
from dmesh_server.core.model import Liveness
from dmesh_server.event_log import (
    KINDS,
    SEVERITIES,
    AdminAction,
    Entry,
    Event,
    Filter,
    Preemption,
    ServerNote,
    task_of,
)
from dmesh_server.web.api.answers import NAME, TASK, hexadecimal, read_task

CURSOR = r"^[0-9a-f]{16}-[0-9]{1,18}$"
"""Pattern of an event cursor: incarnation of the server, number of the event."""
Kind = Annotated[str, StringConstraints(pattern=f"^({'|'.join(KINDS)})$")]

Details = dict[str, str | int | float | bool | list[str]]


class EventView(BaseModel):
    """Something that happened."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": 17, "cursor": "9f3c0a51d2e47b86-17", "time": 1767225600.25, "kind": "member_lost",
                    "severity": "error", "cluster": "train", "task": "/job:worker/task:2",
                    "message": "/job:worker/task:2 (host node7, pid 4711) was lost: its connection closed "
                    "without a goodbye",
                    "details": {
                        "host": "node7", "boot_id": "3f2a9c1e", "pid": 4711,
                        "incarnation": "00000000000000ff", "epoch": 9,
                    },
                }
            ]
        }
    )  # fmt: skip

    id: int = Field(description="grows with every event of this start of the server")
    cursor: str = Field(description="cursor to continue after it: `after`, or `Last-Event-ID`")
    time: float = Field(description="Unix time, seconds")
    kind: str = Field(description="kind of event", json_schema_extra={"enum": list(KINDS)})
    severity: str = Field(description="severity", json_schema_extra={"enum": list(SEVERITIES)})
    cluster: str = Field(description="cluster; empty for an event of the server")
    task: str | None = Field(description="member that it is about, if any")
    message: str = Field(description="description")
    details: Details = Field(description="further fields, by kind")


async def wanted(
    cluster: Annotated[str | None, Query(pattern=NAME, description="only events of this cluster")] = None,
    kind: Annotated[list[Kind] | None, Query(max_length=32, description="only events of these kinds")] = None,
    severity: Annotated[
        str | None,
        Query(
            pattern=f"^({'|'.join(SEVERITIES)})$",
            description="only events of this severity or a worse one: info, warning, error",
        ),
    ] = None,
    task: Annotated[
        str | None, Query(pattern=TASK, description="only events about this member: `/job:worker/task:2`")
    ] = None,
) -> Filter:
    """Read the filter from a request's parameters."""
    return event_filter(cluster, kind, severity, task)


def event_filter(
    cluster: str | None, kind: list[str] | None = None, severity: str | None = None, task: str | None = None
) -> Filter:
    """Return the filter for a request."""
    kinds = frozenset(kind) if kind else None
    if severity not in (None, SEVERITIES[0]):
        least = SEVERITIES.index(severity or "")
        kinds = frozenset(
            one for one, how in KINDS.items()
            if SEVERITIES.index(how) >= least and (kinds is None or one in kinds)
        )  # fmt: skip
    return Filter(cluster, kinds, None if task is None else read_task(task))


def cursor_of(incarnation: int, number: int) -> str:
    """Return the cursor of a reader that has read all events up to a number."""
    return f"{hexadecimal(incarnation)}-{number}"


def place(cursor: str | None, incarnation: int) -> tuple[int | None, bool]:
    """Return up to which event a reader has read, and whether that was at an earlier start of the server.

    Args:
        cursor: Of the pattern `CURSOR`; None if it has read none.
        incarnation: The server's.
    """
    if cursor is None:
        return None, False
    start, _, number = cursor.partition("-")
    return (int(number), False) if int(start, 16) == incarnation else (None, True)


def view_event(entry: Entry, incarnation: int) -> EventView:
    """Show an event.

    Args:
        entry: The event.
        incarnation: The server's.
    """
    task = task_of(entry.event)
    message, details = _describe(entry.event)
    return EventView(
        id=entry.number,
        cursor=cursor_of(incarnation, entry.number),
        time=round(entry.time, 3),
        kind=entry.kind,
        severity=KINDS[entry.kind],
        cluster=entry.event.cluster,
        task=None if task is None else str(task),
        message=message,
        details=details,
    )


def encode_event(entry: Entry, incarnation: int) -> bytes:
    """Return an event as JSON; it is encoded once for all readers."""
    if entry.encoded is None:
        entry.encoded = view_event(entry, incarnation).model_dump_json().encode()
    return entry.encoded


def _describe(event: Event) -> tuple[str, Details]:
    match event:
        case MemberJoined(_, member, epoch, rejoined):
            how = "took the task slot of a member that was gone" if rejoined else "joined"
            return f"{messages.name(member)} {how}", _member(event) | {"epoch": epoch}
        case MemberDeparted(_, member, epoch):
            return f"{messages.name(member)} {messages.fate_of(member)}", _member(event) | {"epoch": epoch}
        case LivenessReported(_, member):
            state = messages.state_of(member).removeprefix(", ")
            live = member.liveness is Liveness.LIVE
            return f"{messages.name(member)} {'gets on again' if live else f'is {state}'}", _member(event)
        case BarrierEnded():
            return _barrier(event)
        case ClusterFormed(cluster, incarnation, tasks):
            return (
                f"cluster {messages.quote(cluster)} was formed, for {tasks} tasks",
                {"incarnation": hexadecimal(incarnation), "tasks": tasks},
            )
        case ClusterEnded(cluster, epoch):
            return f"cluster {messages.quote(cluster)} has ended: all members have departed", {"epoch": epoch}
        case Preemption(_, task, reason):
            who = f"{task} announced" if task is not None else "there was announced"
            return f"{who} a preemption{f': {reason}' if reason else ''}", {"reason": reason}
        case AdminAction(_, action, target, _, by):
            said = action.replace("_", " ")
            return f"{by}: {said} {target}", {"action": action, "target": target, "by": by}
        case ServerNote(kind, reason):
            return f"{kind.replace('_', ' ')}{f': {reason}' if reason else ''}", {"reason": reason}


def _member(event: MemberJoined | MemberDeparted | LivenessReported) -> Details:
    member, details = event.member, Details()
    details |= {
        "host": member.process.host,
        "boot_id": member.process.boot_id,
        "pid": member.process.pid,
        "incarnation": hexadecimal(member.incarnation),
    }
    if member.reason:
        details["reason"] = member.reason
    if member.activity is not None:
        details |= {"operation": member.activity.operation, "stack": list(member.activity.stack)}
    return details


def _barrier(event: BarrierEnded) -> tuple[str, Details]:
    title = f"barrier {messages.quote(event.name)} (instance {event.instance})"
    details: Details = {
        "barrier": event.name,
        "instance": event.instance,
        "participants": event.participants,
        "waited": round(event.waited, 6),
    }
    if not event.error:
        took = messages.seconds(event.waited)
        return f"{title} was passed by {event.participants} tasks after {took}", details
    details |= {
        "error": event.error,
        "missing": [str(task) for task in event.missing],
        "missing_count": event.missing_count,
    }
    return event.reason, details
