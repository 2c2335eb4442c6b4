"""The steps of a pipeline that look at elements one by one, or at their number."""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmesh.data.elements import TensorSpec, as_element, same_structure, spec_of
from dmesh.data.options import SHARD_HINT, Options
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Elements, Node, Step, opened
from dmesh.data.prefetching import prefetched
from dmesh.errors import ArgumentTypeError, DatasetError, ShardHintError
from dmesh.structure import flatten, map_structure

__all__ = [
    "Concatenate",
    "Enumerate",
    "Filter",
    "Map",
    "Prefetch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Skip",
    "Take",
    "WithOptions",
    "Zip",
]

_AHEAD = 2
"""Number of elements that `prefetch(AUTOTUNE)` reads ahead."""


@dataclass(frozen=True, eq=False)
class Shuffle(Step):
    """Draws each element at random from a buffer of the next ones."""

    buffer_size: int
    """Number of elements to draw from."""
    seed: int | None
    """Of the order; None for another order in each process."""
    reshuffle: bool
    """True if each reading has an order of its own."""
    entropy: int = field(default_factory=lambda: secrets.randbits(64))
    """Stands for the seed if there is none."""
    _readings: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)

    def elements(self) -> Elements:
        """Yields the source's elements in another order."""
        seed = self.entropy if self.seed is None else self.seed
        reading = next(self._readings) if self.reshuffle else 0
        draw = np.random.default_rng([abs(seed), int(seed < 0), reading]).integers
        with opened(self.source) as elements:
            buffer = list(itertools.islice(elements, self.buffer_size))
            for element in elements:
                index = draw(len(buffer))
                yield buffer[index]
                buffer[index] = element
        while buffer:
            index = draw(len(buffer))
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            yield buffer.pop()


@dataclass(frozen=True, eq=False)
class Repeat(Step):
    """Reads its source again and again."""

    count: int | None
    """Number of times; None for ever."""

    def elements(self) -> Elements:
        """Yields the source's elements, several times. A source without elements is not asked for ever."""
        for _ in itertools.count() if self.count is None else range(self.count):
            empty = True
            with opened(self.source) as elements:
                for element in elements:
                    empty = False
                    yield element
            if empty:
                return

    def cardinality(self) -> int:
        """Returns how many elements there are, all repetitions together."""
        once = self.source.cardinality()
        if once == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return once if once < 0 else once * self.count


@dataclass(frozen=True, eq=False)
class Map(Step):
    """Applies a function to each element."""

    function: Callable[..., Any]
    """Takes the items of a tuple as arguments, any other element as one."""
    parallel: int = 1
    """Number of elements that may be worked on at once."""

    def elements(self) -> Elements:
        """Yields what the function returns, in the order of the source."""
        with opened(self.source) as elements:
            if self.parallel > 1:
                yield from self._in_threads(elements)
                return
            for element in elements:
                yield self._apply(element)

    def _in_threads(self, elements: Iterator[Any]) -> Elements:
        pending: deque[Future[Any]] = deque()
        pool = ThreadPoolExecutor(self.parallel, "dmesh-data-map")
        try:
            for element in elements:
                pending.append(pool.submit(copy_context().run, self._apply, element))
                if len(pending) >= self.parallel:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _apply(self, element: Any) -> Any:
        return as_element(call(self.function, element), "what the function given to map() returned")

    def sample(self) -> Any:
        """Returns what the function makes of one element."""
        return self._apply(self.source.sample())

    def spec(self) -> Any:
        """Returns the specs of what the function makes of one element."""
        sample = self.source.sample()
        specs = zip(flatten(sample), flatten(self.source.spec()), strict=True)
        lengths = {leaf.shape[0] for leaf, spec in specs if spec.shape and spec.shape[0] is None}

        def widened(leaf: TensorSpec) -> TensorSpec:
            # As many rows as the source had in this element: it had another number in others.
            open_ended = leaf.shape and leaf.shape[0] in lengths
            return TensorSpec((None, *leaf.shape[1:]), leaf.dtype) if open_ended else leaf

        return map_structure(widened, spec_of(self._apply(sample)))

    def batch_size(self) -> int | None:
        """Returns None: the function may have changed the number of rows."""
        return None


