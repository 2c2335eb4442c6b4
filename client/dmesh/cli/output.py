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
"""Exit code of a verb that could ask, and got an answer that somebody should do something about."""

_PLAIN_WIDTH = 100


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that asks for JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def seconds(text: str) -> float:
    """Reads a number of seconds from the command line."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return value


def tell(text: str) -> None:
    """Prints a paragraph, broken into lines on a terminal only."""
    text = printable(text)
    if sys.stdout.isatty():
        text = textwrap.fill(text, min(shutil.get_terminal_size().columns, _PLAIN_WIDTH))
    print(text, flush=True)  # noqa: T201


def tell_json(value: object) -> None:
    """Prints a value as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False), flush=True)  # noqa: T201


def tell_json_line(value: object) -> None:
    """Prints a value as one line of JSON, of a stream of them."""
    print(json.dumps(value, allow_nan=False), flush=True)  # noqa: T201


def tell_failure(verb: str, message: str, kind: type[Exception], *, as_json: bool) -> None:
    """Says on standard error that a verb could not do what was asked; to programs on standard output, too.

    Args:
        verb: The verb.
        message: What was wrong.
        kind: The class of the error; programs are told its name.
        as_json: Whether a program asked.
    """
    print(f"dmesh {verb}: {message}", file=sys.stderr)  # noqa: T201
    if as_json:
        tell_json_line({"error": {"kind": kind.__name__, "message": message.removeprefix("error: ")}})


def printable(text: str) -> str:
    """Returns a text that can do nothing to a terminal: others have chosen its characters."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def tell_table(head: Sequence[str], rows: Sequence[Sequence[object]], bad: Sequence[bool] = ()) -> None:
    """Prints a table.

    Args:
        head: Names of the columns.
        rows: As many cells each.
        bad: For each row, whether it is to stand out; none if empty.
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
    """Shows something again and again, on a terminal in the same place; returns what the last time returned.

    Args:
        show: Shows it once; returns an exit code.
        interval: Seconds from one time to the next.
        times: How often; None until Ctrl-C.
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
    """Returns a console of rich; None in a pipe, where nobody wants colours, and without it."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()
