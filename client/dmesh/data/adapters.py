"""Datasets of other libraries as sources: PyTorch's `DataLoader` and `Dataset`, Hugging Face's `datasets`.

Neither library is imported here: a program that has such an object has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.cursors import Keys, Table, as_list
from dmesh.data.elements import as_element
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Node
from dmesh.data.sources import Iterated, Rows
from dmesh.errors import ArgumentTypeError, DatasetError

__all__ = ["from_huggingface", "from_torch"]


def from_torch(source: Any) -> Node:
    """Return a source of the elements of a PyTorch `DataLoader` or `Dataset`, with arrays for tensors.

    Raises:
        ArgumentTypeError: `source` is neither.
    """
    readable = hasattr(source, "__iter__") or (hasattr(source, "__getitem__") and hasattr(source, "__len__"))
    if not readable or isinstance(source, Iterator | Mapping | str | np.ndarray):
        raise ArgumentTypeError(
            "from_torch() takes a torch.utils.data.DataLoader or torch.utils.data.Dataset, got "
            f"{type(source).__name__}"
        )
    rows = getattr(source, "batch_size", None)
    if not hasattr(source, "__iter__"):
        return Rows(_Items(source), type(source).__name__)
    rows = getattr(source, "batch_size", None)
    return Iterated(
        start=lambda: source,
        what=f"the {type(source).__name__}",
        length=_length(source),
        rows=rows if isinstance(rows, int) and not isinstance(rows, bool) else None,
        convert=_without_tensors,
    )


class _Items(Table):
    """A PyTorch `Dataset` with random access."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.size = len(source)

    def get(self, key: Any) -> Any:
        """Return an item, with arrays for tensors."""
        return as_element(
            _without_tensors(self._source[int(key)]), f"item {key} of the {type(self._source).__name__}"
        )


def _length(source: Any) -> int:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return UNKNOWN_CARDINALITY


def _without_tensors(value: Any) -> Any:
    """Turn tensors into arrays, and lists, which `DataLoader` makes of tuples, back into tuples."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        return _array_of(value.detach().cpu())
    if isinstance(value, Mapping):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_without_tensors, value))
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, str | bytes) for item in value):
            return np.asarray(value)  # a batch of strings
        return tuple(map(_without_tensors, value))
    return value


def _array_of(tensor: Any) -> NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and tensor.dtype == torch.bfloat16:
        import ml_dtypes

        bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array


class _Columns(Table):
    """A Hugging Face dataset with random access, whose rows can be read many at a time.

    Args:
        source: The dataset, in NumPy's format.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.size = len(source)

    def get(self, key: Any) -> Any:
        """Return a row as a dict."""
        return _columns(self._source[int(key)], f"row {key} of the dataset")

    def gather(self, keys: Keys) -> Any:
        """Return a dict of columns."""
        rows = slice(keys.start, keys.stop, keys.step) if isinstance(keys, range) else list(as_list(keys))
        return _columns(self._source[rows], "a batch of rows of the dataset")


def from_huggingface(source: Any, columns: Iterable[str] | None = None) -> Node:
    """Return a source of the rows of a Hugging Face dataset, as dicts of arrays.

    Raises:
        ArgumentTypeError: `source` is not a Hugging Face dataset, or is a dict of splits.
        DatasetError: A column does not exist.
    """
    if isinstance(source, Mapping):
        raise ArgumentTypeError(
            f"from_huggingface() takes one split, got a dict of the splits {', '.join(map(str, source))}"
        )
    if not hasattr(source, "with_format"):
        raise ArgumentTypeError(
            "from_huggingface() takes a datasets.Dataset or datasets.IterableDataset, got "
            f"{type(source).__name__}"
        )
    wanted = None if columns is None else list(columns)
    known = getattr(source, "column_names", None)
    missing = [name for name in wanted or () if known is not None and name not in known]
    if missing:
        raise DatasetError(f"the dataset has no column {', '.join(missing)}; it has {', '.join(known or ())}")
    if wanted is not None:
        source = source.select_columns(wanted)
    table = source.with_format("numpy")
    if hasattr(table, "__getitem__") and hasattr(table, "__len__"):
        return Rows(_Columns(table), "from_huggingface()")
    return Iterated(
        start=lambda: table,
        what="the dataset",
        convert=lambda row: _columns(row, "a row of the dataset"),
    )


def _columns(row: Mapping[str, Any], what: str) -> Any:
    try:
        return as_element(dict(row), what)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            f"{error}. Omit the column with columns=[...], or pad its rows to equal lengths with the "
            "dataset's own map()"
        ) from error
