"""`Dataset.map` and `Dataset.filter`: functions of the user, called for one element at a time."""

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
    """The function. If the element is a tuple, its items are the arguments, else the element is."""
    parallel: int = 1
    """Maximum number of concurrent calls."""
    processes: bool = False
    """True to call the function in processes instead of threads."""

    def open(self, reading: Reading) -> Cursor:
        """Return the source's cursor with another table, which calls the function on demand."""
        cursor = Pass(self.source.open(reading))
        pool = reading.once(self, lambda: _Pool(self.parallel, self.processes)) if self.parallel > 1 else None
        cursor.table = _Mapped(cursor.table, self.function, pool)
        return cursor

    def sample(self) -> Any:
        """Return the function's result for one element."""
        return _apply(self.function, self.source.sample())

    def spec(self) -> Any:
        """Return the specs of the function's result for one element."""
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
        """Return None: the function may change the number of rows."""
        return None


class _Mapped(Table):
    """Results of a function for the elements of another table.

    Args:
        source: The other table.
        function: The function.
        pool: Threads or processes for the calls; None to call the function in the reading thread.
    """

    def __init__(self, source: Table, function: Callable[..., Any], pool: _Pool | None) -> None:
        self._source = source
        self._function = function
        self._pool = pool
        self.size = source.size
        self.parallel = max(source.parallel, 1 if pool is None else pool.size)

    def get(self, key: Any) -> Any:
        """Return the function's result for one element."""
        if self._pool is not None:
            return self.submit(key)()
        return _apply(self._function, self._source.get(key))

    def submit(self, key: Any) -> Callable[[], Any]:
        """Start calling the function, or making its argument."""
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
        """Start a call; return a function that waits for its result."""
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
        """End threads and processes after their current calls."""
        if self._executor is not None:
            self._executor.shutdown(wait=self._processes, cancel_futures=True)


_BROKEN = (
    "a process of map(..., processes=True) ended: it was killed, or could not import the program. Programs "
    "that use processes need `if __name__ == '__main__':` around their main code"
)


def _apply(function: Callable[..., Any], element: Any) -> Any:
    return as_element(_call(function, element), "what the function given to map() returned")


@dataclass(frozen=True, eq=False)
class Filter(Transform):
    """Keeps the elements for which a function returns True."""

    predicate: Callable[..., Any]
    """Function with the arguments of `Map.function`."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that makes each element and calls the function with it."""
        return _Filtering(self.source.open(reading), self.predicate)

    def cardinality(self) -> int:
        """Return UNKNOWN_CARDINALITY."""
        return UNKNOWN_CARDINALITY


class _Filtering(Pass):
    """Cursor of a filter: over keys if elements are cheap to make again, else over the elements."""

    skip = Cursor.skip

    def __init__(self, source: Cursor, predicate: Callable[..., Any]) -> None:
        super().__init__(source)
        self.lazy = False
        self._predicate = predicate
        self._reader = None if source.table.cheap else Reader(source)
        if self._reader is not None:
            self.table = ELEMENTS

    def keys(self, count: int) -> list[Any]:
        """Return the next keys that the filter keeps."""
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
        """Return the source's position."""
        return self.source.state() if self._reader is None else self._reader.position()

    def restore(self, state: Any) -> None:
        """Move the source."""
        if self._reader is None:
            self.source.restore(state)
        else:
            self._reader.move(state)


def _call(function: Callable[..., Any], element: Any) -> Any:
    """Call a function of the user with an element; the items of a tuple are its arguments."""
    return function(*element) if type(element) is tuple else function(element)


def check_portable(function: Callable[..., Any]) -> None:
    """Raise ArgumentTypeError unless other processes can import a function."""
    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        raise ArgumentTypeError(
            f"map_func cannot be sent to other processes ({error}). With processes=True, define it at the "
            "top level of a module"
        ) from error


def processors() -> int:
    """Return the number of concurrent calls for `num_parallel_calls=AUTOTUNE`."""
    return max(2, os.cpu_count() or 1)
