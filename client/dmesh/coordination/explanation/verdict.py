"""Verdict on a cluster: a headline, the culprits, the members that stop because of them, and the evidence.

The one place that decides what is wrong and who is to blame. `dmesh why`, the REST interface and the
dashboard show what it says.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dmesh.consequences import error_name, follows
from dmesh.coordination.explanation.causes import STRIDE as _STRIDE
from dmesh.coordination.explanation.causes import Explanation, Steps, Suspect, Wait, finish
from dmesh.coordination.explanation.evidence import (
    MOST_NAMED,
    Evidence,
    also,
    last_call,
    line_of,
    position,
    process,
    progress,
    state,
    what,
)
from dmesh.coordination.explanation.picture import Group, Picture
from dmesh.coordination.explanation.text import be_text, count_text, ranks_text, seconds_text, verb_text
from dmesh.coordination.members import DepartureCause, Member, MemberState, Task

GRAVE = 5.0
"""Seconds from which on a wait is a failure rather than a delay."""
_FORMING = 60.0
"""Seconds in which clients may register before their absence is a delay."""
_ENOUGH = 16
"""Calls that each rank must have reported before one is called slow."""

_TASK = re.compile(r"/job:([A-Za-z0-9_.-]{1,128})/task:([0-9]{1,9})")
_VERBS = {
    DepartureCause.PROCESS_GONE: "killed",
    DepartureCause.DISCONNECTED: "disconnected",
    DepartureCause.SILENT: "silent",
    DepartureCause.NOT_BACK: "not back after the server's restart",
    DepartureCause.EVICTED: "evicted by an operator",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Diagnosis of a cluster."""

    kind: str
    """`failed`, `waiting`, `deadlock`, `slow`, `forming`, `ended` or `healthy`."""
    severity: str
    """`bad`, `warn`, `ok` or `idle`."""
    headline: str
    """Headline: `Rank 3 is holding up 5 ranks · 13 s`."""
    consequence: str = ""
    """Effect on the others: `5 others stopped because of it`; empty if the headline says it all."""
    since: float | None = None
    """Seconds that it has lasted; None if nothing waits."""
    culprits: tuple[Suspect, ...] = ()
    """Members with which it began."""
    victims: tuple[Task, ...] = ()
    """Members that stopped or wait because of them, sorted."""
    evidence: tuple[Evidence, ...] = ()
    """Facts that lead to the verdict, the most telling first."""


def judge(explanation: Explanation, picture: Picture) -> Verdict:
    """Diagnose a cluster, and find the culprit.

    Args:
        explanation: What the cluster waits for.
        picture: The cluster.
    """
    return finish(judge_in_steps(explanation, picture))


def judge_in_steps(explanation: Explanation, picture: Picture) -> Steps[Verdict]:
    """Do the work of `judge` in steps, so that an event loop can run between them."""
    gone = next((wait for wait in explanation.waits if _is_loss(wait)), None)
    if gone is not None:
        return (yield from _failed(gone, explanation, picture))
    first = _leading(explanation)
    yield
    if first is None:
        return (yield from _calm(picture))
    if first.kind == "members":
        return _forming(first, picture)
    # Ranks that wait for each other's data in one call are no circle of calls.
    if not {*explanation.circle} <= {*first.present}:
        return _deadlock(first, explanation, picture)
    return _waiting(first, explanation, picture)


def describe(verdict: Verdict) -> str:
    """Word a verdict for a terminal: the headline, the culprits, the evidence; one fact a line."""
    lines = [verdict.headline]
    if verdict.consequence:
        lines.append(f"  {verdict.consequence}")
    for culprit in verdict.culprits[:MOST_NAMED]:
        lines.append(f"  {'culprit':<13}  {_identity(culprit)}")
    if len(verdict.culprits) > MOST_NAMED:
        lines.append(f"  {'':<13}  and {len(verdict.culprits) - MOST_NAMED} more")
    lines += [f"  {fact.label:<13}  {fact.text}" for fact in verdict.evidence if fact.label != "process"]
    return "\n".join(lines)


def slowest(groups: Collection[tuple[int, Group]]) -> tuple[int, float, float] | None:
    """Return the rank for which others wait repeatedly, its share of waiting, and the next larger one.

    The rank that arrives last does not wait. A verdict needs enough calls of all ranks, and a clear
    difference.

    Args:
        groups: Each rank with its progress in one group.
    """
    known = sorted(
        (group.waited_us / group.elapsed_us, rank)
        for rank, group in groups
        if group.counted >= _ENOUGH and group.elapsed_us > 0
    )
    if len(known) < max(2, len(groups)):
        return None
    (least, rank), (next_least, _) = known[:2]
    return (rank, least, next_least) if next_least > 0.2 and least < next_least / 2 else None


def _is_loss(wait: Wait) -> bool:
    return wait.kind == "members" and any(suspect.state != "vacant" for suspect in wait.suspects)


