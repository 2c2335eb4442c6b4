"""Serialization of functions, arguments, results and errors, without pickle.

Functions go by name, `MODULE:QUALNAME`, and a worker only runs those of its own program (`__main__`) and of
the modules that it names. Arguments and results are the plain values of `dmesh.collectives.send_object`.
With `serializer=`, the program's own code encodes functions, arguments and results.
"""

from __future__ import annotations

import builtins
import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from dmesh import errors
from dmesh.collectives.object_encoding import decode, encode
from dmesh.collectives.objects import Codec, Serializer
from dmesh.errors import (
    DMeshError,
    OutOfRangeError,
    RemoteFunctionError,
    StrategyTypeError,
    StrategyValueError,
)

__all__ = ["Encoding", "decode_error", "encode_error", "name_of"]

_LONGEST_MESSAGE = 10_000
_LONGEST_TRACEBACK = 50_000


class Encoding:
    """Encoding of functions and values as bytes, on either side.

    Args:
        serializer: The program's own; None for names and plain values.
        modules: Of a worker: names of modules and packages whose functions it runs, beside `__main__`.
    """

    def __init__(self, serializer: Serializer | None = None, modules: Iterable[str] = ()) -> None:
        self._codec = None if serializer is None else Codec("dmesh.distribute.coordinator", serializer)
        self._modules = (modules,) if isinstance(modules, str) else tuple(modules)

    def encode_call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return a function and its arguments as bytes.

        Raises:
            StrategyTypeError: The function cannot be found by a name.
            CollectiveTypeError: An argument is no plain value.
        """
        if self._codec is not None:
            return self._codec.encode((fn, tuple(args), dict(kwargs)))
        return encode([name_of(fn), tuple(args), dict(kwargs)])

    def decode_call(self, data: bytes) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """Return a function and its arguments.

        Raises:
            StrategyValueError: There is no such function, or this worker does not run it.
        """
        if self._codec is not None:
            fn, args, kwargs = self._codec.decode(data)
        else:
            name, args, kwargs = decode(data)
            fn = self._find(str(name))
        return fn, list(args), dict(kwargs)

    def encode_value(self, value: Any) -> bytes:
        """Return a result as bytes."""
        return encode(value) if self._codec is None else self._codec.encode(value)

    def decode_value(self, data: bytes) -> Any:
        """Return a result."""
        return decode(data) if self._codec is None else self._codec.decode(data)

    def _find(self, name: str) -> Callable[..., Any]:
        module, _, qualname = name.partition(":")
        if module != "__main__" and not any(
            module == allowed or module.startswith(f"{allowed}.") for allowed in self._modules
        ):
            raise StrategyValueError(
                f"this worker does not run functions of the module {module!r:.200}; start it with "
                f"run_worker(modules=[{module.partition('.')[0]!r:.200}]) if it should"
            )
        try:
            found = reduce(getattr, qualname.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise StrategyValueError(f"this worker has no function {name:.200}: {error}") from error
        # An allowed module's imports are not its own: `main:os.system` is no function of main.
        if not callable(found) or _name(found) != name:
            raise StrategyValueError(f"{name:.200} is no function of that module on this worker")
        return found


def _name(fn: object) -> str:
    return f"{getattr(fn, '__module__', '')}:{getattr(fn, '__qualname__', '')}"


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name by which a worker finds a function.

    Raises:
        StrategyTypeError: It has none.
    """
    name = _name(fn)
    module, _, qualname = name.partition(":")
    if callable(fn) and module and qualname and "<" not in qualname:
        try:
            found: Any = reduce(getattr, qualname.split("."), importlib.import_module(module))
            if found is fn:
                return name
        except (ImportError, AttributeError):
            pass  # the error says so
    raise StrategyTypeError(
        f"{fn!r:.200} cannot be sent to a worker by name: it must be a function that is defined at the top "
        "level of a module. Define it there, or give the coordinator and the workers a serializer="
    )


def encode_error(error: BaseException) -> dict[str, str]:
    """Return the description of an error."""
    kind = type(error)
    lines = "".join(traceback.format_exception(error))
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error)[:_LONGEST_MESSAGE],
        "traceback": lines[-_LONGEST_TRACEBACK:],
    }


def decode_error(what: str, client: int, described: Mapping[str, Any]) -> RemoteFunctionError:
    """Return a worker's error, which derives from the same built-in class."""
    kind, message, lines = (str(described.get(key, "")) for key in ("kind", "message", "traceback"))
    short = kind.removeprefix("builtins.").removeprefix("dmesh.errors.")
    text = f"{what} failed on client {client}: {short}: {message}"
    error = _class_of(kind)(text, client, kind, lines)
    error.add_note(f"on client {client}:\n{lines.rstrip()}")
    return error


def _class_of(kind: str) -> type[RemoteFunctionError]:
    """Return the class of an error, derived from the error's class on the worker if possible."""
    module, _, name = kind.rpartition(".")
    base: Any = OutOfRangeError if kind == "builtins.StopIteration" else None
    if base is None and module in ("builtins", "dmesh.errors"):
        base = getattr(builtins if module == "builtins" else errors, name, None)
    if not isinstance(base, type) or not issubclass(base, Exception) or base in (Exception, DMeshError):
        return RemoteFunctionError
    if issubclass(RemoteFunctionError, base):
        return RemoteFunctionError
    try:
        made = type("RemoteFunctionError", (RemoteFunctionError, base), {"__module__": "dmesh.errors"})
        made("", 0, "", "")  # some need arguments of their own
    except TypeError:
        return RemoteFunctionError
    return made
