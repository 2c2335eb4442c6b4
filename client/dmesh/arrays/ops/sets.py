"""Set operations by a sample sort: distinct elements, unions, differences, membership; `searchsorted`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays.creation import scattered
from dmesh.arrays.dispatch.operands import blocks_for, check_operand, grid_among
from dmesh.arrays.dispatch.reduction import accumulate, normalized_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.indexing import compress, read_whole
from dmesh.arrays.ops.joining import concatenate
from dmesh.arrays.ops.mappings import Pick, moved_dims, pick, reshape
from dmesh.arrays.ops.selection import flatnonzero, local_elementwise, where_
from dmesh.arrays.ops.sorting import positions, sort_together
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.errors import UnshardableError

# Distinct elements ------------------------------------------------------------------------------------------


def first_of_runs(x: DTensor, equal_nan: bool) -> DTensor:
    """Return where an element of a sorted one-dimensional array differs from the preceding one."""
    spec = x.spec
    target = spec.replace(dtype=np.bool_)
    ends = [stop - 1 for start, stop in spec.cuts(0) if stop > start]
    before = pick(x, [Pick(len(ends), np.array(ends, np.intp))], [WHOLE])
    if x._shards is None:
        return DTensor(target, None)

    def first(region: Any, block: Any, last: Any) -> Any:
        mask = np.ones(len(block), bool)
        mask[1:] = _differ(block[1:], block[:-1], equal_nan)
        if len(block) and region[0][0]:
            at = ends.index(region[0][0] - 1)
            mask[:1] = _differ(block[:1], last[at : at + 1], equal_nan)
        return mask

    rows = list(zip(spec.regions, x.blocks, blocks_for(spec, before), strict=True))
    return DTensor(target, tuple(each(first, rows, spec.grid, spec.largest)))


def _differ(a: Any, b: Any, equal_nan: bool) -> Any:
    found = a != b
    if equal_nan and a.dtype.kind in "fcmM":
        found = found & ~((a != a) & (b != b))
    return found


def _ravel(x: DTensor) -> DTensor:
    return reshape(x, (x.size,))


def _distinct(
    x: DTensor, equal_nan: bool = True, index: bool = False, inverse: bool = False, counts: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Return the distinct elements, their first indices, the inverse indices, and their counts."""
    flat = _ravel(x)
    keys, *order = sort_together("np.unique", flat, *([positions(flat.spec)] if index or inverse else []))
    first = first_of_runs(keys, equal_nan)
    where = which = number = None
    if index:
        where = compress(order[0], first)
    if inverse:
        run = elementwise(np.subtract, (accumulate(np.add, first, 0, np.intp), 1), {})
        which = reshape(sort_together("np.unique", order[0], run)[1], x.shape)
    if counts:
        starts = flatnonzero(first)
        end = scattered(np.array([flat.size], np.intp), spec_of(flat.spec.grid, (1,), np.dtype(np.intp)))
        number = concatenate([starts[1:], end[: starts.size]]) - starts
    return compress(keys, first), where, which, number


def _as_rows(x: DTensor) -> DTensor:
    """Return the rows of a matrix as structured elements, which compare lexicographically."""
    table = reshape(x, (x.shape[0], math.prod(x.shape[1:])))
    spec = table.spec.complete()
    axis = next((axis for axis in spec.axes if axis != WHOLE), WHOLE)
    whole = spec.replace(axes=(axis, WHOLE))
    fields = np.dtype([(f"f{at}", x.dtype) for at in range(table.shape[1])])
    target = spec_of(spec.grid, table.shape[:1], fields, (axis,))
    if not fields.itemsize:
        raise ValueError(f"np.unique: rows of shape {x.shape[1:]} have no elements to compare")

    def joined(block: Any) -> Any:
        return np.ascontiguousarray(block).view(fields).reshape(len(block))

    return run_local("unique", joined, [table], [whole], (target,))[0]


