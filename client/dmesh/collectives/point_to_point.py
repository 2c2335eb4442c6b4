"""Transfers between two ranks; `api` has the rules for all functions.

```python
send(x, right, tag=1)
y = recv(None, ANY_SOURCE, tag=1, status=(status := Status()))  # dtype and shape travel with the array
```

* **Matching.** A receive takes an array that was sent with its tag, from its source: of several from one
  rank, the one that was sent first. `ANY_SOURCE` and `ANY_TAG` match all. Receives take arrays in the order
  in which they were made; but one from any source leaves to a later one, which names a source and no tag,
  what that rank sends without a tag.
* **Shape.** A template `x` says what must come; anything else is a `CollectiveMismatchError` on both ranks.
  Without one, a new array is made of the dtype and shape that were sent; or `out` takes the array, if it has
  the same dtype and room for it, and the beginning of `out` is returned, with the shape that was sent. A
  larger array is a `CollectiveMismatchError` on both ranks.
* **Media.** Arrays without a tag go over the group's fastest medium, those with one as messages.
* **Failures.** A rank that dies ends all calls of its group, as always. A receive from any source fails
  because ranks have left only once all have.
* **This rank.** A rank can send to itself. Such a send is buffered, whatever its size, and does not wait
  unless it is synchronous.
* **The edge.** With `NULL_PEER`, a send does nothing, and a receive returns `out`, unchanged, or None.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike

from dmesh.collectives.api import Async, AsyncOut, ProcessGroup, Sync, SyncOut, collective, resolve
from dmesh.collectives.envelope import ANY_SOURCE, ANY_TAG, NULL_PEER, Status, Wildcard
from dmesh.collectives.futures import Completed, Future, Joined
from dmesh.collectives.request import Array

Source = int | Literal[Wildcard.ANY_SOURCE, Wildcard.NULL_PEER]
Peer = int | Literal[Wildcard.NULL_PEER]
Tag = int | Literal[Wildcard.ANY_TAG]


@overload
def send(
    x: ArrayLike, dst: Peer, *, tag: int = 0, synchronous: bool = False, **options: Unpack[Sync]
) -> None: ...
@overload
def send(
    x: ArrayLike, dst: Peer, *, tag: int = 0, synchronous: bool = False, **options: Unpack[Async]
) -> Future[None]: ...
@collective
def send(
    x: ArrayLike,
    dst: Peer,
    *,
    tag: int = 0,
    synchronous: bool = False,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an array to one rank, which must call `recv`.

    In the blocking form it returns once the array may be changed. An array of up to 16 KiB is buffered, so
    that this can be before the receiver's call: the first one that has not been received never waits. A
    larger one waits for the receiver, over every medium. Two ranks that both send a large array first wait
    for each other until their time runs out: use `sendrecv`, `async_op=True`, or `permute`.

    Sends and receives of two ranks match in their order, in each direction and for each tag by itself. With
    `async_op=True` the array may be changed when the future is complete. The transfer progresses whether or
    not a thread waits for it; a thread that waits for the future drives it itself, which is fastest.

    Args:
        x: The array.
        dst: Position of the receiver; or `NULL_PEER`.
        tag: A number from 0 to 2147483647, which the receiver can ask for.
        synchronous: True to be complete only when the receiver has the array, however small it is; needs a
            tag of at least 1.
    """
    members = resolve(group)
    if dst is NULL_PEER:
        return Completed(None) if async_op else None
    if type(tag) is int and tag == 0 and not synchronous:
        return members.perform(timeout, async_op, "send", x, root=dst)
    more = {"synchronous": True} if synchronous else {}
    return members.perform(timeout, async_op, "send", x, root=dst, tag=tag, **more)


@overload
def recv(
    x: ArrayLike | None,
    src: Source,
    *,
    tag: Tag = 0,
    status: Status | None = None,
    **options: Unpack[SyncOut],
) -> Array: ...
@overload
def recv(
    x: ArrayLike | None,
    src: Source,
    *,
    tag: Tag = 0,
    status: Status | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array]: ...
