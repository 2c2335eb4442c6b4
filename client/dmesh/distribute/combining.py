"""Exchange between replicas: sums, means and rows, first within each client, then between clients.

The replicas of a client are folded in the order of their ids and the clients in theirs, so that the result
has the same bits on all replicas and in every run. Accumulators are those of the collectives: short floats
are added in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.bucketing import BUCKET_BYTES, fill_buckets
from dmesh.collectives.futures import Completed, then
from dmesh.collectives.group import Group
from dmesh.collectives.reduction import resolve
from dmesh.collectives.request import describe_dtype
from dmesh.distribute.agreement import Description, call_in_replicas
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.placement import Placement
from dmesh.distribute.reduce_op import ReduceOp
from dmesh.errors import StrategyTypeError, StrategyValueError
from dmesh.structure import flatten, outline, rebuild

__all__ = [
    "Array",
    "Combiner",
    "Reduction",
    "as_value",
    "check_rank",
    "describe_values",
    "finish_along",
    "frozen",
    "share_out",
    "sum_along",
]

Array = NDArray[Any]
_COLLECTIVE_OPS = {ReduceOp.SUM: "sum", ReduceOp.MEAN: "mean"}
_MOST_COMPILED = 256
"""Reductions that are kept compiled."""
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


def as_value(value: Any, what: str) -> Array:
    """Return a replica's value as an array of native byte order.

    Raises:
        StrategyTypeError: It is none that could be sent.
    """
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise StrategyTypeError(
            f"{what} needs arrays or numbers, got {type(value).__name__}: objects cannot be combined"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def frozen(array: Array) -> Array:
    """Return a read-only view of an array, because several replicas share it."""
    view = np.asarray(array)[...]
    view.flags.writeable = False
    return view


def describe_values(arrays: Sequence[Array], but_axis: int | None = None) -> str:
    """Return dtypes and shapes as text; they must be equal in all replicas.

    Args:
        arrays: The values of one replica.
        but_axis: An axis along which they may have different lengths.
    """
    return ", ".join(
        describe_dtype(array.dtype)
        + "["
        + ",".join(
            "?" if but_axis is not None and axis == but_axis % array.ndim else str(length)
            for axis, length in enumerate(array.shape)
        )
        + "]"
        for array in arrays
    )


class Reduction:
    """All-reduce of a structure of arrays, compiled for their dtypes and shapes.

    Args:
        name: Name of the call: of `all_reduce`, buckets are filled from the first array to the last, of
            others from the last to the first.
        op: SUM or MEAN.
        like: Structure of arrays.
        limit: Bytes that are sent together at most.
        swaps: True if arrays are converted to native byte order first.
    """

    def __init__(self, name: str, op: ReduceOp, like: Any, limit: int, *, swaps: bool = False) -> None:
        arrays, nested = flatten(like), outline(like)
        self.op = op
        self.swaps = swaps
        self._is_list = type(like) is list and all(outline(leaf) == "*" for leaf in like)
        self._is_bare = nested == "*"
        self.values = describe_values(arrays)
        """Dtypes and shapes in words."""
        self.rules = [resolve(_COLLECTIVE_OPS[op], array.dtype) for array in arrays]
        """Accumulator and result of each array."""
        self.shapes = [array.shape for array in arrays]
        """Shape of each array."""
        backwards = name != "all_reduce"
        filled = fill_buckets(arrays[::-1] if backwards else arrays, limit)
        last = len(arrays) - 1
        self.buckets = [[last - at for at in bucket] for bucket in filled] if backwards else filled
        """Positions of the arrays that are sent together."""
        self.description: Description = call_in_replicas(
            f"{name} {op.value} of {self.values}"
            + ("" if nested == "*" else f" in {nested}")
            + ("" if limit == BUCKET_BYTES else f", {limit} bytes together")
        )
        """Description of the call of replicas."""

    def rebuild(self, like: Any, arrays: list[Array]) -> Any:
        """Return results in the structure of the values."""
        if self._is_bare:
            return arrays[0]
        return list(arrays) if self._is_list else rebuild(like, arrays)


class Combiner:
    """Exchange of the values of all replicas. All clients must call the same methods in the same order.

    Args:
        placement: All replicas.
        group: All clients, if there are several.
        options: Options of exchanges, unless a call has its own.
    """

    def __init__(self, placement: Placement, group: Group | None, options: CommunicationOptions) -> None:
        self._placement = placement
        self._group = group
        self._options = options
        self._compiled: dict[Any, Reduction] = {}

    def bytes_per_pack(self, options: CommunicationOptions | None) -> int:
        """Return the maximum size of a bucket, bytes; 0 for the default."""
        return (options or self._options).bytes_per_pack

    def reduction(
        self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None
    ) -> tuple[Reduction, list[Array]]:
        """Return the all-reduce of a replica's value, which is compiled once, and the value's arrays."""
        return self.compiled("all_reduce", op, value, self.bytes_per_pack(options) or BUCKET_BYTES)

    def compiled(self, name: str, op: ReduceOp, value: Any, limit: int) -> tuple[Reduction, list[Array]]:
        """Return the reduction of a name for a replica's value; see `Reduction` for the arguments."""
        kind = type(value)
        outlined: Any = kind
        if kind is np.ndarray:
            arrays = [value]
        elif kind in (list, tuple) and all(type(leaf) is np.ndarray for leaf in value):
            arrays = list(value)
        else:
            arrays = [as_value(leaf, f"{name} {op.value}") for leaf in flatten(value)]
            outlined = outline(value)
        key = (name, op, limit, outlined, *map(_DTYPE, arrays), *map(_SHAPE, arrays))
        known = self._compiled.get(key)
        if known is None or known.swaps:
            swaps = not all(array.dtype.isnative for array in arrays)
            arrays = [as_value(array, f"{name} {op.value}") for array in arrays]
        if known is None:
            like = arrays[0] if outlined in (np.ndarray, "*") else rebuild(value, arrays)
            known = Reduction(name, op, like, limit, swaps=swaps)
            if len(self._compiled) >= _MOST_COMPILED:
                self._compiled.clear()
            self._compiled[key] = known
        return known, arrays

    def reduce(
        self,
        reduction: Reduction,
        replicas: Sequence[Sequence[Array]],
        options: CommunicationOptions | None = None,
    ) -> list[Array]:
        """Reduce arrays over all replicas.

        Args:
            reduction: Reduction, compiled for these arrays.
            replicas: Arrays of each replica of this client, in the order of the replicas.
            options: Options of the exchange.

        Returns:
            The reduced arrays, which cannot be written to.
        """
        results: list[Any] = [None] * len(reduction.rules)
        timeout = self.timeout(options)
        for bucket in reduction.buckets:
            parts = [_flat([arrays[at] for at in bucket]) for arrays in replicas]
            found = self.reduce_flat(reduction, bucket[0], parts, timeout, owned=len(bucket) > 1)
            share_out(reduction, bucket, found, results)
        return results

    def reduce_flat(
        self,
        reduction: Reduction,
        at: int,
        parts: Sequence[Array],
        timeout: float | None,
        *,
        owned: bool,
        group: Group | None = None,
        later: bool = False,
    ) -> Any:
        """Reduce one bucket over all replicas.

        Args:
            reduction: Reduction, of which this is a bucket.
            at: Position of an array in the bucket.
            parts: Array of each replica of this client.
            timeout: Seconds; None for the cluster's limit.
            owned: True if the parts may be overwritten, and be the result.
            group: All clients, if not through the group of other exchanges.
            later: True to return a future at once.
        """
        rule = reduction.rules[at]
        clients: Any = group or self._group  # an overload cannot be chosen by a bool
        if len(parts) == 1 and clients is not None:  # the group does all, also the rounding
            [part] = parts
            out = part if owned and rule.result == part.dtype and part.flags.carray else None
            op = _COLLECTIVE_OPS[reduction.op]
            if timeout is None and not later:
                return clients.all_reduce(part, op, out=out)
            return clients.all_reduce(part, op, out=out, timeout=timeout, async_op=later)
        total = np.empty(parts[0].shape, rule.accumulator)
        for index, part in enumerate(parts):
            rule.fold(part, total, index == 0)

        def finish(total: Array) -> Array:
            result = total if rule.result == rule.accumulator else np.empty(total.shape, rule.result)
            rule.finish(total, result, self._placement.size)
            return result

        if clients is None:
            return Completed(finish(total)) if later else finish(total)
        found: Any = clients.all_reduce(total, "sum", out=total, timeout=timeout, async_op=later)
        return then(found, finish) if later else finish(found)

    def gather(self, columns: Sequence[Sequence[Array]], axis: int) -> list[Array]:
        """Concatenate the values of all replicas, in the order of the replicas.

        Args:
            columns: For each value, the arrays of this client's replicas; lengths along `axis` may differ.
            axis: Axis along which they are joined.
        """
        if self._group is None:
            return [frozen(np.concatenate(parts, axis=axis)) for parts in columns]
        mine = np.array([[part.shape[axis] for part in parts] for parts in columns])
        lengths = self._group.all_gather(mine)  # by client, value and replica
        return [
            frozen(self._gather(self._group, parts, axis, lengths[:, number]))
            for number, parts in enumerate(columns)
        ]

    def _gather(self, group: Group, parts: Sequence[Array], axis: int, lengths: Array) -> Array:
        own = np.concatenate([np.moveaxis(part, axis, 0) for part in parts])
        totals = lengths.sum(axis=1).tolist()
        rows = group.all_gather(own, axis=0, counts=totals)
        if not self._placement.consecutive:
            ends = np.cumsum(lengths)
            spans = zip(ends - lengths.reshape(-1), ends, strict=True)
            ids = [one.id for client in range(group.size) for one in self._placement.of_client(client)]
            pieces = {number: rows[begin:end] for number, (begin, end) in zip(ids, spans, strict=True)}
            rows = np.concatenate([pieces[number] for number in sorted(pieces)])
        return np.moveaxis(rows, 0, axis)

    def first(self, values: Sequence[Array]) -> list[Array]:
        """Return the values of the client of replica 0, on all clients."""
        if self._group is None:
            return [frozen(value) for value in values]
        root = self._placement.replicas[0].client
        return [frozen(self._group.broadcast(value, root)) for value in values]

    def timeout(self, options: CommunicationOptions | None) -> float | None:
        """Return the limit of an exchange in seconds; None for the cluster's."""
        return (options or self._options).timeout_seconds


