"""Sources of datasets: the class methods that create a `Dataset`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from dmesh.data import adapters, csv_files, files, parquet, records, sources, webdataset
from dmesh.data.elements import TensorSpec, as_element, check_integer
from dmesh.data.examples import FixedLenFeature, VarLenFeature
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Node
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten

__all__ = ["Creation"]


class Creation(ABC):
    """Class methods that create a dataset from a source."""

    @classmethod
    @abstractmethod
    def _of(cls, node: Node) -> Self:
        """Return the dataset of a pipeline."""

    @classmethod
    def from_tensors(cls, tensors: Any) -> Self:
        """Return a dataset of one element.

        Args:
            tensors: The element; lists and numbers become arrays.

        Raises:
            ArgumentTypeError: A leaf of it cannot become an array.
        """
        return cls._of(sources.single(as_element(tensors, "the element")))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Self:
        """Return a dataset of the rows of arrays, along their first dimension.

        Args:
            tensors: A structure of arrays with equal first lengths. They are not copied: do not change them.

        Raises:
            ArgumentTypeError: A leaf of it cannot become an array.
            DatasetError: An array has no dimension, or the first lengths differ.
        """
        return cls._of(sources.slices(as_element(tensors, "the argument")))

    @classmethod
    def range(cls, *args: int, output_type: DTypeLike = np.int64) -> Self:
        """Return a dataset of integers; the arguments are those of Python's `range`.

        Raises:
            ArgumentTypeError: An argument is not an integer, or their number is wrong.
            DatasetError: The step is 0.
        """
        if not 1 <= len(args) <= 3:
            raise ArgumentTypeError(f"Dataset.range() takes 1 to 3 integers, got {len(args)}")
        numbers = [check_integer("an argument of Dataset.range()", number) for number in args]
        if len(numbers) == 3 and numbers[2] == 0:
            raise DatasetError("the step of Dataset.range() must not be 0")
        return cls._of(sources.Range(range(*numbers), np.dtype(output_type)))

    @classmethod
    def from_generator(
        cls, generator: Callable[..., Iterable[Any]], output_signature: Any = None, args: tuple[Any, ...] = ()
    ) -> Self:
        """Return a dataset of the items of an iterator.

        Args:
            generator: Function that returns a new iterator each time the dataset is read.
            output_signature: Structure of `TensorSpec` of all elements; None to infer it from the first
                element.
            args: Arguments of `generator`.

        Raises:
            ArgumentTypeError: `generator` is not callable, or the signature has something else than a
                `TensorSpec`.
        """
        if not callable(generator):
            raise ArgumentTypeError(
                "generator must be a function that returns an iterator, so that the dataset can be read more "
                f"than once; got {type(generator).__name__}"
            )
        return cls._of(sources.Iterated(lambda: generator(*args), _signature(output_signature)))

    @classmethod
    def from_iterable(cls, iterable: Iterable[Any] | Self, output_signature: Any = None) -> Self:
        """Return a dataset of the items of an iterable that can be iterated many times.

        A list of arrays counts as a tuple: loaders of batches yield such lists.

        Args:
            iterable: Object whose `__iter__` returns a new iterator each time.
            output_signature: As in `from_generator`.

        Raises:
            ArgumentTypeError: `iterable` cannot be iterated, or only once.
        """
        if isinstance(iterable, cls):
            return iterable
        if isinstance(iterable, Iterator):
            raise ArgumentTypeError(
                f"this {type(iterable).__name__} can be read only once, but a dataset is read again in every "
                "epoch. Pass the function that makes it: Dataset.from_generator(function)"
            )
        if not isinstance(iterable, Iterable) or isinstance(iterable, str | bytes | Mapping | np.ndarray):
            raise ArgumentTypeError(
                "expected a dmesh.data.Dataset, or another iterable of structures of NumPy arrays, got "
                f"{type(iterable).__name__}. Use Dataset.from_tensor_slices() for arrays"
            )
        length = len(iterable) if isinstance(iterable, Sequence) else UNKNOWN_CARDINALITY
        return cls._of(
            sources.Iterated(
                lambda: iterable,
                _signature(output_signature),
                what=f"the {type(iterable).__name__}",
                length=length,
                lists_are_tuples=True,
            )
        )

    @classmethod
    def from_npy(cls, paths: files.Files) -> Self:
        """Return a dataset of the rows of `.npy` files, which are mapped into memory.

        Args:
            paths: A path, a pattern such as `data/*.npy`, or several of them.

        Raises:
            DatasetError: A file does not exist.
            FileFormatError: On reading: a file is not a `.npy` file, or holds Python objects.
        """
        return cls._of(files.NpyFiles(files.as_files(paths)))

    @classmethod
    def from_npz(
        cls,
        paths: files.Files,
        names: Iterable[str] | None = None,
        max_unpacked_bytes: int = files.MOST_UNPACKED,
    ) -> Self:
        """Return a dataset of the rows of the arrays in `.npz` files, as dicts.

        Arrays that are not compressed (`numpy.savez`) are mapped into memory, others are unpacked.

        Args:
            paths: A path, a pattern such as `data/*.npz`, or several of them.
            names: Names of the arrays; None for all.
            max_unpacked_bytes: Maximum size of an unpacked array, bytes.

        Raises:
            DatasetError: A file does not exist.
            FileFormatError: On reading: a file is not a `.npz` file, holds Python objects, or lacks one of
                the arrays.
        """
        limit = check_integer("max_unpacked_bytes", max_unpacked_bytes, 0)
        chosen = None if names is None else tuple(names)
        return cls._of(files.NpzFiles(files.as_files(paths), chosen, limit))

    @classmethod
    def from_csv(
        cls,
        paths: files.Files,
        columns: Mapping[str, DTypeLike] | Sequence[DTypeLike],
        *,
        delimiter: str = ",",
        encoding: str = "utf-8-sig",
    ) -> Self:
        """Return a dataset of the lines of CSV files.

        Args:
            paths: A path, a pattern such as `data/*.csv`, or several of them.
            columns: For files with a header line: a dict from the names of the wanted columns to dtypes;
                elements are dicts. For files without: a list of dtypes, one for each column; elements are
                tuples.
            delimiter: Separator of fields.
            encoding: Encoding of the files.

        Raises:
            ArgumentTypeError: `columns` is neither.
            DatasetError: A file does not exist.
            FileFormatError: On reading: a line has the wrong number of fields, or a field that is not of its
                dtype. The message has file and line.
        """
        if not isinstance(delimiter, str) or len(delimiter) != 1:
            raise ArgumentTypeError(f"delimiter must be one character, got {delimiter!r:.80}")
        return cls._of(
            csv_files.CsvFiles(files.as_files(paths), csv_files.csv_columns(columns), delimiter, encoding)
        )

    @classmethod
    def from_tfrecord(
        cls,
        paths: files.Files,
        features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None,
        *,
        compression_type: str | None = None,
    ) -> Self:
        """Return a dataset of the records of TFRecord files.

        Args:
            paths: A path, a pattern such as `data/*.tfrecord`, or several of them.
            features: Features to read of the `tf.train.Example` in each record, by name; elements are dicts.
                None for the bytes of the records, as arrays of uint8.
            compression_type: GZIP or ZLIB; None or empty for none.

        Raises:
            ArgumentTypeError: A feature is neither a `FixedLenFeature` nor a `VarLenFeature`.
            DatasetError: A file does not exist, or the compression type is unknown.
            FileFormatError: On reading: a file is damaged or not a TFRecord file, or an example lacks a
                feature or has another type of it. The message has the file and the number of the record.
        """
        if features is not None and not all(
            isinstance(feature, FixedLenFeature | VarLenFeature) for feature in features.values()
        ):
            raise ArgumentTypeError("features must be FixedLenFeatures and VarLenFeatures, by name")
        kind = records.checked_compression(compression_type)
        chosen = None if features is None else dict(features)
        return cls._of(records.RecordFiles(files.as_files(paths), kind, chosen))

    @classmethod
    def from_parquet(cls, paths: files.Files, columns: Iterable[str] | None = None) -> Self:
        """Return a dataset of the rows of Parquet files, as dicts, one row group after the other.

        Needs pyarrow: `pip install 'dmesh[parquet]'`.

        Args:
            paths: A path, a pattern such as `data/*.parquet`, or several of them.
            columns: Names of the columns to read; None for all.

        Raises:
            DatasetError: A file does not exist.
            MissingExtraError: pyarrow is not installed.
            FileFormatError: On reading: a file is not a Parquet file or lacks a column, or a column cannot
                become an array.
        """
        chosen = None if columns is None else tuple(columns)
        return cls._of(parquet.ParquetFiles(files.as_files(paths), chosen))

    @classmethod
    def from_webdataset(cls, paths: files.Files, extensions: Iterable[str] | None = None) -> Self:
        """Return a dataset of the samples in WebDataset tar files: adjacent files with one base name.

        An element is a dict from extensions to arrays, with the base name as `__key__`. `.npy` becomes an
        array, `.cls` an integer, `.txt` a string; any other file becomes an array of its bytes. If the tar
        file is not compressed, skipped samples and those of other workers are not read, except for headers.

        Args:
            paths: A path, a pattern such as `data/*.tar`, or several of them.
            extensions: Extensions to read, such as `jpg` and `cls`; None for all. Each sample must have all.

        Raises:
            DatasetError: A file does not exist.
            FileFormatError: On reading: a file is not a tar file, or a sample lacks an extension or cannot
                be decoded.
        """
        chosen = None if extensions is None else tuple(name.removeprefix(".") for name in extensions)
        return cls._of(webdataset.TarFiles(files.as_files(paths), chosen))

    @classmethod
    def from_torch(cls, source: Any) -> Self:
        """Return a dataset of the elements of a PyTorch `DataLoader` or `Dataset`.

        Tensors become arrays (on the host, without gradient), lists become tuples.

        Args:
            source: A `torch.utils.data.DataLoader` or `torch.utils.data.Dataset`.

        Raises:
            ArgumentTypeError: `source` is neither.
        """
        return cls._of(adapters.from_torch(source))

    @classmethod
    def from_huggingface(cls, source: Any, columns: Iterable[str] | None = None) -> Self:
        """Return a dataset of the rows of a Hugging Face dataset, as dicts.

        Args:
            source: A `datasets.Dataset` or `datasets.IterableDataset`: one split.
            columns: Names of the columns; None for all.

        Raises:
            ArgumentTypeError: `source` is neither.
            DatasetError: A column does not exist.
        """
        return cls._of(adapters.from_huggingface(source, columns))


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
