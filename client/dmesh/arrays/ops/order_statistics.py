"""Medians and quantiles: on each device if the dimensions can be unsharded, else after a sample sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.reduction import is_kept, normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops.along import along, check_plain
from dmesh.arrays.ops.mappings import Pick, moved_dims, pick, reshape
from dmesh.arrays.ops.sorting import fits, sort_dim
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.errors import UnshardableError

_f: Any  # loop variable of the registrations below


def _freeze(value: Any) -> Any:
    return tuple(np.asarray(value).tolist()) if isinstance(value, (list, np.ndarray)) else value


def _statistic(function: Any, operands: int) -> Any:
    """Return the handler of an order statistic, which removes the dimensions."""

    def handler(
        a: Any, *args: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any
    ) -> Any:
        name = f"np.{function.__name__}"
        args_left = list(args)
        given = (
            [args_left.pop(0) for _ in range(operands)]
            if args_left
            else [kwargs.pop("q")]
            if operands
            else []
        )
        if args_left:
            axis = args_left.pop(0)
        if args_left:
            raise UnshardableError(f"{name} of sharded arrays takes its further arguments by name")
        if kwargs.pop("overwrite_input", False):
            raise UnshardableError(f"overwrite_input= of {name} is not supported on sharded arrays")
        check_plain(name, *given, *kwargs.values())
        x, dims = (reshape(a, (a.size,)), (0,)) if axis is None else (a, normalized_axes(axis, a.ndim))
        gone = range(a.ndim) if axis is None else dims
        quantiles = np.shape(given[0]) if given else ()
        frozen = tuple(_freeze(np.asarray(value).reshape(-1)) if quantiles else value for value in given)
        if fits(x.spec, dims) or not _is_sortable(function, x, dims, kwargs):
            (result,) = along(
                name, x, dims, _quantiles(function, dims, frozen, tuple(sorted(kwargs.items())))
            )
        else:
            x, dims = _merged(x, dims)
            result = _by_sorting(name, function, x, dims[0], frozen, kwargs.get("method", "linear"))
        # The quantiles are along the first of the dimensions, which moves to the front.
        count = result.shape[dims[0]]
        rest = [d for d in range(x.ndim) if d not in dims]
        result = moved_dims(result, [*dims, *rest])
        shape = tuple(result.shape[len(dims) :])
        if is_kept(keepdims):
            shape = tuple(1 if d in gone else n for d, n in enumerate(a.shape))
        result = reshape(result, (*quantiles, *shape)) if count or quantiles else result
        return result if out is None else store(result, out, "unsafe")

    return handler


def _is_sortable(function: Any, x: DTensor, dims: tuple[int, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a statistic needs only a few elements of the sorted dimensions."""
    skips = function in (np.nanmedian, np.nanquantile, np.nanpercentile)
    lines = x.ndim > len(dims)
    method = kwargs.get("method", "linear")
    plain = (method in _DEFINITIONS or method in _PLACES) and kwargs.get("weights") is None
    return plain and x.size > 0 and x.dtype.kind in "iuf" and not (skips and lines)


_DEFINITIONS: dict[str, tuple[float, float]] = {
    "interpolated_inverted_cdf": (0, 1), "hazen": (0.5, 0.5), "weibull": (0, 0), "linear": (1, 1),
    "median_unbiased": (1 / 3, 1 / 3), "normal_unbiased": (3 / 8, 3 / 8),
}  # fmt: skip
"""Alpha and beta of Hyndman and Fan's continuous definitions of a quantile."""


def _averaged(n: int, at: Any) -> Any:
    place = n * at - 1
    low = np.floor(place)
    return low + np.where(place == low, 0.5 * (place >= 0), 1)


def _closest(n: int, at: Any) -> Any:
    place = n * at - 1.5
    low = np.floor(place)
    parity = np.quantile(np.arange(3), 0.5, method="closest_observation")  # NumPy 2.0 differs from 2.4
    return np.where((place == low) & (low % 2 == parity), low, low + 1)


_PLACES: dict[str, Callable[[int, Any], Any]] = {
    "inverted_cdf": lambda n, at: np.ceil(n * at - 1),
    "averaged_inverted_cdf": _averaged,
    "closest_observation": _closest,
    "lower": lambda n, at: np.floor((n - 1) * at),
    "higher": lambda n, at: np.ceil((n - 1) * at),
    "midpoint": lambda n, at: (np.floor((n - 1) * at) + np.ceil((n - 1) * at)) / 2,
    "nearest": lambda n, at: np.rint((n - 1) * at),
}
"""Position of a quantile among n sorted elements, from 0, for the other methods."""
_WHOLE = ("inverted_cdf", "closest_observation", "lower", "higher", "nearest")
"""Methods that return one of the elements."""


