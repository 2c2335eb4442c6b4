"""Collectives as functions: on the world of the running cluster, or on the group that is named.

Rules for all of them:

* All members of the group must call the same function, with arrays of the same dtype and shape and the same
  arguments, in the same order. A mismatch is a `CollectiveMismatchError` on every rank.
* Arrays may have any shape, order and byte order; results are in C order and native byte order. Any dtype
  whose elements are plain memory can be moved, including those of ml_dtypes, strings, dates and structures;
  object arrays are refused.
* With `counts`, the lengths of the ranks' blocks along one axis may differ, and may be 0:
  `all_gather(x, axis=0, counts="exchange")` joins arrays as `np.concatenate` does. The other axes must agree.
* Arrays on a CPU of libraries that export DLPack (PyTorch, JAX) and buffers (`array.array`, bytearray,
  memoryview) are taken as they are, without a copy, also as `out`. Results are NumPy arrays, or `out`.
* `root`, `src` and `dst` are positions in the group, which for the world are client ids.
* `out` takes the result in place of a new array: same dtype and shape, and writable. It is returned. What it
  holds after an error is not defined. It may overlap the input, which is copied first if necessary. No
  copy is made if both are the same array (except in `all_to_all` and `permute`), or if one of them is this
  rank's own block of the other: `all_gather(out[rank], out=out)`, `reduce_scatter(x, out=x[rank])`.
* `timeout` is in seconds from when the call begins; None means the cluster's `DMESH_COLLECTIVE_TIMEOUT`.
  Running out of time is an error on all ranks.
* With `async_op=True` the function returns a future of the result at once: a `concurrent.futures.Future`,
  with `wait()` for `result()`. A group's asynchronous calls are carried out one after the other by a thread
  of its own. Leave arrays alone until the future is done. It cannot be cancelled.
* Nothing is sent before the arguments have been checked. After any other error the group cannot be used
  until all its members `reset` it, or the survivors `shrink` it.
* Arrays on GPUs (`cupy.ndarray`) go through NCCL, and so do their results: `all_reduce`, `reduce`,
  `broadcast`, `all_gather`, `reduce_scatter`, `all_to_all`, `send` and `recv` take them. docs/gpu.md says
  what is different then.
* A call returns when this rank has its result and all members have made the call; `send` and `recv` concern
  their two ranks alone.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar, Unpack, cast, overload

from numpy.typing import ArrayLike, DTypeLike

from dmesh import native
from dmesh.collectives.futures import Future
from dmesh.collectives.operators import OpLike
from dmesh.collectives.request import Array, Request, Requests
from dmesh.errors import CollectiveTypeError, NativeCoreError
from dmesh.runtime import context

F = TypeVar("F", bound=Callable[..., Any])

Counts = Sequence[int] | Literal["exchange"]
"""Lengths of the ranks' blocks; `"exchange"` where this rank does not know them."""

_PYTHON_ONLY = ("scatter", "permute", "scan", "exscan")
_ARGUMENTS = {
    "op": "`sum`, `prod`, `min`, `max`, `mean`, `any`, `all`, `bitwise_and`, `bitwise_or` or `bitwise_xor`\n"
    "        (short: `band`, `bor`, `bxor`); `dmesh.collectives.reduction` says what they mean for a dtype.\n"
    "        NumPy arrays also by `min_location`, `max_location`, a ufunc, a function of two arrays or an\n"
    "        `Op`; see `dmesh.collectives.operators`.",
    "out": "Array for the result.",
    "serializer": "Encoding in place of MessagePack: a module or object with `dumps` and `loads`, such as\n"
    "        `json`, or a pair of these functions. With `pickle`, any sender can run code here.",
    "group": "Ranks that take part; None for all clients.",
    "timeout": "Seconds; None for the cluster's limit.",
    "async_op": "True to return a future at once.",
}
_RAISES = """

Raises:
    CollectiveMismatchError: Another rank made a different call.
    CollectiveTimeoutError: The call timed out, on this rank or on another.
    CollectiveTypeError: An argument has the wrong type, or the elements cannot be moved or reduced.
    CollectiveValueError: An argument is out of range.
    PeerLostError: A member of the group died or left."""


