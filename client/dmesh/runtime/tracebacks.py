"""Tracebacks of uncaught errors, without the frames of dmesh itself."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

FULL = "DMESH_TRACEBACK"
"""Name of the variable that, set to `full`, keeps the frames of dmesh."""
_OWN = f"{Path(__file__).resolve().parents[1]}{os.sep}"


def install() -> None:
    """Fold the tracebacks of uncaught errors from now on, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an uncaught error to standard error. The error itself keeps all its frames."""
    if _wants_all():
        sys.__excepthook__(kind, error, trace)
        return
    try:
        lines = folded(error)
    except Exception:  # noqa: BLE001 - an error whose own methods fail: the interpreter copes with that
        sys.__excepthook__(kind, error, trace)
        return
    print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201


def folded(error: BaseException) -> list[str]:
    """Return the lines of an error's traceback without the frames of dmesh and of the libraries below them.

    Errors that it was raised from are left out if they come from inside dmesh alone: its message says what
    there is to say of them. A traceback that would have no frame left keeps all.
    """
    described = traceback.TracebackException.from_exception(error, compact=True)
    _fold(described)
    return [line for part in described.format() for line in part.splitlines()]


def described(error: BaseException) -> list[str]:
    """Return the lines of an error's traceback, folded unless DMESH_TRACEBACK is `full`."""
    if _wants_all():
        return [line for part in traceback.format_exception(error) for line in part.splitlines()]
    return folded(error)


def _wants_all() -> bool:
    return os.environ.get(FULL, "").strip().lower() == "full"


def _fold(described: traceback.TracebackException) -> None:
    described.stack = _outside(described.stack)
    for name in ("__cause__", "__context__"):
        origin = getattr(described, name)
        if origin is None:
            continue
        if all(_is_inside(frame) for frame in origin.stack):
            setattr(described, name, None)
        else:
            _fold(origin)
    for one in described.exceptions or ():
        _fold(one)


@cache
def _libraries() -> tuple[str, ...]:
    """Return the directories of Python's library and of the installed packages."""
    import sysconfig  # slow, and most programs end without an error

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in names)


def _outside(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of the user's program, also of functions of it that dmesh has called."""
    kept: list[traceback.FrameSummary] = []
    within = False
    for frame in stack:
        if frame.filename.startswith(_OWN):
            if kept and not within:  # the marks under a call of dmesh would mark all of it
                kept[-1] = _without_marks(kept[-1])
            within = True
        elif not within or not frame.filename.startswith(_libraries()):
            within = False
            kept.append(frame)
    return traceback.StackSummary.from_list(kept) if kept else stack


def _without_marks(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    return traceback.FrameSummary(
        frame.filename, frame.lineno, frame.name, lookup_line=False, line=frame.line
    )


def _is_inside(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((_OWN, *_libraries(), "<frozen"))
