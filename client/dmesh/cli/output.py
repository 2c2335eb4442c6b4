"""Output of commands: tables and text for people, JSON for programs. Coloured on a terminal, with rich."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

BAD_NEWS = 3
"""Exit code of a verb whose answer needs attention: a lost member, a missing key."""

_PLAIN_WIDTH = 100


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the `--json` flag."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def seconds(text: str) -> float:
    """Reads a number of seconds from the command line."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, at least 0, got {text!r}")
    return value


def print_text(text: str) -> None:
    """Prints a paragraph, wrapped on a terminal only."""
    text = printable(text)
    if sys.stdout.isatty():
        text = textwrap.fill(text, min(shutil.get_terminal_size().columns, _PLAIN_WIDTH))
    print(text, flush=True)  # noqa: T201


def print_json(value: object) -> None:
    """Prints a value as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False), flush=True)  # noqa: T201


def print_json_line(value: object) -> None:
    """Prints a value as one line of JSON, for streams of values."""
    print(json.dumps(value, allow_nan=False), flush=True)  # noqa: T201


def print_failure(verb: str, message: str, kind: type[Exception], *, as_json: bool) -> None:
    """Prints a verb's failure on standard error and, with `--json`, as JSON on standard output.

    Args:
        verb: The verb.
        message: Description of the failure.
        kind: Class of the error; the JSON has its name.
        as_json: Whether to print JSON, too.
    """
    print(f"dmesh {verb}: {message}", file=sys.stderr)  # noqa: T201
    if as_json:
        print_json_line({"error": {"kind": kind.__name__, "message": message.removeprefix("error: ")}})


def printable(text: str) -> str:
    """Returns a text without characters that control a terminal: it comes from other processes."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], bad: Sequence[bool] = ()) -> None:
    """Prints a table.

    Args:
        head: Names of the columns.
        rows: Rows of cells, one cell for each column.
        bad: For each row, whether to highlight it; empty to highlight none.
    """
    cells = [[printable(str(cell)).replace("\n", " ") for cell in row] for row in rows]
    marked = list(bad) or [False] * len(cells)
    console = _console()
    if console is not None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in head:
            table.add_column(name, overflow="fold")
        for row, stands_out in zip(cells, marked, strict=True):
            table.add_row(*(Text(cell, style="red" if stands_out else "") for cell in row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for line in (list(head), *cells):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(text.rstrip())  # noqa: T201
    sys.stdout.flush()


def repeat(show: Callable[[], int], interval: float, times: int | None = None) -> int:
    """Calls `show` repeatedly, on a cleared terminal; returns the last exit code.

    Args:
        show: Prints once; returns an exit code.
        interval: Seconds between two calls.
        times: Number of calls; None to repeat until Ctrl-C.
    """
    shown = 0
    while True:
        if sys.stdout.isatty() and times != 1:
            print("\x1b[H\x1b[2J", end="")  # noqa: T201 -- empties the screen
        code = show()
        shown += 1
        if shown == times:
            return code
        time.sleep(interval)


def _console() -> Any:
    """Returns a rich console; None in a pipe, if colors are off, or without rich."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()