class ProcessGroup(ABC):
    """Group of clients, as the public functions see it; see `group.Group`."""

    requests: Requests
    """Makes the requests of this rank's calls."""

    def perform(self, timeout: float | None, async_op: bool, kind: str, *arguments: Any, **named: Any) -> Any:
        """Validate and carry out a call; see `Requests.make` for its arguments."""
        return self.call(self.requests.make(kind, *arguments, **named), timeout, async_op)

    @abstractmethod
    def call(self, request: Request, timeout: float | None, async_op: bool) -> Any:
        """Carry out a validated call."""

    @abstractmethod
    def look(self, request: Request) -> Any:
        """Return the message that a probe finds without waiting; None if there is none."""


@dataclass(frozen=True, slots=True)
class World:
    """Group of all clients, as a part of the process-wide state."""

    group: ProcessGroup


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group that a function was given, or the world."""
    if group is None:
        state = context.process.get().context
        world = None if state is None else state.parts.get(World)
        return world.group if isinstance(world, World) else context.current().get(World).group
    if not isinstance(group, ProcessGroup):
        raise CollectiveTypeError(f"group must be a dmesh.collectives.Group, got {type(group).__name__}")
    return group


def collective(function: F) -> F:
    """Complete a function's docstring, and let the native core take its usual calls; see `fast_path.c`."""
    function.__doc__ = complete(function.__doc__, inspect.signature(function).parameters)
    try:
        core = native.core()
    except NativeCoreError:
        return function  # the caller that starts the collectives gets the reason
    name = function.__name__
    if core is None or name in _PYTHON_ONLY or name.endswith("_object"):
        return function
    return cast(F, core.FastPath(name, function, context.process, World))


def complete(docstring: str | None, arguments: Iterable[str]) -> str | None:
    """Add to a docstring what all functions share; the documentation site calls this, too."""
    if docstring is None:  # python -OO
        return None
    head, returns, result = inspect.cleandoc(docstring).partition("\n\nReturns:\n")
    if "\n\nArgs:\n" not in head:
        head += "\n\nArgs:"
    for name, text in _ARGUMENTS.items():
        if name in arguments and f"\n    {name}: " not in head:
            head += f"\n    {name}: {text}"
    return head + returns + result + _RAISES


class method(Generic[F]):
    """Method of groups: a public function with `group=` this group."""

    def __new__(cls, function: F) -> method[F]:
        """Return the native core's method, if it has one."""
        native_method = getattr(function, "method", None)
        return super().__new__(cls) if native_method is None else cast("method[F]", native_method)

    def __init__(self, function: F) -> None:
        @wraps(function)
        def unbound(group: ProcessGroup, /, *args: Any, **kwargs: Any) -> Any:
            return function(*args, group=group, **kwargs)

        self._unbound: Any = unbound

    def __get__(self, group: object, owner: type) -> F:
        return cast(F, self._unbound.__get__(group, owner))


class Sync(TypedDict, total=False):
    """Arguments of all calls that return when they are complete."""

    group: ProcessGroup | None
    timeout: float | None
    async_op: Literal[False]


class Async(TypedDict, total=False):
    """Arguments of all calls that return a future."""

    group: ProcessGroup | None
    timeout: float | None
    async_op: Required[Literal[True]]


class SyncOut(Sync, total=False):
    """Options of calls with a result."""

    out: Array | None


class AsyncOut(Async, total=False):
    """Options of calls with a result."""

    out: Array | None