@dataclass(frozen=True, eq=False)
class Filter(Step):
    """Keeps the elements of which a function says True."""

    predicate: Callable[..., Any]
    """Takes what `Map.function` takes."""

    def elements(self) -> Elements:
        """Yields the elements that are kept."""
        with opened(self.source) as elements:
            for element in elements:
                kept = np.asarray(call(self.predicate, element))
                if kept.dtype != np.bool_ or kept.shape != ():
                    raise ArgumentTypeError(
                        f"the predicate given to filter() must return a bool, got {kept.dtype} of shape "
                        f"{kept.shape}"
                    )
                if kept:
                    yield element

    def cardinality(self) -> int:
        """Returns that it is not known."""
        return UNKNOWN_CARDINALITY


@dataclass(frozen=True, eq=False)
class Take(Step):
    """Ends after some elements."""

    count: int
    """Number of elements; negative for all."""

    def elements(self) -> Elements:
        """Yields the first elements, and does not ask for one more."""
        if self.count == 0:
            return
        with opened(self.source) as elements:
            for number, element in enumerate(elements, start=1):
                yield element
                if number == self.count:
                    return

    def cardinality(self) -> int:
        """Returns how many of the source's elements remain."""
        all_of_them = self.source.cardinality()
        if self.count < 0 or all_of_them == UNKNOWN_CARDINALITY:
            return 0 if self.count == 0 else all_of_them
        return self.count if all_of_them == INFINITE_CARDINALITY else min(self.count, all_of_them)


@dataclass(frozen=True, eq=False)
class Skip(Step):
    """Leaves out the first elements."""

    count: int
    """Number of elements; negative for all."""

    def elements(self) -> Elements:
        """Yields the elements that follow."""
        if self.count < 0:
            return
        with opened(self.source) as elements:
            yield from itertools.islice(elements, self.count, None)

    def cardinality(self) -> int:
        """Returns how many of the source's elements remain."""
        if self.count < 0:
            return 0
        all_of_them = self.source.cardinality()
        return all_of_them if all_of_them < 0 else max(0, all_of_them - self.count)


@dataclass(frozen=True, eq=False)
class Shard(Step):
    """Keeps every `num_shards`-th element."""

    num_shards: int
    """Of how many shards; `SHARD_HINT` to be told later."""
    index: int
    """Index of the shard."""

    def elements(self) -> Elements:
        """Yields the elements of one shard."""
        if self.num_shards == SHARD_HINT:
            raise ShardHintError(
                "shard(SHARD_HINT, SHARD_HINT) only means something in a dataset that is given to "
                "experimental_distribute_dataset with AutoShardPolicy.HINT; elsewhere, say which shard"
            )
        with opened(self.source) as elements:
            yield from itertools.islice(elements, self.index, None, self.num_shards)

    def cardinality(self) -> int:
        """Returns how many of the source's elements are in this shard."""
        all_of_them = self.source.cardinality()
        if all_of_them < 0 or self.num_shards == SHARD_HINT:
            return all_of_them
        return max(0, math.ceil((all_of_them - self.index) / self.num_shards))


@dataclass(frozen=True, eq=False)
class Enumerate(Step):
    """Puts a number in front of each element."""

    start: int
    """The first number."""

    def elements(self) -> Elements:
        """Yields pairs of number and element."""
        with opened(self.source) as elements:
            for number, element in enumerate(elements, self.start):
                yield np.asarray(number), element

    def sample(self) -> Any:
        """Returns a pair."""
        return np.asarray(self.start), self.source.sample()

    def spec(self) -> Any:
        """Returns the specs of a pair."""
        return TensorSpec((), np.int64), self.source.spec()

    def batch_size(self) -> int | None:
        """Returns None: the number has no rows."""
        return None


