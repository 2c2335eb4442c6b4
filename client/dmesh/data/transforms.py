"""Transforms that select and combine elements by position; they work on keys and read no data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dmesh.data.cursors import Cursor, Keys, Pass, Table, as_list, read
from dmesh.data.elements import TensorSpec, same_structure
from dmesh.data.options import SHARD_HINT, Options
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, Reading, Transform
from dmesh.data.tables import chained
from dmesh.errors import ArgumentTypeError, DatasetError, ShardHintError
from dmesh.structure import flatten, map_structure, rebuild

__all__ = ["Concatenate", "Repeat", "Shard", "Skip", "Take", "WithOptions", "Zip", "common_spec", "parts"]


@dataclass(frozen=True, eq=False)
class Repeat(Transform):
    """Repeats its source."""

    count: int | None
    """Number of times; None for ever."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that opens the source for each repetition."""
        return _Repeating(lambda number: self.source.open(reading.repetition(number)), self.count)

    def cardinality(self) -> int:
        """Return the total number of elements of all repetitions."""
        once = self.source.cardinality()
        if once == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return once if once < 0 else once * self.count


class _Repeating(Pass):
    def __init__(self, start: Callable[[int], Cursor], count: int | None) -> None:
        super().__init__(start(0))
        self._start = start
        self._count = count
        self._number = 0
        self._empty = True

    def keys(self, count: int) -> Keys:
        """Return keys of the current repetition, or of the next one."""
        while self._count is None or self._number < self._count:
            if len(block := self.source.keys(count)):
                self._empty = False
                return block
            if not self._again():
                break
        return []

    def skip(self, count: int) -> int:
        """Skip keys, across repetitions if necessary."""
        skipped = 0
        while skipped < count and (self._count is None or self._number < self._count):
            step = self.source.skip(count - skipped)
            self._empty &= not step
            skipped += step
            if skipped < count and not self._again():
                break
        return skipped

    def _again(self) -> bool:
        """Open the source again, unless it is empty."""
        if self._empty:
            self._count = 0
            return False
        self.source.close()
        self._number += 1
        self._empty = True
        table = self.table
        self.source = self._start(self._number)
        self.source.table = table  # the same rows, read in another order
        return True

    def state(self) -> list[Any]:
        """Return the number of the repetition, and the position in it."""
        return [self._number, self._empty, self.source.state()]

    def restore(self, state: Any) -> None:
        """Open one repetition."""
        self._number, self._empty, position = state
        if self._number:
            self.source.close()
            self.source = self._start(self._number)
        self.source.restore(position)


@dataclass(frozen=True, eq=False)
class Take(Transform):
    """Keeps the first elements."""

    count: int
    """Number of elements; negative for all."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that ends early."""
        source = self.source.open(reading)
        return source if self.count < 0 else _Taking(source, self.count)

    def cardinality(self) -> int:
        """Return the number of the source's elements that remain."""
        all_of_them = self.source.cardinality()
        if self.count < 0 or all_of_them == UNKNOWN_CARDINALITY:
            return 0 if self.count == 0 else all_of_them
        return self.count if all_of_them == INFINITE_CARDINALITY else min(self.count, all_of_them)


class _Taking(Pass):
    def __init__(self, source: Cursor, count: int) -> None:
        super().__init__(source)
        self._left = count

    def keys(self, count: int) -> Keys:
        """Return the source's next keys; read none beyond the last."""
        if not self._left:
            return []
        block = self.source.keys(min(count, self._left))
        self._left -= len(block)
        return block

    def skip(self, count: int) -> int:
        """Skip keys."""
        skipped = self.source.skip(min(count, self._left))
        self._left -= skipped
        return skipped

    def state(self) -> list[Any]:
        """Return the number of keys that are left."""
        return [self._left, self.source.state()]

    def restore(self, state: Any) -> None:
        """Move the source."""
        self._left, position = state
        self.source.restore(position)