@collective
def recv(
    x: ArrayLike | None,
    src: Source,
    *,
    tag: Tag = 0,
    status: Status | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive an array from one rank, or from any, which must call `send`.

    Sends and receives of two ranks match in their order, in each direction and for each tag by itself, and
    independently of the group's collectives: receives can be started with `async_op=True` before the sends
    that they match.

    ```python
    if dmesh.rank() == 0:
        dmesh.collectives.send(np.arange(3.0), 1, tag=7)
    elif dmesh.rank() == 1:
        assert list(dmesh.collectives.recv(None, 0, tag=7)) == [0.0, 1.0, 2.0]
    ```

    Args:
        x: An array of the dtype and shape that will come, which is neither looked at nor changed. None if
            they are unknown: then `out` may be larger than what comes.
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        tag: Tag of the array; or `ANY_TAG`.
        status: Is filled with the source, tag, dtype and shape of the received array.
        out: Takes the array; without `x`, its beginning does.

    Returns:
        The array that came.
    """
    members = resolve(group)
    if src is NULL_PEER:
        if status is not None:
            status.source = status.tag = status.dtype = None
            status.shape = ()
        return Completed(out) if async_op else out
    more: dict[str, Any] = {} if type(tag) is int and tag == 0 else {"tag": tag}
    if status is not None:
        more["status"] = status
    return members.perform(timeout, async_op, "recv", x, out, root=src, **more)


@overload
def sendrecv(
    x: ArrayLike,
    dst: Peer,
    like: ArrayLike | None,
    src: Source,
    *,
    sendtag: int = 0,
    recvtag: Tag = 0,
    status: Status | None = None,
    **options: Unpack[SyncOut],
) -> Array: ...
@overload
def sendrecv(
    x: ArrayLike,
    dst: Peer,
    like: ArrayLike | None,
    src: Source,
    *,
    sendtag: int = 0,
    recvtag: Tag = 0,
    status: Status | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array]: ...
def sendrecv(
    x: ArrayLike,
    dst: Peer,
    like: ArrayLike | None,
    src: Source,
    *,
    sendtag: int = 0,
    recvtag: Tag = 0,
    status: Status | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an array to one rank and receive one from the same or another rank, at the same time.

    Ranks that all call it do not wait for each other in a circle, whatever the arrays' size.

    Args:
        x: The array to send, which must not overlap `out`.
        dst: Position of the receiver; or `NULL_PEER`.
        like: An array of the dtype and shape to receive; None if they are unknown. See `recv`.
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        sendtag: Tag of `x`.
        recvtag: Tag of what is received; or `ANY_TAG`.
        status: Is filled with the source, tag, dtype and shape of the received array.
        out: Takes what is received; without `like`, its beginning does.
        group: Ranks that take part; None for all clients.
        timeout: Seconds; None for the cluster's limit.
        async_op: True to return a future at once.

    Returns:
        The array that came.

    Raises:
        CollectiveError: As `send` and `recv`.
    """
    members = resolve(group)
    if src is not NULL_PEER:
        members.requests.make("recv", like, out, root=src, tag=recvtag)  # refused before anything is sent
    sent: Future[None] = send(x, dst, tag=sendtag, group=members, timeout=timeout, async_op=True)
    if async_op:
        got = recv(
            like, src, tag=recvtag, status=status, group=members, out=out, timeout=timeout, async_op=True
        )
        return Joined(got, sent)
    try:
        if status is None and type(recvtag) is int and recvtag == 0:
            received = recv(like, src, group=members, out=out, timeout=timeout)  # perhaps on the fast path
        else:
            received = recv(like, src, tag=recvtag, status=status, group=members, out=out, timeout=timeout)
    finally:
        sent.exception()  # the array may be changed from now on
    sent.result()
    return received


def isend(
    x: ArrayLike, dst: Peer, *, tag: int = 0, group: ProcessGroup | None = None, timeout: float | None = None
) -> Future[None]:
    """Begin to send an array to one rank: `send` with `async_op=True`.

    ```python
    futures = [irecv(halo, left), isend(edge, right)]
    for future in futures:
        future.wait()
    ```

    Args:
        x: The array, which may be changed when the future is complete.
        dst: Position of the receiver; or `NULL_PEER`.
        tag: A number from 0 to 2147483647, which the receiver can ask for.
        group: Ranks that take part; None for all clients.
        timeout: Seconds; None for the cluster's limit.

    Returns:
        The future.

    Raises:
        CollectiveError: As `send`.
    """
    return send(x, dst, tag=tag, group=group, timeout=timeout, async_op=True)


def irecv(
    out: Array | None,
    src: Source,
    *,
    tag: Tag = 0,
    status: Status | None = None,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> Future[Array]:
    """Begin to receive an array: `recv(out, src, out=out, async_op=True)`, which stores it in `out`.

    Args:
        out: Takes the array, which must have its dtype and shape. None if they are unknown.
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        tag: Tag of the array; or `ANY_TAG`.
        status: Is filled with the source, tag, dtype and shape of the received array.
        group: Ranks that take part; None for all clients.
        timeout: Seconds; None for the cluster's limit.

    Returns:
        The future of `out`, or of a new array.

    Raises:
        CollectiveError: As `recv`.
    """
    return recv(out, src, tag=tag, status=status, group=group, out=out, timeout=timeout, async_op=True)


def probe(
    src: Source,
    *,
    tag: Tag = 0,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> Status:
    """Wait until an array can be received, and describe it without receiving it.

    A `recv(None, status.source, tag=status.tag)` of the same thread receives that array.

    Args:
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        tag: Tag of the array; or `ANY_TAG`.
        group: Ranks that take part; None for all clients.
        timeout: Seconds; None for the cluster's limit.

    Returns:
        Source, tag, dtype, shape and bytes of the array.

    Raises:
        CollectiveError: As `recv`.
    """
    members = resolve(group)
    if src is NULL_PEER:
        return Status()
    found: Status = members.perform(timeout, False, "probe", root=src, tag=tag)
    return found


def iprobe(src: Source, *, tag: Tag = 0, group: ProcessGroup | None = None) -> Status | None:
    """Describe an array that can be received now, without waiting; see `probe`.

    Args:
        src: Position of the sender; `ANY_SOURCE`; or `NULL_PEER`.
        tag: Tag of the array; or `ANY_TAG`.
        group: Ranks that take part; None for all clients.

    Returns:
        Source, tag, dtype, shape and bytes of the array; None if there is none.

    Raises:
        CollectiveError: The group has failed.
    """
    members = resolve(group)
    if src is NULL_PEER:
        return Status()
    found: Status | None = members.look(members.requests.make("probe", root=src, tag=tag))
    return found


__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "NULL_PEER",
    "Status",
    "iprobe",
    "irecv",
    "isend",
    "probe",
    "recv",
    "send",
    "sendrecv",
]
