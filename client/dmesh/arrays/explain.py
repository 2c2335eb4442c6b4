"""`explain`: the steps of a function of sharded arrays, found without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ledger import Entry, tracing
from dmesh.structure import map_structure


@dataclass(frozen=True, slots=True)
class Explanation:
    """Steps of a function, and the bytes that they move."""

    steps: tuple[Entry, ...]
    """The steps, in order."""
    result: Any
    """Result of the function; its arrays have a placement, but no elements."""

    @property
    def bytes_by_client(self) -> dict[int, int]:
        """Bytes that each client's devices receive from other devices."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.bytes_by_client)
        return {client: total[client] for client in sorted(total)}

    @property
    def bytes(self) -> int:
        """Total bytes that devices receive from other devices."""
        return sum(self.bytes_by_client.values())

    @property
    def peak(self) -> int:
        """Bytes of the largest block that a device holds at any step."""
        return max((step.largest for step in self.steps), default=0)

    def __str__(self) -> str:
        lines = [f"{len(self.steps)} steps, {self.bytes:,} bytes between devices, {self.peak:,} in a block"]
        for step in self.steps:
            moved = sum(step.bytes_by_client.values())
            lines.append(f"  {step.operation}: {step.what}" + (f", {moved:,} bytes" if moved else ""))
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return the steps of a function of sharded arrays: layouts, collectives and bytes.

    Nothing is computed, sent or allocated, and one client may call it alone. Steps that depend on the
    elements, such as indexing with a mask, cannot be explained.

    ```python
    print(dmesh.explain(lambda a, b: (a @ b).sum(), x, y))
    ```

    Args:
        fn: Function that uses NumPy's functions and operators.
        *args: Its positional arguments; sharded arrays may be in lists, tuples and dicts.
        **kwargs: Its keyword arguments.

    Returns:
        The steps; `str()` formats them as a table.

    Raises:
        ArrayError: As the function itself would.
        UnshardableError: A step depends on the elements.
    """

    def emptied(value: Any) -> Any:
        return DTensor(value.spec, None) if isinstance(value, DTensor) else value

    with tracing() as steps:
        result = fn(*map_structure(emptied, args), **map_structure(emptied, kwargs))
    return Explanation(tuple(steps), result)
