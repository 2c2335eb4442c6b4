"""Counts of values: `bincount` and histograms, as partial sums."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from dmesh.arrays.creation import scattered
from dmesh.arrays.dispatch.operands import check_operand, grid_among
from dmesh.arrays.dispatch.reduction import reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
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
    if a.dtype == np.bool_:
        a = astype(a, np.dtype(np.uint8))
    flat = mappings.reshape(a, (a.size,)) if a.ndim != 1 else a
    edges, range = _edges(flat, bins, range)
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


def _edges(a: DTensor, bins: Any, range: Any) -> tuple[Any, Any]:
    """Return the edges of bins, as a plain array, and the range that they divide."""
    if range is None and np.ndim(bins) == 0 and a.size:
        range = _extremes(a)
    return np.histogram_bin_edges(np.empty(0, a.dtype), bins, range), range


@implements(np.histogram_bin_edges)
def histogram_bin_edges(a: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> Any:
    """Return the edges of a histogram's bins, as a plain array."""
    if weights is not None or isinstance(bins, (str, DTensor)):
        raise UnshardableError(
            "np.histogram_bin_edges takes no weights=, and bins as a number or a plain array"
        )
    return _edges(a, bins, range)[0]


@implements(np.histogramdd)
def histogramdd(
    sample: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> Any:
    """Return how many points lie in each bin of a grid, as a partial sum, and the edges as plain arrays."""
    if isinstance(sample, DTensor):
        points = sample if sample.ndim > 1 else mappings.reshape(sample, (sample.size, 1))
        columns = [points[:, at] for at in np.arange(points.shape[1])]
    else:
        columns = list(sample)
    return _histogram_of("np.histogramdd", columns, bins, range, density, weights)


@implements(np.histogram2d)
def histogram2d(
    x: Any, y: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> Any:
    """Return how many points lie in each bin of a plane, as a partial sum, and the edges as plain arrays."""
    if isinstance(bins, (list, tuple, np.ndarray)) and len(bins) not in (1, 2):
        bins = [bins, bins]
    counts, edges = _histogram_of("np.histogram2d", [x, y], bins, range, density, weights)
    return counts, *edges


def _histogram_of(
    name: str, columns: list[Any], bins: Any, range: Any, density: Any, weights: Any
) -> tuple[Any, list[Any]]:
    if weights is not None or density or not all(isinstance(x, DTensor) and x.ndim == 1 for x in columns):
        raise UnshardableError(
            f"{name} of sharded arrays takes sharded coordinates, no weights= and no density="
        )
    grid_among(columns, name)
    if any(len(x) != len(columns[0]) for x in columns):
        raise ValueError("x and y must have the same length.")
    each = list(bins) if isinstance(bins, (list, tuple, np.ndarray)) else [bins] * len(columns)
    ranges = [None] * len(columns) if range is None else list(range)
    ends = [_ends(*one) for one in zip_longest(columns, each[: len(columns)], ranges[: len(columns)])]
    edges = list(np.histogramdd(ends, bins, range)[1])  # NumPy itself checks bins and ranges
    spec = columns[0].spec.complete()
    over = [axis for axis in spec.axes if axis != WHOLE]
    target = spec_of(
        spec.grid, tuple(len(e) - 1 for e in edges), np.dtype(float), None, over, "sum" if over else ""
    )
    # Bins of equal widths are given by their number, as NumPy finds their elements in another way.
    given: list[Any] = [len(e) - 1 if np.ndim(b) == 0 else e for b, e in zip(each, edges, strict=True)]
    bounds = [(e[0], e[-1]) for e in edges]

    def kernel(*blocks: Any) -> Any:
        return np.histogramdd(blocks, given, bounds)[0]

    placed = [spec.replace(dtype=x.dtype) for x in columns]
    (counts,) = run_local(name.removeprefix("np."), kernel, columns, placed, (target,))
    return counts, edges


def _ends(x: DTensor, bins: Any, range: Any) -> Any:
    """Return two elements that make NumPy choose the same bins as all of them."""
    if not x.size:
        return np.empty(0, x.dtype)
    if range is not None or np.ndim(bins):
        return np.zeros(2, x.dtype)
    return np.array(_extremes(x), x.dtype)


def _extremes(x: DTensor) -> tuple[Any, Any]:
    """Return the smallest and the largest element."""
    return reduce(np.minimum, x, None).item(), reduce(np.maximum, x, None).item()


def _widths(like: DTensor, edges: Any) -> DTensor:
    widths = np.diff(edges)
    return scattered(widths, spec_of(like.spec.grid, widths.shape, widths.dtype))