def share_out(reduction: Reduction, bucket: Sequence[int], found: Array, results: list[Any]) -> None:
    """Put the arrays of a reduced bucket into `results`, read-only."""
    found = frozen(found)
    if len(bucket) == 1:
        results[bucket[0]] = found
        return
    end = 0
    for at in bucket:
        shape = reduction.shapes[at]
        begin, end = end, end + math.prod(shape)
        results[at] = found[begin:end].reshape(shape)


def _flat(arrays: Sequence[Array]) -> Array:
    """Return concatenated arrays; a single array unchanged."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([array if array.ndim == 1 else array.reshape(-1) for array in arrays])


def sum_along(op: ReduceOp, part: Array, axes: tuple[Any, ...]) -> Array:
    """Return the sum of a replica's rows along axes, in the accumulator's dtype.

    Short floats are added in float32 and a mean of integers in float64, as between replicas; sums of integers
    become as wide as NumPy's.

    Raises:
        StrategyValueError: The array has no such axes.
    """
    whole = all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in axes)
    if not whole or len({one % part.ndim for one in axes if -part.ndim <= one < part.ndim}) < len(axes):
        wanted = axes[0] if len(axes) == 1 else axes
        raise StrategyValueError(f"reduce got axis {wanted!r:.200} for an array of {part.ndim} dimensions")
    rule = resolve(_COLLECTIVE_OPS[op], part.dtype)
    widens = op is ReduceOp.SUM and rule.accumulator.kind in "iub"
    with np.errstate(all="ignore"):  # a warning must not become an exception on this client alone
        return np.asarray(np.sum(part, axis=axes, dtype=None if widens else rule.accumulator))


def finish_along(op: ReduceOp, dtype: np.dtype[Any], total: Any, count: Any = 1) -> Any:
    """Return the sum or mean of all rows of arrays of a dtype, rounded once."""
    if op is ReduceOp.SUM:
        rule = resolve("sum", dtype)
        return total if rule.accumulator.kind in "iub" else _rounded(total, rule.result)
    return _rounded(np.divide(total, count), resolve("mean", dtype).result)


def _rounded(total: Any, dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        return frozen(np.asarray(total).astype(dtype, copy=False))


def check_rank(array: Array, axis: int, what: str) -> None:
    """Raise an error for scalars, and for axes that an array does not have.

    Raises:
        StrategyValueError: It is one.
    """
    if array.ndim == 0:
        raise StrategyValueError(
            f"{what} puts arrays one behind the other; a scalar has no axis. Add one first"
        )
    if not -array.ndim <= axis < array.ndim:
        raise StrategyValueError(f"{what} got axis {axis} for an array of {array.ndim} dimensions")
