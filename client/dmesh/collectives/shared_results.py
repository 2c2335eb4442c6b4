"""Collectives that are called again and again, and whose result all ranks of a host share.

In large collectives of one host, most time is lost because every rank writes a result of its own. Where the
members share memory, a plan's result exists once: two buffers that its calls use by turns. A call gives up
the result of the last one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dmesh._log import logger
from dmesh.collectives.api import Counts
from dmesh.collectives.backends.shm.arrays import PLACE_SIZE
from dmesh.collectives.group import Group
from dmesh.collectives.persistent import empty_shared, members_of, planned
from dmesh.collectives.reduction import canonical_op, resolve
from dmesh.collectives.request import MAX_LENGTH, Array, Request, text_from
from dmesh.collectives.validation import as_input, check_position
from dmesh.errors import CollectiveError, CollectiveMismatchError, SharedMemoryError

_LENDER = 0
"""Position of the member whose memory the results are in."""
_PAGE = 4096
_NEVER, _NOT_NOW, _CAN = range(3)
"""What a member says of memory in common: it has none at all, not so much at the moment, or enough."""
_TEXT = 4 * MAX_LENGTH
"""Bytes of the text that members compare, in UTF-8."""


class SharedPlan(ABC):
    """A collective that is ready to be called, whose result all ranks of a host have in common.

    Args:
        group: Ranks that take part.
        what: Text of all that the members must agree on.
        shape: Shape of the result.
        dtype: Its dtype.
    """

    def __init__(self, group: Group, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._group = group
        self._what = what
        self._turn = 0
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        padded = -(-nbytes // _PAGE) * _PAGE
        found = common_memory(group, what, 2 * padded)
        self.generation = group.generation
        """The generation of the group in which it can be called."""
        self._of = group.id  # another one after a reset: then the ranks may be in different turns
        self.is_common = found is not None
        """True if the result is in common memory; else each rank has its own."""
        if found is None:
            self._results = [np.empty(shape, dtype), np.empty(shape, dtype)]
        else:
            self._results = [found[at : at + nbytes].view(dtype).reshape(shape) for at in (0, padded)]
        self._views = [result.view() for result in self._results]
        for view in self._views:
            view.flags.writeable = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._what} in {self._group.label}>"

    def __call__(self, x: Array | None = None, *, timeout: float | None = None) -> Array:
        """Carry the collective out; all ranks must call their plan.

        Args:
            x: This rank's contribution, of a broadcast the root's array; None for the content of `input`. It
                is not changed.
            timeout: Seconds; None for the cluster's limit.

        Returns:
            A read-only array, which holds until the next call.

        Raises:
            CollectiveTypeError: `x` is no array, or has another dtype than was planned.
            CollectiveValueError: It has another shape.
            CollectiveError: As for the collective; or the group was reset, or has other members, since.
        """
        self._group.refuse_forked_child()
        if (self._group.generation, self._group.id) != (self.generation, self._of):
            changed = "was reset" if self._group.generation == self.generation else "got other members"
            raise CollectiveError(f"{self!r} was made before {self._group.label} {changed}: make another one")
        self._run(x, timeout)
        turn, self._turn = self._turn, 1 - self._turn
        return self._views[turn]

    @abstractmethod
    def _run(self, x: Array | None, timeout: float | None) -> None:
        """Put the result of the call whose turn it is into its place."""


class PlannedAllGather(SharedPlan):
    """An all-gather that is ready to be called; made by `plan_all_gather`.

    The result has shape (ranks, *shape), or with `counts` the arrays joined along axis 0.
    """

    def __init__(self, group: Group, like: Array, counts: tuple[int, ...] | None = None) -> None:
        self._counts = counts
        self._place: int | slice = group.rank
        arguments, shape = [], (group.size, *like.shape)
        if counts is not None:
            begin = sum(counts[: group.rank])
            self._place = slice(begin, begin + counts[group.rank])
            arguments, shape = [f"counts={list(counts)}"], (sum(counts), *like.shape[1:])
        what = text_from("plan_all_gather", arguments, like.dtype, like.shape if counts is None else shape)
        super().__init__(group, what, shape, like.dtype)

    @property
    def input(self) -> Array:
        """The place of this rank's contribution to the next call: part of its result."""
        return self._results[self._turn][self._place, ...]

    def _run(self, x: Array | None, timeout: float | None) -> None:
        _fill(self, self.input, x)
        if self.is_common:
            self._group.barrier(timeout=timeout)
        else:
            result = self._results[self._turn]
            self._group.all_gather(self.input, out=result, counts=self._counts, timeout=timeout)


