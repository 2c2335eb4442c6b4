"""Collectives that are planned once and called again and again, with arrays of one dtype and shape.

A plan allocates and validates once, and chooses its native call once. Plans whose result all ranks of a host
share are in `shared_results`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from dmesh import native
from dmesh.collectives.api import (
    ProcessGroup,
    all_reduce,
    barrier,
    exscan,
    reduce,
    reduce_scatter,
    scan,
)
from dmesh.collectives.api import resolve as group_or_world
from dmesh.collectives.data_movement import all_gather, all_to_all, broadcast, gather, permute, scatter
from dmesh.collectives.futures import Future
from dmesh.collectives.group import Group
from dmesh.collectives.operators import OpLike
from dmesh.collectives.point_to_point import recv, send
from dmesh.collectives.request import OPS, Array, Request
from dmesh.collectives.validation import as_input
from dmesh.errors import (
    CollectiveTypeError,
    CollectiveValueError,
    NativeCoreError,
)

_PLANNABLE: tuple[Callable[..., Any], ...] = (
    all_reduce, reduce, reduce_scatter, scan, exscan, broadcast, all_gather, gather, scatter, all_to_all,
    permute, barrier, send, recv,
)  # fmt: skip
_NATIVE = {"x": None, "op": "sum", "root": 0, "axis": None, "dst": None, "src": None, "out": None}
"""Arguments of calls that an endpoint can take whole, in the native core's order, and their defaults."""


class _Called:
    """Base of plans without the native core: all calls go to `_call`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plan."""
        return self._call(*args, **kwargs)

    _call: Any

    def prepare(self, *_: object) -> bool:
        """Return False: there is no endpoint that takes calls."""
        return False


def _base() -> Any:
    """Return the class from which plans inherit their calls: the native one, if there is one."""
    with contextlib.suppress(NativeCoreError):  # the caller that starts the collectives gets the reason
        core = native.core()
        return _Called if core is None else core.PlannedCall
    return _Called


_PlannedCall: Any = _base()


class Plan(_PlannedCall):  # type: ignore[misc]
    """Call that is prepared once and made many times; created by `plan` and `plan_all_reduce`.

    Where the group has a native endpoint, the first call prepares the others: dtypes, shapes, operation and
    memory are checked once, and each later call is a call of the endpoint alone. Other calls are validated
    once, unless what travels has to be copied out of the array first.

    Args:
        group: Ranks that take part.
        function: What is called.
        arguments: Its arguments, by name.
    """

    def __init__(self, group: Group, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._group, self._function, self._arguments = group, function, arguments
        x = arguments.get("x")
        self.input: Any = None if function is recv else x
        """This rank's contribution: its content when the plan is called counts."""
        request = self._request = self._validated(arguments)
        if isinstance(request, Request) and request.reduction is not None and request.reduction.op in OPS:
            arguments["op"] = request.reduction.op  # by its usual name, which the native core knows
        if _has_known_result(request):
            arguments["out"] = np.empty(request.shape, request.dtype)
            request = self._request = self._validated(arguments)
        self.result: Any = arguments.get("out")
        """Takes the result of each call; None if this rank gets none, or a new array each time."""
        self._is_reusable = not isinstance(request, Request) or _reads(request, self.input)
        self._is_usual = arguments.keys() <= _NATIVE.keys() and (
            function is not recv or self.input is not None
        )

    def __repr__(self) -> str:
        what = self._request.text if isinstance(self._request, Request) else self._function.__name__
        return f"<Plan: {what} in {self._group.label}>"

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Array | None = None, *, timeout: float | None = None, async_op: Literal[False] = False
        ) -> Any: ...
        @overload
        def __call__(
            self, x: Array | None = None, *, timeout: float | None = None, async_op: Literal[True]
        ) -> Future[Any]: ...
        def __call__(
            self, x: Array | None = None, *, timeout: float | None = None, async_op: bool = False
        ) -> Any:
            """Make the call; to the other ranks it is one like any other.

            Args:
                x: This rank's contribution, like the planned one; None for the content of `input`.
                timeout: Seconds; None for the cluster's limit.
                async_op: Return a future at once.

            Returns:
                What the function returns, in `result` if there is one; or a future of it.

            Raises:
                CollectiveTypeError: `x` is no array, or has another dtype than was planned.
                CollectiveValueError: It has another shape.
                CollectiveError: As for the function.
            """

    def _call(self, x: Array | None = None, *, timeout: float | None = None, async_op: bool = False) -> Any:
        arguments = self._arguments if x is None else {**self._arguments, "x": planned(self, x, self.input)}
        if not self._is_usual:
            reuses = x is None and self._is_reusable
            request = self._request if reuses else self._validated(arguments)
            if isinstance(request, Request):
                return self._group.call(request, timeout, async_op)
        found = self._function(**arguments, group=self._group, timeout=timeout, async_op=async_op)
        endpoint = self._endpoint()
        if self._is_usual and endpoint is not None and not async_op:
            values = tuple(self._arguments.get(name, usual) for name, usual in _NATIVE.items())
            self.prepare(self._group, endpoint, self._function.__name__, values)
        return found

    def _validated(self, arguments: dict[str, Any]) -> Any:
        """Return the request of a call; or its result, if nothing is sent."""
        return self._function(**arguments, group=_Validator(self._group))

    def _endpoint(self) -> Any:
        """Return the native endpoint for the call, once there is one."""
        generation, dst, src = self._group.current, self._arguments.get("dst"), self._arguments.get("src")
        if isinstance(dst, int):
            return generation.outgoing[dst]
        return generation.incoming[src] if isinstance(src, int) else generation.endpoint


