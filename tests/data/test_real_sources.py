"""Sources of other libraries, with the libraries themselves; `make sources` installs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from dmesh.data import UNKNOWN_CARDINALITY, Dataset, TensorSpec
from dmesh.data.experimental import AutoShardPolicy
from dmesh.data.iterator import DatasetIterator
from dmesh.distribute.input_sharding import divide, effective_policy
from dmesh.errors import ArgumentTypeError, FileFormatError

pytestmark = pytest.mark.sources


def resumed(dataset, taken):
    """Returns the elements of an iterator that continues after some elements, as another one saved it."""
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    fresh = iter(dataset)
    fresh.restore(iterator.state())
    rest = list(fresh)
    assert [repr(element) for element in rest] == [repr(element) for element in iterator]
    return rest


# -- PyTorch -------------------------------------------------------------------------------------------------


def test_a_dataloader_of_torch():
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    x = torch.arange(10.0).reshape(5, 2).requires_grad_()
    tensors = TensorDataset(x, torch.arange(5).to(torch.bfloat16))
    loader = Dataset.from_torch(DataLoader(tensors, batch_size=2))
    assert [batch[0].tolist() for batch in loader] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert [batch[1].astype(int).tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3
    assert loader.node.batch_size() == 2
    assert len(resumed(loader, 1)) == 2

    class Count(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    streamed = Dataset.from_torch(DataLoader(Count(), batch_size=3))
    assert [batch.tolist() for batch in streamed] == [[0, 1, 2], [3]]
    assert Dataset.from_torch(Count()).cardinality() == UNKNOWN_CARDINALITY


def test_a_dataset_of_torch_has_random_access():
    import torch
    from torch.utils.data import Dataset as TorchDataset

    read = []

    class Squares(TorchDataset):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int):
            read.append(index)
            return {"x": torch.full((2,), index), "y": index * index}

    dataset = Dataset.from_torch(Squares()).shuffle(100, seed=1).shard(4, 0).batch(5)
    batches = list(dataset)
    assert len(batches) == len(dataset) == 5
    assert [int(row[0]) for batch in batches for row in batch["x"]] == read
    assert all(np.array_equal(batch["x"][:, 0] ** 2, batch["y"]) for batch in batches)
    assert dataset.element_spec["x"] == TensorSpec([None, 2], np.int64)
    resumed(dataset, 2)


# -- Hugging Face --------------------------------------------------------------------------------------------


def test_a_huggingface_dataset():
    import datasets

    columns = {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 2], "text": ["a", "bb", "c"]}
    table = datasets.Dataset.from_dict(columns)
    dataset = Dataset.from_huggingface(table)
    assert len(dataset) == 3
    assert [row["x"].tolist() for row in dataset] == columns["x"]
    assert [batch["text"].tolist() for batch in dataset.batch(2)] == [["a", "bb"], ["c"]]
    assert [batch.tolist() for batch in dataset.map(lambda row: row["label"]).batch(2)] == [[0, 1], [2]]
    streamed = Dataset.from_huggingface(table.to_iterable_dataset(), columns=["label"])
    assert [int(row["label"]) for row in streamed] == [int(row["label"]) for row in streamed] == [0, 1, 2]
    with pytest.raises(ArgumentTypeError, match="splits train"):
        Dataset.from_huggingface(datasets.DatasetDict({"train": table}))
    ragged = datasets.Dataset.from_dict({"x": [[1], [1, 2]]})
    with pytest.raises(ArgumentTypeError, match=r"columns=\[\.\.\.\]"):
        list(Dataset.from_huggingface(ragged).batch(2))


def test_a_huggingface_dataset_is_shuffled_by_number():
    import datasets

    table = datasets.Dataset.from_dict({"x": list(range(50))})
    dataset = Dataset.from_huggingface(table).shuffle(50, seed=1).batch(8)
    first = [batch["x"].tolist() for batch in dataset]
    assert sorted(number for batch in first for number in batch) == list(range(50))
    same = Dataset.range(50).shuffle(50, seed=1).batch(8)
    assert [batch.tolist() for batch in same] == first, "the order is that of any source of 50 rows"
    assert len(resumed(dataset, 3)) == 4


# -- Parquet -------------------------------------------------------------------------------------------------


@pytest.fixture
def parquet_files(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for index, length in enumerate((10, 7)):
        numbers = np.arange(100 * index, 100 * index + length)
        table = pyarrow.table(
            {
                "n": numbers,
                "x": pyarrow.FixedSizeListArray.from_arrays(np.repeat(numbers, 2).astype(np.float32), 2),
                "pair": [[int(n), -int(n)] for n in numbers],
                "text": [f"row {n}" for n in numbers],
                "image": [bytes(range(n % 5)) for n in range(length)],
            }
        )
        parquet.write_table(table, tmp_path / f"{index}.parquet", row_group_size=4)
    return str(tmp_path / "*.parquet")


def test_rows_of_parquet_files(parquet_files):
    dataset = Dataset.from_parquet(parquet_files)
    rows = list(dataset)
    numbers = [*range(10), *range(100, 107)]
    assert len(rows) == len(dataset) == 17
    assert [int(row["n"]) for row in rows] == numbers
    assert [row["x"].tolist() for row in rows] == [[n, n] for n in numbers]
    assert [row["pair"].tolist() for row in rows] == [[n, -n] for n in numbers]
    assert [str(row["text"]) for row in rows] == [f"row {n}" for n in numbers]
    assert [row["image"].tolist() for row in rows][:6] == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], []]
    chosen = Dataset.from_parquet(parquet_files, ["n", "x"]).batch(6)
    assert [batch["n"].tolist() for batch in chosen] == [numbers[:6], numbers[6:12], numbers[12:]]
    assert next(iter(chosen))["x"].dtype == np.float32
    shuffled = Dataset.from_parquet(parquet_files, ["n"]).shuffle(5, seed=1).repeat(2).batch(4)
    assert sorted(n for batch in shuffled for n in batch["n"].tolist()) == sorted(numbers * 2)
    resumed(shuffled, 5)


def test_row_groups_that_are_skipped_are_not_read(parquet_files, monkeypatch):
    from pyarrow import parquet

    read = []
    whole = parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_group",
        lambda self, i, **more: read.append(i) or whole(self, i, **more),
    )
    assert [int(row["n"]) for row in Dataset.from_parquet(parquet_files).skip(9).take(2)] == [9, 100]
    assert read == [2, 0]


def test_parquet_files_are_divided_among_workers(parquet_files):
    dataset = Dataset.from_parquet(parquet_files, ["n"]).batch(4)
    assert effective_policy(dataset.node, AutoShardPolicy.AUTO, 2) is AutoShardPolicy.FILE
    shares = [
        list(DatasetIterator(divide(dataset.node, AutoShardPolicy.FILE, 2, 1, worker))) for worker in (0, 1)
    ]
    assert [[n for part in share for n in part["n"].tolist()] for share in shares] == [
        list(range(10)), list(range(100, 107)),
    ]  # fmt: skip


def test_what_is_no_parquet_is_refused(tmp_path, parquet_files):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "text").write_text("hello")
    with pytest.raises(FileFormatError, match="text: cannot be read as a Parquet file"):
        list(Dataset.from_parquet(tmp_path / "text"))
    with pytest.raises(FileFormatError, match="no column y; the file has n, x, pair, text, image"):
        list(Dataset.from_parquet(parquet_files, ["y"]))
    parquet.write_table(pyarrow.table({"x": [1, None], "s": [{"a": 1}, {"a": 2}]}), tmp_path / "holes")
    with pytest.raises(FileFormatError, match="column x has 1 null values"):
        list(Dataset.from_parquet(tmp_path / "holes", ["x"]))
    with pytest.raises(FileFormatError, match="column s is struct<a: int64>, of which no array"):
        list(Dataset.from_parquet(tmp_path / "holes", ["s"]))


# -- WebDataset ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_tar_files_that_webdataset_wrote(tmp_path, suffix):
    import webdataset

    path = tmp_path / f"samples.{suffix}"
    with webdataset.TarWriter(str(path)) as writer:
        for index in range(5):
            writer.write(
                {
                    "__key__": f"a/{index:03}",
                    "npy": np.full(3, index),
                    "cls": index,
                    "txt": f"n {index}",
                    "bin": b"x",
                }
            )
    rows = list(Dataset.from_webdataset(path))
    assert [str(row["__key__"]) for row in rows] == [f"a/{index:03}" for index in range(5)]
    assert [row["npy"].tolist() for row in rows] == [[index] * 3 for index in range(5)]
    assert [(int(row["cls"]), str(row["txt"]), row["bin"].tolist()) for row in rows] == [
        (index, f"n {index}", [120]) for index in range(5)
    ]
    read = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert read == [str(row["__key__"]) for row in rows]
    gc.collect()
