"""Registry of the operations that sharded arrays have, by NumPy's function.

`DTensor` looks operations up here, and the modules of `ops` enter theirs, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)

FUNCTIONS: dict[Callable[..., Any], Handler] = {}
"""Handler of each of NumPy's functions that take sharded arrays."""
REFUSED: dict[str, str] = {}
"""Why a function of NumPy's is refused, by its name; `docs/coverage.md` lists them."""
NOTES: dict[Callable[..., Any], str] = {}
"""How a function is carried out, for `docs/coverage.md`."""
HOOKS: dict[str, Handler] = {}
"""Operations of `DTensor` that are not NumPy's: `ufunc`, `getitem`, `setitem`, `relayout` and others."""


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
