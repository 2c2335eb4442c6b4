"""Report of an ended job for programs: the JSON object of `dmesh run --json`."""

from __future__ import annotations

import signal
from typing import Any

from dmesh.launcher.diagnosis import Outcome, rank_failures
from dmesh.launcher.supervisor import LaunchResult


def job_report(result: LaunchResult, host: str, seconds: float) -> dict[str, Any]:
    """Return the report of a job as a JSON object.

    Args:
        result: How the job ended.
        host: Name of this machine.
        seconds: How long it took.
    """
    failures = rank_failures(result.outcomes)
    return {
        "exit_code": result.exit_code,
        "host": host,
        "seconds": round(seconds, 3),
        "failures": [outcome.rank for outcome in failures],
        "ranks": [_rank(outcome, host) for outcome in result.outcomes],
    }


def _rank(outcome: Outcome, host: str) -> dict[str, Any]:
    traceback = outcome.traceback
    return {
        "rank": outcome.rank,
        "host": outcome.host or host,
        "pid": outcome.pid,
        "exit_code": outcome.status if outcome.status >= 0 and not outcome.lost else None,
        "signal": None if outcome.status >= 0 else _name(-outcome.status),
        "ended_by_launcher": None if outcome.ended_by is None else outcome.ended_by.name,
        "role": outcome.role.name.lower(),
        "order": outcome.order,
        "seconds": round(outcome.seconds, 3),
        "restarts": outcome.restarts,
        "lost": outcome.lost or None,
        "exception": None if traceback is None or not traceback.exception else traceback.exception,
        "last_lines": list(outcome.last_lines),
    }


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
