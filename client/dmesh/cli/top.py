"""`dmesh top`: what each rank does now, how much of its time it waits, and who holds the others up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmesh.cli.observing import Observer, Picture
    from dmesh.v1.progress_pb2 import LoopProgress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Shows what each rank of a cluster is doing, updated every second: its current or last call, its calls per
second, and the share of its recent calls that it spent waiting for others. For loops in dmesh.progress, it
also shows the step, the steps per second and the time left. The rank that waits least while others wait a lot
is the straggler: it comes first. In a pipe, prints once."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer; 2 for an invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json, seconds
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "top", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    add = parser.add_argument
    add("--interval", metavar="S", type=seconds, default=1.0, help="seconds between updates (default 1)")
    add("--count", metavar="N", type=int, help="number of updates (default: until Ctrl-C; in a pipe 1)")
    add("--rows", metavar="N", type=int, default=40, help="show at most N ranks (default 40)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import repeat

    times = args.count if args.count is not None else None if sys.stdout.isatty() else 1
    with Observer.of(args) as observer:
        view = _View(observer, args)
        return repeat(view.show, args.interval, times)


class _View:
    def __init__(self, observer: Observer, args: argparse.Namespace) -> None:
        self._observer = observer
        self._args = args
        self._counts: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}

    def show(self) -> int:
        """Looks once."""
        from dmesh.cli.output import print_json_line, print_table, print_text

        picture = self._observer.look()
        rows = [self._row(rank, said) for rank, said in sorted(_by_rank(picture).items())]
        rows.sort(key=lambda row: (row["behind"] is False, row["waited"] is None, row["waited"] or 0.0))
        if self._args.json:
            print_json_line({"cluster": picture.cluster, "ranks": rows})
            return 0
        shown = rows[: self._args.rows]
        if not shown:
            print_text(f"No member of cluster {picture.cluster!r} has reported its progress yet.")
            return 0
        has_loops = any(row["loops"] for row in shown)
        print_table(
            ("RANK", *(("STEP", "STEPS/S", "LEFT") if has_loops else ()),
             "GROUP", "CALL#", "STATE", "CALLS/S", "WAITS", "CALL", "WHERE"),
            [
                (
                    row["rank"],
                    *(_steps(row["loops"]) if has_loops else ()),
                    row["group"],
                    row["sequence"],
                    row["state"],
                    "-" if row["rate"] is None else f"{row['rate']:.1f}",
                    "-" if row["waited"] is None else f"{row['waited']:.0%}",
                    row["call"],
                    row["where"],
                )
                for row in shown
            ],
            [bool(row["behind"]) for row in shown],
        )  # fmt: skip
        if len(rows) > len(shown):
            print_text(f"... and {len(rows) - len(shown)} more ranks; --rows shows them.")
        return 0

    def _row(self, rank: int, said: Mapping[str, Any]) -> dict[str, Any]:
        import time

        from dmesh.cli.groups import STATES, waited_share
        from dmesh.cli.members import short

        report, top = said["report"], said["group"]
        finished = sum(group.finished for group in report.groups)
        now = time.monotonic() - said["age"]  # when it said so
        then, before = self._counts.get(rank, (now, finished))
        if now - then > 0.1 and finished >= before:  # a new report
            self._rates[rank] = (finished - before) / (now - then)
            self._counts[rank] = now, finished
        self._counts.setdefault(rank, (now, finished))
        return {
            "rank": rank,
            "group": "" if top is None else top.name,
            "sequence": 0 if top is None else top.issued,
            "state": "idle" if top is None else STATES.get(top.last.state, "?"),
            "rate": self._rates.get(rank),
            "waited": None if top is None else waited_share(top),
            "call": "" if top is None else top.last.call,
            "where": short(report.where),
            "behind": said["behind"],
            "loops": [_loop(loop, said["age"]) for loop in report.loops],
        }


def _loop(loop: LoopProgress, age: float) -> dict[str, Any]:
    from dmesh.cli.loops import time_left

    return {
        "name": loop.name,
        "unit": loop.unit,
        "done": loop.done,
        "total": loop.total or None,
        "rate": loop.rate,
        "left": time_left(loop, age),
        "over": loop.over,
    }


def _steps(loops: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return step, speed and time left of a rank's innermost loop."""
    from dmesh.coordination.explanation.text import seconds_text

    if not loops:
        return "-", "-", "-"
    loop = loops[-1]
    step = f"{loop['done']}/{loop['total']}" if loop["total"] else f"{loop['done']}"
    left = "over" if loop["over"] else "-" if loop["left"] is None else seconds_text(loop["left"])
    return step, f"{loop['rate']:.1f}" if loop["rate"] else "-", left


def _by_rank(picture: Picture) -> dict[int, dict[str, Any]]:
    """Returns what each rank said: its report, the group that it was last in, and whether others wait."""
    from dmesh.coordination.explanation import explain

    waits = [wait for wait in explain(picture).waits if wait.kind == "collective"]
    behind = {suspect.rank for wait in waits for suspect in wait.suspects}
    found = {}
    for task, said in picture.reports.items():
        top = next(iter(said.report.groups), None)
        found[task.index] = {
            "report": said.report,
            "group": top,
            "age": said.age_ms / 1000,
            "behind": task.index in behind,
        }
    return found