@dataclass(frozen=True, eq=False)
class Prefetch(Step):
    """Reads ahead in a thread."""

    buffer_size: int
    """Number of elements; 0 for none."""

    def elements(self) -> Elements:
        """Yields the source's elements."""
        if self.buffer_size == 0:
            return self.source.elements()
        size = _AHEAD if self.buffer_size < 0 else self.buffer_size
        return prefetched(self.source.elements, size, "dmesh-data-prefetch")


@dataclass(frozen=True, eq=False)
class WithOptions(Step):
    """Carries options; elements pass."""

    options: Options
    """They win over those below."""

    def elements(self) -> Elements:
        """Yields the source's elements."""
        return self.source.elements()


@dataclass(frozen=True, eq=False)
class _Several(Node):
    """A node that reads several others."""

    sources: tuple[Node, ...]
    """The nodes that it reads."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        return self.sources

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Returns this node reading others."""
        return type(self)(inputs)

    def batch_size(self) -> int | None:
        """Returns the batch size that all sources have, if it is one."""
        sizes = {source.batch_size() for source in self.sources}
        return sizes.pop() if len(sizes) == 1 else None


class Zip(_Several):
    """Yields tuples of one element of each source, as long as all have one."""

    def elements(self) -> Elements:
        """Yields the tuples."""
        with ExitStack() as stack:
            columns = [stack.enter_context(opened(source)) for source in self.sources]
            yield from zip(*columns, strict=False)

    def cardinality(self) -> int:
        """Returns the smallest of the sources'."""
        numbers = {source.cardinality() for source in self.sources}
        if UNKNOWN_CARDINALITY in numbers:
            return UNKNOWN_CARDINALITY
        return min(numbers - {INFINITE_CARDINALITY}, default=INFINITE_CARDINALITY)

    def sample(self) -> Any:
        """Returns a tuple of samples."""
        return tuple(source.sample() for source in self.sources)

    def spec(self) -> Any:
        """Returns the tuple of the sources' specs."""
        return tuple(source.spec() for source in self.sources)


class Concatenate(_Several):
    """Yields the elements of one source after those of the other."""

    def elements(self) -> Elements:
        """Yields the elements of all sources."""
        for source in self.sources:
            with opened(source) as elements:
                yield from elements

    def cardinality(self) -> int:
        """Returns the sum of the sources'."""
        numbers = [source.cardinality() for source in self.sources]
        for special in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
            if special in numbers:
                return special
        return sum(numbers)

    def spec(self) -> Any:
        """Returns specs that hold for the elements of all sources."""
        first, *others = [source.spec() for source in self.sources]
        for other in others:
            first = map_structure(_wider, first, other)
        return first

    def check(self) -> None:
        """Raises ArgumentTypeError unless the elements of all sources can follow each other."""
        first, *others = [source.spec() for source in self.sources]
        for other in others:
            try:
                same_structure(other, first, "an element of the second dataset")
            except DatasetError as error:
                raise ArgumentTypeError(str(error)) from None
            for mine, theirs in zip(flatten(first), flatten(other), strict=True):
                if mine.dtype != theirs.dtype or len(mine.shape) != len(theirs.shape):
                    raise ArgumentTypeError(
                        "concatenate() needs datasets of the same dtypes and numbers of dimensions, got "
                        f"{mine} and {theirs}"
                    )


def _wider(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    shape = [a if a == b else None for a, b in zip(one.shape, other.shape, strict=True)]
    return TensorSpec(shape, one.dtype)


def call(function: Callable[..., Any], element: Any) -> Any:
    """Calls a function of the user with an element: a tuple's items are its arguments."""
    return function(*element) if type(element) is tuple else function(element)


def processors() -> int:
    """Returns how many threads `num_parallel_calls=AUTOTUNE` takes."""
    return max(2, os.cpu_count() or 1)
