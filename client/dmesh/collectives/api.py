"""Collectives as functions: on the world of the running cluster, or on the group that is named.

What holds for all of them:

* All members of the group must call the same function, with arrays of the same dtype and shape and the same
  arguments, in the same order. A mismatch is a `CollectiveMismatchError` on every rank.
* Arrays may have any shape, order and byte order; results are in C order and native byte order. Any dtype
  whose elements are plain memory can be moved, including those of ml_dtypes, strings, dates and structures;
  object arrays are refused.
* `root`, `src` and `dst` are positions in the group, which for the world are client ids.
* `out` takes the result in place of a new array: same dtype and shape, writable, and either the input itself
  or separate from it. It is returned. What it holds after an error is not defined.
* `timeout` is in seconds from when the call begins; None means the cluster's `DMESH_COLLECTIVE_TIMEOUT`.
  Running out of time is an error on all ranks.
* With `async_op=True` the function returns a `concurrent.futures.Future` of the result at once. A group's
  asynchronous calls are carried out one after the other by a thread of its own. Leave arrays alone until the
  future is done. It cannot be cancelled.
* Nothing is sent before the arguments have been checked. After any other error the group cannot be used any
  more.
* Arrays on GPUs (`cupy.ndarray`) go through NCCL, and so do their results: `all_reduce`, `reduce`,
  `broadcast`, `all_gather`, `reduce_scatter`, `all_to_all`, `send` and `recv` take them. docs/gpu.md says
  what is different then.
* A call returns when this rank has its result and all members have made the call; `send` and `recv` concern
  their two ranks alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast, overload

from numpy.typing import ArrayLike, DTypeLike

from dmesh import native
from dmesh.collectives.request import Array, Request, Requests
from dmesh.errors import CollectiveTypeError, NativeCoreError
from dmesh.runtime import context

F = TypeVar("F", bound=Callable[..., Any])

NATIVE = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "all_to_all",
    "send",
    "recv",
)
"""Functions that the native core can take."""


class ProcessGroup(ABC):
    """Group of clients, as the public functions see it; see `group.Group`."""

    requests: Requests
    """Makes the requests of this rank's calls."""

    @property
    def part(self) -> World:
        """The group as the part of the process-wide state that functions use if they are given no group."""
        return World(self)

    @abstractmethod
    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Carry out a validated call."""


@dataclass(frozen=True, slots=True)
class World:
    """Group of all clients, as a part of the process-wide state."""

    group: ProcessGroup
    """The group."""


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group that a function was given, or the world.

    Raises:
        CollectiveTypeError: It is no group.
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    if group is None:
        return context.current().get(World).group
    if not isinstance(group, ProcessGroup):
        raise CollectiveTypeError(f"group must be a dmesh.collectives.Group, got {type(group).__name__}")
    return group


def fast_path(function: F) -> F:
    """Let the native core take the usual calls of a public function; see `fast_path.c` in `client/native`."""
    try:
        core = native.core()
    except NativeCoreError:
        return function  # whoever starts the collectives hears of it
    if core is None or function.__name__ not in NATIVE:
        return function
    return cast(F, core.FastPath(function.__name__, function, resolve))


class method(Generic[F]):
    """Method of groups: a public function with `group=` this group.

    Args:
        function: The public function.
    """

    def __new__(cls, function: F) -> method[F]:
        """Return the native core's method, if it has one."""
        native_method = getattr(function, "method", None)
        return super().__new__(cls) if native_method is None else cast("method[F]", native_method)

    def __init__(self, function: F) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __get__(self, group: object, owner: type) -> F:
        if group is None:

            def unbound(group: ProcessGroup, /, *args: Any, **kwargs: Any) -> Any:
                return self._function(*args, group=group, **kwargs)

            return cast(F, unbound)

        def bound(*args: Any, **kwargs: Any) -> Any:
            return self._function(*args, group=group, **kwargs)

        return cast(F, bound)


