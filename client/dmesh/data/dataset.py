"""`Dataset`: a sequence of elements, and its transforms."""

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
"""Maximum number of elements that `enumerate` counts; ranges cannot be much longer."""

AUTOTUNE = -1
"""For `num_parallel_calls` and `prefetch`: a number chosen for this machine."""


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

    Names, arguments and results are those of `tf.data.Dataset`; `docs/data.md` lists the differences.

    Args:
        node: The pipeline. Programs create datasets with class methods such as `from_tensor_slices`.
    """

    @classmethod
    def _of(cls, node: Node) -> Self:
        made = cls.__new__(cls)
        Dataset.__init__(made, node)
        return made

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise ArgumentTypeError(
                "create a Dataset with Dataset.from_tensor_slices() or another of its class methods"
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
            ArgumentTypeError: There are no datasets, or one of them is not a `Dataset`.
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
        """Combine several elements into one, whose arrays have one more dimension.

        Args:
            batch_size: Number of elements.
            drop_remainder: Whether to drop a last batch with fewer elements.
            num_parallel_calls: Ignored: batches are made one after the other.
            deterministic: Ignored: elements always keep their order.

        Raises:
            DatasetError: The size is less than 1; or, on reading, elements have arrays of different shapes.
        """
        size = check_integer("batch_size", batch_size, 1)
        return Dataset(Batch(self._node, size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """Split each element into its rows. The inverse of `batch`."""
        return Dataset(rebatching.Unbatch(self._node))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """Change the batch size, like `unbatch` and then `batch`.

        Args:
            batch_size: Number of rows; or several numbers, which are used in turn.
            drop_remainder: Whether to drop a last batch with fewer rows.

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
        """Draw each element at random from a buffer of the next `buffer_size` elements.

        Args:
            buffer_size: Number of elements to draw from; that of the whole dataset for a uniform order.
            seed: Equal seeds give equal orders, in all processes; None for a different order in each process.
            reshuffle_each_iteration: Whether each reading has a different order. The order depends on the
                seed, the number of the reading, and that of the repetition.

        Raises:
            DatasetError: The buffer size is less than 1.
        """
        size = check_integer("buffer_size", buffer_size, 1)
        number = None if seed is None else check_integer("seed", seed)
        return Dataset(Shuffle(self._node, size, number, bool(reshuffle_each_iteration)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Read the dataset several times.

        Args:
            count: Number of times; None or a negative number for ever.
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
        """Apply a function to each element.

        Mapping a function of whole batches after `batch` is much faster than mapping one of rows before it.
        The function is called in the order of the elements, and only for elements that are read, not for
        those that a later `skip` or `shard` drops.

        Args:
            map_func: Function that returns an element. If the element is a tuple, its items are the
                arguments, else the element is.
            num_parallel_calls: Maximum number of concurrent calls; `AUTOTUNE` for a number chosen for this
                machine.
            deterministic: Ignored: elements always keep their order.
            processes: Whether to call the function in processes instead of threads, for functions that hold
                the GIL. Elements and results are pickled, and the processes import the program.

        Raises:
            ArgumentTypeError: `map_func` is not callable, or cannot be pickled for processes.
            DatasetError: `num_parallel_calls` is less than 1.
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
        """Keep the elements for which a function returns True.

        Args:
            predicate: Function with the arguments of `map_func` that returns a bool.

        Raises:
            ArgumentTypeError: `predicate` is not callable; or, on reading, it did not return a bool.
        """
        return Dataset(mapping.Filter(self._node, _callable("predicate", predicate)))

    def take(self, count: int) -> Dataset:
        """Keep the first `count` elements; all if it is negative."""
        return Dataset(transforms.Take(self._node, check_integer("count", count)))

    def skip(self, count: int) -> Dataset:
        """Drop the first `count` elements; all if it is negative."""
        return Dataset(transforms.Skip(self._node, check_integer("count", count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep every `num_shards`-th element, starting at number `index`.

        Args:
            num_shards: Number of shards. If both numbers are `dmesh.data.experimental.SHARD_HINT`,
                `experimental_distribute_dataset` with `AutoShardPolicy.HINT` sets them.
            index: Index of the shard.

        Raises:
            DatasetError: `num_shards` is less than 1, or `index` out of range.
        """
        shards, shard = check_integer("num_shards", num_shards), check_integer("index", index)
        if (shards, shard) != (SHARD_HINT, SHARD_HINT):
            if shards < 1:
                raise DatasetError(f"num_shards must be at least 1, got {shards}")
            if not 0 <= shard < shards:
                raise DatasetError(f"index must be from 0 to {shards - 1}, got {shard}")
        return Dataset(transforms.Shard(self._node, shards, shard))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Append the elements of another dataset.

        Raises:
            ArgumentTypeError: Its elements are of other structures or dtypes.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentTypeError(f"concatenate() takes a Dataset, got {type(dataset).__name__}")
        made = Dataset(transforms.Concatenate((*transforms.parts(self._node), dataset._node)))
        made._spec = transforms.common_spec(self.element_spec, dataset.element_spec)
        return made

    def enumerate(self, start: int = 0) -> Dataset:
        """Pair each element with its number, counted from `start`: `(number, element)`."""
        first = check_integer("start", start)
        numbers = Range(range(first, min(first + _MANY, 2**63 - 1)), np.dtype(np.int64))
        return Dataset(transforms.Zip((numbers, self._node)))

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Reads ahead in a thread.

        The iterator raises the thread's exceptions. The thread ends with the iterator.

        Args:
            buffer_size: Number of elements that wait at most; `AUTOTUNE` or None for a number that suits, 0
                for no thread.

        Raises:
            DatasetError: The size is negative, and not `AUTOTUNE`.
        """
        size = AUTOTUNE if buffer_size is None else check_integer("buffer_size", buffer_size, AUTOTUNE)
        return Dataset(Prefetch(self._node, size))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Call a function with the dataset, and return its result, another dataset.

        Raises:
            ArgumentTypeError: The result is not a `Dataset`.
        """
        made = _callable("transformation_func", transformation_func)(self)
        if not isinstance(made, Dataset):
            raise ArgumentTypeError(
                f"the function given to apply() must return a Dataset, got {type(made).__name__}"
            )
        return made

    # -- properties, and reading -----------------------------------------------------------------------------

    def with_options(self, options: Options) -> Dataset:
        """Return the dataset with options, which override earlier ones.

        Raises:
            ArgumentTypeError: `options` is not an `Options`.
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

        After `map`, or for a generator without signature, the first access reads the first element.
        """
        if self._spec is None:
            self._spec = self._node.spec()
        return self._spec

    def cardinality(self) -> int:
        """Return the number of elements, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`."""
        return self._node.cardinality()

    def __len__(self) -> int:
        number = self.cardinality()
        if number == INFINITE_CARDINALITY:
            raise ArgumentTypeError("this dataset is infinite, so it has no length")
        if number == UNKNOWN_CARDINALITY:
            raise ArgumentTypeError("the length of this dataset is unknown until it has been read")
        return number

    def __bool__(self) -> bool:
        return True  # finding out whether there are elements could mean reading one

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._node)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Return `iter(dataset)`: elements are NumPy arrays anyway."""
        return iter(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Reduce all elements to one value with a function.

        Args:
            initial_state: State for the first call.
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
