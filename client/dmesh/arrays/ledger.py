"""Accounting of the bytes that operations move: counted at run time, or listed by `explain`.

Counted are the bytes that a client's devices read from other devices, of the same client or of others. An
all-reduce of n bytes among k clients counts as 2 n (k - 1) / k for each of them, a reduce-scatter as half of
that, and a reduction among a client's own devices as the bytes that it reads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from pathlib import Path

_ROOM = str(Path(__file__).parent)
_NUMPY = f"{Path('numpy')}/"


@dataclass(slots=True)
class Moved:
    """Bytes that this client's devices have received from other devices, by kind of transfer."""

    by_kind: Counter[str] = field(default_factory=Counter)
    """Bytes by kind: `exchange`, `fold`, `all_gather`, `all_reduce`, `reduce_scatter`, `counts`."""

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """A step of an operation, as `explain` lists it."""

    operation: str
    """Name of the operation."""
    what: str
    """Description: `local` or the transfer, and the layouts before and after it."""
    kind: str
    """Kind of the transfer; `local` if nothing moves."""
    bytes_by_client: dict[int, int]
    """Bytes that each client's devices receive from other devices."""
    largest: int
    """Bytes of the largest block on a device after the step."""


_moved: ContextVar[tuple[Moved, ...]] = ContextVar("dmesh_bytes_moved", default=())
_trace: ContextVar[list[Entry] | None] = ContextVar("dmesh_explain", default=None)
_operation: ContextVar[str] = ContextVar("dmesh_operation", default="")


@contextmanager
def bytes_moved() -> Iterator[Moved]:
    """Count the bytes that this client's devices receive from other devices within the `with` block.

    ```python
    with dmesh.debug.bytes_moved() as moved:
        total = float(x.sum())
    print(moved.total)
    ```

    Returns:
        The count, which is updated until the end of the block.
    """
    mine = Moved()
    token = _moved.set((*_moved.get(), mine))
    try:
        yield mine
    finally:
        _moved.reset(token)


@contextmanager
def tracing() -> Iterator[list[Entry]]:
    """List the steps of operations on arrays without elements."""
    entries: list[Entry] = []
    token = _trace.set(entries)
    try:
        yield entries
    finally:
        _trace.reset(token)


class operation:
    """Name the operation of the steps in a `with` block; an outer operation's name has priority.

    Args:
        name: The name.
    """

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name
        self._token: Token[str] | None = None

    def __enter__(self) -> None:
        """Set the name."""
        if not _operation.get():
            self._token = _operation.set(self._name)

    def __exit__(self, *_: object) -> None:
        """Reset it."""
        if self._token is not None:
            _operation.reset(self._token)


def current_operation(default: str) -> str:
    """Return the name of the current operation."""
    return _operation.get() or default


def count(kind: str, nbytes: int) -> None:
    """Add bytes to all active counts."""
    if nbytes:
        for one in _moved.get():
            one.by_kind[kind] += nbytes


def record(what: str, kind: str, bytes_by_client: dict[int, int], largest: int, default: str) -> None:
    """Add a step to the active list, if there is one."""
    entries = _trace.get()
    if entries is not None:
        entries.append(Entry(current_operation(default), what, kind, bytes_by_client, largest))


def is_tracing() -> bool:
    """Return whether steps are listed."""
    return _trace.get() is not None


def place() -> str:
    """Return the file and line of the program that called the current operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_ROOM)
        or f"/{_NUMPY}" in frame.f_code.co_filename.replace("\\", "/")
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
