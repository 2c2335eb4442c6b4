"""`explain`: the steps of a function of sharded arrays, found by its rules alone, without data."""

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
    """Steps of a function, and what they move."""

    steps: tuple[Entry, ...]
    """The steps, in their order."""
    result: Any
    """The result, with arrays that have a placement and no elements."""

    @property
    def bytes_by_client(self) -> dict[int, int]:
        """Bytes that each client's devices get from other devices."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.bytes_by_client)
        return {client: total[client] for client in sorted(total)}

    @property
    def bytes(self) -> int:
        """Bytes that all devices get from other devices."""
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
    """Return the steps that a function would take on sharded arrays: layouts, collectives and bytes.

    Only rules run: nothing is computed, sent or allocated, and one client alone may ask. What depends on the
    elements, such as a mask, cannot be explained.

    ```python
    print(dmesh.explain(lambda a, b: (a @ b).sum(), x, y))
    ```

    Args:
        fn: Uses NumPy's functions and operators on its arguments.
        *args: Its arguments; sharded arrays may be in lists, tuples and dicts.
        **kwargs: Likewise.

    Returns:
        The steps; `str()` of it is a table.

    Raises:
        ArrayError: As the function itself would.
        UnshardableError: A step depends on the elements.
    """

    def emptied(value: Any) -> Any:
        return DTensor(value.spec, None) if isinstance(value, DTensor) else value

    with tracing() as steps:
        result = fn(*map_structure(emptied, args), **map_structure(emptied, kwargs))
    return Explanation(tuple(steps), result)
