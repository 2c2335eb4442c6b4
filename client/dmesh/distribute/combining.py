"""Exchange between replicas: sums, means and rows, first among those of a client, then between clients.

The replicas of a client are folded in the order of their ids and the clients in theirs, so that the result
has the same bits on all replicas and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.bucketing import BUCKET_BYTES, all_reduce_many
from dmesh.collectives.group import Group
from dmesh.collectives.reduction import resolve
from dmesh.collectives.request import describe_dtype
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.placement import Placement
from dmesh.distribute.reduce_op import ReduceOp
from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["Array", "Combiner", "as_value", "check_rank", "describe_values", "frozen"]

Array = NDArray[Any]


def as_value(value: Any, what: str) -> Array:
    """Returns a replica's value as an array.

    Raises:
        StrategyTypeError: It is none that could be sent.
    """
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise StrategyTypeError(
            f"{what} needs arrays or numbers, got {type(value).__name__}: objects cannot be combined"
        )
    return array


def frozen(array: Array) -> Array:
    """Returns the array, which several replicas are about to share, as one that cannot be written to."""
    view = np.asarray(array)[...]
    view.flags.writeable = False
    return view


def describe_values(arrays: Sequence[Array], but_axis: int | None = None) -> str:
    """Describes what the values of all replicas must have in common.

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


class Combiner:
    """Combines the values of all replicas. All clients must call the same methods in the same order.

    Args:
        placement: All replicas.
        group: All clients, if there are several.
        options: How values are exchanged, unless a call says otherwise.
    """

    def __init__(self, placement: Placement, group: Group | None, options: CommunicationOptions) -> None:
        self._placement = placement
        self._group = group
        self._options = options

    def reduce(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Array]],
        options: CommunicationOptions | None = None,
    ) -> list[Array]:
        """Reduces values over all replicas.

        Args:
            op: How.
            columns: For each value, what the replicas of this client have of it, in their order: arrays of
                the same shape and dtype.
            options: How large and for how long.

        Returns:
            The reduced values; they cannot be written to.
        """
        rules = [resolve("mean" if op is ReduceOp.MEAN else "sum", parts[0].dtype) for parts in columns]
        totals = []
        for rule, parts in zip(rules, columns, strict=True):
            total = np.empty(parts[0].shape, rule.accumulator)
            for index, part in enumerate(parts):
                rule.fold(part, total, index == 0)
            totals.append(total)
        if self._group is not None:
            options = options or self._options
            totals = all_reduce_many(
                totals,
                "sum",
                group=self._group,
                out=totals,
                bucket_bytes=options.bytes_per_pack or BUCKET_BYTES,
                timeout=options.timeout_seconds,
            )
        results = []
        for rule, total in zip(rules, totals, strict=True):
            result = total if rule.result == rule.accumulator else np.empty(total.shape, rule.result)
            rule.finish(total, result, self._placement.size)
            results.append(frozen(result))
        return results

    def gather(self, columns: Sequence[Sequence[Array]], axis: int) -> list[Array]:
        """Puts the values of all replicas one behind the other, in the order of the replicas.

        Args:
            columns: As for `reduce`, but the lengths along `axis` may differ.
            axis: Along which.
        """
        return [frozen(self._gather(parts, axis)) for parts in columns]

    def _gather(self, parts: Sequence[Array], axis: int) -> Array:
        if self._group is None:
            return np.concatenate(parts, axis=axis)
        parts = [np.moveaxis(part, axis, 0) for part in parts]
        mine = np.array([len(part) for part in parts])
        lengths = self._group.all_gather(mine)  # of clients and their replicas
        rest = parts[0].shape[1:]
        room = np.zeros((int(lengths.sum(axis=1).max()), *rest), parts[0].dtype)
        np.concatenate(parts, axis=0, out=room[: int(mine.sum())])
        blocks = self._group.all_gather(room)
        pieces: dict[int, Array] = {}
        for client, block in enumerate(blocks):
            ends = np.cumsum(lengths[client])
            for replica, end, length in zip(
                self._placement.of_client(client), ends, lengths[client], strict=True
            ):
                pieces[replica.id] = block[end - length : end]
        joined = np.concatenate([pieces[number] for number in sorted(pieces)], axis=0)
        return np.moveaxis(joined, 0, axis)

    def first(self, values: Sequence[Array]) -> list[Array]:
        """Gives all clients the values that the client of replica 0 has."""
        if self._group is None:
            return [frozen(value) for value in values]
        root = self._placement.replicas[0].client
        return [frozen(self._group.broadcast(value, root)) for value in values]


def check_rank(array: Array, axis: int, what: str) -> None:
    """Refuses to gather scalars, and axes that an array does not have.

    Raises:
        StrategyValueError: It is one.
    """
    if array.ndim == 0:
        raise StrategyValueError(
            f"{what} puts arrays one behind the other; a scalar has no axis. Add one first"
        )
    if not -array.ndim <= axis < array.ndim:
        raise StrategyValueError(f"{what} got axis {axis} for an array of {array.ndim} dimensions")
