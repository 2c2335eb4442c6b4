"""The nodes that a dataset is a pipeline of: what every node can do, and walks over all of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from dmesh.data.elements import TensorSpec, spec_of, stack
from dmesh.errors import DatasetError
from dmesh.structure import flatten, map_structure

__all__ = [
    "Elements",
    "INFINITE_CARDINALITY",
    "Node",
    "opened",
    "static_batch_size",
    "Step",
    "transform",
    "uneven",
    "UNKNOWN_CARDINALITY",
    "walk",
]

Elements: TypeAlias = Generator[Any, None, None]
"""Iterator over elements that must be closed."""

INFINITE_CARDINALITY = -1
"""`Dataset.cardinality` of a dataset without end."""
UNKNOWN_CARDINALITY = -2
"""`Dataset.cardinality` of a dataset whose length only reading it would tell."""


class Node(ABC):
    """A source of elements, or a step that makes elements of those of other nodes.

    Nodes do not change; one may be read several times at once.
    """

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Returns this node reading other nodes."""
        assert not inputs
        return self

    @abstractmethod
    def elements(self) -> Elements:
        """Yields the elements, from the first one."""

    def batches(self, size: int, drop_remainder: bool) -> Elements:
        """Yields the elements in batches. Nodes that can make them of a piece do so."""
        with opened(self) as elements:
            while rows := list(islice(elements, size)):
                if len(rows) == size or not drop_remainder:
                    yield stack(rows)

    @abstractmethod
    def cardinality(self) -> int:
        """Returns how many elements there are, or one of the two constants."""

    def sample(self) -> Any:
        """Returns an element to learn structure, dtypes and shapes from.

        Raises:
            DatasetError: There is none.
        """
        with opened(self) as elements:
            for element in elements:
                return element
        raise DatasetError(
            "the dataset has no elements, so nothing is known of their structure; "
            "from_generator and from_iterable take it as output_signature"
        )

    def spec(self) -> Any:
        """Returns the structure of specs of all elements. Reads an element if nothing else says it."""
        return spec_of(self.sample())

    def batch_size(self) -> int | None:
        """Returns how many rows all elements but the last have; None if it is not known."""
        return None


@dataclass(frozen=True, eq=False)
class Step(Node):
    """A node that reads one other; unless it says otherwise, what it yields is like what it reads."""

    source: Node
    """The node that it reads."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The node that this one reads."""
        return (self.source,)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Returns this step reading another node."""
        [source] = inputs
        return dataclasses.replace(self, source=source)

    def cardinality(self) -> int:
        """Returns how many elements the source has."""
        return self.source.cardinality()

    def sample(self) -> Any:
        """Returns an element of the source."""
        return self.source.sample()

    def spec(self) -> Any:
        """Returns the source's specs."""
        return self.source.spec()

    def batch_size(self) -> int | None:
        """Returns the source's batch size."""
        return self.source.batch_size()


def opened(node: Node) -> AbstractContextManager[Elements]:
    """Reads a node in a `with` block, at whose end the node is closed, and with it what it reads itself."""
    return closing(node.elements())


def walk(node: Node) -> Iterator[Node]:
    """Yields a node and all that it reads, directly or not."""
    yield node
    for below in node.inputs:
        yield from walk(below)


def transform(node: Node, change: Callable[[Node], Node]) -> Node:
    """Returns a pipeline with every node replaced by what `change` makes of it, sources first."""
    inputs = tuple(transform(below, change) for below in node.inputs)
    return change(node.with_inputs(inputs) if inputs else node)


def static_batch_size(node: Node) -> int | None:
    """Returns how many rows the elements of a pipeline but the last have, if its steps or its spec say it."""
    known = node.batch_size()
    if known is not None:
        return known
    lengths: set[int | None] = {leaf.shape[0] if leaf.shape else None for leaf in flatten(node.spec())}
    return lengths.pop() if len(lengths) == 1 else None


def uneven(spec: Any) -> Any:
    """Returns specs whose first lengths are not known."""
    return map_structure(
        lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf, spec
    )
