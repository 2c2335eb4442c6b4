"""Plan of a dataset: nodes, and functions over all nodes of a pipeline.

A node describes elements; `Node.open` returns a cursor that reads them (`cursors.py`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dmesh.data.cursors import Cursor
from dmesh.data.elements import TensorSpec, spec_of
from dmesh.errors import DatasetError
from dmesh.structure import flatten, map_structure

__all__ = [
    "INFINITE_CARDINALITY",
    "Node",
    "Order",
    "Reading",
    "static_batch_size",
    "static_rows",
    "transform",
    "Transform",
    "UNKNOWN_CARDINALITY",
    "walk",
    "with_rows",
]

INFINITE_CARDINALITY = -1
"""`Dataset.cardinality` of an infinite dataset."""
UNKNOWN_CARDINALITY = -2
"""`Dataset.cardinality` of a dataset whose length is only known after reading it."""


T = TypeVar("T")

Place = tuple[tuple[int, ...], int]
"""Position of a node: the indices of the inputs on the path from the pipeline's end, and the node's `id`."""


@dataclass
class Order:
    """Random order of a shuffle, which changes from reading to reading."""

    entropy: int
    """Seed of the order."""
    readings: int = 0
    """Number of readings begun so far."""


@dataclass(frozen=True)
class Reading:
    """Context of one reading of a pipeline: the orders of its shuffles, and the current repetition.

    The number of the reading is fixed for each shuffle at the beginning, so that the order of elements does
    not depend on prefetching.
    """

    orders: dict[Place, Order]
    """For each shuffle: entropy and number of this reading."""
    shared: tuple[Order, ...] = ()
    """The nodes' own `Order` objects, which count readings; in the order of `orders`."""
    made: dict[Place, Any] = field(default_factory=dict)
    """Objects shared by all repetitions of this reading, such as thread pools."""
    branches: tuple[int, ...] = ()
    """Indices of the inputs on the path from the end of the pipeline to the node that is opened."""
    repetitions: tuple[int, ...] = ()
    """Numbers of the current repetitions, outermost first."""

    @classmethod
    def begin(cls, node: Node, *, counts: bool = True) -> Reading:
        """Begin another reading of a pipeline.

        Args:
            node: The last node.
            counts: False to leave the order of the next reading unchanged.
        """
        orders, shared = {}, []
        for branches, shuffle, order in _shuffles(node, ()):
            orders[branches, id(shuffle)] = Order(order.entropy, order.readings)
            order.readings += counts
            shared.append(order)
        return cls(orders, tuple(shared))

    def once(self, node: Node, make: Callable[[], T]) -> T:
        """Return an object of a node that is made once for this reading; `close` closes it."""
        place = self.branches, id(node)
        if place not in self.made:
            self.made[place] = make()
        made: T = self.made[place]
        return made

    def close(self) -> None:
        """Close the objects that were made for the reading."""
        for made in self.made.values():
            if hasattr(made, "close"):
                made.close()

    def order(self, node: Node) -> Order:
        """Return a shuffle's entropy, and the number of this reading for it."""
        return self.orders[self.branches, id(node)]

    def repetition(self, number: int) -> Reading:
        """Return the context of one repetition."""
        return dataclasses.replace(self, repetitions=(*self.repetitions, number))

    def branch(self, index: int) -> Reading:
        """Return the context of one of several inputs."""
        return dataclasses.replace(self, branches=(*self.branches, index))

    def state(self) -> list[list[int]]:
        """Return the orders, to be restored."""
        return [[order.entropy, order.readings] for order in self.orders.values()]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Adopt the orders of another reading; later readings continue from there.

        Raises:
            DatasetError: The orders are those of another pipeline.
        """
        if len(state) != len(self.orders):
            raise DatasetError(
                f"the state has {len(state)} shuffles, but this dataset has {len(self.orders)}: it is the "
                "state of another dataset"
            )
        for own, shared, (entropy, number) in zip(self.orders.values(), self.shared, state, strict=True):
            own.entropy, own.readings = shared.entropy, shared.readings = entropy, number
            shared.readings += 1


def _shuffles(node: Node, branches: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Node, Order]]:
    if node.shuffled is not None:
        yield branches, node, node.shuffled
    for index, below in enumerate(node.inputs):
        yield from _shuffles(below, branches if isinstance(node, Transform) else (*branches, index))


class Node(ABC):
    """A source of elements, or a transform of the elements of other nodes.

    Nodes are immutable; several readings may use one at the same time.
    """

    shuffled: Order | None = None
    """Order of the node's elements, if it shuffles."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Nodes that this one reads."""
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Return this node with other inputs."""
        assert not inputs
        return self

    @abstractmethod
    def open(self, reading: Reading) -> Cursor:
        """Return a cursor at the first element."""

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements, or one of the two constants."""

    def sample(self) -> Any:
        """Return an element from which structure, dtypes and shapes are inferred.

        Raises:
            DatasetError: The dataset is empty.
        """
        reading = Reading.begin(self, counts=False)
        cursor = self.open(reading)
        try:
            for key in cursor.keys(1):
                return cursor.table.get(key)
        finally:
            cursor.close()
            reading.close()
        raise DatasetError(
            "the dataset has no elements, so their structure is unknown. Pass output_signature to "
            "from_generator or from_iterable"
        )

    def spec(self) -> Any:
        """Return the structure of specs of all elements. Read an element if necessary."""
        return spec_of(self.sample())

    def batch_size(self) -> int | None:
        """Return the number of rows of all elements but the last; None if it is not known."""
        return None


@dataclass(frozen=True, eq=False)
class Transform(Node):
    """A node with one input. By default, its elements are like the source's."""

    source: Node
    """Node that it reads."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The node that this one reads."""
        return (self.source,)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Return this transform with another input."""
        [source] = inputs
        return dataclasses.replace(self, source=source)

    def cardinality(self) -> int:
        """Return the number of the source's elements."""
        return self.source.cardinality()

    def sample(self) -> Any:
        """Return an element of the source."""
        return self.source.sample()

    def spec(self) -> Any:
        """Return the source's specs."""
        return self.source.spec()

    def batch_size(self) -> int | None:
        """Return the source's batch size."""
        return self.source.batch_size()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all its direct and indirect inputs."""
    yield node
    for below in node.inputs:
        yield from walk(below)


def transform(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return a pipeline with every node replaced by the result of `change`, sources first."""
    inputs = tuple(transform(below, change) for below in node.inputs)
    return change(node.with_inputs(inputs) if inputs else node)


def static_batch_size(node: Node) -> int | None:
    """Return the number of rows of all elements but the last, if the transforms or the spec tell."""
    known = node.batch_size()
    return static_rows(node.spec()) if known is None else known


def static_rows(spec: Any) -> int | None:
    """Returns the first length of all arrays, if the specs say the same one."""
    lengths: set[int | None] = {leaf.shape[0] if leaf.shape else None for leaf in flatten(spec)}
    return lengths.pop() if len(lengths) == 1 else None


def with_rows(spec: Any, rows: int | None) -> Any:
    """Returns specs of arrays with another first length; None for one that is not known."""
    return map_structure(
        lambda leaf: TensorSpec((rows, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf, spec
    )