def _as_columns(rows: DTensor, dtype: np.dtype[Any]) -> DTensor:
    spec = rows.spec
    target = spec_of(spec.grid, (rows.size, len(spec.dtype.names or ())), dtype, (spec.axes[0], WHOLE))
    shape = (-1, len(spec.dtype.names or ()))
    return run_local(
        "unique", lambda b: np.ascontiguousarray(b).view(dtype).reshape(shape), [rows], [spec], (target,)
    )[0]


@implements(np.unique)
def unique(
    ar: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: Any = None, *, equal_nan: bool = True, sorted: bool = True,
) -> Any:  # fmt: skip
    """Return the distinct elements, or slices along an axis, in ascending order, sharded."""
    del sorted
    asked = (return_index, return_inverse, return_counts)
    if axis is None or ar.ndim == 1:
        found = _distinct(ar, equal_nan, *asked)
    else:
        (dim,) = normalized_axes(axis, ar.ndim)
        front = moved_dims(ar, [dim, *(d for d in range(ar.ndim) if d != dim)])
        rows, *rest = _distinct(_as_rows(front), equal_nan, *asked)
        lines = reshape(_as_columns(rows, ar.dtype), (rows.size, *front.shape[1:]))
        found = (moved_dims(lines, [*range(1, dim + 1), 0, *range(dim + 1, ar.ndim)]), *rest)
    results = tuple(one for one, wanted in zip(found, (True, *asked), strict=True) if wanted)
    return results if len(results) > 1 else results[0]


@implements(np.unique_values)
def unique_values(x: Any) -> DTensor:
    """Return the distinct elements, in ascending order."""
    return unique(x, equal_nan=False)  # type: ignore[no-any-return]


def _named(function: Callable[..., Any], *wanted: int) -> Callable[[Any], Any]:
    """Return the handler of a function whose result is a named tuple of results of `_distinct`."""
    kind = type(function(np.empty(0)))

    def handler(x: Any) -> Any:
        found = _distinct(x, False, *(number in wanted for number in (1, 2, 3)))
        return kind(*(found[number] for number in wanted))

    return handler


implements(np.unique_all)(_named(np.unique_all, 0, 1, 2, 3))
implements(np.unique_counts)(_named(np.unique_counts, 0, 3))
implements(np.unique_inverse)(_named(np.unique_inverse, 0, 2))


# Two arrays -------------------------------------------------------------------------------------------------


def _both(name: str, a: Any, b: Any) -> None:
    for x in (a, b):
        check_operand(x, name)
        if not isinstance(x, DTensor):
            raise UnshardableError(f"{name} takes two sharded arrays: dmesh.full makes one of a number")
    grid_among([a, b], name)


@implements(np.union1d)
def union1d(ar1: Any, ar2: Any) -> Any:
    """Return the distinct elements of two arrays, in ascending order."""
    _both("np.union1d", ar1, ar2)
    return unique(concatenate([_ravel(ar1), _ravel(ar2)]))


@implements(np.intersect1d)
def intersect1d(ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False) -> Any:
    """Return the distinct common elements of two arrays, in ascending order."""
    del assume_unique
    _both("np.intersect1d", ar1, ar2)
    a, at, _, _ = _distinct(ar1, index=return_indices)
    b, place, _, _ = _distinct(ar2, index=return_indices)
    common = isin(a, b)
    values = astype(compress(a, common), np.result_type(a.dtype, b.dtype))
    if not return_indices:
        return values
    return values, compress(at, common), compress(place, isin(b, a))


@implements(np.setdiff1d)
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the distinct elements of one array that are not in the other."""
    _both("np.setdiff1d", ar1, ar2)
    a = _ravel(ar1) if assume_unique else unique(ar1)
    return compress(a, isin(a, ar2, invert=True))


@implements(np.setxor1d)
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the distinct elements that are in exactly one of two arrays, in ascending order."""
    _both("np.setxor1d", ar1, ar2)
    a, b = setdiff1d(ar1, ar2, assume_unique), setdiff1d(ar2, ar1, assume_unique)
    return sort_together("np.setxor1d", concatenate([a, b]))[0]


