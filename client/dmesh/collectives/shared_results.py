"""Collectives whose result exists once on a host: all ranks read the same memory.

What costs time in large collectives of one host is that every rank writes a result of its own. Where members
share memory, a plan that is made here has two buffers in common, which its calls use by turns: who calls
again gives up the result of the last call.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dmesh._log import logger
from dmesh.collectives.backends.shm.arrays import PLACE_SIZE
from dmesh.collectives.group import Group
from dmesh.collectives.persistent import check_planned, empty_for
from dmesh.collectives.reduction import canonical_op, resolve
from dmesh.collectives.request import MAX_LENGTH, Array, text_from
from dmesh.collectives.validation import as_input, check_position
from dmesh.collectives.world import group_or_world
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    SharedMemoryError,
)

_LENDER = 0
"""Position of the member whose memory it is."""
_PAGE = 4096


class SharedPlan:
    """A collective that is ready to be called, whose result all ranks of a host have in common.

    Args:
        group: Who takes part.
        what: All that the members must agree on.
        shape: Of the result.
        dtype: Of the result.
    """

    def __init__(self, group: Group, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._group = group
        self._what = what
        self._turn = 0
        found = _common(group, what, 2 * _padded(shape, dtype))
        self.generation = group.generation
        """The generation of the group in which it can be called."""
        self.is_common = found is not None
        """True if the result is in common memory; else each rank has its own."""
        self._results = (
            [np.empty(shape, dtype), np.empty(shape, dtype)] if found is None else _cut(found, shape, dtype)
        )
        self._read_only = [_read_only(result) for result in self._results]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._what} in {self._group.label}>"

    def _check(self) -> None:
        self._group.refuse_forked_child()
        if self._group.generation != self.generation:
            raise CollectiveError(
                f"{self!r} was made before the members of {self._group.label} changed: make another one"
            )

    def _done(self) -> Array:
        turn, self._turn = self._turn, 1 - self._turn
        return self._read_only[turn]

    def _fill(self, into: Array, x: Array | None) -> None:
        """Puts a contribution into its place."""
        if x is not None:
            check_planned(x, into, self)
            into[...] = x


class PlannedAllGather(SharedPlan):
    """An all-gather that is ready to be called; made by `plan_all_gather`."""

    def __init__(self, group: Group, like: Array) -> None:
        super().__init__(
            group,
            text_from("plan_all_gather", [], like.dtype, like.shape),
            (group.size, *like.shape),
            like.dtype,
        )
        self._own = None if self.is_common else np.empty(like.shape, like.dtype)

    @property
    def input(self) -> Array:
        """The place of this rank's contribution to the next call; in common memory part of its result."""
        if self._own is not None:
            return self._own
        row: Array = self._results[self._turn][self._group.rank, ...]
        return row

    def __call__(self, x: Array | None = None, *, timeout: float | None = None) -> Array:
        """Gives all ranks the contributions of all; all of them must call their plan.

        Args:
            x: This rank's contribution; None for what stands in `input`.
            timeout: Seconds; see the module `api`.

        Returns:
            A read-only array of shape (ranks, *shape), which holds until the next call.

        Raises:
            CollectiveTypeError: `x` is no array, or has another dtype than was planned.
            CollectiveValueError: It has another shape.
            CollectiveError: As for `all_gather`; or the group's members have changed since it was planned.
        """
        self._check()
        self._fill(self.input, x)
        if self._own is None:
            self._group.barrier(timeout=timeout)
        else:
            self._group.all_gather(self._own, out=self._results[self._turn], timeout=timeout)
        return self._done()


