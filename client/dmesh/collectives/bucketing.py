"""Many arrays reduced in few collectives: gradients of a model, statistics of a step.

A collective of few bytes costs what it costs to wait for the others, and a hundred of them a hundred times
that. Arrays of one dtype are therefore laid one behind the other into buckets, and each bucket is one
all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from dmesh.collectives.api import Async, ProcessGroup, Sync
from dmesh.collectives.api import resolve as resolve_group
from dmesh.collectives.futures import Completed, Future, then
from dmesh.collectives.group import Group
from dmesh.collectives.persistent import Plan, plan_all_reduce, planned
from dmesh.collectives.reduction import canonical_op, resolve
from dmesh.collectives.request import Array
from dmesh.collectives.validation import as_input, check_out
from dmesh.errors import CollectiveValueError

_WHAT = "all_reduce_many"

BUCKET_BYTES = 8 << 20
"""Bytes of a bucket, unless the caller says otherwise."""


def fill_buckets(arrays: Sequence[Array], limit: int) -> list[list[int]]:
    """Distribute arrays over buckets: arrays of one dtype together, as many as fit, in their order.

    Depends on dtypes and sizes alone, so that all ranks come to the same buckets in the same order.

    Args:
        arrays: The arrays.
        limit: Bytes of a bucket; an array that is larger has one of its own.

    Returns:
        For each bucket, the positions of its arrays.

    Raises:
        CollectiveValueError: The limit is not positive.
    """
    if limit <= 0:
        raise CollectiveValueError(f"bucket_bytes must be positive, not {limit}")
    filling: dict[np.dtype[Any], list[int]] = {}
    filled: list[list[int]] = []
    room: dict[np.dtype[Any], int] = {}
    for position, array in enumerate(arrays):
        if array.nbytes > room.get(array.dtype, -1):
            filling[array.dtype] = []
            room[array.dtype] = limit
            filled.append(filling[array.dtype])
        filling[array.dtype].append(position)
        room[array.dtype] -= array.nbytes
    return filled


@overload
def all_reduce_many(
    arrays: Iterable[ArrayLike],
    op: str = "sum",
    *,
    out: Sequence[Array] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Unpack[Sync],
) -> list[Array]: ...
@overload
def all_reduce_many(
    arrays: Iterable[ArrayLike],
    op: str = "sum",
    *,
    out: Sequence[Array] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Unpack[Async],
) -> Future[list[Array]]: ...
def all_reduce_many(
    arrays: Iterable[ArrayLike],
    op: str = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Sequence[Array] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce each of many arrays as `all_reduce` does, but in as few collectives as possible.

    The results have the same bits, except where several clients on each of several hosts fold large arrays
    row by row (see docs/tcp.md): together they may be large enough for that, and one by one not.

    Args:
        arrays: This rank's contributions: any number, of any shapes and dtypes; equal in number, shapes and
            dtypes on all ranks, and in the same order.
        op: As for `all_reduce`, except operations with a location and your own ones.
        group: Ranks that take part; None for all clients.
        out: Arrays for the results, one for each; None for new ones. Results that share a bucket then share
            one piece of memory, which lives as long as any of them.
        bucket_bytes: Bytes that are sent together at most; an array that is larger is sent by itself. Must be
            the same on all ranks.
        timeout: Seconds for each of the collectives; None for the cluster's limit.
        async_op: Return a future of the results at once. The arrays may be changed when it is done.

    Returns:
        The results, in the order of `arrays`.

    Raises:
        CollectiveTypeError: The reduction has no meaning for an array's dtype, or an `out` does not fit.
        CollectiveValueError: An array is none, `out` has another length, or `bucket_bytes` is not positive.
        CollectiveError: As for `all_reduce`.
    """
    members: Any = resolve_group(group)  # an overload cannot be chosen by a bool
    op = canonical_op(op)
    given = list(arrays)
    inputs = [as_input(x, _WHAT) for x in given]
    results = [resolve(op, array.dtype).result for array in inputs]
    buckets = fill_buckets(inputs, bucket_bytes)
    wanted: Sequence[Array | None] = [None] * len(inputs) if out is None else list(out)
    if len(wanted) != len(inputs):
        raise CollectiveValueError(f"{_WHAT} got {len(inputs)} arrays, but {len(wanted)} in out=")
    for x, array, result, target in zip(given, inputs, results, wanted, strict=True):
        check_out(target, result, array.shape, x if isinstance(x, np.ndarray) else None, _WHAT)

    def begin(bucket: list[int], later: bool) -> Any:
        first = bucket[0]
        if len(bucket) == 1:
            return members.all_reduce(inputs[first], op, out=wanted[first], timeout=timeout, async_op=later)
        flat = np.concatenate([inputs[position].reshape(-1) for position in bucket])
        target = flat if results[first] == flat.dtype else None
        return members.all_reduce(flat, op, out=target, timeout=timeout, async_op=later)

    def end(reduced: Sequence[Array]) -> list[Array]:
        found: dict[int, Array] = {}
        for bucket, flat in zip(buckets, reduced, strict=True):
            if len(bucket) == 1:
                found[bucket[0]] = flat
                continue
            offset = 0
            for position in bucket:
                array, target = inputs[position], wanted[position]
                piece = flat[offset : offset + array.size].reshape(array.shape)
                offset += array.size
                if target is not None:
                    target[...] = piece
                found[position] = piece if target is None else target
        return [found[position] for position in range(len(inputs))]

    if not async_op:
        return end([begin(bucket, later=False) for bucket in buckets])
    futures: list[Future[Array]] = [begin(bucket, later=True) for bucket in buckets]
    if not futures:
        return Completed([])
    # A group's calls are carried out one after the other: when the last one is over, all are.
    return then(futures[-1], lambda _: end([future.result() for future in futures]))


