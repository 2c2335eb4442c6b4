"""Values with a part for each replica: arguments and results of `Strategy.run`.

A client holds the parts of its own replicas, in the order of their ids; the other clients hold theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dmesh.distribute.array_operators import ArrayOperators
from dmesh.errors import StrategyTypeError, StrategyValueError
from dmesh.structure import flatten, map_structure, outline, rebuild

__all__ = ["DistributedValues", "Mirrored", "PerReplica", "regroup", "select_replica"]


class DistributedValues:
    """A value for each replica of this client.

    Args:
        values: One for each of this client's replicas, in the order of their ids.

    Raises:
        StrategyValueError: There is none.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise StrategyValueError(f"a {type(self).__name__} needs a value for each replica, got none")

    def part(self, index: int) -> Any:
        """Return the part of a replica, by its position among this client's."""
        return self.values[index]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this client's replicas, in the order of their ids."""
        return self._values

    def __repr__(self) -> str:
        parts = ",\n".join(f"  {index}: {value!r}" for index, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{parts}\n}}"


class PerReplica(DistributedValues):
    """Values that differ from replica to replica, such as the parts of a batch."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        # Without this, NumPy would wrap the whole in an array of objects and go on.
        raise StrategyTypeError(
            f"this PerReplica has {len(self._values)} values, one for each replica, and is not an array: "
            "pass it to strategy.run, combine the values with strategy.reduce or strategy.gather, "
            "or get them with strategy.experimental_local_results"
        )


class Mirrored(ArrayOperators, DistributedValues):
    """Values that are the same on all replicas; they can be used as the array that they are."""

    def read_value(self) -> NDArray[Any]:
        """Return the value."""
        return np.asarray(self._values[0])


def select_replica(index: int, structure: Any) -> Any:
    """Return a nested structure for one replica, with its part of each distributed value.

    Args:
        index: Of the replica, among those of this client.
        structure: Lists, tuples and dicts with leaves that may be `DistributedValues`; others are the same
            for all replicas.
    """
    return map_structure(
        lambda leaf: leaf.part(index) if isinstance(leaf, DistributedValues) else leaf, structure
    )


def regroup(structures: Sequence[Any]) -> Any:
    """Return one nested structure of distributed values, made of the replicas' structures.

    The value of a single replica stays bare, and so do None and a distributed value that all replicas return.

    Args:
        structures: Result of each replica of this client, in the order of their ids.

    Raises:
        StrategyValueError: The structures differ.
    """
    first = structures[0]
    if len(structures) == 1:
        return first
    expected = outline(first)
    for index, other in enumerate(structures):
        if outline(other) != expected:
            raise StrategyValueError(
                f"the replicas returned different structures: replica 0 of this client {expected}, "
                f"replica {index} {outline(other)}. All replicas must return the same structure"
            )
    return rebuild(first, [_together(leaves) for leaves in zip(*map(flatten, structures), strict=True)])


def _together(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    # Only these: equal small numbers are the same object in Python, and whether a value can be reduced must
    # not depend on that.
    if (first is None or isinstance(first, DistributedValues)) and all(leaf is first for leaf in leaves):
        return first
    return PerReplica(leaves)