class PlannedBroadcast(SharedPlan):
    """A broadcast that is ready to be called; made by `plan_broadcast`."""

    def __init__(self, group: Group, like: Array, root: int) -> None:
        what = text_from("plan_broadcast", [f"root={root}"], like.dtype, like.shape)
        super().__init__(group, what, like.shape, like.dtype)
        self._root = root

    @property
    def input(self) -> Array:
        """Array that the next call gives to all, for the root to fill; in common memory it is the result."""
        return self._results[self._turn]

    def _run(self, x: Array | None, timeout: float | None) -> None:
        if self._group.rank == self._root:
            _fill(self, self.input, x)
        if self.is_common:
            self._group.barrier(timeout=timeout)
        else:
            self._group.broadcast(self.input, self._root, out=self.input, timeout=timeout)


class PlannedSharedAllReduce(SharedPlan):
    """An all-reduce that is ready to be called; made by `plan_shared_all_reduce`.

    Contributions in shared memory, such as `input`, are not copied.
    """

    def __init__(self, group: Group, like: Array, op: str, result: np.dtype[Any]) -> None:
        what = text_from("plan_shared_all_reduce", [op], like.dtype, like.shape)
        super().__init__(group, what, like.shape, result)
        self.input = empty_shared(group, like.shape, like.dtype)
        """A place for contributions, from which others on the host can read them without a copy."""
        self._op = op

    def _run(self, x: Array | None, timeout: float | None) -> None:
        x = planned(self, x, self.input)
        result = self._results[self._turn]
        if self.is_common:
            # Each member folds its part of all arrays, and puts it into the lender's result.
            lends = self._group.rank == _LENDER
            self._group.reduce(x, self._op, _LENDER, out=result if lends else None, timeout=timeout)
            self._group.barrier(timeout=timeout)
        else:
            self._group.all_reduce(x, self._op, out=result, timeout=timeout)


def plan_all_gather(
    like: ArrayLike, *, counts: Counts | None = None, group: Group | None = None
) -> PlannedAllGather:
    """Prepare an all-gather that is called many times, and whose result the ranks of a host share.

    ```python
    plan = dmesh.collectives.plan_all_gather(like=shard)
    while running:
        compute(out=plan.input)     # in place: nothing is copied at all
        everything = plan()         # read-only, the same memory on all ranks
    ```

    All members must call this, as any collective. Where they do not all share memory (docs/shared-memory.md),
    the plan works as well, with a result for each rank.

    Args:
        like: Has dtype and shape of the contributions.
        counts: For contributions whose lengths along axis 0 differ: as for `all_gather`.
        group: Ranks that take part; None for all clients.

    Raises:
        CollectiveMismatchError: The members plan different things.
        CollectiveTypeError: The elements are not plain memory.
        CollectiveValueError: `like` is no array.
        CollectiveError: As for `all_gather`.
        NotInitializedError: No group was given, and the system has not been initialized.
    """
    members, array = members_of(group), as_input(like, "plan_all_gather")
    if counts is None:
        return PlannedAllGather(members, array)
    members.requests.make("all_gather", array, counts=counts)  # checks the counts
    lengths = members.all_gather(len(array)) if isinstance(counts, str) else counts
    return PlannedAllGather(members, array, tuple(map(int, lengths)))


def plan_broadcast(like: ArrayLike, root: int = 0, *, group: Group | None = None) -> PlannedBroadcast:
    """Prepare a broadcast that is called many times, and whose result the ranks of a host share.

    Args:
        like: Has dtype and shape of the array.
        root: Position of the rank that has it.
        group: Ranks that take part; None for all clients.

    Raises:
        CollectiveValueError: `like` is no array, or there is no such root.
        CollectiveError: As for `plan_all_gather`.
    """
    members = members_of(group)
    root = check_position(root, members.size, "root", "plan_broadcast")
    return PlannedBroadcast(members, as_input(like, "plan_broadcast"), root)