class PlannedAllReduceMany:
    """All-reduces of many arrays that are ready to be called; made by `plan_all_reduce_many`."""

    def __init__(self, group: Group | None, arrays: Sequence[Array], op: str, bucket_bytes: int) -> None:
        self._plans: list[Plan] = []
        places: dict[int, tuple[Array, Array]] = {}
        for bucket in fill_buckets(arrays, bucket_bytes):
            total = sum(arrays[position].size for position in bucket)
            like = np.broadcast_to(np.empty((), arrays[bucket[0]].dtype), total)
            plan = plan_all_reduce(like, op, group=group)
            self._plans.append(plan)
            end = 0
            for position in bucket:
                begin, end = end, end + arrays[position].size
                shape = arrays[position].shape
                places[position] = plan.input[begin:end].reshape(shape), plan.result[begin:end].reshape(shape)
        self.inputs = [places[position][0] for position in range(len(arrays))]
        """Places for contributions, in the order of the arrays: parts of the buckets."""
        self.results = [places[position][1] for position in range(len(arrays))]
        """Results of the last call, in that order; the next one overwrites them."""

    def __repr__(self) -> str:
        return f"<PlannedAllReduceMany: {len(self.inputs)} arrays in {len(self._plans)} buckets>"

    @overload
    def __call__(
        self,
        arrays: Iterable[Array] | None = None,
        *,
        timeout: float | None = None,
        async_op: Literal[False] = False,
    ) -> list[Array]: ...
    @overload
    def __call__(
        self, arrays: Iterable[Array] | None = None, *, timeout: float | None = None, async_op: Literal[True]
    ) -> Future[list[Array]]: ...
    def __call__(
        self, arrays: Iterable[Array] | None = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Reduce the contributions of all ranks; all of them must call their plan, or `all_reduce_many`.

        Args:
            arrays: This rank's contributions, which are copied into `inputs`; None for what is there.
            timeout: Seconds for each of the collectives; None for the cluster's limit.
            async_op: Return a future at once.

        Returns:
            `results`, or a future of them.

        Raises:
            CollectiveTypeError: One is no array, or has another dtype than was planned.
            CollectiveValueError: One has another shape, or their number is another.
            CollectiveError: As for `all_reduce`.
        """
        if arrays is not None:
            given = list(arrays)
            if len(given) != len(self.inputs):
                raise CollectiveValueError(f"{self!r} was called with {len(given)} arrays")
            for x, place in zip(given, self.inputs, strict=True):
                planned(self, x, place)
            for x, place in zip(given, self.inputs, strict=True):
                place[...] = x
        if not async_op:
            for plan in self._plans:
                plan() if timeout is None else plan(timeout=timeout)
            return self.results
        futures = [plan(timeout=timeout, async_op=True) for plan in self._plans]
        if not futures:
            return Completed(self.results)

        def end(_: Any) -> list[Array]:
            for future in futures:
                future.result()
            return self.results

        return then(futures[-1], end)


def plan_all_reduce_many(
    like: Iterable[ArrayLike],
    op: str = "sum",
    *,
    group: Group | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> PlannedAllReduceMany:
    """Prepare a reduction of many arrays that is called many times. Nothing is sent.

    ```python
    plan = dmesh.collectives.plan_all_reduce_many(like=gradients)
    while training:
        compute(out=plan.inputs)    # into the buckets: nothing is copied
        totals = plan()             # the same arrays each time
    ```

    The buckets are those of `all_reduce_many`, and in shared memory where there is some (see
    docs/shared-memory.md).

    Args:
        like: Have the dtypes and shapes of the contributions.
        op: As for `all_reduce`, except operations with a location and your own ones.
        group: Ranks that take part; None for all clients.
        bucket_bytes: As for `all_reduce_many`.

    Raises:
        CollectiveTypeError: The reduction has no meaning for an array's dtype.
        CollectiveValueError: An array is none, or `bucket_bytes` is not positive.
        SharedMemoryError: There is no more memory to share (`DMESH_SHARED_MEMORY`).
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    inputs = [as_input(x, "plan_all_reduce_many") for x in like]
    op = canonical_op(op)
    for array in inputs:
        resolve(op, array.dtype)
    return PlannedAllReduceMany(group, inputs, op, bucket_bytes)