@overload
def all_reduce(
    x: ArrayLike, op: OpLike = "sum", *, compress: DTypeLike | None = None, **options: Unpack[SyncOut]
) -> Array: ...
@overload
def all_reduce(
    x: ArrayLike, op: OpLike = "sum", *, compress: DTypeLike | None = None, **options: Unpack[AsyncOut]
) -> Future[Array]: ...
@collective
def all_reduce(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    compress: DTypeLike | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the arrays of all ranks element by element; every rank gets the result.

    The contributions are reduced in the order of ranks, once for every element: the result has the same bits
    on all ranks and in every run. Large arrays of several ranks on each of several hosts are folded host by
    host (see docs/tcp.md), again with the same bits on all ranks and in every run.

    ```python
    total = dmesh.collectives.all_reduce(np.full(3, dmesh.rank() + 1))
    assert total[0] == sum(range(1, dmesh.size() + 1))
    largest = dmesh.collectives.all_reduce(np.float32(dmesh.rank()), "max")
    assert largest == dmesh.size() - 1
    ```

    Args:
        x: This rank's contribution: an array or a number.
        compress: `float16` or `bfloat16`: dtype in which arrays of float32 or float64 are sent. It halves the
            bytes or better, but rounds the contributions and the result to 11 or 8 bits. The reduction is in
            float32. All ranks must pass the same.

    Returns:
        The result, of `x`'s shape.
    """
    members = resolve(group)
    return members.call(
        members.requests.make("all_reduce", x, out, op=op, compress=compress), timeout, async_op
    )


@overload
def reduce(x: ArrayLike, op: OpLike = "sum", root: int = 0, **options: Unpack[SyncOut]) -> Array | None: ...
@overload
def reduce(
    x: ArrayLike, op: OpLike = "sum", root: int = 0, **options: Unpack[AsyncOut]
) -> Future[Array | None]: ...
@collective
def reduce(
    x: ArrayLike,
    op: OpLike = "sum",
    root: int = 0,
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the arrays of all ranks element by element; the root gets the result.

    The bits are those of `all_reduce`.

    ```python
    total = dmesh.collectives.reduce(np.ones(2), root=0)
    assert (total is None) == (dmesh.rank() != 0)
    ```

    Args:
        x: This rank's contribution.
        root: Position of the rank that gets the result.
        out: Array for the result; on the root only.

    Returns:
        The result on the root, None on the others.
    """
    return resolve(group).perform(timeout, async_op, "reduce", x, out, op=op, root=root)


@overload
def reduce_scatter(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    **options: Unpack[SyncOut],
) -> Array: ...
@overload
def reduce_scatter(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    **options: Unpack[AsyncOut],
) -> Future[Array]: ...
@collective
def reduce_scatter(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    axis: int | None = None,
    counts: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the arrays of all ranks; each rank gets its own part of the result.

    The bits are those of `all_reduce`.

    ```python
    part = dmesh.collectives.reduce_scatter(np.ones((dmesh.size(), 4)))
    assert part.shape == (4,) and part[0] == dmesh.size()
    ```

    Args:
        x: This rank's contribution: one row for each rank along axis 0, unless `axis` is given.
        axis: None to get the row `x[rank]` of the result, without that axis; a number to cut that axis, whose
            length the size of the group must divide, and get this rank's block.
        counts: For blocks whose lengths along the axis differ: these lengths, by rank, the same on all ranks.
            The axis is 0 then, unless it is given.

    Returns:
        This rank's row or block of the result.
    """
    return resolve(group).perform(
        timeout, async_op, "reduce_scatter", x, out, op=op, axis=axis, counts=counts
    )


@overload
def scan(x: ArrayLike, op: OpLike = "sum", **options: Unpack[SyncOut]) -> Array: ...
@overload
def scan(x: ArrayLike, op: OpLike = "sum", **options: Unpack[AsyncOut]) -> Future[Array]: ...
@collective
def scan(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the arrays of the ranks up to each rank, element by element: an inclusive prefix reduction.

    The contributions are folded in the order of ranks; the last rank's result is that of `all_reduce`.

    Args:
        x: This rank's contribution.

    Returns:
        The reduction of the arrays of the ranks 0 to this one, of `x`'s shape.
    """
    return resolve(group).perform(timeout, async_op, "scan", x, out, op=op)


@overload
def exscan(x: ArrayLike, op: OpLike = "sum", **options: Unpack[SyncOut]) -> Array | None: ...
@overload
def exscan(x: ArrayLike, op: OpLike = "sum", **options: Unpack[AsyncOut]) -> Future[Array | None]: ...
@collective
def exscan(
    x: ArrayLike,
    op: OpLike = "sum",
    *,
    group: ProcessGroup | None = None,
    out: Array | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the arrays of the ranks before each rank, element by element: an exclusive prefix reduction.

    The contributions are folded in the order of ranks. No rank is before rank 0: it gets the operation's
    identity, which is NumPy's: 0 for `sum`, 1 for `prod`, all bits for `bitwise_and`. `min`, `max`, `mean`
    and those with location have none; then rank 0 gets None, and `out` stays as it is.

    Args:
        x: This rank's contribution; the last rank's counts for nothing, but must be like the others'.

    Returns:
        The reduction of the arrays of all ranks before this one, of `x`'s shape; None on rank 0 if the
        operation has no identity.
    """
    return resolve(group).perform(timeout, async_op, "exscan", x, out, op=op)


@overload
def barrier(**options: Unpack[Sync]) -> None: ...
@overload
def barrier(**options: Unpack[Async]) -> Future[None]: ...
@collective
def barrier(
    *, group: ProcessGroup | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Wait until all ranks have called it."""
    return resolve(group).perform(timeout, async_op, "barrier")
