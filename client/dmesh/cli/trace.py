"""`dmesh trace merge`: merges the traces of all ranks into one, with their clocks aligned."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.alignment import Offset
    from dmesh.cli.trace_files import RankTrace

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Merges the traces that clients wrote to a directory (DMESH_TRACE=DIR) into one file. Open it with
https://ui.perfetto.dev or chrome://tracing. Ranks on one host share a clock. The clocks of several hosts are
aligned by calls that all ranks finish together (barriers, all-reduces ...); the command prints how precise
the alignment is."""
_EPILOG = """\
exit code: 0; 2 if there are no traces, if they belong to several runs, or if a file is not a trace."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.output import add_json

    parser = subparsers.add_parser("trace", help="merge the traces of all ranks into one", allow_abbrev=False)
    verbs = parser.add_subparsers(title="verbs", dest="trace_verb", metavar="VERB", required=True)
    merge = verbs.add_parser(
        "merge",
        help="merge the traces of all ranks into one",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    merge.add_argument("directory", metavar="DIR", help="directory in DMESH_TRACE, or trace files", nargs="+")
    merge.add_argument("--out", metavar="FILE", help="output file (default DIR/merged.json)")
    add_json(merge)
    merge.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs `trace merge`; returns the process's exit code.

    Raises:
        ConfigurationError: There is nothing to merge, or the result cannot be written.
    """
    from dmesh.cli.output import print_json, print_text
    from dmesh.cli.progress import Bar
    from dmesh.cli.trace_files import find, read, write

    places = [Path(place) for place in args.directory]
    default = (places[0] if places[0].is_dir() else places[0].parent) / "merged.json"
    out = Path(args.out) if args.out else default
    with Bar() as bar:
        ranks: list[RankTrace] = []
        paths = find(places, out)
        for path in paths:
            bar.show(f"reading {path}", len(ranks), len(paths))
            ranks.append(read(path))
        bar.show("aligning the clocks", 0, None)
        offsets = _align(ranks)
        found = {clock: offset.seconds for clock, offset in offsets.items()}
        count = write(out, ranks, found, lambda done: bar.show(f"writing {out}", done, len(ranks)))
    clocks = {
        clock: {"offset": o.seconds, "uncertainty": _finite(o.uncertainty), "origin": o.origin}
        for clock, o in offsets.items()
    }
    if args.json:
        cut = [trace.rank for trace in ranks if not trace.complete]
        print_json({"file": str(out), "ranks": len(ranks), "events": count, "cut": cut, "clocks": clocks})
        return 0
    print_text(f"Wrote {out}: {count} calls of {len(ranks)} ranks. {_quality(offsets)}")
    for trace in ranks:
        if not trace.complete:
            print_text(
                f"The trace of rank {trace.rank} is incomplete: its process was killed or is still running."
            )
        if trace.left_out or trace.lost:
            print_text(f"The trace of rank {trace.rank} lacks {trace.left_out + trace.lost} calls.")
    return 0


def _align(ranks: list[RankTrace]) -> dict[str, Offset]:
    from dmesh.cli.alignment import Call, align, group_calls

    times: dict[str, dict[Call, list[tuple[float, float]]]] = {}
    walls: dict[str, float] = {}
    for trace in ranks:
        calls = times.setdefault(trace.clock, {})
        walls.setdefault(trace.clock, trace.wall)
        for call, span in group_calls(trace.events).items():
            calls.setdefault(call, []).append(span)
    return align(times, walls)


def _quality(offsets: dict[str, Offset]) -> str:
    worst = max((offset.uncertainty for offset in offsets.values()), default=0.0)
    if any(offset.origin == "wall clock" for offset in offsets.values()):
        return "Some hosts have no call in common with the others: their wall clocks were believed."
    if len(offsets) < 2:
        return "They share one clock."
    return f"Their {len(offsets)} clocks are aligned to within {worst * 1e3:.3f} ms."


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value
