"""Functions composed of others: cross products, gradients, grids, polynomials, flat indices."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import check_operand, free_axes, grid_among
from dmesh.arrays.dispatch.reduction import normalized_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, can_cast, run_local, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops.joining import concatenate, stack
from dmesh.arrays.ops.mappings import reshape, take_along
from dmesh.arrays.ops.shapes import axis_of, broadcast_to, moveaxis
from dmesh.errors import UnshardableError


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None) -> Any:
    """Return the cross products of vectors of three elements."""
    for x in (a, b):
        check_operand(x, "np.cross")
    grid_among([a, b], "np.cross")
    first, second, third = (axisa, axisb, axisc) if axis is None else (axis,) * 3
    x, y = moveaxis(a, first, -1), moveaxis(b, second, -1)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        raise ValueError(
            f"Both input arrays must be (arrays of) 3-dimensional vectors, but they have {x.shape[-1]} and "
            f"{y.shape[-1]} dimensions instead."
        )
    u, v = ([one[..., at] for at in range(3)] for one in (x, y))
    made = [u[i] * v[j] - u[j] * v[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return moveaxis(stack(made, made[0].ndim), -1, third)


@implements(getattr(np.linalg, "cross", None))
def linalg_cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return the cross products of vectors of three elements."""
    return cross(x1, x2, axis=axis)


