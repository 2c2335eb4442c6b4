"""Collectives that move arrays without changing them; `api` says what holds for all."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Literal, overload

from numpy.typing import ArrayLike

from dmesh.collectives.api import ProcessGroup, fast_path, resolve
from dmesh.collectives.request import Array


@overload
def broadcast(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def broadcast(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def broadcast(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gives every rank the root's array.

    The other ranks must say what they will receive with an array of the same dtype and shape; its elements
    are not looked at and not changed, unless it is `out`, too.

    Args:
        x: On the root, the array; on the others, one like it.
        root: Position of the rank whose array it is.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        A copy of the root's array.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("broadcast", x, out, root=root), timeout, async_op)


@overload
def all_gather(
    x: ArrayLike,
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def all_gather(
    x: ArrayLike,
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def all_gather(
    x: ArrayLike,
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gives every rank the arrays of all.

    Args:
        x: This rank's array.
        axis: None to stack the arrays along a new first axis, as `np.stack` does; a number to join them along
            that axis, as `np.concatenate` does.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The arrays in the order of ranks: shape `(size, *x.shape)`, or `x.shape` with `axis` as many times as
        long.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("all_gather", x, out, axis=axis), timeout, async_op)


@overload
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array | None: ...
@overload
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array | None]: ...
@fast_path
def gather(
    x: ArrayLike,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gives the root the arrays of all ranks.

    Args:
        x: This rank's array.
        root: Position of the rank that gets them.
        group: Who takes part; None for all clients.
        out: Takes the result; on the root alone.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        On the root the arrays in the order of ranks, of shape `(size, *x.shape)`; None on the others.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("gather", x, out, root=root), timeout, async_op)


@overload
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def scatter(
    x: ArrayLike | None = None,
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gives every rank its row of the root's array.

    The other ranks must say what they will receive: with an array of the dtype and shape of one row, which is
    neither looked at nor changed, or with `out`.

    Args:
        x: On the root, an array with one row for each rank along axis 0; on the others, one like a row, or
            None.
        root: Position of the rank whose rows they are.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The row at this rank's position.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("scatter", x, out, root=root), timeout, async_op)


@overload
def all_to_all(
    x: ArrayLike,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def all_to_all(
    x: ArrayLike,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def all_to_all(
    x: ArrayLike,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges blocks between all ranks: block j of rank i becomes block i of rank j.

    Args:
        x: An array whose axis 0 the size of the group divides; most simply with one row for each rank.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        An array of the same shape.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("all_to_all", x, out), timeout, async_op)


@overload
def permute(
    x: ArrayLike,
    pairs: Iterable[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def permute(
    x: ArrayLike,
    pairs: Iterable[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def permute(
    x: ArrayLike,
    pairs: Iterable[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Moves arrays between ranks along (source, target) pairs, as JAX's `ppermute` does.

    All ranks must pass the same pairs, those that appear in none as well.

    Args:
        x: This rank's array.
        pairs: Positions; none may be twice a source or twice a target.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The array that came, or zeros where no pair has this rank for its target.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("permute", x, out, pairs=pairs), timeout, async_op)


@overload
def send(
    x: ArrayLike,
    dst: int,
    *,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> None: ...
@overload
def send(
    x: ArrayLike,
    dst: int,
    *,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[None]: ...
@fast_path
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
        group: Who takes part; None for all clients.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("send", x, root=dst), timeout, async_op)


@overload
def recv(
    x: ArrayLike | None,
    src: int,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def recv(
    x: ArrayLike | None,
    src: int,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
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
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The array that came.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: The elements are Python objects, or `out` has another dtype.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("recv", x, out, root=src), timeout, async_op)
