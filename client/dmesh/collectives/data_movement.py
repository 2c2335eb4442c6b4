"""Collectives that move arrays without changing them; `api` says what holds for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack, overload

from numpy.typing import ArrayLike

from dmesh.collectives.api import (
    AsyncOut,
    Counts,
    ProcessGroup,
    SyncOut,
    collective,
    resolve,
)
from dmesh.collectives.futures import Future
from dmesh.collectives.request import Array


@overload
def broadcast(x: ArrayLike, root: int = 0, **options: Unpack[SyncOut]) -> Array: ...
@overload
def broadcast(x: ArrayLike, root: int = 0, **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def broadcast(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the root's array to every rank.

    The other ranks pass an array of the same dtype and shape; its elements are neither read nor changed,
    unless it is also `out`.

    ```python
    weights = dmesh.collectives.broadcast(np.full(4, dmesh.rank()), root=0)
    assert list(weights) == [0, 0, 0, 0]
    ```

    Args:
        x: On the root, the array; on the others, an array of the same dtype and shape.
        root: Position of the rank that sends its array.

    Returns:
        A copy of the root's array.
    """
    return resolve(group).perform(timeout, async_op, "broadcast", x, out, root=root)


@overload
def all_gather(
    x: ArrayLike, *, axis: int | None = None, counts: Counts | None = None, **options: Unpack[SyncOut]
) -> Array: ...
@overload
def all_gather(
    x: ArrayLike, *, axis: int | None = None, counts: Counts | None = None, **options: Unpack[AsyncOut]
) -> Future[Array]: ...
@collective
def all_gather(
    x: ArrayLike,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the arrays of all ranks to every rank.

    ```python
    ranks = dmesh.collectives.all_gather(np.int64(dmesh.rank()))
    assert list(ranks) == list(range(dmesh.size()))
    ```

    Args:
        x: This rank's array.
        axis: None to stack the arrays along a new first axis, as `np.stack` does; a number to join them along
            that axis, as `np.concatenate` does.
        counts: For arrays whose lengths along the axis differ: these lengths, by rank, or `"exchange"` if the
            ranks do not know each other's. The axis is 0 then, unless it is given.

    Returns:
        The arrays in the order of ranks. Stacked arrays have the shape `(size, *x.shape)`; joined ones are
        along `axis` as long as all arrays together.
    """
    return resolve(group).perform(timeout, async_op, "all_gather", x, out, axis=axis, counts=counts)


@overload
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    **options: Unpack[SyncOut],
) -> Array | None: ...
@overload
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array | None]: ...
@collective
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the arrays of all ranks to the root.

    ```python
    rows = dmesh.collectives.gather(np.arange(3), root=0)
    assert (rows.shape == (dmesh.size(), 3)) if dmesh.rank() == 0 else (rows is None)
    ```

    Args:
        x: This rank's array.
        root: Position of the rank that gets them.
        axis: As for `all_gather`.
        counts: As for `all_gather`.
        out: Array for the result; on the root only.

    Returns:
        On the root, the arrays in the order of ranks, as `all_gather` returns them; None on the others.
    """
    return resolve(group).perform(timeout, async_op, "gather", x, out, root=root, axis=axis, counts=counts)


@overload
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    **options: Unpack[SyncOut],
) -> Array: ...
@overload
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array]: ...
@collective
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    axis: int | None = None,
    counts: Counts | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Distribute the rows or blocks of the root's array: each rank gets one.

    The other ranks must say what they will receive: with an array of the dtype and shape of one row or block,
    which is neither looked at nor changed, or with `out`.

    ```python
    rows = np.arange(dmesh.size() * 2).reshape(-1, 2) if dmesh.rank() == 0 else np.empty(2, int)
    row = dmesh.collectives.scatter(rows, root=0)
    assert row[0] == 2 * dmesh.rank()
    ```

    Args:
        x: On the root, an array with one row for each rank along axis 0, or with one block for each along
            `axis`; on the others, one like a row or block, or None.
        root: Position of the rank that has the rows.
        axis: None for rows, which have one axis less than `x`; a number to cut that axis into blocks.
        counts: For blocks whose lengths along the axis differ: these lengths, by rank. The other ranks may
            pass `"exchange"`; the length of the array that they pass has no meaning then. The axis is 0,
            unless it is given.

    Returns:
        The row or block at this rank's position.
    """
    return resolve(group).perform(timeout, async_op, "scatter", x, out, root=root, axis=axis, counts=counts)


@overload
def all_to_all(
    x: ArrayLike,
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    recv_counts: Counts | None = None,
    **options: Unpack[SyncOut],
) -> Array: ...
@overload
def all_to_all(
    x: ArrayLike,
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    recv_counts: Counts | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array]: ...
@collective
def all_to_all(
    x: ArrayLike,
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    recv_counts: Counts | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Exchange blocks between all ranks: block j of rank i becomes block i of rank j.

    ```python
    got = dmesh.collectives.all_to_all(np.full(dmesh.size(), dmesh.rank()))
    assert list(got) == list(range(dmesh.size()))
    ```

    Args:
        x: An array whose axis 0 the size of the group divides; most simply with one row for each rank.
        axis: Axis that is cut into blocks, and along which they are joined; None is 0.
        counts: For blocks whose lengths along the axis differ: those that this rank sends, by rank.
        recv_counts: Lengths of the blocks that this rank expects, by rank. None or `"exchange"` if it does
            not know them: they are exchanged in any case.

    Returns:
        The blocks, joined in the order of ranks. With equal blocks, this is an array of the same shape.
    """
    return resolve(group).perform(
        timeout, async_op, "all_to_all", x, out, axis=axis, counts=counts, recv_counts=recv_counts
    )


@overload
def permute(x: ArrayLike, pairs: Iterable[tuple[int, int]], **options: Unpack[SyncOut]) -> Array: ...
@overload
def permute(x: ArrayLike, pairs: Iterable[tuple[int, int]], **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def permute(
    x: ArrayLike,
    pairs: Iterable[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Move arrays between ranks along (source, target) pairs, as JAX's `ppermute` does.

    ```python
    ring = [(rank, (rank + 1) % dmesh.size()) for rank in range(dmesh.size())]
    left = dmesh.collectives.permute(np.int64(dmesh.rank()), ring)
    assert left == (dmesh.rank() - 1) % dmesh.size()
    ```

    All ranks must pass the same pairs, including ranks that appear in none.

    Args:
        x: This rank's array.
        pairs: Positions of ranks; each may be a source once and a target once.

    Returns:
        The received array, or zeros if this rank is the target of no pair.
    """
    return resolve(group).perform(timeout, async_op, "permute", x, out, pairs=pairs)
