"""`Dataset.map` and `Dataset.filter`: functions of the user, which are called for one element at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import copy_context
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from dmesh.data.cursors import ELEMENTS, Cursor, Pass, Table
from dmesh.data.elements import TensorSpec, as_element, reshaped, spec_of
from dmesh.data.iterator import Reader
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Reading, Transform
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten, map_structure

__all__ = ["check_portable", "Filter", "Map", "processors"]


@dataclass(frozen=True, eq=False)
class Map(Transform):
    """Applies a function to each element."""

    function: Callable[..., Any]
    """Function that takes the items of a tuple as arguments, any other element as one."""
    parallel: int = 1
    """Number of elements that may be worked on at once."""
    processes: bool = False
    """True if they are worked on in processes, not in threads."""

    def open(self, reading: Reading) -> Cursor:
        """Returns the source's cursor with another table: elements are made when they are needed."""
        cursor = Pass(self.source.open(reading))
        pool = reading.once(self, lambda: _Pool(self.parallel, self.processes)) if self.parallel > 1 else None
        cursor.table = _Mapped(cursor.table, self.function, pool)
        return cursor

    def sample(self) -> Any:
        """Returns the function's result for one element."""
        return _apply(self.function, self.source.sample())

    def spec(self) -> Any:
        """Returns the specs of the function's result for one element."""
        sample = self.source.sample()
        source = flatten(self.source.spec())
        specs = zip(flatten(sample), source, strict=True)
        lengths = {leaf.shape[0] for leaf, spec in specs if spec.shape and spec.shape[0] is None}
        any_rank = any(spec.shape is None for spec in source)

        def widened(leaf: TensorSpec) -> TensorSpec:
            if any_rank:
                return TensorSpec(None, leaf.dtype)
            # As many rows as the source had in this element: it had another number in others.
            open_ended = leaf.shape and leaf.shape[0] in lengths
            return reshaped(leaf, lambda own: (None, *own[1:])) if open_ended else leaf

        return map_structure(widened, spec_of(_apply(self.function, sample)))

    def batch_size(self) -> int | None:
        """Returns None: the function may have changed the number of rows."""
        return None


class _Mapped(Table):
    """Results of a function for the elements of another table.

    Args:
        source: The other table.
        function: The function.
        pool: Threads or processes to call it in; None to call it where the element is needed.
    """

    def __init__(self, source: Table, function: Callable[..., Any], pool: _Pool | None) -> None:
        self._source = source
        self._function = function
        self._pool = pool
        self.size = source.size
        self.parallel = max(source.parallel, 1 if pool is None else pool.size)

    def get(self, key: Any) -> Any:
        """Returns the function's result for one element."""
        if self._pool is not None:
            return self.submit(key)()
        return _apply(self._function, self._source.get(key))

    def submit(self, key: Any) -> Callable[[], Any]:
        """Begins to call the function, or to make its argument."""
        argument = self._source.submit(key)
        if self._pool is not None:
            return self._pool.submit(self._function, argument)
        return lambda: _apply(self._function, argument())


class _Pool:
    """Threads or processes that call a function.

    Args:
        size: Number of them.
        processes: True for processes.
    """

    def __init__(self, size: int, processes: bool) -> None:
        self.size = size
        self._processes = processes
        self._executor: Executor | None = None

    def submit(self, function: Callable[..., Any], argument: Callable[[], Any]) -> Callable[[], Any]:
        """Begins a call; returns a function that waits for its result."""
        if self._processes:
            return self._in_process(function, argument())
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.size, "dmesh-data-map")
        run = copy_context().run
        return self._executor.submit(run, lambda: _apply(function, argument())).result

    def _in_process(self, function: Callable[..., Any], element: Any) -> Callable[[], Any]:
        if self._executor is None:
            # A forked child must not use dmesh.
            self._executor = ProcessPoolExecutor(self.size, multiprocessing.get_context("spawn"))
        try:
            future = self._executor.submit(_apply, function, element)
        except BrokenProcessPool as error:
            raise DatasetError(_BROKEN) from error

        def wait() -> Any:
            try:
                return future.result()
            except BrokenProcessPool as error:
                raise DatasetError(_BROKEN) from error

        return wait

    def close(self) -> None:
        """Ends threads and processes once they have finished their calls."""
        if self._executor is not None:
            self._executor.shutdown(wait=self._processes, cancel_futures=True)


_BROKEN = (
    "a process that map(..., processes=True) started has ended: it was killed, or could not import the "
    "program. Programs that use processes need `if __name__ == '__main__':` around what they do"
)


def _apply(function: Callable[..., Any], element: Any) -> Any:
    return as_element(_call(function, element), "what the function given to map() returned")


@dataclass(frozen=True, eq=False)
class Filter(Transform):
    """Keeps the elements for which a function returns True."""

    predicate: Callable[..., Any]
    """Function that takes what `Map.function` takes."""

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor that makes each element to ask the function."""
        return _Filtering(self.source.open(reading), self.predicate)

    def cardinality(self) -> int:
        """Returns that it is not known."""
        return UNKNOWN_CARDINALITY


class _Filtering(Pass):
    """Cursor of a filter: over keys where elements are cheap to make again, else over the elements."""

    skip = Cursor.skip

    def __init__(self, source: Cursor, predicate: Callable[..., Any]) -> None:
        super().__init__(source)
        self.lazy = False
        self._predicate = predicate
        self._reader = None if source.table.cheap else Reader(source)
        if self._reader is not None:
            self.table = ELEMENTS

    def keys(self, count: int) -> list[Any]:
        """Returns the next keys that are kept."""
        kept: list[Any] = []
        if self._reader is not None:
            for element in self._reader:
                if self._keeps(element):
                    kept.append(element)
                    if len(kept) == count:
                        break
            return kept
        while len(kept) < count and len(block := self.source.keys(1)):
            if self._keeps(self.table.get(block[0])):
                kept.append(block[0])
        return kept

    def _keeps(self, element: Any) -> bool:
        kept = np.asarray(_call(self._predicate, element))
        if kept.dtype != np.bool_ or kept.shape != ():
            raise ArgumentTypeError(
                f"the predicate given to filter() must return a bool, got {kept.dtype} of shape {kept.shape}"
            )
        return bool(kept)

    def state(self) -> Any:
        """Returns the source's position."""
        return self.source.state() if self._reader is None else self._reader.position()

    def restore(self, state: Any) -> None:
        """Moves the source."""
        if self._reader is None:
            self.source.restore(state)
        else:
            self._reader.move(state)


def _call(function: Callable[..., Any], element: Any) -> Any:
    """Calls a function of the user with an element: a tuple's items are its arguments."""
    return function(*element) if type(element) is tuple else function(element)


def check_portable(function: Callable[..., Any]) -> None:
    """Raises ArgumentTypeError unless other processes can import a function."""
    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        raise ArgumentTypeError(
            f"map_func cannot be given to other processes ({error}); processes=True takes functions that are "
            "defined at the top level of a module"
        ) from error


def processors() -> int:
    """Returns the number of calls at once for `num_parallel_calls=AUTOTUNE`."""
    return max(2, os.cpu_count() or 1)
