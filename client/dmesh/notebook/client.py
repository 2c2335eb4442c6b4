"""Program of a notebook's client, started as `python -m dmesh.notebook.client DESCRIPTOR`: runs cells.

DESCRIPTOR is its end of a socket pair, inherited from the notebook's process. When the other end is closed,
the client exits like a script after its last line.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from dmesh.errors import CollectiveError
from dmesh.notebook.messages import Channel
from dmesh.runtime import tracebacks

_LONGEST_REPR = 100_000
_MOST_LINES = 200
"""Maximum number of lines of a traceback that are sent."""


class CellRunner:
    """Runs cells one after the other in the namespace of the module `__main__`.

    Args:
        begin: Called when a cell begins; later interrupts are for this cell.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module  # functions and classes of cells get this `__module__`
        self._namespace = vars(module)
        self._running = False
        self._missed = False
        """True if an interrupt arrived after `begin` was called and before the cell ran."""
        signal.signal(signal.SIGINT, self._on_interrupt)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request; return the reply."""
        if request["kind"] == "run":
            return self._run(request["source"], request["name"], draws=request["draws"])
        if request["kind"] == "push":
            self._namespace.update(request["values"])
            return {}
        name = request["name"]
        if name not in self._namespace:
            return {"missing": True}
        return {"value": self._namespace[name]}

    def _run(self, source: str, name: str, *, draws: bool) -> dict[str, Any]:
        self._missed = False  # an earlier interrupt was for the previous cell
        self._begin()
        try:
            try:
                self._running = True
                if self._missed:
                    raise KeyboardInterrupt
                return self._execute(source, name, draws=draws)
            finally:
                self._running = False
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt end only the cell
            self._running = False
            return {"error": _described(error, name)}
        finally:
            for stream in (sys.stdout, sys.stderr):
                # A cell may have closed or replaced the stream.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

    def _execute(self, source: str, name: str, *, draws: bool) -> dict[str, Any]:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        last: ast.Expression | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
            last = ast.Expression(tree.body[-1].value)
            del tree.body[-1]
        exec(compile(tree, name, "exec", dont_inherit=True), self._namespace)  # noqa: S102 - the notebook's code
        if last is None:
            return {}
        value = eval(compile(last, name, "eval", dont_inherit=True), self._namespace)  # noqa: S307 - likewise
        if value is None:
            return {}
        self._namespace["_"] = value
        draw = getattr(value, "_repr_html_", None) if draws else None
        html = draw() if callable(draw) else None
        return {
            "text": _shortened(repr(value)),
            "html": html if isinstance(html, str) and len(html) <= _LONGEST_REPR else None,
        }

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._running:
            raise KeyboardInterrupt
        self._missed = True


def main(argv: list[str]) -> None:
    """Run cells until the notebook closes its end."""
    descriptor = int(argv[1])
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    runner = CellRunner(lambda: channel.send({"begun": True}))
    channel.send({})  # ready
    while (request := channel.receive()) is not None:
        reply = runner.answer(request)
        try:
            channel.send(reply)
        except CollectiveError as error:  # a value cannot be sent
            channel.send({"refused": str(error)})


def _described(error: BaseException, name: str) -> dict[str, Any]:
    # In a client, `sys.exit` raises a subclass of SystemExit.
    kind = SystemExit if isinstance(error, SystemExit) else type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    message = str(error).partition("\n")[0]
    lines = tracebacks.described(error)
    if len(lines) > _MOST_LINES:  # keep the beginning, and the end with the message
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
    exception = f"{module}{kind.__qualname__}: {message}" if message else f"{module}{kind.__qualname__}"
    if kind is SystemExit:
        lines[-1] = exception
    return {
        "lines": lines,
        "exception": exception,
        "interrupted": isinstance(error, KeyboardInterrupt),
        "line": _line_in(error, name),
    }


def _line_in(error: BaseException, name: str) -> int | None:
    """Return the line of the cell that raised an error; None if none did."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}..."


if __name__ == "__main__":
    main(sys.argv)