@dataclass(frozen=True, eq=False)
class Skip(Transform):
    """Drops the first elements."""

    count: int
    """Number of elements; negative for all."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that begins later."""
        source = self.source.open(reading)
        return _Taking(source, 0) if self.count < 0 else _Stepping(source, self.count, 1)

    def cardinality(self) -> int:
        """Return the number of the source's elements that remain."""
        if self.count < 0:
            return 0
        all_of_them = self.source.cardinality()
        return all_of_them if all_of_them < 0 else max(0, all_of_them - self.count)


@dataclass(frozen=True, eq=False)
class Shard(Transform):
    """Keeps every `num_shards`-th element."""

    num_shards: int
    """Number of shards; `SHARD_HINT` if it is set later."""
    index: int
    """Index of the shard."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over one shard.

        Raises:
            ShardHintError: The shard was not set.
        """
        if self.num_shards == SHARD_HINT:
            raise ShardHintError(
                "shard(SHARD_HINT, SHARD_HINT) works only in a dataset that is passed to "
                "experimental_distribute_dataset with AutoShardPolicy.HINT. Elsewhere, pass real numbers"
            )
        return _Stepping(self.source.open(reading), self.index, self.num_shards)

    def cardinality(self) -> int:
        """Return the number of the source's elements in this shard."""
        all_of_them = self.source.cardinality()
        if all_of_them < 0 or self.num_shards == SHARD_HINT:
            return all_of_them
        return max(0, math.ceil((all_of_them - self.index) / self.num_shards))