class _Validator(ProcessGroup):
    """Stands in for a group whose calls are only validated: each returns its request."""

    def __init__(self, group: Group) -> None:
        self.requests = group.requests

    def call(self, request: Request, timeout: float | None, async_op: bool) -> Request:
        del timeout, async_op
        return request

    def look(self, request: Request) -> Request:
        return request


def _has_known_result(request: Any) -> bool:
    """Return whether this rank gets a result that can be allocated before the call, and is not yet."""
    return (
        isinstance(request, Request)
        and request.shape is not None
        and request.out is None
        and request.exchange is None
        and request.device is None
    )


def _reads(request: Request, x: Any) -> bool:
    """Return whether a request's input is the caller's array itself, which may change until the call."""
    if request.exchange is not None or request.device is not None:
        return False
    return request.source is None or (type(x) is np.ndarray and np.may_share_memory(request.source, x))


def plan(function: Callable[..., Any], *arguments: Any, group: Group | None = None, **named: Any) -> Plan:
    """Prepare a call that is made many times: check its arguments and allocate its buffers. Nothing is sent.

    ```python
    exchange = dmesh.collectives.plan(dmesh.collectives.all_to_all, x, out=y)
    while running:
        compute(out=x)
        exchange()                  # the content of x now; the result is in y
    ```

    Args:
        function: A function of `dmesh.collectives`, of arrays and not of objects: a collective, `send` or
            `recv`.
        arguments: Its arguments; without `out=`, an array for the result is made once.
        group: Ranks that take part; None for all clients.
        named: Its arguments by name, but for `timeout` and `async_op`, which belong to each call.

    Raises:
        CollectiveTypeError: The function cannot be planned, or an argument has the wrong type.
        CollectiveValueError: An argument is out of range, or the input is no array.
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    if function not in _PLANNABLE:
        names = ", ".join(known.__name__ for known in _PLANNABLE)
        raise CollectiveTypeError(f"plan needs a function of dmesh.collectives: {names}; got {function!r}")
    later = {"timeout", "async_op"} & named.keys()
    if later:
        raise CollectiveTypeError(f"{' and '.join(sorted(later))} belong to a plan's calls, not to the plan")
    try:
        bound = inspect.signature(function).bind(*arguments, **named).arguments
    except TypeError as error:
        raise CollectiveTypeError(f"plan of {function.__name__}: {error}") from None
    x = bound.get("x")
    if x is not None and not hasattr(x, "__array_interface__") and not hasattr(x, "__cuda_array_interface__"):
        raise CollectiveValueError(
            f"plan of {function.__name__} needs an array that each call reads, got {type(x).__name__}"
        )
    return Plan(members_of(group), function, bound)


def plan_all_reduce(like: ArrayLike, op: OpLike = "sum", *, group: Group | None = None) -> Plan:
    """Prepare an all-reduce with its own input and result arrays, in shared memory if possible.

    ```python
    plan = dmesh.collectives.plan_all_reduce(like=gradient)
    while training:
        compute(out=plan.input)
        total = plan()              # the same array each time
    ```

    Other ranks on the host read the input without a copy; see docs/shared-memory.md. Nothing is sent.

    Args:
        like: Has dtype and shape of the contributions.
        op: As for `all_reduce`.
        group: Ranks that take part; None for all clients.

    Raises:
        CollectiveTypeError: The reduction has no meaning for the dtype.
        CollectiveValueError: There is no such reduction, or `like` is no array.
        SharedMemoryError: There is no more memory to share (`DMESH_SHARED_MEMORY`).
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    members, array = members_of(group), as_input(like, "plan_all_reduce")
    request = members.requests.make("all_reduce", array, op=op)
    arguments = {"x": empty_shared(members, array.shape, array.dtype), "op": op}
    return Plan(members, all_reduce, {**arguments, "out": empty_shared(members, array.shape, request.dtype)})


def members_of(group: Group | None) -> Group:
    """Return the group that a function was given, or the world."""
    return cast(Group, group_or_world(group))


def empty_shared(group: Group, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array that others on the host can read and write, where this client shares memory."""
    pool = group.communicator.pool
    return np.empty(shape, dtype) if pool is None else pool.empty(shape, dtype)


def planned(plan: object, x: Array | None, place: Array) -> Array:
    """Return a contribution, which must be like its place; the place itself if there is none."""
    if x is None:
        return place
    if place is None:
        raise CollectiveTypeError(f"{plan!r} takes no array argument")
    if not isinstance(x, np.ndarray) or x.dtype != place.dtype:
        found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise CollectiveTypeError(f"{plan!r} was called with {found}: make another plan for it")
    if x.shape != place.shape:
        raise CollectiveValueError(
            f"{plan!r} was called with an array of shape {x.shape}: make another plan for it"
        )
    return x
