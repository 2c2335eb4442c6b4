"""Progress of a long command: a bar on a terminal, with rich; nothing elsewhere.

It is drawn on standard error, and gone when the work is done: what the verb prints is the same with it.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any


class Bar:
    """A bar; nothing at all where standard error is no terminal, or without rich. A context."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return self
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return self
        from rich.markup import escape

        self._escape = escape
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def show(self, what: str, done: float, total: float | None) -> None:
        """Shows how far it is.

        Args:
            what: What is being done.
            done: How much of it is.
            total: How much there is to do; None if unknown.
        """
        if self._progress is None:
            return
        from dmesh.cli.output import printable

        text = self._escape(printable(what))
        if self._task is None:
            self._task = self._progress.add_task(text, total=total, completed=done)
            self._progress.start()
        else:
            self._progress.update(self._task, description=text, total=total, completed=done)

    def clear(self) -> None:
        """Takes it away: something is about to be printed, or all is done. It may be shown again."""
        if self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None