# Look-ups ---------------------------------------------------------------------------------------------------


def _is_large(table: Any, values: Any) -> bool:
    """Return whether a table is sharded, and sorting it with the values moves less than gathering it."""
    return (
        isinstance(table, DTensor) and isinstance(values, DTensor) and table.spec.shards > 1
        and table.size * table.spec.shards > values.size
    )  # fmt: skip


def _sorted_with(name: str, first: DTensor, second: DTensor) -> tuple[DTensor, DTensor]:
    """Sort two concatenated arrays, stably; return the elements and their old indices."""
    joined = concatenate([_ravel(first), _ravel(second)])
    keys, places = sort_together(name, joined, positions(joined.spec))
    return keys, places


def _in_order(name: str, places: DTensor, results: DTensor, chosen: DTensor, like: DTensor) -> DTensor:
    """Return results of some of the concatenated elements in their old order, in the shape of `like`."""
    found = sort_together(name, compress(places, chosen), compress(results, chosen))[1]
    target = like.spec.complete().replace(dtype=results.dtype)
    return move(reshape(found, like.shape), target)


@implements(np.isin)
def isin(
    element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
) -> Any:
    """Return whether elements are in a table; every device gets the whole table if it is small."""
    if not _is_large(test_elements, element):
        table = np.asarray(read_whole(test_elements))
        if not isinstance(element, DTensor):
            return np.isin(element, table, assume_unique, invert, kind=kind)
        return local_elementwise(
            "isin", lambda b: np.asarray(np.isin(b, table, False, invert, kind=kind)), [element], bool
        )
    grid_among([element, test_elements], "np.isin")
    keys, places = _sorted_with("np.isin", test_elements, element)
    # A run of equal elements begins with those of the table, if there are any.
    run = accumulate(np.add, first_of_runs(keys, False), 0, np.intp)
    of_table = elementwise(np.less, (places, test_elements.size), {})
    found = elementwise(np.equal, (accumulate(np.maximum, where_(of_table, run, 0), 0), run), {})
    result = _in_order("np.isin", places, found, elementwise(np.logical_not, (of_table,), {}), element)
    return elementwise(np.logical_not, (result,), {}) if invert else result


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> Any:
    """Return the insertion points of values in a sorted array: each device counts elements of its own block.

    Values that are sharded along the same mesh dimension are sorted together with the array. Every device
    gets the whole array if it is small, or if there is a `sorter`.
    """
    name = "np.searchsorted"
    if side not in ("left", "right"):
        raise ValueError(f"search side must be 'left' or 'right' (got {side!r})")
    cut = isinstance(a, DTensor) and a.spec.shards > 1 and a.ndim == 1
    if not cut or sorter is not None or (isinstance(v, DTensor) and not _is_large(a, v)):
        table, order = np.asarray(read_whole(a)), None if sorter is None else read_whole(sorter)
        if not isinstance(v, DTensor):
            return np.searchsorted(table, v, side, order)
        return local_elementwise(
            "searchsorted", lambda b: np.asarray(np.searchsorted(table, b, side, order)), [v], np.intp
        )
    if not isinstance(v, DTensor):
        check_operand(v, name)
        value = np.asarray(v)
        v = scattered(value, spec_of(a.spec.grid, (), value.dtype))
    grid_among([a, v], name)
    spec, at = a.spec.complete(), v.spec.complete()
    if spec.axes[0] not in at.axes:
        target = spec_of(spec.grid, v.shape, np.dtype(np.intp), at.axes, spec.axes, "sum")
        return run_local(name, lambda t, b: np.searchsorted(t, b, side), [a, v], [spec, at], (target,))[0]
    if side == "right":
        _, places = _sorted_with(name, a, v)
        of_table = elementwise(np.less, (places, a.size), {})
    else:
        _, places = _sorted_with(name, v, a)
        of_table = elementwise(np.greater_equal, (places, v.size), {})
    counts = accumulate(np.add, of_table, 0, np.intp)
    return _in_order(name, places, counts, elementwise(np.logical_not, (of_table,), {}), v)