def _leading(explanation: Explanation) -> Wait | None:
    """Return the wait that the verdict is about: of a stuck member, the call in which others wait for it."""
    first = next(iter(explanation.waits), None)
    if first is not None and first.kind == "liveness":
        blamed = {suspect.task for suspect in first.suspects}
        for wait in explanation.waits:
            if wait.present and blamed & {suspect.task for suspect in wait.suspects}:
                return wait
    return first


# -- Failures


def _failed(gone: Wait, explanation: Explanation, picture: Picture) -> Steps[Verdict]:
    departed = (MemberState.LOST, MemberState.FAILED)
    members = {str(_task(one)): one for one in picture.state.members if one.state in departed}
    yield
    roots = yield from _first_failures(list(members.values()))
    culprits = tuple(suspect for suspect in gone.suspects if suspect.task in roots)
    stopped = [member for task, member in members.items() if task not in roots]
    yield
    waiting = _waiting_for(culprits, explanation, picture)
    yield
    them = "it" if len(culprits) == 1 else "them"
    parts = []
    if stopped:
        who = "1 other" if len(stopped) == 1 else f"{len(stopped)} others"
        parts.append(f"{who} stopped because of {them}")
    if waiting:
        parts.append(f"{count_text(len(waiting), 'rank')} {verb_text(waiting, 'wait')} for {them}")
    first = culprits[0]
    line = f" · {line_of(first.where)}" if len(culprits) == 1 and first.where else ""
    evidence = [*position(first), *last_call(first), *process(first)]
    evidence += [
        Evidence("reason", f"{_rank_of(one)}{one.reason}" if len(culprits) > 1 else one.reason)
        for one in culprits[:MOST_NAMED]
        if one.reason
    ]
    others = yield from _reasons(stopped)
    evidence += [*progress(first), *others, *also(explanation, gone)]
    return Verdict(
        "failed",
        "bad",
        f"{_names(culprits, picture)} {_fate(members[first.task], len(culprits))}{line}",
        "; ".join(parts),
        gone.since,
        culprits,
        _sorted({_task(one) for one in stopped} | waiting),
        tuple(evidence),
    )


def _first_failures(gone: Sequence[Member]) -> Steps[set[str]]:
    """Return the tasks whose failure is no consequence of another's.

    The members that ended because of others say so, and mostly name them.
    """
    own, named = list[Member](), Counter[str]()
    for number, member in enumerate(gone):
        if not follows(member.reason):
            own.append(member)
        else:
            named.update({f"/job:{job}/task:{index}" for job, index in _TASK.findall(member.reason)})
        if number % _STRIDE == 0:
            yield
    own = own or list(gone)
    return {str(_task(one)) for one in [one for one in own if named[str(_task(one))]] or own}


def _fate(member: Member, count: int) -> str:
    """Return how a member ended, as the rest of a headline."""
    verb = _VERBS.get(member.cause)
    if verb is not None:
        return f"{'was' if count == 1 else 'were'} {verb}"
    name = error_name(member.reason)
    if name:
        return f"failed with {name}"
    return member.reason if member.reason.startswith("exited with code ") else "failed"


def _reasons(stopped: Iterable[Member]) -> Steps[list[Evidence]]:
    """Return the messages of failed members, once for each kind of error."""
    ranks, examples = defaultdict[str, list[int]](list), dict[str, str]()
    for number, member in enumerate(stopped):
        if number % _STRIDE == 0:
            yield
        kind = error_name(member.reason) or member.reason
        ranks[kind].append(member.index)
        examples.setdefault(kind, member.reason)
    ordered = sorted(ranks, key=lambda kind: -len(ranks[kind]))[:MOST_NAMED]
    return [Evidence("others", f"{ranks_text(ranks[kind])}: {examples[kind]}") for kind in ordered]


# -- Waits


def _waiting(first: Wait, explanation: Explanation, picture: Picture) -> Verdict:
    culprits = first.suspects
    victims = _waiting_for(culprits, explanation, picture)
    since = f" · {seconds_text(first.since)}"
    grave = first.since >= GRAVE or first.kind == "liveness"
    one = culprits[0] if culprits else None
    evidence = [*(position(one) if one else ()), *what(first), *(process(one) if one else ())]
    if one is not None:
        evidence += [*state(one), *last_call(one), *progress(one)]
    evidence += also(explanation, first)
    names = _names(culprits, picture)
    if first.kind == "liveness":
        assert one is not None, "a wait for a member's liveness is about that member"
        headline = f"{names} is {one.state}" + (f" · {line_of(one.where)}" if one.where else since)
    elif not culprits:
        victims = {Task(_job(picture), rank) for rank in first.present}
        who = f"{count_text(len(victims), 'rank')} {verb_text(victims, 'wait')}"
        headline = f"{who}; no rank is known to be late{since}"
    elif not victims:
        headline = f"{names} {verb_text(culprits, 'wait')} for data{since}"
    else:
        headline = f"{names} {be_text(culprits)} holding up {count_text(len(victims), 'rank')}{since}"
    return Verdict(
        "waiting", "bad" if grave else "warn", headline, "", first.since, culprits, _sorted(victims),
        tuple(evidence),
    )  # fmt: skip


