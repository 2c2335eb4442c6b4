"""Collectives that are called again and again with arrays of one dtype and shape."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike

from dmesh.collectives.group import Group
from dmesh.collectives.reduction import canonical_op, resolve
from dmesh.collectives.request import Array
from dmesh.collectives.validation import as_input
from dmesh.collectives.world import group_or_world
from dmesh.errors import CollectiveTypeError, CollectiveValueError

_WHAT = "plan_all_reduce"


class PlannedAllReduce:
    """An all-reduce that is ready to be called; made by `plan_all_reduce`.

    Args:
        group: Who takes part.
        like: Of this dtype and shape are the contributions.
        op: As for `all_reduce`.
        result: Of this dtype is the result.
    """

    def __init__(self, group: Group, like: Array, op: str, result: np.dtype[Any]) -> None:
        self.input = empty_for(group, like.shape, like.dtype)
        """A place for contributions, from which others on the host can read them without a copy."""
        self.result = empty_for(group, like.shape, result)
        """Result of the last call; the next one overwrites it."""
        self._group = group
        self._op = op

    def __repr__(self) -> str:
        what = f"{self._op} of {self.input.dtype} {self.input.shape}"
        return f"<PlannedAllReduce: {what} in {self._group.label}>"

    @overload
    def __call__(
        self, x: Array | None = None, *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> Array: ...
    @overload
    def __call__(
        self, x: Array | None = None, *, timeout: float | None = None, async_op: Literal[True]
    ) -> Future[Array]: ...
    def __call__(
        self, x: Array | None = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Folds the contributions of all ranks; all of them must call their plan.

        Args:
            x: This rank's contribution; None for what stands in `input`.
            timeout: Seconds; see the module `api`.
            async_op: Return a future at once.

        Returns:
            `result`, or a future of it.

        Raises:
            CollectiveTypeError: `x` is no array, or has another dtype than was planned.
            CollectiveValueError: It has another shape.
            CollectiveError: As for `all_reduce`.
        """
        if x is None:
            x = self.input
        else:
            check_planned(x, self.input, self)
        group: Any = self._group  # the overload depends on `async_op`
        return group.all_reduce(x, self._op, out=self.result, timeout=timeout, async_op=async_op)


def plan_all_reduce(like: ArrayLike, op: str = "sum", *, group: Group | None = None) -> PlannedAllReduce:
    """Prepares an all-reduce that is called again and again; nothing is sent.

    ```python
    plan = dmesh.collectives.plan_all_reduce(like=gradient)
    while training:
        compute(out=plan.input)
        total = plan()              # the same array each time
    ```

    What is allocated and checked for a call has been when it is called: input and result are made here, in
    shared memory where there is some (see docs/shared-memory.md).

    Args:
        like: Of this dtype and shape are the contributions.
        op: As for `all_reduce`.
        group: Who takes part; None for all clients.

    Returns:
        What to call.

    Raises:
        CollectiveTypeError: The reduction has no meaning for the dtype.
        CollectiveValueError: There is no such reduction, or `like` is no array.
        SharedMemoryError: There is no more memory to share (`DMESH_SHARED_MEMORY`).
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    members = group_or_world(group)
    array = as_input(like, _WHAT)
    op = canonical_op(op)
    return PlannedAllReduce(members, array, op, resolve(op, array.dtype).result)


def check_planned(x: Array, like: Array, plan: object) -> None:
    """Checks a contribution to a plan.

    Args:
        x: The contribution.
        like: An array of the dtype and shape that were planned.
        plan: The plan, for messages.

    Raises:
        CollectiveTypeError: It is no array, or has another dtype.
        CollectiveValueError: It has another shape.
    """
    if not isinstance(x, np.ndarray) or x.dtype != like.dtype:
        found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise CollectiveTypeError(f"{plan!r} was called with {found}: plan another one for that")
    if x.shape != like.shape:
        raise CollectiveValueError(
            f"{plan!r} was called with an array of shape {x.shape}: plan another one for that"
        )


def empty_for(group: Group, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns an array that others on the host can read and write, where this client shares memory."""
    shared_memory = group.communicator.shared_memory
    pool = None if shared_memory is None else shared_memory.pool
    return np.empty(shape, dtype) if pool is None else pool.empty(shape, dtype)
