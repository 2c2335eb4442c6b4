"""Output of `dmesh tune` during and after its measurement: for people, for programs, and for its launcher.

A process of its own measures. It sends progress and results as lines of JSON to the process that the user has
started, which shows them in the form that the user asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dmesh.cli.output import print_json
from dmesh.cli.progress import Bar
from dmesh.collectives.measurement import Step, Table
from dmesh.launcher.labels import Output

_MARK = "dmesh-tune: "
"""Prefix of lines for the launcher: others, of a library, may be JSON, too."""


class Presenter:
    """Shows progress and results of the measurement.

    Args:
        bar: Where progress is shown.
        as_json: Whether one JSON object is printed at the end, and nothing before.
    """

    def __init__(self, bar: Bar, *, as_json: bool) -> None:
        self._bar = bar
        self._as_json = as_json
        self._tables: list[Mapping[str, Any]] = []
        self._finished = False

    @property
    def finished(self) -> bool:
        """True once it has shown the result."""
        return self._finished

    def show(self, what: str | Table | Step) -> None:
        """Show what `measure` reports."""
        if isinstance(what, Step):
            self._bar.show(what.title, what.done, what.total)
        elif isinstance(what, Table):
            self._tables.append(
                {"title": what.title, "ways": list(what.ways), "bytes": list(what.seconds),
                 "seconds": [list(row) for row in what.seconds.values()]}
            )  # fmt: skip
            self._print("\n".join(what.lines()))
        else:
            self._print(what)

    def finish(self, result: Mapping[str, Any], text: str) -> None:
        """Show the result.

        Args:
            result: For programs.
            text: For people.
        """
        self._finished = True
        self._print(text)
        if self._as_json:
            self._bar.clear()
            print_json({**result, "measured": self._tables})

    def _print(self, text: str) -> None:
        if not self._as_json:
            self._bar.clear()
            print(text, flush=True)  # noqa: T201


class Sender:
    """Sends everything to the launcher, which shows it."""

    def show(self, what: str | Table | Step) -> None:
        """See `Presenter.show`."""
        kind = {Step: "step", Table: "table"}.get(type(what), "line")
        self._send({kind: what if isinstance(what, str) else asdict(what)})

    def finish(self, result: Mapping[str, Any], text: str) -> None:
        """See `Presenter.finish`."""
        self._send({"finish": [result, text]})

    def _send(self, message: Mapping[str, Any]) -> None:
        print(_MARK + json.dumps(message), flush=True)  # noqa: T201


class Receiver(Output):
    """Standard output of the clients, as the launcher hears it.

    Args:
        presenter: Shows what is meant for it.
        other: Where other lines go, such as those of a library.
    """

    def __init__(self, presenter: Presenter, other: Output) -> None:
        super().__init__(1, {})
        self._presenter = presenter
        self._other = other

    def write(self, data: bytes) -> None:
        """Takes whole lines."""
        for line in data.splitlines(keepends=True):
            if line.startswith(_MARK.encode()):
                [(kind, value)] = json.loads(line[len(_MARK) :]).items()
                self._hear(kind, value)
            else:
                self._other.write(line)

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "finish":
            self._presenter.finish(*value)
        elif kind == "step":
            self._presenter.show(Step(**value))
        elif kind == "table":  # JSON has texts for keys
            seconds = {int(nbytes): tuple(row) for nbytes, row in value["seconds"].items()}
            self._presenter.show(Table(value["title"], tuple(value["ways"]), seconds))
        else:
            self._presenter.show(value)
