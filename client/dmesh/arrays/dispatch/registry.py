"""Registry of the handlers of NumPy's functions for sharded arrays.

The modules of `ops` register handlers and `DTensor` looks them up, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

from dmesh.errors import UnshardableError

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)

FUNCTIONS: dict[Callable[..., Any], Handler] = {}
"""Handler of each supported NumPy function."""
_OBJECTS = "its arguments or results are Python objects, files or text"
REFUSED: dict[str, str] = {
    "array2string": "it would gather the array: repr(x) shows this client's blocks",
    "array_repr": "it would gather the array: repr(x) shows this client's blocks",
    "array_str": "it would gather the array: repr(x) shows this client's blocks",
    "save": "dmesh.checkpoint.save writes the blocks; np.save(path, x.full()) gathers the array",
    "savez": "dmesh.checkpoint.save writes the blocks; np.savez(path, x=x.full()) gathers the array",
    "savez_compressed": "dmesh.checkpoint.save writes the blocks; x.full() gathers the array",
    "savetxt": "it would gather the array: np.savetxt(path, x.full())",
    "nditer": _OBJECTS,
    "shares_memory": "blocks of sharded arrays share memory until one is written to, which programs "
    "never see",
    "may_share_memory": "blocks of sharded arrays share memory until one is written to, which programs "
    "never see",
    "vectorize": "it calls Python for each element: dmesh.from_function, or dmesh.shard_map",
    "apply_along_axis": "it calls Python for each row: dmesh.shard_map does so for the blocks",
    "apply_over_axes": "it calls Python for each dimension: call the function yourself",
    "piecewise": "it takes Python functions: np.where",
}
"""Why a NumPy function is refused, by name; `docs/coverage.md` lists them."""
NOTES: dict[Callable[..., Any], str] = {}
"""Implementation of each function in a few words, for `docs/coverage.md`."""
HOOKS: dict[str, Handler] = {}
"""Operations of `DTensor` other than NumPy's functions: `ufunc`, `getitem`, `relayout` and others."""


_CREATES = "like= is refused: dmesh.zeros and its relatives make sharded arrays, by layout="
REFUSED |= dict.fromkeys(
    (
        "arange", "array", "asanyarray", "asarray", "ascontiguousarray", "asfortranarray", "empty", "eye",
        "frombuffer", "fromfile", "fromfunction", "fromiter", "fromstring", "full", "genfromtxt", "identity",
        "linspace", "loadtxt", "ones", "require", "tri", "zeros",
    ),
    _CREATES,
)  # fmt: skip


@cache
def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name within `numpy`, such as `linalg.norm`."""
    module = function.__module__.removeprefix("numpy").lstrip(".").replace("lib.scimath", "emath")
    return f"{module}.{function.__name__}" if module else function.__name__


def refuse(func: Callable[..., Any]) -> NoReturn:
    """Raise `UnshardableError` for a function that has no handler, with the reason."""
    name = name_of(func)
    reason = REFUSED.get(name, "not implemented for sharded arrays")
    raise UnshardableError(
        f"np.{name} is refused on sharded arrays: {reason}. Use dmesh.shard_map to run it on the blocks, or "
        "x.full() for the whole array. docs/coverage.md lists the supported functions"
    )


def implements(*functions: Callable[..., Any] | None, note: str = "distributed") -> Callable[[F], F]:
    """Register a handler for functions of NumPy; None stands for one that this version of NumPy lacks."""

    def register(handler: F) -> F:
        for function in functions:
            if function is not None:
                FUNCTIONS[function] = handler
                NOTES[function] = note
        return handler

    return register


def hook(name: str) -> Callable[[F], F]:
    """Register an operation of `DTensor`."""

    def register(handler: F) -> F:
        HOOKS[name] = handler
        return handler

    return register