class PlannedBroadcast(SharedPlan):
    """A broadcast that is ready to be called; made by `plan_broadcast`."""

    def __init__(self, group: Group, like: Array, root: int) -> None:
        super().__init__(
            group,
            text_from("plan_broadcast", [f"root={root}"], like.dtype, like.shape),
            like.shape,
            like.dtype,
        )
        self._root = root

    @property
    def input(self) -> Array:
        """Array that the next call gives to all, for the root to fill; in common memory it is the result."""
        return self._results[self._turn]

    def __call__(self, x: Array | None = None, *, timeout: float | None = None) -> Array:
        """Gives all ranks the root's array; all of them must call their plan.

        Args:
            x: On the root: the array; None for what stands in `input`. Not looked at elsewhere.
            timeout: Seconds; see the module `api`.

        Returns:
            A read-only array, which holds until the next call.

        Raises:
            CollectiveTypeError: `x` is no array, or has another dtype than was planned.
            CollectiveValueError: It has another shape.
            CollectiveError: As for `broadcast`; or the group's members have changed since it was planned.
        """
        self._check()
        if self._group.rank == self._root:
            self._fill(self.input, x)
        if self.is_common:
            self._group.barrier(timeout=timeout)
        else:
            self._group.broadcast(self.input, self._root, out=self.input, timeout=timeout)
        return self._done()


class PlannedSharedAllReduce(SharedPlan):
    """An all-reduce that is ready to be called; made by `plan_shared_all_reduce`."""

    def __init__(self, group: Group, like: Array, op: str, result: np.dtype[Any]) -> None:
        super().__init__(
            group, text_from("plan_shared_all_reduce", [op], like.dtype, like.shape), like.shape, result
        )
        self.input = empty_for(group, like.shape, like.dtype)
        """A place for contributions, from which others on the host can read them without a copy."""
        self._op = op

    def __call__(self, x: Array | None = None, *, timeout: float | None = None) -> Array:
        """Folds the contributions of all ranks; all of them must call their plan.

        Args:
            x: This rank's contribution; None for what stands in `input`. It is not changed, and not copied
                either if it is in shared memory.
            timeout: Seconds; see the module `api`.

        Returns:
            A read-only array, which holds until the next call.

        Raises:
            CollectiveTypeError: `x` is no array, or has another dtype than was planned.
            CollectiveValueError: It has another shape.
            CollectiveError: As for `all_reduce`; or the group's members have changed since it was planned.
        """
        self._check()
        if x is None:
            x = self.input
        check_planned(x, self.input, self)
        result = self._results[self._turn]
        if self.is_common:
            # Each member folds its part of all arrays, and puts it into the lender's result.
            lends = self._group.rank == _LENDER
            self._group.reduce(x, self._op, _LENDER, out=result if lends else None, timeout=timeout)
            self._group.barrier(timeout=timeout)
        else:
            self._group.all_reduce(x, self._op, out=result, timeout=timeout)
        return self._done()


def plan_all_gather(like: ArrayLike, *, group: Group | None = None) -> PlannedAllGather:
    """Prepares an all-gather that is called again and again, and whose result all ranks of a host share.

    ```python
    plan = dmesh.collectives.plan_all_gather(like=shard)
    while running:
        compute(out=plan.input)     # in place: nothing is copied at all
        everything = plan()         # read-only, the same memory on all ranks
    ```

    All members must call this, as any collective. Where they do not all share memory (docs/shared-memory.md),
    the plan works as well, with a result for each rank.

    Args:
        like: Of this dtype and shape are the contributions.
        group: Who takes part; None for all clients.

    Raises:
        CollectiveMismatchError: The members plan different things.
        CollectiveTypeError: The elements are not plain memory.
        CollectiveValueError: `like` is no array.
        CollectiveError: As for `all_gather`.
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    return PlannedAllGather(group_or_world(group), as_input(like, "plan_all_gather"))


def plan_broadcast(like: ArrayLike, root: int = 0, *, group: Group | None = None) -> PlannedBroadcast:
    """Prepares a broadcast that is called again and again, and whose result all ranks of a host share.

    Args:
        like: Of this dtype and shape is the array.
        root: Position of the one who has it.
        group: Who takes part; None for all clients.

    Raises:
        CollectiveValueError: `like` is no array, or there is no such root.
        CollectiveError: As for `plan_all_gather`.
    """
    members = group_or_world(group)
    root = check_position(root, members.size, "root", "plan_broadcast")
    return PlannedBroadcast(members, as_input(like, "plan_broadcast"), root)


def plan_shared_all_reduce(
    like: ArrayLike, op: str = "sum", *, group: Group | None = None
) -> PlannedSharedAllReduce:
    """Prepares an all-reduce that is called again and again, and whose result all ranks of a host share.

    Args:
        like: Of this dtype and shape are the contributions.
        op: As for `all_reduce`.
        group: Who takes part; None for all clients.

    Raises:
        CollectiveTypeError: The reduction has no meaning for the dtype.
        CollectiveValueError: There is no such reduction, or `like` is no array.
        SharedMemoryError: There is no more memory for the contributions (`DMESH_SHARED_MEMORY`).
        CollectiveError: As for `plan_all_gather`.
    """
    members = group_or_world(group)
    array = as_input(like, "plan_shared_all_reduce")
    op = canonical_op(op)
    return PlannedSharedAllReduce(members, array, op, resolve(op, array.dtype).result)


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of a result, in whole pages."""
    return -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // _PAGE) * _PAGE


