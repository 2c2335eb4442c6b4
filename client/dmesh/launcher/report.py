"""The launcher's own lines: the report of a failed job, with its cause first and then the consequences."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dmesh.launcher.diagnosis import Outcome, Role
from dmesh.launcher.labels import Output

_PREFIX = "dmesh run: "
_MOST_FOLLOWERS = 8
_MOST_MESSAGE = 120
_SEEN_BY_ALL = frozenset({"CollectiveMismatchError", "CollectiveTimeoutError"})
"""Errors of one call, of which each rank may know another side."""
_HINTS = {
    signal.SIGKILL: "by kill -9, or by the kernel because memory ran out (`dmesg` would show it)",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a memory-mapped file that shrank or a full disk",
    signal.SIGABRT: "native code gave up; its message should be above",
}


class Reporter:
    """Writer of the launcher's own lines.

    Args:
        output: The launcher's standard error.
        host: Name of this machine.
    """

    def __init__(self, output: Output, host: str) -> None:
        self._output = output
        self._host = host

    def notice(self, text: str) -> None:
        """Write one line, now."""
        self._output.write(f"{_PREFIX}{text}\n".encode())

    def failure_noticed(self, outcome: Outcome, seconds: float) -> None:
        """Say at once that a client failed and what happens next; `summary` says why."""
        self.notice(
            f"rank {outcome.rank} ({_where(outcome)}) {outcome.how()}; "
            f"the others have {seconds:g} s to exit on their own"
        )

    def replacing(self, outcome: Outcome, number: int, limit: int) -> None:
        """Say at once that a client failed and that another process takes its place."""
        why = f" ({_shortened(outcome.traceback.exception)})" if outcome.traceback is not None else ""
        self.notice(
            f"rank {outcome.rank} ({_where(outcome)}) {outcome.how()}{why}; "
            f"restarting it ({number} of {limit})"
        )

    def summary(self, failures: Sequence[Outcome], ended_well: Sequence[int], *, visible: bool) -> None:
        """Report a failed job.

        Args:
            failures: As `diagnosis.rank_failures` gives them: where it began first.
            ended_well: Ranks that had ended with exit code 0.
            visible: Whether the end of the first one's standard error is still before the user's eyes.
        """
        first = failures[0]
        alike = [outcome for outcome in failures if outcome is first or failed_alike(outcome, first)]
        followers = [outcome for outcome in failures if outcome not in alike]
        who = _named(alike) if len(alike) > 1 else f"rank {first.rank}"
        pid = f" (pid {first.pid})" if len(alike) == 1 else ""
        headline = (
            f"{_PREFIX}FAILED: {who} on {self._hosts(alike)}{pid} {_verb(first.how(), alike)} "
            f"after {first.seconds:.1f} s{hint_of(first)}"
        )
        lines = [headline, *_details(first, visible=visible)]
        if followers:
            groups = group_endings(followers)
            if len(groups) == 1:
                lines.append(f"  the others followed: {groups[0]}")
            else:
                lines += ["  the others followed:", *(f"    {text}" for text in groups[:_MOST_FOLLOWERS])]
            if len(groups) > _MOST_FOLLOWERS:
                lines.append(f"    and {len(groups) - _MOST_FOLLOWERS} more")
        if ended_well:
            lines.append(f"  ended with exit code 0: {name_ranks(ended_well)}")
            if first.role > Role.ENDED_WHILE_FAILING:
                lines.append("  (perhaps too early: the failed ranks still needed somebody)")
        self._output.write("".join(f"{line}\n" for line in lines).encode())

    def _hosts(self, outcomes: Sequence[Outcome]) -> str:
        by_rank = sorted(outcomes, key=lambda outcome: outcome.rank)
        names = list(dict.fromkeys(outcome.host or self._host for outcome in by_rank))
        more = ", ..." if len(names) > _MOST_FOLLOWERS else ""
        return f"host{'s' if len(names) > 1 else ''} {', '.join(names[:_MOST_FOLLOWERS])}{more}"


def _where(outcome: Outcome) -> str:
    """Return a client's process and, if it is elsewhere, its host."""
    return f"host {outcome.host}, pid {outcome.pid}" if outcome.host else f"pid {outcome.pid}"


def failed_alike(one: Outcome, other: Outcome) -> bool:
    """Return whether two clients failed with the same error, so that neither is to blame before the other."""
    if one.lost or other.lost:
        return one.lost == other.lost
    mine, others = one.traceback, other.traceback
    if mine is None or others is None or one.how() != other.how() or one.role is not other.role:
        return False
    return mine.exception == others.exception or (
        mine.type_name == others.type_name and mine.type_name in _SEEN_BY_ALL
    )


def group_endings(outcomes: Sequence[Outcome]) -> list[str]:
    """Describe how clients ended, those together that ended alike."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        text = _ending(outcome)
        # Ranks learn of one loss from the data plane or from the server, whose reasons differ.
        alike = text.partition("): ")[0] if "PeerLostError: lost rank" in text else text
        groups.setdefault(alike, []).append(outcome)
    return [
        f"{_named(alike)}{f' ({_where(alike[0])})' if len(alike) == 1 else ''} "
        f"{_verb(_ending(alike[0]), alike)}"
        for alike in groups.values()
    ]


def _verb(text: str, outcomes: Sequence[Outcome]) -> str:
    return f"were {text[4:]}" if len(outcomes) > 1 and text.startswith("was ") else text


def _named(outcomes: Sequence[Outcome]) -> str:
    return name_ranks([outcome.rank for outcome in outcomes])


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `rank 2` or `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] + 1 == rank:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:_MOST_FOLLOWERS]]
    more = ", ..." if len(spans) > _MOST_FOLLOWERS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{more}"


def hint_of(outcome: Outcome) -> str:
    """Return the possible cause of a client's signal, as the end of a sentence; empty if it is obvious."""
    try:
        hint = _HINTS.get(signal.Signals(-outcome.status)) if outcome.status < 0 else None
    except ValueError:
        hint = None
    return f", {hint}" if hint else ""


def _details(first: Outcome, *, visible: bool) -> list[str]:
    """Return the first failure's last output; only the most important line if the user can still see it."""
    if first.lost:
        return [f"  {first.lost}"]
    if first.traceback is not None:
        if visible and first.traceback.exception:
            return [f"  {first.traceback.exception}"]
        return ["  its last traceback:", *(f"    {line}" for line in first.traceback.lines)]
    if first.last_lines:
        lines = first.last_lines[-1:] if visible else first.last_lines
        return ["  the end of its standard error:", *(f"    {line}" for line in lines)]
    return ["  it wrote nothing to standard error"]


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_MESSAGE else f"{text[:_MOST_MESSAGE]}..."


def _ending(outcome: Outcome) -> str:
    text = outcome.how()
    if outcome.traceback is not None and outcome.traceback.exception:
        _, colon, message = outcome.traceback.exception.partition(":")
        summary = f"{outcome.traceback.type_name}{colon}{message}"  # without the exception's module
        text += f"{' after' if outcome.ended_by else ':'} {_shortened(summary)}"
    return text