def _deadlock(first: Wait, explanation: Explanation, picture: Picture) -> Verdict:
    circle = set(explanation.circle)
    found = {s.rank: s for wait in explanation.waits for s in wait.suspects if s.rank in circle}
    culprits = tuple(found[rank] for rank in explanation.circle if rank in found)
    victims = _waiting_for(culprits, explanation, picture)
    evidence = [
        Evidence("line", f"rank {one.rank}: {one.where}") for one in culprits[:MOST_NAMED] if one.where
    ]
    evidence += [*what(first), *also(explanation, first)]
    chain = " → ".join(map(str, (*explanation.circle, explanation.circle[0])))
    return Verdict(
        "deadlock",
        "bad",
        f"{_names(culprits, picture)} wait for each other · {seconds_text(first.since)}",
        f"This deadlock will not resolve itself: ranks {chain}",
        first.since,
        culprits,
        _sorted(victims),
        tuple(evidence),
    )


def _forming(first: Wait, picture: Picture) -> Verdict:
    slots = len(picture.state.members) + len(picture.state.vacant)
    missing = len(first.suspects)
    have = "has" if missing == 1 else "have"
    return Verdict(
        "forming",
        "idle" if first.since < _FORMING else "warn",
        f"{missing} of {count_text(slots, 'client')} {have} not registered yet · {seconds_text(first.since)}",
        since=first.since,
        evidence=(Evidence("missing", ranks_text([s.rank for s in first.suspects])),),
    )


def _calm(picture: Picture) -> Steps[Verdict]:
    """Judge a cluster in which nothing waits for long."""
    there = sum(not member.state.departed for member in picture.state.members)
    if not there and picture.state.members:
        left = count_text(len(picture.state.members), "member")
        return Verdict("ended", "idle", f"Finished: {left} left cleanly")
    yield
    slow = yield from _slow(picture)
    if slow is not None:
        return slow
    headline = f"Nothing is waiting · {count_text(there, 'member')} {'is' if there == 1 else 'are'} connected"
    return Verdict("healthy", "ok", headline)


def _slow(picture: Picture) -> Steps[Verdict | None]:
    """Judge a cluster in which one rank is usually the last one."""
    streams = defaultdict[tuple[int, int], list[tuple[Task, Group]]](list)
    present = {_task(one): one for one in picture.state.members if not one.state.departed}
    for number, (task, said) in enumerate(picture.reports.items()):
        if number % _STRIDE == 0:
            yield
        if task in present:
            for group in said.report.groups:
                streams[group.id, group.generation].append((task, group))
    for stream in sorted(streams.values(), key=lambda stream: -len(stream)):
        yield
        found = slowest([(number, group) for number, (_, group) in enumerate(stream)])
        if found is None or len(stream) < stream[0][1].size:
            continue
        number, least, others = found
        task, group = stream[number]
        member, report = present[task], picture.reports[task].report
        culprit = Suspect(
            task.index, str(task), member.process.host, member.process.pid, "connected", "", group.last.call,
            group.last.sequence, None, report.where, report.operation, picture.reports[task].age_ms / 1000,
        )  # fmt: skip
        share = Evidence(
            "share", f"it waited {least:.0%} of its recent calls, the others {others:.0%} or more"
        )
        return Verdict(
            "slow",
            "warn",
            f"Rank {task.index} is slower than the others · they wait {others:.0%} of their calls",
            culprits=(culprit,),
            evidence=(share, *position(culprit), *process(culprit)),
        )
    return None


# -- Members


def _waiting_for(culprits: Iterable[Suspect], explanation: Explanation, picture: Picture) -> set[Task]:
    """Return the ranks that wait for these members, at once or by way of others."""
    blamed = {suspect.rank for suspect in culprits}
    chain, job = set(blamed), _job(picture)
    waits = [(set(wait.present), {one.rank for one in wait.suspects}) for wait in explanation.waits]
    grown = True
    while grown:
        grown = False
        for present, suspects in waits:
            if suspects & chain and not present <= chain:
                chain |= present
                grown = True
    return {Task(job, rank) for rank in chain - blamed}


def _job(picture: Picture) -> str:
    """Return the job whose members take part in collectives."""
    jobs = {task.job for task in picture.reports} or {member.job for member in picture.state.members}
    return min(jobs, default="")


def _names(culprits: Sequence[Suspect], picture: Picture) -> str:
    if len({member.job for member in picture.state.members}) > 1:
        return ", ".join(one.task for one in culprits[:MOST_NAMED])
    return ranks_text([one.rank for one in culprits]).capitalize()


def _identity(one: Suspect) -> str:
    process = f", host {one.host or '?'}, pid {one.pid}" if one.state != "vacant" else ""
    return f"{_rank_of(one)}{one.task}{process}"


def _rank_of(one: Suspect) -> str:
    return f"rank {one.rank}: "


def _task(member: Member) -> Task:
    return Task(member.job, member.index)


def _sorted(tasks: Iterable[Task]) -> tuple[Task, ...]:
    return tuple(sorted(tasks, key=lambda task: (task.job, task.index)))  # tasks themselves compare slowly
