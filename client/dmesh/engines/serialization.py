"""Pickled functions, results and exceptions, between this process and the ranks that it started.

Nothing here unpickles bytes from a network or a named file: Dask and Ray pickle on their own, and a local
rank inherits a file descriptor from its parent.
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
"""File name that cloudpickle gives to functions."""


class _Pickler(Protocol):
    def dumps(self, value: object, /) -> bytes: ...


def dumps(value: object, function: object) -> bytes:
    """Pickle a call, with cloudpickle if it is installed, for functions of a script or a notebook cell.

    Args:
        value: The object to pickle.
        function: The called function, for the messages.

    Raises:
        MissingExtraError: It is a function of a script or a notebook, and cloudpickle is not installed.
        ArgumentTypeError: The function or one of its arguments cannot be pickled.
    """
    pickler = _pickler()
    name = getattr(function, "__qualname__", repr(function))
    if pickler is pickle and (getattr(function, "__module__", "") == "__main__" or "<" in name):
        raise MissingExtraError(
            f"{name} is defined in a script, a notebook or another function, so only cloudpickle can send it "
            "to other processes: pip install 'dmesh[launch]', or move it to a module that they can import"
        )
    try:
        return pickler.dumps(value)
    except Exception as error:
        raise ArgumentTypeError(
            f"{name}, or one of its arguments, cannot be sent to another process: {type(error).__name__}: "
            f"{error}. Create open files, locks and connections inside the function"
        ) from error


def loads(data: bytes) -> Any:
    """Unpickle bytes of the parent or child process, read from an inherited file descriptor."""
    return pickle.loads(data)  # noqa: S301 - only the two processes have the descriptor


def name_file(function: object, file: str) -> None:
    """Set a function's file name, which cloudpickle drops, for tracebacks.

    Args:
        function: The function. The functions among its globals are changed with it.
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
    """Return whether an exception keeps its type when it is pickled and unpickled."""
    try:
        return type(loads(_pickler().dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 - an exception's own methods may do anything
        return False


def _pickler() -> _Pickler:
    for name in ("cloudpickle", *(["ray.cloudpickle"] if "ray" in sys.modules else ())):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return pickle
