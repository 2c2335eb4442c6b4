"""`Dataset`: a sequence of elements, and the transforms that make one of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np

from dmesh.data import mapping, rebatching, transforms
from dmesh.data.batching import Batch
from dmesh.data.creation import Creation
from dmesh.data.elements import check_integer
from dmesh.data.iterator import DatasetIterator, describe
from dmesh.data.options import SHARD_HINT, Options
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, walk
from dmesh.data.prefetching import Prefetch
from dmesh.data.shuffling import Shuffle
from dmesh.data.sources import Range
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten, map_structure, with_values

__all__ = ["AUTOTUNE", "Dataset"]

_MANY = 2**62
"""Numbers that `enumerate` has; a range can have hardly more."""

AUTOTUNE = -1
"""For `num_parallel_calls` and `prefetch`: a number that suits this machine."""


class Dataset(Creation):
    """Sequence of elements, possibly endless, that can be read many times.

    An element is a NumPy array or a nested structure of arrays: tuples, named tuples and dicts. Methods
    return new datasets and read nothing; only iterating reads.

    ```python
    images, labels = np.zeros((100, 28, 28), np.float32), np.arange(100) % 10
    dataset = (
        dmesh.data.Dataset.from_tensor_slices({"image": images, "label": labels})
        .shuffle(10_000, seed=1)
        .batch(64)
    )
    for batch in dataset:
        assert batch["image"].shape[1:] == (28, 28)
    ```

    Names, arguments and results are those of `tf.data.Dataset`; `docs/data.md` says what differs.

    Args:
        node: The pipeline; datasets are made by the static methods below.
    """

    @classmethod
    def _of(cls, node: Node) -> Self:
        made = cls.__new__(cls)
        Dataset.__init__(made, node)
        return made

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise ArgumentTypeError(
                "make a Dataset with Dataset.from_tensor_slices() or another of its methods"
            )
        self._node = node
        self._spec: Any = None

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Returns a dataset of one element of each dataset at a time, as long as the shortest.

        ```python
        x, y = Dataset.range(3), Dataset.range(10, 20)
        list(Dataset.zip({"x": x, "pair": (x, y)}))[2]  # {"x": 2, "pair": (2, 12)}
        ```

        Args:
            *args: The datasets, whose elements become tuples; or one structure of datasets, whose elements
                have the same structure: tuples, named tuples and dicts, in any depth.
            datasets: The structure instead.

        Raises:
            ArgumentTypeError: There are none, or something else is among them.
        """
        if args and datasets is not None:
            raise ArgumentTypeError("Dataset.zip() takes datasets one by one or as datasets=, not both")
        given = datasets if not args else args[0] if len(args) == 1 else args
        nodes = _nodes(given)
        if isinstance(nodes, Node):
            return Dataset(nodes)
        flat = type(nodes) is tuple and all(isinstance(node, Node) for node in nodes)
        like = None if flat else map_structure(lambda _: None, nodes)
        return Dataset(transforms.Zip(tuple(flatten(nodes)), like))

    # -- transforms -----------------------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Combines several elements into one, whose arrays have one more dimension.

        Args:
            batch_size: Number of elements.
            drop_remainder: True to leave out a last batch of fewer.
            num_parallel_calls: Changes nothing: batches are made one after the other.
            deterministic: Changes nothing: the order of elements always stays.

        Raises:
            DatasetError: The size is not at least 1; or, when it is read: arrays of different shapes.
        """
        size = check_integer("batch_size", batch_size, 1)
        return Dataset(Batch(self._node, size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """Makes an element of each row. The opposite of `batch`."""
        return Dataset(rebatching.Unbatch(self._node))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """Makes batches of other sizes, as `unbatch` and `batch` would.

        Args:
            batch_size: Number of rows; or several numbers, one after the other, and again from the first one.
            drop_remainder: True to leave out a last batch of fewer.

        Raises:
            DatasetError: A size is negative, or all are 0.
        """
        given = np.atleast_1d(np.asarray(batch_size))
        sizes = tuple(check_integer("a size in rebatch()", size, 0) for size in given.ravel())
        if not any(sizes):
            raise DatasetError(f"rebatch() needs a size of at least 1, got {batch_size!r:.80}")
        return Dataset(rebatching.Rebatch(self._node, sizes, bool(drop_remainder)))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Draws each element at random from the next `buffer_size` ones.

        Args:
            buffer_size: Number of elements to draw from; all of them for a uniform order.
            seed: The same gives the same order, in any process; None for another one in each.
            reshuffle_each_iteration: True for another order in each reading, determined by the seed, the
                number of the reading, and that of the repetition.

        Raises:
            DatasetError: The buffer size is not at least 1.
        """
        size = check_integer("buffer_size", buffer_size, 1)
        number = None if seed is None else check_integer("seed", seed)
        return Dataset(Shuffle(self._node, size, number, bool(reshuffle_each_iteration)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Reads the dataset several times.

        Args:
            count: Number of times; None or a negative number for no end.
        """
        number = None if count is None or check_integer("count", count) < 0 else int(count)
        return Dataset(transforms.Repeat(self._node, number))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        processes: bool = False,
    ) -> Dataset:
        """Applies a function to each element.

        A function of whole batches, mapped after `batch`, is much faster than one of rows, mapped before it.
        The function is called for the elements that are read, in their order, and not for those that a later
        `skip`, `shard` or worker leaves out.

        Args:
            map_func: Function that takes the items of a tuple as arguments, any other element as one; it
                returns an element.
            num_parallel_calls: Number of elements that may be worked on at once; `AUTOTUNE` for a number that
                suits.
            deterministic: Changes nothing: the order of elements always stays.
            processes: True to work in processes, for functions that hold the interpreter's lock; threads
                otherwise. Elements and results are pickled, and the processes import the program.

        Raises:
            ArgumentTypeError: It cannot be called, or not be given to processes.
            DatasetError: The number is not at least 1.
        """
        function = _callable("map_func", map_func)
        calls = 1
        if num_parallel_calls == AUTOTUNE:
            calls = mapping.processors()
        elif num_parallel_calls is not None:
            calls = check_integer("num_parallel_calls", num_parallel_calls, 1)
        if processes:
            mapping.check_portable(function)
        return Dataset(mapping.Map(self._node, function, calls, bool(processes)))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements of which a function returns True.

        Args:
            predicate: Function that takes the arguments of `map`'s and returns a bool.

        Raises:
            ArgumentTypeError: It cannot be called; or, when it is read: it returned something else.
        """
        return Dataset(mapping.Filter(self._node, _callable("predicate", predicate)))

    def take(self, count: int) -> Dataset:
        """Ends after `count` elements; a negative number takes all."""
        return Dataset(transforms.Take(self._node, check_integer("count", count)))

    def skip(self, count: int) -> Dataset:
        """Leaves out the first `count` elements; a negative number leaves out all."""
        return Dataset(transforms.Skip(self._node, check_integer("count", count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps every `num_shards`-th element, beginning with number `index`.

        Args:
            num_shards: Number of shards; `dmesh.data.experimental.SHARD_HINT` to have both numbers
                filled in by `experimental_distribute_dataset` with `AutoShardPolicy.HINT`.
            index: Index of this one.

        Raises:
            DatasetError: There is no such shard.
        """
        shards, shard = check_integer("num_shards", num_shards), check_integer("index", index)
        if (shards, shard) != (SHARD_HINT, SHARD_HINT):
            if shards < 1:
                raise DatasetError(f"num_shards must be at least 1, got {shards}")
            if not 0 <= shard < shards:
                raise DatasetError(f"index must be from 0 to {shards - 1}, got {shard}")
        return Dataset(transforms.Shard(self._node, shards, shard))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Continues with another dataset.

        Raises:
            ArgumentTypeError: Its elements are of other structures or dtypes.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentTypeError(f"concatenate() takes a Dataset, got {type(dataset).__name__}")
        made = Dataset(transforms.Concatenate((*transforms.parts(self._node), dataset._node)))
        made._spec = transforms.common_spec(self.element_spec, dataset.element_spec)
        return made

    def enumerate(self, start: int = 0) -> Dataset:
        """Makes pairs of a number, from `start` up, and the element."""
        first = check_integer("start", start)
        numbers = Range(range(first, min(first + _MANY, 2**63 - 1)), np.dtype(np.int64))
        return Dataset(transforms.Zip((numbers, self._node)))

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Reads ahead in a thread.

        Exceptions of the dataset are raised to the reader. The thread ends with the iterator.

        Args:
            buffer_size: Number of elements that wait at most; `AUTOTUNE` or None for a number that suits, 0
                for no thread.

        Raises:
            DatasetError: The size is negative, and not `AUTOTUNE`.
        """
        size = AUTOTUNE if buffer_size is None else check_integer("buffer_size", buffer_size, AUTOTUNE)
        return Dataset(Prefetch(self._node, size))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Returns the result of a function for the dataset.

        Raises:
            ArgumentTypeError: It is no Dataset.
        """
        made = _callable("transformation_func", transformation_func)(self)
        if not isinstance(made, Dataset):
            raise ArgumentTypeError(
                f"the function given to apply() must return a Dataset, got {type(made).__name__}"
            )
        return made

    # -- properties, and reading -----------------------------------------------------------------------------

    def with_options(self, options: Options) -> Dataset:
        """Returns the dataset with options; those that are set replace the former ones.

        Raises:
            ArgumentTypeError: They are none.
        """
        if not isinstance(options, Options):
            raise ArgumentTypeError(f"with_options() takes dmesh.data.Options, got {type(options).__name__}")
        return Dataset(transforms.WithOptions(self._node, deepcopy(options)))

    def options(self) -> Options:
        """Returns the options that were set; the last ones win. They cannot be changed."""
        options = Options()
        for node in walk(self._node):
            if isinstance(node, transforms.WithOptions):
                options.experimental_distribute.take(node.options.experimental_distribute)
        options.experimental_distribute.frozen()
        return options.frozen()

    @property
    def node(self) -> Node:
        """Last node of the pipeline, for its distribution."""
        return self._node

    @property
    def element_spec(self) -> Any:
        """Structure of `TensorSpec` of all elements.

        After `map`, or for a generator without signature, the first element is read to find it.
        """
        if self._spec is None:
            self._spec = self._node.spec()
        return self._spec

    def cardinality(self) -> int:
        """Returns the number of elements, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`."""
        return self._node.cardinality()

    def __len__(self) -> int:
        number = self.cardinality()
        if number == INFINITE_CARDINALITY:
            raise ArgumentTypeError("this dataset has no end, and no length")
        if number == UNKNOWN_CARDINALITY:
            raise ArgumentTypeError("the length of this dataset is not known before it is read")
        return number

    def __bool__(self) -> bool:
        return True  # whether there are elements may not be known

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._node)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Returns an iterator over the elements, which are NumPy arrays here anyway."""
        return iter(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combines all elements by a function, one after the other.

        Args:
            initial_state: State that it takes with the first element.
            reduce_func: Function that takes the state and an element, and returns the next state.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def __repr__(self) -> str:
        return f"<Dataset: {describe(self._node)}>"


def _nodes(structure: Any) -> Any:
    """Returns the nodes of a structure of datasets, in the same structure."""
    if isinstance(structure, Dataset):
        return structure.node
    if isinstance(structure, Mapping) and structure:
        return with_values(structure, {key: _nodes(part) for key, part in structure.items()})
    if isinstance(structure, tuple) and structure:
        parts = [_nodes(part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    raise ArgumentTypeError(
        f"Dataset.zip() takes datasets, and tuples and dicts of them, got {structure!r:.80}"
    )


def _callable(name: str, function: Any) -> Any:
    if not callable(function):
        raise ArgumentTypeError(f"{name} must be a function, got {type(function).__name__}")
    return function
