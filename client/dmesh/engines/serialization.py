"""Functions and exceptions as bytes, for processes that this one has started or that an engine feeds.

Nothing here reads bytes from a network or a named file: engines carry their own, and a local rank inherits
its bytes from its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from types import CodeType, FunctionType
from typing import Any, Protocol

from dmesh.errors import ArgumentTypeError, MissingExtraError

_UNNAMED = "<dynamic-code>"
"""File of functions that cloudpickle has carried."""


class _Pickler(Protocol):
    def dumps(self, value: object, /) -> bytes: ...


def dumps(value: object, function: object) -> bytes:
    """Pickle a call: by cloudpickle, which also takes functions of a script or a notebook cell.

    Args:
        value: What to pickle.
        function: The function that is called, for the messages.

    Raises:
        MissingExtraError: It is a function of a script or a notebook, and cloudpickle is not installed.
        ArgumentTypeError: The function or one of its arguments cannot be pickled.
    """
    pickler = _pickler()
    name = getattr(function, "__qualname__", repr(function))
    if pickler is pickle and (getattr(function, "__module__", "") == "__main__" or "<" in name):
        raise MissingExtraError(
            f"{name} is a function of a script, a notebook or another function, which needs cloudpickle to "
            "get to other processes: pip install 'dmesh[launch]', or move it to a module that they can import"
        )
    try:
        return pickler.dumps(value)
    except Exception as error:
        raise ArgumentTypeError(
            f"{name}, or one of its arguments, cannot be sent to another process: {type(error).__name__}: "
            f"{error}. Make open files, locks and connections inside of the function"
        ) from error


def loads(data: bytes) -> Any:
    """Unpickle bytes of a parent or child process, which came by a descriptor that the child inherited."""
    return pickle.loads(data)  # noqa: S301 - only the two processes have that descriptor


def name_file(function: object, file: str) -> None:
    """Give a function the name of its file, for tracebacks: cloudpickle leaves it out.

    Args:
        function: The function, and with it those of its module that it calls.
        file: The file.
    """
    if not isinstance(function, FunctionType) or function.__code__.co_filename != _UNNAMED:
        return
    for one in (function, *function.__globals__.values()):
        if isinstance(one, FunctionType) and one.__code__.co_filename == _UNNAMED:
            one.__code__ = _in_file(one.__code__, file)


def _in_file(code: CodeType, file: str) -> CodeType:
    consts = (_in_file(inner, file) if isinstance(inner, CodeType) else inner for inner in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(consts))


def survives(error: BaseException) -> bool:
    """Return whether an exception is the same after being pickled and unpickled."""
    try:
        return type(loads(_pickler().dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 - an exception's own methods may do anything
        return False


def _pickler() -> _Pickler:
    for name in ("cloudpickle", *(["ray.cloudpickle"] if "ray" in sys.modules else ())):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return pickle
