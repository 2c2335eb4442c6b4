"""Reads the traces that clients have written, and writes the one that is made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmesh.collectives.trace import FORMAT, HEAD, MOST_BYTES
from dmesh.errors import ConfigurationError

_LONGEST_LINE = 1 << 16
_MOST_FILES = 100_000


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Trace of one rank."""

    path: Path
    """Path of the file."""
    rank: int
    """The client's id."""
    run: str
    """The same for all ranks of one run."""
    clock: str
    """Says which clock its times are of."""
    wall: float
    """Time of the wall clock when that clock shows 0."""
    events: Sequence[Mapping[str, Any]]
    """The events, without the one that names their process."""
    complete: bool
    """True if the trace was ended properly."""
    left_out: int
    """Calls that were left out because the file was full."""
    lost: int
    """Calls that the native core had forgotten before they were fetched."""


def find(places: Sequence[Path], out: Path) -> list[Path]:
    """Returns the files to read, sorted.

    Args:
        places: Directories, or files.
        out: What is to be written, and so is none of them.

    Raises:
        ConfigurationError: There are none.
    """
    found: list[Path] = []
    for place in places:
        found += sorted(place.glob("rank-*.json"))[:_MOST_FILES] if place.is_dir() else [place]
    found = [path for path in found if path.absolute() != out.absolute()]
    if not found:
        shown = ", ".join(map(str, places))
        raise ConfigurationError(f"there is no trace in {shown}: run your program with DMESH_TRACE={shown}")
    return found


def read(path: Path) -> RankTrace:
    """Reads one file. What was cut in the middle of an event, by the end of a process, is read up to there.

    Raises:
        ConfigurationError: It cannot be read, or is no trace of dmesh.
    """
    try:
        with path.open("rb") as file:
            events = list(_events(file.read(2 * MOST_BYTES + 1), path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    head = _arguments(events[0]) if events and events[0].get("name") == HEAD else {}
    rank, run = head.get("rank"), head.get("run")
    if head.get("format") != FORMAT or not isinstance(rank, int) or not isinstance(run, str):
        raise ConfigurationError(f"{path} is not a trace of this version of dmesh")
    boot = head.get("boot_id")
    tail = _arguments(events[-1]) if events[-1].get("name") == "dmesh_trace_end" else None
    return RankTrace(
        path=path,
        rank=rank,
        run=run,
        # Who does not know its kernel has a clock of its own.
        clock=boot if isinstance(boot, str) and boot else f"rank {rank}",
        wall=_number(head.get("wall")) - _number(head.get("monotonic")),
        events=events[1:] if tail is None else events[1:-1],
        complete=tail is not None,
        left_out=round(_number((tail or {}).get("left_out"))),
        lost=round(_number((tail or {}).get("lost"))),
    )


def write(
    out: Path,
    ranks: Sequence[RankTrace],
    offsets: Mapping[str, float],
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Writes one trace; returns how many calls there are in it.

    Args:
        out: The file.
        ranks: What each rank has written.
        offsets: What is to be added to the times of each clock, seconds.
        progress: Called with the number of written ranks, before each rank.

    Raises:
        ConfigurationError: They are of several runs, or the file cannot be written.
    """
    runs = sorted({trace.run for trace in ranks})
    if len(runs) > 1:
        example = {trace.run: trace.path for trace in ranks}
        raise ConfigurationError(
            "these traces are of several runs: "
            + ", ".join(f"{path} of {run}" for run, path in sorted(example.items()))
            + ". Remove those of earlier runs, or name the files of one"
        )
    shifted = {clock: round(offset * 1e6, 3) for clock, offset in offsets.items()}
    begins = [
        event["ts"] + shifted[trace.clock] for trace in ranks for event in trace.events if event["ph"] == "X"
    ]
    zero, count = min(begins, default=0.0), 0
    try:
        with out.open("w") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            separator = "\n"
            for done, trace in enumerate(ranks):
                progress(done)
                for event in trace.events:
                    moved = dict(event, pid=trace.rank)
                    if event["ph"] == "X":
                        moved["ts"] = round(event["ts"] + shifted[trace.clock] - zero, 3)
                        count += 1
                    file.write(separator + json.dumps(moved, separators=(",", ":")))
                    separator = ",\n"
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror}") from error
    return count


def _events(data: bytes, path: Path) -> Iterator[Mapping[str, Any]]:
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        text = line.strip().removesuffix(b",")
        if text in (b"[", b"]", b""):
            continue
        if len(text) > _LONGEST_LINE:
            raise ConfigurationError(f"line {number} of {path} is too long: the file is not a trace of dmesh")
        try:
            event = json.loads(text)
        except ValueError as error:
            if number == len(lines):  # cut
                return
            raise ConfigurationError(f"line {number} of {path} is not a trace event: {error}") from error
        if not _is_event(event):
            raise ConfigurationError(f"line {number} of {path} is not a trace event")
        yield event


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or event.get("ph") not in ("X", "M"):
        return False
    if event["ph"] == "M":
        return True
    times = [event.get(name) for name in ("ts", "dur")]
    return all(type(time) in (int, float) and math.isfinite(time) for time in times)  # type: ignore[arg-type]


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
