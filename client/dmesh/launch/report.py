"""What the user reads when a job fails: where it began first, then what followed from it."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dmesh.launch.diagnosis import Outcome, Role
from dmesh.launch.labels import Output

_PREFIX = "dmesh run: "
_MOST_FOLLOWERS = 16
_MOST_MESSAGE = 120
_HINTS = {
    signal.SIGKILL: "by kill -9 or by the kernel for want of memory (then `dmesg` says so)",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a memory-mapped file that shrank or a full disk",
    signal.SIGABRT: "native code gave up; its message should be above",
}


class Reporter:
    """Writes the launcher's own lines.

    Args:
        output: The launcher's standard error.
        host: Name of this machine.
    """

    def __init__(self, output: Output, host: str) -> None:
        self._output = output
        self._host = host

    def notice(self, text: str) -> None:
        """Says one thing, now."""
        self._output.write(f"{_PREFIX}{text}\n".encode())

    def failure_noticed(self, outcome: Outcome, seconds: float) -> None:
        """Says at once that a client failed and what happens next; what it was comes with `summary`."""
        self.notice(
            f"rank {outcome.rank} (pid {outcome.pid}) {outcome.how()}; "
            f"the others have {seconds:g} s to notice and end by themselves"
        )

    def replacing(self, outcome: Outcome, number: int, limit: int) -> None:
        """Says at once that a client failed and that another process takes its place."""
        why = f" ({_shortened(outcome.traceback.exception)})" if outcome.traceback is not None else ""
        self.notice(
            f"rank {outcome.rank} (pid {outcome.pid}) {outcome.how()}{why}; "
            f"starting it again, restart {number} of {limit}"
        )

    def summary(self, failures: Sequence[Outcome], ended_well: Sequence[int]) -> None:
        """Reports a failed job.

        Args:
            failures: As `diagnosis.rank_failures` gives them: where it began first.
            ended_well: Ranks that had ended with exit code 0.
        """
        first, *followers = failures
        headline = (
            f"{_PREFIX}FAILED: rank {first.rank} on host {self._host} (pid {first.pid}) {first.how()} "
            f"after {first.seconds:.1f} s{_hint(first)}"
        )
        lines = [headline, *_details(first)]
        if followers:
            lines.append("  the others followed:")
            lines += [f"    {_follower(outcome)}" for outcome in followers[:_MOST_FOLLOWERS]]
            if len(followers) > _MOST_FOLLOWERS:
                lines.append(f"    and {len(followers) - _MOST_FOLLOWERS} more")
        if ended_well:
            more = ", ..." if len(ended_well) > _MOST_FOLLOWERS else ""
            lines.append(f"  ended with exit code 0: rank {_listed(ended_well[:_MOST_FOLLOWERS])}{more}")
            if first.role > Role.ENDED_WHILE_FAILING:
                lines.append("  (perhaps too early: the failed ranks still needed somebody)")
        self._output.write("".join(f"{line}\n" for line in lines).encode())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _hint(outcome: Outcome) -> str:
    try:
        hint = _HINTS.get(signal.Signals(-outcome.status)) if outcome.status < 0 else None
    except ValueError:
        hint = None
    return f", {hint}" if hint else ""


def _details(first: Outcome) -> list[str]:
    if first.traceback is not None:
        return ["  its last traceback:", *(f"    {line}" for line in first.traceback.lines)]
    if first.last_lines:
        return ["  the end of its standard error:", *(f"    {line}" for line in first.last_lines)]
    return ["  it wrote nothing to standard error"]


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_MESSAGE else f"{text[:_MOST_MESSAGE]}..."


def _follower(outcome: Outcome) -> str:
    text = f"rank {outcome.rank} (pid {outcome.pid}) {outcome.how()}"
    if outcome.traceback is not None and outcome.traceback.exception:
        _, colon, message = outcome.traceback.exception.partition(":")
        summary = f"{outcome.traceback.type_name}{colon}{message}"  # without the exception's module
        text += f"{' after' if outcome.ended_by else ':'} {_shortened(summary)}"
    return text