def plan_shared_all_reduce(
    like: ArrayLike, op: str = "sum", *, group: Group | None = None
) -> PlannedSharedAllReduce:
    """Prepare an all-reduce that is called many times, and whose result the ranks of a host share.

    Args:
        like: Has dtype and shape of the contributions.
        op: As for `all_reduce`, except operations with a location and your own ones.
        group: Ranks that take part; None for all clients.

    Raises:
        CollectiveTypeError: The reduction has no meaning for the dtype.
        CollectiveValueError: There is no such reduction, or `like` is no array.
        SharedMemoryError: There is no more memory for the contributions (`DMESH_SHARED_MEMORY`).
        CollectiveError: As for `plan_all_gather`.
    """
    members, array, op = members_of(group), as_input(like, "plan_shared_all_reduce"), canonical_op(op)
    return PlannedSharedAllReduce(members, array, op, resolve(op, array.dtype).result)


def _fill(plan: object, place: Array, x: Array | None) -> None:
    if x is not None:
        place[...] = planned(plan, x, place)


def common_memory(
    group: Group,
    what: str,
    nbytes: int,
    *,
    call: Callable[[Request], Array] | None = None,
    spare: bool = False,
) -> Array | None:
    """Return bytes with arbitrary contents that all members of a group map; None if not all can share them.

    All members must call this. Memory is given back when no member has a view of it any more.

    Args:
        group: Ranks that take part.
        what: Text of what it is for, which the members must agree on.
        nbytes: How many bytes.
        call: Makes the calls in which the members agree.
        spare: Leave half of the memory that a client may share to others.

    Raises:
        CollectiveMismatchError: The texts differ.
        CollectiveError: As for `all_gather`.
    """
    make, generation = group.requests.make, group.current
    if call is None:
        call = partial(group.call, timeout=None, async_op=False)
    communicator, lends = group.communicator, group.rank == _LENDER
    pool = communicator.pool
    memory: Array | None = None
    place, refusal, able = bytes(PLACE_SIZE), "", _CAN
    if pool is None:
        refusal, able = "this client shares no memory", _NEVER
    elif not nbytes:
        refusal, able = "it has no bytes", _NOT_NOW
    elif spare and lends and not pool.has_spare(nbytes):
        refusal, able = "half of the memory that may be shared is in use", _NOT_NOW
    elif lends:
        processes = {rank: communicator.process_of(rank) for rank in group.ranks}
        try:
            memory, place = pool.lend(
                nbytes,
                group.ranks,
                _LENDER,
                lambda rank: communicator.process_of(rank) != processes[rank],
                group.id,
            )
        except SharedMemoryError as error:
            refusal, able = str(error), _NOT_NOW
    text = what.encode().ljust(_TEXT)[:_TEXT]
    offer = np.frombuffer(text + bytes([able]) + place, np.uint8)
    # If a call fails, others may have mapped the memory, until all have gone on: see `Pool.settle`.
    offers = call(make("all_gather", offer, axis=None, counts=None))
    planned = [bytes(row[:_TEXT]).rstrip().decode(errors="replace") for row in offers]
    alike, able = len(set(planned)) == 1, int(offers[:, _TEXT].min())
    mapped = np.zeros(group.size, np.bool_)
    if alike and able == _CAN:
        if pool is not None and not lends:
            theirs = bytes(offers[_LENDER][_TEXT + 1 :])
            try:
                with generation.lock:
                    if generation.failure is None:  # else the lender may not expect it any more
                        memory = pool.borrow(theirs, nbytes, group.size, group.rank)
            except (OSError, ValueError) as error:
                refusal = f"the memory of rank {group.ranks[_LENDER]} cannot be mapped: {error}"
        vote = np.array([memory is not None], np.bool_)
        mapped = call(make("all_gather", vote, axis=None, counts=None))[:, 0]
        if mapped.all():
            return memory
        able = _NEVER
    if pool is not None and lends:
        pool.excuse(place, [at for at in range(group.size) if at != _LENDER and not mapped[at]])
    if not alike:
        del memory  # the error keeps this frame
        sides = (f"rank {rank} planned {its}" for rank, its in zip(group.ranks, planned, strict=True))
        raise CollectiveMismatchError(f"{group.label}: {', '.join(sides)}. All ranks must plan the same.")
    generation.shares_arrays = able != _NEVER
    logger.log(
        logging.DEBUG if spare and generation.shares_arrays else logging.INFO,
        "each rank of %s has a result of its own: %s",
        group.label,
        refusal or "others cannot share one",
    )
    return None