@overload
def all_reduce(
    x: ArrayLike,
    op: str = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    compress: DTypeLike | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def all_reduce(
    x: ArrayLike,
    op: str = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    compress: DTypeLike | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def all_reduce(
    x: ArrayLike,
    op: str = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    compress: DTypeLike | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces the arrays of all ranks element by element; every rank gets the result.

    The contributions are folded in the order of ranks, once for every element: the result has the same bits
    on all ranks and in every run. Large arrays of several ranks on each of several hosts are folded host by
    host (see docs/tcp.md), with the same bits on all ranks and in every run, too.

    Args:
        x: This rank's contribution.
        op: `sum`, `prod`, `min`, `max`, `mean`, `any`, `all`, `bitwise_and`, `bitwise_or` or `bitwise_xor`
            (short: `band`, `bor`, `bxor`); `dmesh.collectives.reduction` says what each means for each dtype.
        group: Who takes part; None for all clients.
        out: Takes the result.
        compress: `float16` or `bfloat16`: the arrays, of float32 or float64, travel as this. Half the bytes
            or less, but what each rank contributes, and the result, are rounded to 11 or 8 bits. They are
            folded in float32. All ranks must ask for the same.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The result, of `x`'s shape.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: `op` has no meaning for the dtype, `out` has another, or it cannot be compressed.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("all_reduce", x, out, op, compress=compress), timeout, async_op)


@overload
def reduce(
    x: ArrayLike,
    op: str = "sum",
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array | None: ...
@overload
def reduce(
    x: ArrayLike,
    op: str = "sum",
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array | None]: ...
@fast_path
def reduce(
    x: ArrayLike,
    op: str = "sum",
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces the arrays of all ranks element by element; the root gets the result.

    The bits are those of `all_reduce`.

    Args:
        x: This rank's contribution.
        op: `sum`, `prod`, `min`, `max`, `mean`, `any`, `all`, `bitwise_and`, `bitwise_or` or `bitwise_xor`
            (short: `band`, `bor`, `bxor`); `dmesh.collectives.reduction` says what each means for each dtype.
        root: Position of the rank that gets the result.
        group: Who takes part; None for all clients.
        out: Takes the result; on the root alone.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        The result on the root, None on the others.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: `op` has no meaning for the dtype, or `out` has another.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("reduce", x, out, op, root), timeout, async_op)


@overload
def reduce_scatter(
    x: ArrayLike,
    op: str = "sum",
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[False] = False,
) -> Array: ...
@overload
def reduce_scatter(
    x: ArrayLike,
    op: str = "sum",
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: Literal[True],
) -> Future[Array]: ...
@fast_path
def reduce_scatter(
    x: ArrayLike,
    op: str = "sum",
    *,
    axis: int | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces the arrays of all ranks; each rank gets its own part of the result.

    The bits are those of `all_reduce`.

    Args:
        x: This rank's contribution: one row for each rank along axis 0, unless `axis` is given.
        op: `sum`, `prod`, `min`, `max`, `mean`, `any`, `all`, `bitwise_and`, `bitwise_or` or `bitwise_xor`
            (short: `band`, `bor`, `bxor`); `dmesh.collectives.reduction` says what each means for each dtype.
        axis: None to get the row `x[rank]` of the result, without that axis; a number to cut that axis, whose
            length the size of the group must divide, and get this rank's block.
        group: Who takes part; None for all clients.
        out: Takes the result.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Returns:
        This rank's row or block of the result.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveTypeError: `op` has no meaning for the dtype, or `out` has another.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("reduce_scatter", x, out, op, axis=axis), timeout, async_op)


@overload
def barrier(
    *, group: ProcessGroup | None = None, timeout: float | None = None, async_op: Literal[False] = False
) -> None: ...
@overload
def barrier(
    *, group: ProcessGroup | None = None, timeout: float | None = None, async_op: Literal[True]
) -> Future[None]: ...
@fast_path
def barrier(
    *, group: ProcessGroup | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Waits until all ranks have come.

    Args:
        group: Who takes part; None for all clients.
        timeout: Seconds; None for the cluster's limit.
        async_op: Whether to return a future at once.

    Raises:
        CollectiveMismatchError: Another rank called something else.
        CollectiveTimeoutError: The time ran out, here or on another rank.
        CollectiveValueError: An argument is out of range.
        PeerLostError: A member of the group died or left.
    """
    members = resolve(group)
    return members.call(members.requests.make("barrier"), timeout, async_op)
