"""`Dataset`: elements, one after the other, and what is done to them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dmesh.data import adapters, batching, files, records, steps
from dmesh.data.elements import TensorSpec, as_element, check_integer
from dmesh.data.examples import FixedLenFeature, VarLenFeature
from dmesh.data.options import SHARD_HINT, Options
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Elements, Node, walk
from dmesh.data.sources import Iterated, Range, Single, Slices
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten

__all__ = ["AUTOTUNE", "Dataset"]

AUTOTUNE = -1
"""For `num_parallel_calls` and `prefetch`: a number that suits this machine."""


class Dataset:
    """A sequence of elements, which may be long or endless, and read again and again.

    An element is a NumPy array or a nested structure of them: tuples, named tuples and dicts. Methods
    return new datasets and read nothing before somebody iterates.

    ```python
    dataset = (
        dmesh.data.Dataset.from_tensor_slices({"image": images, "label": labels})
        .shuffle(10_000, seed=1)
        .batch(64)
    )
    for batch in dataset:
        train(batch["image"], batch["label"])
    ```

    Names, arguments and results are those of `tf.data.Dataset`; `docs/data.md` says what differs.

    Args:
        node: The pipeline; datasets are made by the static methods below.
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise ArgumentTypeError(
                "make a Dataset with Dataset.from_tensor_slices() or another of its methods"
            )
        self._node = node
        self._spec: Any = None

    # -- where data comes from -------------------------------------------------------------------------------

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Returns a dataset of one element.

        Args:
            tensors: The element; lists and numbers become arrays.

        Raises:
            ArgumentTypeError: It is not made of arrays.
        """
        return Dataset(Single(as_element(tensors, "the element")))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Returns a dataset of the rows of arrays: of what lies along their first dimension.

        Args:
            tensors: A structure of arrays of equal first lengths. They are not copied: leave them alone.

        Raises:
            ArgumentTypeError: It is not made of arrays.
            DatasetError: An array has no dimension, or another first length than the others.
        """
        return Dataset(Slices(as_element(tensors, "the argument")))

    @staticmethod
    def range(*args: int, output_type: DTypeLike = np.int64) -> Dataset:
        """Returns a dataset of integers; the arguments are those of Python's `range`.

        Raises:
            ArgumentTypeError: An argument is no integer, or their number is wrong.
            DatasetError: The step is 0.
        """
        if not 1 <= len(args) <= 3:
            raise ArgumentTypeError(f"Dataset.range() takes 1 to 3 integers, got {len(args)}")
        numbers = [check_integer("an argument of Dataset.range()", number) for number in args]
        if len(numbers) == 3 and numbers[2] == 0:
            raise DatasetError("the step of Dataset.range() must not be 0")
        return Dataset(Range(range(*numbers), np.dtype(output_type)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]], output_signature: Any = None, args: tuple[Any, ...] = ()
    ) -> Dataset:
        """Returns a dataset of what an iterator yields.

        Args:
            generator: Makes the iterator, anew each time the dataset is read.
            output_signature: Structure of `TensorSpec` that all elements have; None to take it from the
                first.
            args: What `generator` is called with.

        Raises:
            ArgumentTypeError: `generator` cannot be called, or the signature is none.
        """
        if not callable(generator):
            raise ArgumentTypeError(
                "generator must be a function that returns an iterator, so that the dataset can be read more "
                f"than once; got {type(generator).__name__}"
            )
        return Dataset(Iterated(lambda: generator(*args), _signature(output_signature)))

    @staticmethod
    def from_iterable(iterable: Iterable[Any], output_signature: Any = None) -> Dataset:
        """Returns a dataset of what an iterable yields that can be read again and again.

        A list that holds arrays is taken for a tuple of them; that is what loaders of batches yield.

        Args:
            iterable: Has an `__iter__` that begins anew each time.
            output_signature: As in `from_generator`.

        Raises:
            ArgumentTypeError: It cannot be iterated, or only once.
        """
        if isinstance(iterable, Dataset):
            return iterable
        if isinstance(iterable, Iterator):
            raise ArgumentTypeError(
                f"this {type(iterable).__name__} can be read once only; a dataset is read from its "
                "beginning in every epoch. Hand over what makes it: Dataset.from_generator(function)"
            )
        if not isinstance(iterable, Iterable) or isinstance(iterable, str | bytes | Mapping | np.ndarray):
            raise ArgumentTypeError(
                "expected a dmesh.data.Dataset, or another iterable of structures of NumPy arrays, got "
                f"{type(iterable).__name__}; arrays go through Dataset.from_tensor_slices()"
            )
        length = len(iterable) if isinstance(iterable, Sequence) else UNKNOWN_CARDINALITY
        return Dataset(
            Iterated(
                lambda: iterable,
                _signature(output_signature),
                what=f"the {type(iterable).__name__}",
                length=length,
                lists_are_tuples=True,
            )
        )

    @staticmethod
    def from_npy(paths: files.Files) -> Dataset:
        """Returns a dataset of the rows of `.npy` files, which are mapped into memory.

        Args:
            paths: A path, a pattern such as `data/*.npy`, or several of them.

        Raises:
            DatasetError: A file does not exist.
            FileFormatError: When it is read: a file is no such file, or holds Python objects.
        """
        return Dataset(files.NpyFiles(files.as_files(paths)))

    @staticmethod
    def from_npz(
        paths: files.Files,
        names: Iterable[str] | None = None,
        max_unpacked_bytes: int = files.MOST_UNPACKED,
    ) -> Dataset:
        """Returns a dataset of the rows of the arrays in `.npz` files, as dicts.

        Arrays that are not compressed (`numpy.savez`) are mapped into memory, others are unpacked.

        Args:
            paths: A path, a pattern such as `data/*.npz`, or several of them.
            names: Which arrays; None for all.
            max_unpacked_bytes: Bytes that an unpacked array may have.

        Raises:
            DatasetError: A file does not exist.
            FileFormatError: When it is read: a file is no such file, holds Python objects, or not these
                arrays.
        """
        limit = check_integer("max_unpacked_bytes", max_unpacked_bytes, 0)
        chosen = None if names is None else tuple(names)
        return Dataset(files.NpzFiles(files.as_files(paths), chosen, limit))

    @staticmethod
    def from_csv(
        paths: files.Files,
        columns: Mapping[str, DTypeLike] | Sequence[DTypeLike],
        *,
        delimiter: str = ",",
        encoding: str = "utf-8-sig",
    ) -> Dataset:
        """Returns a dataset of the lines of CSV files.

        Args:
            paths: A path, a pattern such as `data/*.csv`, or several of them.
            columns: A dict from names to dtypes, for files whose first line has the names of the columns;
                elements are dicts of those that are named. Or a list of dtypes, one for each column, for
                files without such a line; elements are tuples.
            delimiter: What stands between fields.
            encoding: Of the files.

        Raises:
            ArgumentTypeError: `columns` is neither.
            DatasetError: A file does not exist.
            FileFormatError: When it is read: a line is not as expected. The message has file and line.
        """
        if not isinstance(delimiter, str) or len(delimiter) != 1:
            raise ArgumentTypeError(f"delimiter must be one character, got {delimiter!r:.80}")
        return Dataset(files.CsvFiles(files.as_files(paths), files.csv_columns(columns), delimiter, encoding))

    @staticmethod
    def from_tfrecord(
        paths: files.Files,
        features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None,
        *,
        compression_type: str | None = None,
    ) -> Dataset:
        """Returns a dataset of the records of TFRecord files.

        Args:
            paths: A path, a pattern such as `data/*.tfrecord`, or several of them.
            features: What to read of the `tf.train.Example` in each record, by name; elements are dicts. None
                for the bytes of the records, as arrays of uint8.
            compression_type: GZIP or ZLIB; None or empty for none.

        Raises:
            ArgumentTypeError: A feature is neither a `FixedLenFeature` nor a `VarLenFeature`.
            DatasetError: A file does not exist, or there is no such compression.
            FileFormatError: When it is read: a file is damaged or no such file, or an example is not as
                expected. The message has file and number of the record.
        """
        if features is not None and not all(
            isinstance(feature, FixedLenFeature | VarLenFeature) for feature in features.values()
        ):
            raise ArgumentTypeError("features must be FixedLenFeatures and VarLenFeatures, by name")
        kind = records.checked_compression(compression_type)
        chosen = None if features is None else dict(features)
        return Dataset(records.RecordFiles(files.as_files(paths), kind, chosen))

    @staticmethod
    def from_torch(source: Any) -> Dataset:
        """Returns a dataset of what a PyTorch `DataLoader` or `Dataset` yields.

        Tensors become arrays (on the host, without gradient), lists become tuples.

        Args:
            source: A `torch.utils.data.DataLoader` or `torch.utils.data.Dataset`.

        Raises:
            ArgumentTypeError: It is neither.
        """
        return Dataset(adapters.from_torch(source))

    @staticmethod
    def from_huggingface(source: Any, columns: Iterable[str] | None = None) -> Dataset:
        """Returns a dataset of the rows of a Hugging Face dataset, as dicts.

        Args:
            source: A `datasets.Dataset` or `datasets.IterableDataset`: one split.
            columns: Which columns; None for all.

        Raises:
            ArgumentTypeError: It is neither.
            DatasetError: A column does not exist.
        """
        return Dataset(adapters.from_huggingface(source, columns))

    @staticmethod
    def zip(*args: Dataset | tuple[Dataset, ...], datasets: Any = None) -> Dataset:
        """Returns a dataset of tuples of one element of each dataset, as long as the shortest.

        Args:
            *args: The datasets.
            datasets: A tuple of datasets instead.

        Raises:
            ArgumentTypeError: There are none, or something else is among them.
        """
        given: Any = args if datasets is None else datasets
        if len(given) == 1 and isinstance(given[0], tuple):
            [given] = given
        if not given or not all(isinstance(dataset, Dataset) for dataset in given):
            raise ArgumentTypeError("Dataset.zip() takes at least one Dataset, and nothing else")
        return Dataset(steps.Zip(tuple(dataset._node for dataset in given)))

    # -- what is done on the way -----------------------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Makes one element of several: arrays with one more dimension, along which they lie.

        Args:
            batch_size: How many.
            drop_remainder: Whether a last batch of fewer is left out.
            num_parallel_calls: Changes nothing: batches are made one after the other.
            deterministic: Changes nothing: the order of elements always stays.

        Raises:
            DatasetError: The size is not at least 1; or, when it is read: arrays of different shapes.
        """
        size = check_integer("batch_size", batch_size, 1)
        return Dataset(batching.Batch(self._node, size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """Makes an element of each row. The opposite of `batch`."""
        return Dataset(batching.Unbatch(self._node))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """Makes batches of other sizes, as `unbatch` and `batch` would.

        Args:
            batch_size: How many rows; or several numbers, one after the other, and again from the first one.
            drop_remainder: Whether a last batch of fewer is left out.

        Raises:
            DatasetError: A size is negative, or all are 0.
        """
        given = np.atleast_1d(np.asarray(batch_size))
        sizes = tuple(check_integer("a size in rebatch()", size, 0) for size in given.ravel())
        if not any(sizes):
            raise DatasetError(f"rebatch() needs a size of at least 1, got {batch_size!r:.80}")
        return Dataset(batching.Rebatch(self._node, sizes, bool(drop_remainder)))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Draws each element at random from the next `buffer_size` ones.

        Args:
            buffer_size: As many as the dataset has elements, for a uniform order.
            seed: The same gives the same order, in any process; None for another one in each.
            reshuffle_each_iteration: Whether each reading has another order, determined by seed and number of
                the reading.

        Raises:
            DatasetError: The buffer size is not at least 1.
        """
        size = check_integer("buffer_size", buffer_size, 1)
        number = None if seed is None else check_integer("seed", seed)
        return Dataset(steps.Shuffle(self._node, size, number, bool(reshuffle_each_iteration)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Reads the dataset several times.

        Args:
            count: How often; None or a negative number for ever.
        """
        number = None if count is None or check_integer("count", count) < 0 else int(count)
        return Dataset(steps.Repeat(self._node, number))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Applies a function to each element.

        Args:
            map_func: Takes the items of a tuple as arguments, any other element as one; returns an element.
            num_parallel_calls: How many elements may be worked on at once, in threads; `AUTOTUNE` for a
                number that suits.
            deterministic: Changes nothing: the order of elements always stays.

        Raises:
            ArgumentTypeError: It cannot be called.
            DatasetError: The number is not at least 1.
        """
        calls = 1
        if num_parallel_calls == AUTOTUNE:
            calls = steps.processors()
        elif num_parallel_calls is not None:
            calls = check_integer("num_parallel_calls", num_parallel_calls, 1)
        return Dataset(steps.Map(self._node, _callable("map_func", map_func), calls))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements of which a function returns True.

        Args:
            predicate: Takes what the function of `map` takes; returns a bool.

        Raises:
            ArgumentTypeError: It cannot be called; or, when it is read: it returned something else.
        """
        return Dataset(steps.Filter(self._node, _callable("predicate", predicate)))

    def take(self, count: int) -> Dataset:
        """Ends after `count` elements; a negative number takes all."""
        return Dataset(steps.Take(self._node, check_integer("count", count)))

    def skip(self, count: int) -> Dataset:
        """Leaves out the first `count` elements; a negative number leaves out all."""
        return Dataset(steps.Skip(self._node, check_integer("count", count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps every `num_shards`-th element, beginning with number `index`.

        Args:
            num_shards: How many shards there are; `dmesh.data.experimental.SHARD_HINT` to have both numbers
                filled in by `experimental_distribute_dataset` with `AutoShardPolicy.HINT`.
            index: Which one this is.

        Raises:
            DatasetError: There is no such shard.
        """
        shards, shard = check_integer("num_shards", num_shards), check_integer("index", index)
        if (shards, shard) != (SHARD_HINT, SHARD_HINT):
            if shards < 1:
                raise DatasetError(f"num_shards must be at least 1, got {shards}")
            if not 0 <= shard < shards:
                raise DatasetError(f"index must be from 0 to {shards - 1}, got {shard}")
        return Dataset(steps.Shard(self._node, shards, shard))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Continues with another dataset.

        Raises:
            ArgumentTypeError: Its elements are of other structures, dtypes or numbers of dimensions.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentTypeError(f"concatenate() takes a Dataset, got {type(dataset).__name__}")
        node = steps.Concatenate((self._node, dataset._node))
        node.check()
        return Dataset(node)

    def enumerate(self, start: int = 0) -> Dataset:
        """Makes pairs of a number, from `start` up, and the element."""
        return Dataset(steps.Enumerate(self._node, check_integer("start", start)))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Reads ahead in a thread.

        What the dataset raises is raised where it is read. The thread ends with the iterator.

        Args:
            buffer_size: How many elements wait at most; `AUTOTUNE` for a number that suits, 0 for no thread.

        Raises:
            DatasetError: The size is negative, and not `AUTOTUNE`.
        """
        return Dataset(steps.Prefetch(self._node, check_integer("buffer_size", buffer_size, AUTOTUNE)))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Returns what a function makes of the dataset.

        Raises:
            ArgumentTypeError: It is no Dataset.
        """
        made = _callable("transformation_func", transformation_func)(self)
        if not isinstance(made, Dataset):
            raise ArgumentTypeError(
                f"the function given to apply() must return a Dataset, got {type(made).__name__}"
            )
        return made

    # -- what it says of itself ------------------------------------------------------------------------------

    def with_options(self, options: Options) -> Dataset:
        """Returns the dataset with options, which win over those that it had, as far as they are set.

        Raises:
            ArgumentTypeError: They are none.
        """
        if not isinstance(options, Options):
            raise ArgumentTypeError(f"with_options() takes dmesh.data.Options, got {type(options).__name__}")
        return Dataset(steps.WithOptions(self._node, deepcopy(options)))

    def options(self) -> Options:
        """Returns the options that it was given; of several, what was said last."""
        options = Options()
        for node in walk(self._node):
            if isinstance(node, steps.WithOptions):
                options.experimental_distribute.take(node.options.experimental_distribute)
        return options

    @property
    def node(self) -> Node:
        """The last node of the pipeline, for whoever distributes it."""
        return self._node

    @property
    def element_spec(self) -> Any:
        """Structure of `TensorSpec` of all elements.

        Where nothing says it, after `map` or in a generator without signature, the first element is read.
        """
        if self._spec is None:
            self._spec = self._node.spec()
        return self._spec

    def cardinality(self) -> int:
        """Returns how many elements there are, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`."""
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

    def __iter__(self) -> Elements:
        return self._node.elements()

    def as_numpy_iterator(self) -> Elements:
        """Returns an iterator over the elements, which are NumPy arrays here anyway."""
        return iter(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Returns what a function makes of all elements, one after the other.

        Args:
            initial_state: What it gets with the first element.
            reduce_func: Takes the state and an element, returns the next state.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def __repr__(self) -> str:
        return f"<Dataset: {' <- '.join(type(node).__name__ for node in walk(self._node))}>"


def _callable(name: str, function: Any) -> Any:
    if not callable(function):
        raise ArgumentTypeError(f"{name} must be a function, got {type(function).__name__}")
    return function


def _signature(signature: Any) -> Any:
    if signature is None:
        return None
    for leaf in flatten(signature):
        if not isinstance(leaf, TensorSpec):
            raise ArgumentTypeError(
                "output_signature must be a structure of dmesh.data.TensorSpec, got a "
                f"{type(leaf).__name__} in it"
            )
    return signature