def _place(n: int, at: Any, method: str) -> Any:
    """Return the positions of quantiles among n sorted elements; fractions lie between two elements."""
    if method in _PLACES:
        found = _PLACES[method](n, at)
    else:
        alpha, beta = _DEFINITIONS[method]
        found = at * (n - 1) if method == "linear" else n * at + (alpha + at * (1 - alpha - beta)) - 1
    return np.clip(found, 0, n - 1)


def _merged(x: DTensor, dims: tuple[int, ...]) -> tuple[DTensor, tuple[int]]:
    """Return an array in which some dimensions are merged into the last one."""
    if len(dims) == 1:
        return x, (dims[0],)
    rest = [d for d in range(x.ndim) if d not in dims]
    last = moved_dims(x, [*rest, *dims])
    return reshape(last, (*(x.shape[d] for d in rest), math.prod(x.shape[d] for d in dims))), (len(rest),)


def _by_sorting(
    name: str, function: Any, x: DTensor, dim: int, given: tuple[Any, ...], method: str
) -> DTensor:
    """Return quantiles, interpolated between their neighbors among the sorted elements."""
    ordered = sort_dim(name, x, dim)
    n = x.shape[dim]
    skips = function in (np.nanmedian, np.nanquantile, np.nanpercentile)
    if skips and x.dtype.kind == "f":
        n = int(reduce(np.add, elementwise(np.equal, (x, x), {}), None, np.intp).item())
    options = {"method": method} if given else {}
    if function in (np.median, np.nanmedian):
        at = np.array([0.5])
    else:
        scale = 100 if function in (np.percentile, np.nanpercentile) else 1
        at = np.atleast_1d(np.asarray(given[0], np.float64)) / scale
        if not np.all((at >= 0) & (at <= 1)):
            raise ValueError(
                f"{'Percentiles' if scale > 1 else 'Quantiles'} must be in the range [0, {scale}]"
            )
    place = _place(max(n, 1), at, method)
    low = np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, max(n - 1, 0))
    wanted = np.concatenate([low, high, [max(n - 1, 0) if skips else x.shape[dim] - 1]]).astype(np.intp)
    picks = [Pick(m) if d != dim else Pick(len(wanted), wanted) for d, m in enumerate(x.shape)]
    axes = [WHOLE if d == dim else axis for d, axis in enumerate(ordered.spec.axes)]
    taken = pick(ordered, picks, axes)
    kind = np.asarray(function(np.ones(1, x.dtype), *given, **options)).dtype
    shape = tuple(len(at) if d == dim else m for d, m in enumerate(x.shape))

    def between(block: Any) -> Any:
        values = np.moveaxis(block, dim, 0)
        count = len(at)
        pairs = np.stack([values[:count], values[count : 2 * count]])
        if function in (np.median, np.nanmedian):
            found = np.where(place[0] == low[0], pairs[0], np.mean(pairs, axis=0))
        elif method in _WHOLE:
            found = pairs[0]
        else:
            found = np.stack([np.quantile(pairs[:, j], place[j] - low[j], axis=0) for j in range(count)])
        broken = values[-1] != values[-1]  # NaN sorts last
        return np.moveaxis(np.where(broken, values[-1], found), 0, dim)

    target = spec_of(taken.spec.grid, shape, kind, taken.spec.axes)
    return run_local(name.removeprefix("np."), between, [taken], [taken.spec], (target,))[0]


@lru_cache(maxsize=1024)
def _quantiles(function: Any, dims: Any, given: Any, kwargs: Any) -> Callable[..., Any]:
    options = dict(kwargs)

    def kernel(block: Any) -> Any:
        made = np.asarray(function(block, *given, axis=dims, keepdims=True, **options))
        if made.ndim == block.ndim:
            return made
        return np.moveaxis(made, 0, dims[0]).reshape(
            [len(given[0]) if d == dims[0] else n for d, n in enumerate(made.shape[1:])]
        )

    return kernel


for _f, _n in (
    (np.median, 0), (np.nanmedian, 0), (np.quantile, 1), (np.percentile, 1), (np.nanquantile, 1),
    (np.nanpercentile, 1),
):  # fmt: skip
    implements(_f, note="whole dimension")(_statistic(_f, _n))
