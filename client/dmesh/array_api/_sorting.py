"""Sorting functions of the array API: NumPy's, with descending order."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.arrays.dtensor import DTensor

_sort: Any = np.sort  # NumPy's functions, which return sharded arrays for such
_argsort: Any = np.argsort
_flip: Any = np.flip


def sort(x: DTensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> DTensor:
    """Return an array sorted along a dimension.

    Args:
        x: The array.
        axis: The dimension.
        descending: Whether the largest element comes first.
        stable: Whether equal elements keep their order.
    """
    found: DTensor = _sort(x, axis=axis, kind="stable" if stable else None)
    if descending:
        found = _flip(found, axis=axis)
    return found


def argsort(x: DTensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> DTensor:
    """Return the indices that sort an array along a dimension; see `sort`."""
    kind = "stable" if stable else None
    if not descending:
        return _argsort(x, axis=axis, kind=kind)  # type: ignore[no-any-return]
    # Sorting the flipped array and flipping the result keeps the order of equal elements.
    found = _flip(_argsort(_flip(x, axis=axis), axis=axis, kind=kind), axis=axis)
    return x.shape[axis] - 1 - found  # type: ignore[no-any-return]
