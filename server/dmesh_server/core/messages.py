"""Text about tasks, members and times in errors and reasons, so that they read alike everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dmesh_server.core.model import Liveness, Member, MemberState, Task

MAX_DESCRIBED = 32
"""Number of members that one error describes in full; the others appear as ranges of tasks."""

_MAX_QUOTED = 128


def quote(text: str) -> str:
    """Return `text` in quotes, on one line, not longer than an error can bear."""
    if len(text) > _MAX_QUOTED:
        return f"{text[:_MAX_QUOTED]!r}... ({len(text)} characters)"
    return repr(text)


def seconds(duration: float) -> str:
    """Return a duration such as `5.0 s`."""
    return f"{max(duration, 0.0):.1f} s"


def label(task: Task) -> str:
    """Return a task as a caller gave it, on one line, whatever it may contain."""
    return f"/job:{quote(task.job)[1:-1]}/task:{task.index}"


def name(member: Member) -> str:
    """Return `/job:worker/task:2 (host h, pid 9)`, or `... (never registered)` for a vacant task."""
    if member.incarnation == 0:
        return f"{member.task} (never registered)"
    return f"{member.task} (host {member.process.host or 'unknown'}, pid {member.process.pid})"


def name_and_age(member: Member, now: float) -> str:
    """Return the name with the time since it was last seen and, if it departed or is in trouble, how."""
    if member.incarnation == 0:
        return name(member)
    process = f"host {member.process.host or 'unknown'}, pid {member.process.pid}"
    fate = f", {fate_of(member)}" if member.state.departed else state_of(member)
    return f"{member.task} ({process}, last seen {seconds(now - member.last_seen_at)} ago{fate})"


def state_of(member: Member) -> str:
    """Return the problem of a present member, such as `, stuck in its own code: ...`."""
    if member.liveness is Liveness.BLOCKED:
        return f", blocked: {member.reason}"
    if member.liveness is not Liveness.STUCK:
        return ""
    activity = member.activity
    operation = activity.operation if activity is not None else ""
    where = f" at {activity.stack[-1]}" if activity is not None and activity.stack else ""
    return f", stuck in {operation or 'its own code'}{where}: {member.reason}"


def fate_of(member: Member) -> str:
    """Return the fate of a departed member, such as `was lost: no heartbeat for 15.2 s`."""
    verb = {MemberState.LEFT: "left", MemberState.LOST: "was lost", MemberState.FAILED: "failed"}[
        member.state
    ]
    return f"{verb}: {member.reason}" if member.reason else verb


def listing(members: Sequence[Member], now: float) -> str:
    """Return all members with their ages; beyond `MAX_DESCRIBED`, the others as ranges of tasks."""
    text = ", ".join(name_and_age(member, now) for member in members[:MAX_DESCRIBED])
    rest = members[MAX_DESCRIBED:]
    return f"{text}, and {len(rest)} more: {tasks(member.task for member in rest)}" if rest else text


def ranges(listed: Iterable[Task]) -> dict[str, list[tuple[int, int]]]:
    """Return a set of tasks as inclusive ranges of indices by job, both sorted."""
    by_job: dict[str, list[tuple[int, int]]] = {}
    for job, index in sorted((task.job, task.index) for task in listed):
        spans = by_job.setdefault(job, [])
        if spans and spans[-1][1] + 1 >= index:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return by_job


def tasks(listed: Iterable[Task]) -> str:
    """Return a set of tasks in short form, such as `/job:worker/task:0-2,5`."""
    return ", ".join(
        f"/job:{job}/task:" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
        for job, spans in ranges(listed).items()
    )
