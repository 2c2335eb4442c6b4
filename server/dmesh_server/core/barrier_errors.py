"""Errors of barriers, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dmesh_server.core import messages, validation
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Member, Task

_SLIM_FROM = 64
"""Number of members from which on an error's members come without devices and addresses."""
_OTHER_NAMES = "Give barriers of different groups different names."


def not_a_participant(name: str, caller: Member, participants: Collection[Task]) -> CoreError:
    """Return the error for a caller that is none of the participants whom it lists."""
    return _mismatch(
        f"{messages.name(caller)} called barrier {messages.quote(name)} for {messages.tasks(participants)} "
        "without being one of them. Only its participants may call a barrier."
    )


def unknown_task(name: str, task: Task, cluster: str, everyone: Collection[Task]) -> CoreError:
    """Return the error for a participant that is no task of the cluster."""
    return CoreError(
        ErrorKind.UNKNOWN_TASK,
        f"barrier {messages.quote(name)}: /job:{messages.quote(task.job)[1:-1]}/task:{task.index} is not a "
        f"task of cluster {messages.quote(cluster)}, which has {messages.tasks(everyone)}",
    )


def listed_twice(name: str, listed: Sequence[Task]) -> CoreError:
    """Return the error for a list of participants that has one more than once."""
    twice = min(task for task in listed if listed.count(task) > 1)
    return validation.invalid(f"barrier {messages.quote(name)}: {twice} is listed twice as a participant")


def over_for_others(
    name: str, number: int, caller: Member, expected: Collection[Task], participants: Collection[Task]
) -> CoreError:
    """Return the error for a caller that names other participants than the finished instance had."""
    return _mismatch(
        f"{title(name, number)} is already over; it was called for {messages.tasks(expected)}, but "
        f"{messages.name(caller)} called it for {messages.tasks(participants)}. {_OTHER_NAMES}"
    )


def under_way_for_others(
    name: str, number: int, caller: Member, expected: Collection[Task], participants: Collection[Task]
) -> CoreError:
    """Return the error for a caller that is no participant of the instance under way."""
    return _mismatch(
        f"{title(name, number)} is under way for {messages.tasks(expected)}; {messages.name(caller)} is not "
        f"one of them and called it for {messages.tasks(participants)}. {_OTHER_NAMES}"
    )


def disagreement(
    name: str,
    number: int,
    first: Member,
    expected: Collection[Task],
    caller: Member,
    participants: Collection[Task],
) -> CoreError:
    """Return the error for participants that list different participants."""
    return _mismatch(
        f"{title(name, number)} failed: its callers named different participants. {messages.name(first)} "
        f"called it for {messages.tasks(expected)}, {messages.name(caller)} for "
        f"{messages.tasks(participants)}. All participants must pass the same list.",
        (first, caller),
    )


def other_kind(name: str, number: int, caller: Member, *, alive: bool) -> CoreError:
    """Return the error for one name that is used for all participants and for those alive."""
    kinds = ("all its participants", "those of its participants that are alive")
    return _mismatch(
        f"{title(name, number)} failed: it was called for {kinds[not alive]}, but {messages.name(caller)} "
        f"called it for {kinds[alive]}. Give different barriers different names.",
        (caller,),
    )


def wrong_number(name: str, instance: int, caller: Member, number: int, what: str) -> CoreError:
    """Return the error for a caller that has finished more or fewer instances than the others."""
    return _mismatch(
        f"{messages.name(caller)} called barrier {messages.quote(name)} for instance {instance} (the "
        f"number that it has finished), but instance {number} {what}. It called the barrier a different "
        "number of times "
        "than the others: all participants of a name must take part in each of its instances. " + _OTHER_NAMES
    )


def too_many(name: str, count: int, cluster: str) -> CoreError:
    """Return the error for a barrier beyond the limit."""
    return CoreError(
        ErrorKind.LIMIT_EXCEEDED,
        f"barrier {messages.quote(name)} cannot start: {count} barriers are pending in cluster "
        f"{messages.quote(cluster)}, which is the server's limit",
    )


def gone(name: str, number: int, members: tuple[Member, ...], arrived: str) -> CoreError:
    """Return the error for an instance some of whose participants have departed."""
    listed = members[: messages.MAX_DESCRIBED]
    fates = "; ".join(f"{messages.name(member)} {messages.fate_of(member)}" for member in listed)
    more = messages.tasks(member.task for member in members[len(listed) :])
    return CoreError(
        ErrorKind.BARRIER_FAILED,
        f"{title(name, number)} failed: {fates}{f'; also departed: {more}' if more else ''}. {arrived} had "
        "arrived. The cluster cannot continue without this member. Find the cause in its log and exit "
        "code, then start the job again.",
        _slim(members),
    )


def timed_out(
    name: str,
    number: int,
    timeout: float,
    missing: tuple[Member, ...],
    expected: int,
    now: float,
    *,
    rejoin: bool,
) -> CoreError:
    """Return the error for an instance whose time is over, with what to do about the missing tasks."""
    never = sum(1 for member in missing if member.incarnation == 0)
    advice = []
    if never:
        advice.append("Check that tasks that never registered were started with this coordinator's address.")
    if never < len(missing):
        advice.append("Tasks that are alive are late, stuck, or do not call this barrier: see their logs.")
    if rejoin and any(member.state.departed for member in missing):
        advice.append("Departed tasks can be replaced: start a new process for each of them.")
    return CoreError(
        ErrorKind.BARRIER_TIMEOUT,
        f"{title(name, number)} timed out after {messages.seconds(timeout)}: {len(missing)} of {expected} "
        f"tasks are missing: {messages.listing(missing, now)}. " + " ".join(advice),
        _slim(missing),
    )


def cancelled(name: str, number: int, by: str, arrived: str, members: tuple[Member, ...]) -> CoreError:
    """Return the error for an instance that a participant or an operator has cancelled."""
    return CoreError(
        ErrorKind.BARRIER_CANCELLED,
        f"{title(name, number)} was cancelled by {by} after {arrived} had arrived",
        members,
    )


def not_yours_to_cancel(name: str, number: int, caller: Member, expected: Collection[Task]) -> CoreError:
    """Return the error for a caller that cancels a barrier of others."""
    return _mismatch(
        f"{title(name, number)} is for {messages.tasks(expected)}; {messages.name(caller)} is not one of "
        "them and cannot cancel it"
    )


def too_late_to_cancel(name: str, number: int, failure: CoreError | None) -> CoreError:
    """Return the error for a caller that cancels a barrier that is over."""
    outcome = "succeeded" if failure is None else f"failed: {failure.message}"
    return _mismatch(f"{title(name, number)} cannot be cancelled: it is over and {outcome}")


def nothing_to_cancel(name: str, instance: int) -> CoreError:
    """Return the error for a caller that cancels a barrier that is not under way."""
    which = f" (instance {instance})" if instance >= 0 else ""
    return _mismatch(f"barrier {messages.quote(name)}{which} cannot be cancelled: it is not under way")


def title(name: str, number: int) -> str:
    """Name an instance."""
    return f"barrier {messages.quote(name)} (instance {number})"


def _mismatch(message: str, members: tuple[Member, ...] = ()) -> CoreError:
    return CoreError(ErrorKind.BARRIER_MISMATCH, message, members)


def _slim(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Keep an error about very many members small enough to be sent to each of them."""
    if len(members) < _SLIM_FROM:
        return members
    return tuple(replace(member, devices=(), peer_addresses=()) for member in members)
