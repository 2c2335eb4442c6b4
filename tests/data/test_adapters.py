"""Datasets of PyTorch and Hugging Face, by objects like theirs; `make sources` tests the real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dmesh.data import UNKNOWN_CARDINALITY, Dataset, TensorSpec
from dmesh.errors import ArgumentTypeError, DatasetError


class Tensor:
    """What an adapter sees of a `torch.Tensor`."""

    def __init__(self, array, dtype="torch.float32"):
        self._array, self.dtype, self._ready = np.asarray(array), dtype, False

    def detach(self):
        return self

    def cpu(self):
        ready = Tensor(self._array, self.dtype)
        ready._ready = True
        return ready

    def contiguous(self):
        return self

    def view(self, dtype):
        return self

    def numpy(self):
        assert self._ready, "it may be on a GPU, and have a gradient"
        return self._array


class Loader:
    """What an adapter sees of a `torch.utils.data.DataLoader`."""

    def __init__(self, batches, batch_size=None):
        self._batches, self.batch_size, self.dataset = batches, batch_size, None

    def __iter__(self):
        return iter(self._batches)

    def __len__(self):
        return len(self._batches)


class Items:
    """A map-style dataset that raises no IndexError."""

    def __getitem__(self, index):
        return {"x": Tensor([index] * 2), "label": index}

    def __len__(self):
        return 3


class Table:
    """What an adapter sees of a `datasets.Dataset`."""

    def __init__(self, columns, format="python"):
        self._columns, self._format = columns, format
        self.column_names = list(columns)

    def with_format(self, format):
        return Table(self._columns, format)

    def select_columns(self, names):
        return Table({name: self._columns[name] for name in names}, self._format)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, rows):
        assert self._format == "numpy"
        return {name: column[rows] for name, column in self._columns.items()}

    def __iter__(self):
        return (self[row] for row in range(len(self)))


class Stream:
    """What an adapter sees of a `datasets.IterableDataset`."""

    column_names = None

    def with_format(self, format):
        return self

    def __iter__(self):
        return iter([{"x": np.arange(2)}, {"x": np.arange(2, 4)}])


def test_a_loader_yields_arrays_and_tuples():
    batches = [[Tensor([[1.0], [2.0]]), Tensor([1, 2]), ["a", "b"]], [Tensor([[3.0]]), Tensor([3]), ["c"]]]
    dataset = Dataset.from_torch(Loader(batches, batch_size=2))
    for _ in range(2):
        first, second = dataset
        assert isinstance(first, tuple)
        assert first[0].tolist() == [[1], [2]]
        assert second[2].tolist() == ["c"]
    assert len(dataset) == 2
    assert dataset.node.batch_size() == 2
    assert dataset.element_spec[0] == TensorSpec([None, 1], float)


def test_an_indexed_dataset_ends_where_its_length_says():
    rows = list(Dataset.from_torch(Items()))
    assert [(row["x"].tolist(), int(row["label"])) for row in rows] == [([0, 0], 0), ([1, 1], 1), ([2, 2], 2)]


def test_bfloat16_keeps_its_bits(monkeypatch):
    import ml_dtypes

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(bfloat16="bf16", int16="i2"))
    numbers = np.array([1.5, -2], ml_dtypes.bfloat16)
    [array] = Dataset.from_torch(Loader([Tensor(numbers.view(np.int16), "bf16")]))
    assert array.dtype == ml_dtypes.bfloat16
    assert array.tolist() == [1.5, -2]


def test_a_table_yields_rows_and_batches():
    table = Table({"x": np.arange(10).reshape(5, 2), "label": np.arange(5), "text": np.array(list("abcde"))})
    dataset = Dataset.from_huggingface(table, columns=["x", "label"])
    assert len(dataset) == 5
    assert [row["x"].tolist() for row in dataset] == np.arange(10).reshape(5, 2).tolist()
    assert [batch["label"].tolist() for batch in dataset.batch(2)] == [[0, 1], [2, 3], [4]]
    assert [batch["label"].tolist() for batch in dataset.batch(2, True)] == [[0, 1], [2, 3]]
    assert [str(row["text"]) for row in Dataset.from_huggingface(table).take(1)] == ["a"]
    with pytest.raises(DatasetError, match="no column y; it has x, label, text"):
        Dataset.from_huggingface(table, columns=["y"])


def test_a_stream_of_rows_can_be_read_again():
    dataset = Dataset.from_huggingface(Stream())
    assert (
        [row["x"].tolist() for row in dataset] == [row["x"].tolist() for row in dataset] == [[0, 1], [2, 3]]
    )
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_what_is_neither_is_refused():
    for other in (3, None, "text", {"train": 1}, iter([1]), np.zeros(3)):
        with pytest.raises(ArgumentTypeError, match="from_torch"):
            Dataset.from_torch(other)
    with pytest.raises(ArgumentTypeError, match="got list"):
        Dataset.from_huggingface([1])
    with pytest.raises(ArgumentTypeError, match="splits train, test"):
        Dataset.from_huggingface({"train": Table({"x": np.zeros(1)}), "test": None})
