"""`bincount` and `histogram`, as partial sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.arrays.creation import scattered
from dmesh.arrays.dispatch.operands import check_operand
from dmesh.arrays.dispatch.reduction import reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import elementwise, run_local
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.errors import UnshardableError


@implements(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Any:
    """Return the number of occurrences of each integer, as a partial sum."""
    if x.ndim != 1:
        raise ValueError("object too deep for desired array")
    if x.dtype.kind not in "iub":
        raise TypeError(
            f"Cannot cast array data from {x.dtype!r} to dtype('int64') according to the rule 'safe'"
        )
    highest = int(reduce(np.maximum, x, None).item()) if x.size else -1
    if x.size and int(reduce(np.minimum, x, None).item()) < 0:
        raise ValueError("'list' argument must have no negative elements")
    n = max(highest + 1, minlength)
    spec = x.spec.complete()
    over = [axis for axis in spec.axes if axis != WHOLE]
    operands: list[Any] = [x]
    placed: list[Any] = [spec]
    if weights is not None:
        check_operand(weights, "np.bincount")
        operands.append(weights)
        placed.append(weights.spec.complete().replace(axes=spec.axes))
    dtype = np.dtype(np.intp if weights is None else np.float64)
    target = spec_of(spec.grid, (n,), dtype, None, over, "sum" if over else "")
    (result,) = run_local("bincount", lambda b, w=None: np.bincount(b, w, n), operands, placed, (target,))
    return result


@implements(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Return the number of elements in each bin, as a partial sum, and the bin edges as a plain array."""
    if weights is not None or isinstance(bins, (str, DTensor)):
        raise UnshardableError(
            "np.histogram of sharded arrays takes bins= as a number or a plain array, and no weights="
        )
    flat = mappings.reshape(a, (a.size,)) if a.ndim != 1 else a
    if range is None and np.ndim(bins) == 0 and a.size:
        range = (reduce(np.minimum, flat, None).item(), reduce(np.maximum, flat, None).item())
    edges = np.histogram_bin_edges(np.empty(0, a.dtype), bins, range)
    spec = flat.spec.complete()
    over = [axis for axis in spec.axes if axis != WHOLE]
    target = spec_of(spec.grid, (len(edges) - 1,), np.dtype(np.intp), None, over, "sum" if over else "")

    def kernel(block: Any) -> Any:
        return np.histogram(block, bins, range)[0] if np.ndim(bins) == 0 else np.histogram(block, bins)[0]

    (counts,) = run_local("histogram", kernel, [flat], [spec], (target,))
    if density:
        return elementwise(np.true_divide, (counts, reduce(np.add, counts, None)), {}) / _widths(
            counts, edges
        ), edges
    return counts, edges


def _widths(like: DTensor, edges: Any) -> DTensor:
    widths = np.diff(edges)
    return scattered(widths, spec_of(like.spec.grid, widths.shape, widths.dtype))