def _cut(memory: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
    """Returns the two results that are in common memory."""
    count, step = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, _padded(shape, dtype)
    return [memory[at : at + count].view(dtype).reshape(shape) for at in (0, step)]


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _common(group: Group, what: str, nbytes: int) -> Array | None:
    """Finds out whether all members plan the same; gives them memory in common, or None if that cannot be."""
    communicator, members, me = group.communicator, group.size, group.rank
    shared_memory = communicator.shared_memory
    memory: Array | None = None
    place, refusal = bytes(PLACE_SIZE), ""
    if shared_memory is None or shared_memory.pool is None or not nbytes:
        refusal = "this client shares no memory"
    elif me == _LENDER:
        processes = {rank: communicator.process_of(rank) for rank in group.ranks}
        try:
            memory, place = shared_memory.lend(
                nbytes, group.ranks, me, lambda rank: communicator.process_of(rank) != processes[rank]
            )
        except SharedMemoryError as error:
            refusal = str(error)
    with contextlib.ExitStack() as undo:
        if memory is not None:
            assert shared_memory is not None
            undo.callback(shared_memory.take_back, place)
        text = what.encode().ljust(4 * MAX_LENGTH)[: 4 * MAX_LENGTH]
        told = group.all_gather(np.frombuffer(text + bytes([not refusal]) + place, np.uint8))
        _compare(group, [bytes(row[: 4 * MAX_LENGTH]).rstrip().decode(errors="replace") for row in told])
        able = [bool(row[4 * MAX_LENGTH]) for row in told]
        if all(able) and me != _LENDER:
            assert shared_memory is not None
            try:
                theirs = bytes(told[_LENDER][4 * MAX_LENGTH + 1 :])
                memory = shared_memory.borrow(theirs, nbytes, members, me)
            except (OSError, ValueError) as error:
                refusal = f"the memory of rank {group.ranks[_LENDER]} cannot be mapped: {error}"
        # If this call fails, others may have agreed already: then they say themselves when they are done.
        coming_to_nothing = undo.pop_all()
        if int(group.all_reduce(np.array(not refusal and all(able), np.int8), "min")):
            return memory
        coming_to_nothing.close()
    logger.info(
        "each rank of %s has a result of its own: %s", group.label, refusal or "others cannot share one"
    )
    return None


def _compare(group: Group, planned: list[str]) -> None:
    """Raises, on all members alike, if they do not plan the same."""
    if len(set(planned)) > 1:
        sides = ", ".join(
            f"rank {rank} planned {text}" for rank, text in zip(group.ranks, planned, strict=True)
        )
        raise CollectiveMismatchError(f"{group.label}: {sides}. All ranks must plan the same.")
