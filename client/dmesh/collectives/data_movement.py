"""Collectives that move arrays without changing them; `api` says what holds for all."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Unpack, overload

from numpy.typing import ArrayLike

from dmesh.collectives.api import Async, AsyncOut, ProcessGroup, Sync, SyncOut, collective, resolve
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

    The other ranks must say what they will receive with an array of the same dtype and shape; its elements
    are not looked at and not changed, unless it is `out`, too.

    Args:
        x: On the root, the array; on the others, one like it.
        root: Position of the rank whose array it is.

    Returns:
        A copy of the root's array.
    """
    return resolve(group).perform(timeout, async_op, "broadcast", x, out, root=root)


@overload
def all_gather(x: ArrayLike, *, axis: int | None = None, **options: Unpack[SyncOut]) -> Array: ...
@overload
def all_gather(x: ArrayLike, *, axis: int | None = None, **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def all_gather(
    x: ArrayLike,
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the arrays of all ranks to every rank.

    Args:
        x: This rank's array.
        axis: None to stack the arrays along a new first axis, as `np.stack` does; a number to join them along
            that axis, as `np.concatenate` does.

    Returns:
        The arrays in the order of ranks: shape `(size, *x.shape)`, or `x.shape` with `axis` as many times as
        long.
    """
    return resolve(group).perform(timeout, async_op, "all_gather", x, out, axis=axis)


@overload
def gather(x: ArrayLike, root: int = 0, **options: Unpack[SyncOut]) -> Array | None: ...
@overload
def gather(x: ArrayLike, root: int = 0, **options: Unpack[AsyncOut]) -> Future[Array | None]: ...
@collective
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the arrays of all ranks to the root.

    Args:
        x: This rank's array.
        root: Position of the rank that gets them.
        out: Takes the result; on the root alone.

    Returns:
        On the root the arrays in the order of ranks, of shape `(size, *x.shape)`; None on the others.
    """
    return resolve(group).perform(timeout, async_op, "gather", x, out, root=root)


@overload
def scatter(x: ArrayLike | None = None, root: int = 0, **options: Unpack[SyncOut]) -> Array: ...
@overload
def scatter(x: ArrayLike | None = None, root: int = 0, **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Distribute the rows of the root's array: each rank gets one.

    The other ranks must say what they will receive: with an array of the dtype and shape of one row, which is
    neither looked at nor changed, or with `out`.

    Args:
        x: On the root, an array with one row for each rank along axis 0; on the others, one like a row, or
            None.
        root: Position of the rank that has the rows.

    Returns:
        The row at this rank's position.
    """
    return resolve(group).perform(timeout, async_op, "scatter", x, out, root=root)


@overload
def all_to_all(x: ArrayLike, **options: Unpack[SyncOut]) -> Array: ...
@overload
def all_to_all(x: ArrayLike, **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def all_to_all(
    x: ArrayLike,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Exchange blocks between all ranks: block j of rank i becomes block i of rank j.

    Args:
        x: An array whose axis 0 the size of the group divides; most simply with one row for each rank.

    Returns:
        An array of the same shape.
    """
    return resolve(group).perform(timeout, async_op, "all_to_all", x, out)


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

    All ranks must pass the same pairs, those that appear in none as well.

    Args:
        x: This rank's array.
        pairs: Positions; none may be twice a source or twice a target.

    Returns:
        The array that came, or zeros where no pair has this rank for its target.
    """
    return resolve(group).perform(timeout, async_op, "permute", x, out, pairs=pairs)


@overload
def send(x: ArrayLike, dst: int, **options: Unpack[Sync]) -> None: ...
@overload
def send(x: ArrayLike, dst: int, **options: Unpack[Async]) -> Future[None]: ...
@collective
def send(
    x: ArrayLike,
    dst: int,
    *,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an array to one rank, which must call `recv`.

    In the blocking form it returns once the array may be changed. An array of up to 16 KiB is buffered, so
    that this can be before the receiver's call: the first one that has not been received never waits. A
    larger one waits for the receiver, over whatever medium. Two ranks that both send a large array first
    wait for each other until their time runs out: use `async_op=True`, or `permute`.

    Sends and receives of two ranks match in their order, in each direction by itself. With `async_op=True`
    the array may be changed when the future is complete. The transfer progresses whether or not somebody
    waits for it; a thread that waits for the future drives it itself, which is fastest.

    Args:
        x: The array.
        dst: Position of the receiver.
    """
    return resolve(group).perform(timeout, async_op, "send", x, root=dst)


@overload
def recv(x: ArrayLike | None, src: int, **options: Unpack[SyncOut]) -> Array: ...
@overload
def recv(x: ArrayLike | None, src: int, **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def recv(
    x: ArrayLike | None,
    src: int,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive an array from one rank, which must call `send`.

    Sends and receives of two ranks match in their order, in each direction by itself, and independently of
    the group's collectives: receives can be started with `async_op=True` before the sends that they match.

    Args:
        x: An array of the dtype and shape that will come, which is neither looked at nor changed; None if
            `out` is given.
        src: Position of the sender.

    Returns:
        The array that came.
    """
    return resolve(group).perform(timeout, async_op, "recv", x, out, root=src)