@implements(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Return the gradient along dimensions, for evenly spaced points."""
    dims = normalized_axes(axis, f.ndim)
    if any(np.ndim(one) for one in varargs):
        raise UnshardableError("np.gradient of sharded arrays takes distances as numbers")
    if len(varargs) not in (0, 1, len(dims)):
        raise TypeError("invalid number of arguments")
    if edge_order not in (1, 2):
        raise ValueError("'edge_order' greater than 2 not supported")
    steps = list(varargs) * len(dims) if len(varargs) == 1 else list(varargs) or [1.0] * len(dims)
    x = f if f.dtype.kind in "fcm" else astype(f, np.dtype(np.float64))
    if f.dtype == np.bool_ and dims and min(f.shape[dim] for dim in dims) > edge_order:
        raise TypeError("np.gradient of booleans is not supported: use f.astype(int)")
    found = tuple(_slope(x, dim, step, edge_order) for dim, step in zip(dims, steps, strict=True))
    return found[0] if len(found) == 1 else found


def _slope(x: DTensor, dim: int, step: Any, edge_order: int) -> DTensor:
    n = x.shape[dim]
    if n < edge_order + 1:
        raise ValueError(
            "Shape of array too small to calculate a numerical gradient, at least (edge_order + 1) elements "
            "are required."
        )

    def part(start: int, stop: int) -> Any:
        return x[(*(slice(None),) * dim, slice(start, stop))]

    inner = (part(2, n) - part(0, n - 2)) / (2.0 * step)
    if edge_order == 1:
        first, last = (part(1, 2) - part(0, 1)) / step, (part(n - 1, n) - part(n - 2, n - 1)) / step
    else:
        first = part(0, 1) * (-1.5 / step) + part(1, 2) * (2.0 / step) + part(2, 3) * (-0.5 / step)
        last = part(n - 3, n - 2) * (0.5 / step) + part(n - 2, n - 1) * (-2.0 / step)
        last = last + part(n - 1, n) * (1.5 / step)
    result: DTensor = concatenate([first, inner, last], dim)
    return result


@implements(np.meshgrid)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    """Return the coordinates of a grid, one array for each dimension."""
    del copy
    if indexing not in ("xy", "ij"):
        raise ValueError("Valid values for `indexing` are 'xy' and 'ij'.")
    for x in xi:
        check_operand(x, "np.meshgrid")
    lines = [x if isinstance(x, DTensor) and x.ndim == 1 else reshape(x, (x.size,)) for x in xi]
    grid_among(lines, "np.meshgrid")
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = [1, 0]
    made = []
    for x, at in zip(lines, order, strict=True):
        made.append(reshape(x, tuple(x.size if d == at else 1 for d in range(len(xi)))))
    shape = np.broadcast_shapes(*(x.shape for x in made))
    return tuple(made) if sparse else tuple(broadcast_to(x, shape) for x in made)


@implements(np.polyfit)
def polyfit(
    x: Any, y: Any, deg: int, rcond: Any = None, full: bool = False, w: Any = None, cov: Any = False
) -> Any:
    """Return the coefficients of the polynomial that fits points best, by least squares."""
    if full or cov:
        raise UnshardableError("np.polyfit of sharded arrays takes no full= and no cov=")
    if not isinstance(x, DTensor) or not isinstance(y, DTensor):
        raise UnshardableError("np.polyfit takes sharded points and values")
    if deg < 0 or x.ndim != 1 or not x.size or y.ndim not in (1, 2) or len(x) != len(y):
        raise TypeError("expected x and y of the same length, x of one dimension, and a degree of 0 or more")
    powers: Any = np.vander(x * 1.0, deg + 1)
    values: Any = y * 1.0
    if w is not None:
        check_operand(w, "np.polyfit")
        powers, values = powers * w[:, None], values * (w if y.ndim == 1 else w[:, None])
    scale = np.sqrt((powers * powers).sum(axis=0))
    limit = len(x) * np.finfo(powers.dtype).eps if rcond is None else rcond
    found, _, rank, _ = np.linalg.lstsq(powers / scale, values, limit)
    if int(rank) != deg + 1:
        warnings.warn("Polyfit may be poorly conditioned", np.exceptions.RankWarning, stacklevel=2)
    return (found.T / scale).T


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """Return the values of a polynomial with plain numbers as coefficients."""
    if isinstance(p, DTensor) or not isinstance(x, DTensor):
        raise UnshardableError("np.polyval takes plain coefficients and sharded points")
    result: Any = x * 0
    for coefficient in np.asarray(p):
        result = result * x + coefficient
    return result


@implements(np.put_along_axis, note="whole dimension")
def put_along_axis(arr: Any, indices: Any, values: Any, axis: Any) -> None:
    """Write elements by their indices along a dimension, one list of indices for each line."""
    for x in (arr, indices, values):
        check_operand(x, "np.put_along_axis")
    if axis is None or not isinstance(arr, DTensor) or not isinstance(indices, DTensor):
        raise UnshardableError("np.put_along_axis takes sharded arrays, and an axis")
    dim = axis_of(axis, arr.ndim)
    spec = free_axes(arr.spec, [dim])
    if indices.shape[:dim] + indices.shape[dim + 1 :] != arr.shape[:dim] + arr.shape[dim + 1 :]:
        raise UnshardableError("np.put_along_axis of sharded arrays takes indices for each line")
    operands, placed = [arr, indices], [spec, indices.spec.complete().replace(axes=spec.axes)]
    if isinstance(values, DTensor) and values.ndim:
        full = broadcast_to(values, indices.shape)
        operands.append(full)
        placed.append(full.spec.complete().replace(axes=spec.axes))
    number = values if len(operands) < 3 else None
    if isinstance(number, DTensor):
        number = number.item()

    def written(block: Any, at: Any, new: Any = number) -> Any:
        made = np.array(block)
        np.put_along_axis(made, at, new, dim)
        return made

    store(run_local("put_along_axis", written, operands, placed, (spec,))[0], arr, "unsafe")


@implements(np.tril_indices_from)
def tril_indices_from(arr: Any, k: int = 0) -> Any:
    """Return the places of a matrix's lower triangle, as plain arrays."""
    return _triangle(np.tril_indices, arr, k)


@implements(np.triu_indices_from)
def triu_indices_from(arr: Any, k: int = 0) -> Any:
    """Return the places of a matrix's upper triangle, as plain arrays."""
    return _triangle(np.triu_indices, arr, k)


def _triangle(places: Any, arr: DTensor, k: int) -> Any:
    if arr.ndim != 2:
        raise ValueError("input array must be 2-d")
    return places(arr.shape[0], k, arr.shape[1])


@implements(np.diag_indices_from)
def diag_indices_from(arr: Any) -> Any:
    """Return the places of the main diagonal, as plain arrays."""
    if arr.ndim < 2:
        raise ValueError("input array must be at least 2-d")
    if len(set(arr.shape)) > 1:
        raise ValueError("All dimensions of input must be of equal length")
    return np.diag_indices(arr.shape[0], arr.ndim)


@implements(np.choose)
def choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    """Return elements of several arrays, of the one that an index names at each place."""
    if mode not in ("raise", "wrap", "clip"):
        raise ValueError(f"clipmode must be 'clip', 'raise', or 'wrap' (got {mode!r})")
    if isinstance(choices, DTensor):
        choices = [choices[at] for at in range(len(choices))]
    n = len(choices)
    check_operand(a, "np.choose")
    if not isinstance(a, DTensor) or a.dtype.kind not in "iub":
        raise UnshardableError("np.choose takes a sharded array of integers as its first argument")
    if mode == "raise" and a.size and (bool((a < 0).any()) or bool((a >= n).any())):
        raise ValueError("invalid entry in choice array")
    places: Any = a % n if mode == "wrap" else np.clip(a, 0, n - 1)
    result = np.select([places == at for at in range(n)], list(choices), 0)
    return result if out is None else store(result, out, "same_kind")


@implements(np.fill_diagonal)
def fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    """Write a number to the main diagonal."""
    if a.ndim < 2:
        raise ValueError("array must be at least 2-d")
    if np.ndim(val) or wrap or isinstance(val, DTensor):
        raise UnshardableError("np.fill_diagonal of sharded arrays takes a number, and no wrap=True")
    if a.ndim > 2 and len(set(a.shape)) > 1:
        raise ValueError("All dimensions of input must be of equal length")
    for region, block in zip(a.spec.complete().regions, _complete(a).writable(), strict=True):
        at = np.arange(max(low for low, _ in region), min(high for _, high in region))
        block[tuple(at - low for low, _ in region)] = val


def _complete(a: DTensor) -> DTensor:
    """Return an array after its contributions are reduced."""
    return a if not a.spec.partial else store(a, a, "no")


@implements(np.resize)
def resize(a: Any, new_shape: Any) -> Any:
    """Return an array of another size, with the elements repeated as often as needed."""
    shape = (new_shape,) if isinstance(new_shape, (int, np.integer)) else tuple(new_shape)
    n = math.prod(shape)
    if any(length < 0 for length in shape):
        raise ValueError("all elements of `new_shape` must be non-negative")
    flat: Any = reshape(a, (a.size,))
    if not a.size or n <= a.size:
        found = flat[:n] if a.size else flat * np.zeros((), a.dtype)
    else:
        found = take_along(flat, np.arange(n, dtype=np.intp) % a.size, 0)
    if found.size != n:
        raise UnshardableError("np.resize of an empty array to one with elements: dmesh.zeros makes it")
    return reshape(found, shape)


@implements(np.ravel_multi_index)
def ravel_multi_index(multi_index: Any, dims: Any, mode: Any = "raise", order: str = "C") -> Any:
    """Return the flat indices of places, which are given dimension by dimension."""
    modes = [mode] * len(dims) if isinstance(mode, str) else list(mode)
    if order != "C" or not {"raise", "wrap", "clip"} >= set(modes):
        raise UnshardableError("np.ravel_multi_index of sharded arrays takes order='C', and modes of NumPy's")
    if not len(multi_index) == len(dims) == len(modes):
        raise ValueError(f"parameter multi_index must be a sequence of length {len(dims)}")
    result: Any = 0
    for index, n, how in zip(multi_index, dims, modes, strict=True):
        check_operand(index, "np.ravel_multi_index")
        if np.result_type(index).kind not in "iu":
            raise TypeError("only int indices permitted")
        if how == "raise" and np.size(index) and (np.any(index < 0) or np.any(index >= n)):
            raise ValueError("invalid entry in coordinates array")
        place = index % n if how == "wrap" else np.clip(index, 0, n - 1) if how == "clip" else index
        result = result * n + place
    return result.astype(np.intp)


@implements(np.unravel_index)
def unravel_index(indices: Any, shape: Any, order: str = "C") -> Any:
    """Convert flat indices to indices along each dimension."""
    if order != "C":
        raise UnshardableError("np.unravel_index of sharded arrays takes order='C' only")
    if indices.dtype.kind not in "biu":
        raise TypeError("only int indices permitted")
    lengths = tuple(np.atleast_1d(shape).tolist())
    size = math.prod(lengths)
    if indices.size and (bool((indices < 0).any()) or bool((indices >= size).any())):
        raise ValueError(f"an index is out of bounds for array with size {size}")
    strides = [math.prod(lengths[at + 1 :]) for at in range(len(lengths))]
    if not can_cast(indices.dtype, np.dtype(np.intp), "same_kind"):
        raise TypeError("only int indices permitted")
    x: Any = astype(indices, np.dtype(np.intp))
    return tuple(x // max(stride, 1) % max(n, 1) for stride, n in zip(strides, lengths, strict=True))