class _Stepping(Pass):
    """Cursor that keeps every `step`-th key.

    Args:
        source: Cursor of the source.
        gap: Number of keys to skip before the first kept key.
        step: Distance between kept keys.
    """

    def __init__(self, source: Cursor, gap: int, step: int) -> None:
        super().__init__(source)
        self._gap = gap
        self._step = step

    def keys(self, count: int) -> Keys:
        """Return the next kept keys; read none beyond them."""
        if self._gap:
            self._gap -= self.source.skip(self._gap)
            if self._gap:
                return []
        block = self.source.keys((count - 1) * self._step + 1)
        kept = block[:: self._step]
        self._gap = len(kept) * self._step - len(block)
        return kept

    def skip(self, count: int) -> int:
        """Skip keys."""
        if not count:
            return 0
        passed = self._gap + (count - 1) * self._step + 1
        behind = self.source.skip(passed) - self._gap  # counted from the first kept key
        kept = max(0, -(-behind // self._step))
        self._gap = kept * self._step - behind
        return kept

    def state(self) -> list[Any]:
        """Return the number of keys to skip next, and the source's position."""
        return [self._gap, self.source.state()]

    def restore(self, state: Any) -> None:
        """Move the source."""
        self._gap, position = state
        self.source.restore(position)


@dataclass(frozen=True, eq=False)
class WithOptions(Transform):
    """Adds options; elements pass unchanged."""

    options: Options
    """Options, which override those of the source."""

    def open(self, reading: Reading) -> Cursor:
        """Return the source's cursor."""
        return self.source.open(reading)


@dataclass(frozen=True, eq=False)
class _Several(Node):
    """A node that reads several others."""

    sources: tuple[Node, ...]
    """Nodes that it reads."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        return self.sources

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Returns this node reading others."""
        return dataclasses.replace(self, sources=inputs)

    def batch_size(self) -> int | None:
        """Return the common batch size of all sources, if there is one."""
        sizes = {source.batch_size() for source in self.sources}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, eq=False)
class Zip(_Several):
    """Yields structures of one element of each source, as long as all have one."""

    like: Any = None
    """Structure of which each source's elements are a leaf; None for a tuple."""

    @property
    def build(self) -> Callable[[list[Any]], Any]:
        """Function that makes an element of those of the sources."""
        return tuple if self.like is None else partial(rebuild, self.like)

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor whose keys are tuples of keys."""
        sources = [source.open(reading.branch(index)) for index, source in enumerate(self.sources)]
        return _Zipping(sources, self.build)

    def cardinality(self) -> int:
        """Return the smallest of the sources' cardinalities."""
        numbers = {source.cardinality() for source in self.sources}
        if UNKNOWN_CARDINALITY in numbers:
            return UNKNOWN_CARDINALITY
        return min(numbers - {INFINITE_CARDINALITY}, default=INFINITE_CARDINALITY)

    def sample(self) -> Any:
        """Returns a structure of samples."""
        return self.build([source.sample() for source in self.sources])

    def spec(self) -> Any:
        """Returns the structure of the sources' specs."""
        return self.build([source.spec() for source in self.sources])


class _Columns(Table):
    """Structures of one element of each of several tables."""

    def __init__(self, tables: list[Table], build: Callable[[list[Any]], Any]) -> None:
        self._tables = tables
        self._build = build
        self.cheap = all(table.cheap for table in tables)
        self.parallel = max(table.parallel for table in tables)

    def get(self, key: Any) -> Any:
        """Returns a structure."""
        return self._build([table.get(own) for table, own in zip(self._tables, key, strict=True)])

    def submit(self, key: Any) -> Callable[[], Any]:
        """Begins to make the elements of a structure."""
        pending = [table.submit(own) for table, own in zip(self._tables, key, strict=True)]
        return lambda: self._build([wait() for wait in pending])

    def gather(self, keys: Keys) -> Any:
        """Returns a structure of batches."""
        columns = zip(*as_list(keys), strict=True) if len(keys) else [[]] * len(self._tables)
        return self._build(
            [table.gather(list(own)) for table, own in zip(self._tables, columns, strict=True)]
        )


class _Zipping(Cursor):
    def __init__(self, sources: list[Cursor], build: Callable[[list[Any]], Any]) -> None:
        self._sources = sources
        self.table = _Columns([source.table for source in sources], build)
        self.lazy = all(source.lazy for source in sources)

    def keys(self, count: int) -> Keys:
        """Return tuples of the sources' next keys."""
        blocks = []
        for source in self._sources:
            blocks.append(as_list(read(source, count)))
            count = len(blocks[-1])
            if not count:
                return []
        return list(zip(*blocks, strict=False))

    def skip(self, count: int) -> int:
        """Skip keys of all sources."""
        for source in self._sources:
            count = source.skip(count)
        return count

    def state(self) -> list[Any]:
        """Return the sources' positions."""
        return [source.state() for source in self._sources]

    def restore(self, state: Any) -> None:
        """Move the sources."""
        for source, position in zip(self._sources, state, strict=True):
            source.restore(position)

    def close(self) -> None:
        """End the sources' readings."""
        for source in self._sources:
            source.close()


class Concatenate(_Several):
    """Yields the elements of each source after those of the one before."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over one source after the other."""
        cursors = [source.open(reading.branch(index)) for index, source in enumerate(self.sources)]
        return chained(cursors)

    def cardinality(self) -> int:
        """Return the sum of the sources' cardinalities."""
        numbers = [source.cardinality() for source in self.sources]
        for special in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
            if special in numbers:
                return special
        return sum(numbers)

    def spec(self) -> Any:
        """Return specs that the elements of all sources match."""
        first, *others = [source.spec() for source in self.sources]
        for other in others:
            first = map_structure(_wider, first, other)
        return first


def parts(node: Node) -> tuple[Node, ...]:
    """Returns the sources of a `Concatenate`, and any other node as the only one."""
    return node.sources if isinstance(node, Concatenate) else (node,)


def common_spec(first: Any, other: Any) -> Any:
    """Returns specs that hold for the elements of two datasets, of which the second is to follow the first.

    Raises:
        ArgumentTypeError: They have different structures or dtypes.
    """
    try:
        same_structure(other, first, "an element of the second dataset")
    except DatasetError as error:
        raise ArgumentTypeError(str(error)) from None
    for mine, theirs in zip(flatten(first), flatten(other), strict=True):
        if mine.dtype != theirs.dtype:
            raise ArgumentTypeError(
                f"concatenate() needs datasets of the same dtypes, got {mine} and {theirs}"
            )
    return map_structure(_wider, first, other)


def _wider(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return TensorSpec(None, one.dtype)
    shape = [a if a == b else None for a, b in zip(one.shape, other.shape, strict=True)]
    return TensorSpec(shape, one.dtype)
