"""Files as datasets: what is read, and what is refused, naming file and line."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.data import UNKNOWN_CARDINALITY, Dataset, TensorSpec
from dmesh.errors import ArgumentTypeError, DatasetError, FileFormatError


@pytest.fixture
def arrays(tmp_path):
    parts = [np.arange(10).reshape(5, 2), np.arange(10, 14).reshape(2, 2), np.arange(14, 24).reshape(5, 2)]
    for index, part in enumerate(parts):
        np.save(tmp_path / f"{index}.npy", part)
        np.savez(tmp_path / f"{index}.npz", x=np.asfortranarray(part), y=part[:, 0] > 3)
        np.savez_compressed(tmp_path / f"packed-{index}.npz", x=np.asfortranarray(part), y=part[:, 0] > 3)
    return tmp_path


def test_rows_of_npy_files(arrays):
    dataset = Dataset.from_npy(str(arrays / "*.npy"))
    assert np.array_equal(list(dataset), np.arange(24).reshape(12, 2))
    assert len(dataset) == 12
    assert dataset.element_spec == TensorSpec([2], np.int64)
    first = next(iter(dataset))
    with pytest.raises(ValueError, match="read-only"):
        first += 1
    for batch in dataset.batch(5):
        batch += 1  # a copy
    assert np.array_equal(next(iter(dataset)), [0, 1])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 12, 20])
@pytest.mark.parametrize("drop", [False, True])
def test_batches_go_across_the_borders_of_files(arrays, size, drop):
    dataset = Dataset.from_npy(sorted(arrays.glob("*.npy"))).batch(size, drop)
    one_by_one = Dataset.from_npy(sorted(arrays.glob("*.npy"))).map(lambda x: x).batch(size, drop)
    assert [x.tolist() for x in dataset] == [x.tolist() for x in one_by_one]
    assert len(dataset) == len(list(dataset))


@pytest.mark.parametrize("kind", ["?.npz", "packed-?.npz"])
def test_rows_of_npz_files(arrays, kind):
    dataset = Dataset.from_npz(str(arrays / kind))
    assert dataset.element_spec == {"x": TensorSpec([2], np.int64), "y": TensorSpec([], np.bool_)}
    rows = list(dataset)
    assert len(rows) == len(dataset) == 12
    assert [row["x"].tolist() for row in rows] == np.arange(24).reshape(12, 2).tolist()
    assert [bool(row["y"]) for row in rows] == [number > 3 for number in range(0, 24, 2)]
    assert [list(row) for row in Dataset.from_npz(str(arrays / kind), names=["y"]).take(1)] == [["y"]]


def test_stored_arrays_are_mapped_and_packed_ones_bounded(arrays):
    source = Dataset.from_npz(arrays / "0.npz").node
    assert isinstance(source.load(str(arrays / "0.npz"))["x"], np.memmap)
    with pytest.raises(FileFormatError, match=r"packed-0\.npz: the array x\.npy has \d+ bytes unpacked"):
        list(Dataset.from_npz(arrays / "packed-0.npz", max_unpacked_bytes=100))


def test_empty_files_have_no_rows(tmp_path):
    np.save(tmp_path / "a.npy", np.empty((0, 3), np.float32))
    np.savez(tmp_path / "a.npz", x=np.empty((0, 3), np.float32))
    for dataset in (Dataset.from_npy(tmp_path / "a.npy"), Dataset.from_npz(tmp_path / "a.npz")):
        assert list(dataset) == list(dataset.batch(2)) == []
    assert Dataset.from_npy(tmp_path / "a.npy").element_spec == TensorSpec([3], np.float32)


def test_files_that_are_none_are_refused_by_name(tmp_path):
    objects = np.array([{"a": 1}], dtype=object)
    np.save(tmp_path / "objects.npy", objects)
    np.savez(tmp_path / "objects.npz", x=objects)
    np.savez_compressed(tmp_path / "packed.npz", x=objects)
    np.savez(tmp_path / "uneven.npz", x=np.zeros(2), y=np.zeros(3))
    np.save(tmp_path / "scalar.npy", np.float64(3))
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "nothing.npy").write_bytes(b"")
    short = io.BytesIO()
    np.save(short, np.zeros(1000))
    (tmp_path / "short.npy").write_bytes(short.getvalue()[:500])
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as archive:
        archive.writestr("x.npy", short.getvalue()[:500])
        archive.writestr("y.npy", b"\x93NUMPY\x01\x00\x00\x00")
    with zipfile.ZipFile(tmp_path / "boasting.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        boast = short.getvalue().replace(b"(1000,)", b"(%d,)" % 10**12)
        archive.writestr("x.npy", boast[:500])
    for path in sorted(tmp_path.iterdir()):
        read = Dataset.from_npy if path.suffix == ".npy" else Dataset.from_npz
        with pytest.raises(FileFormatError, match=path.name) as caught:
            list(read(path))
        assert caught.value.path == str(path)
    with pytest.raises(FileFormatError, match="no array z; the file has x, y"):
        list(Dataset.from_npz(tmp_path / "uneven.npz", names=["z"]))


def test_paths_are_checked_at_once(tmp_path):
    with pytest.raises(DatasetError, match=r"no file .*missing"):
        Dataset.from_npy(tmp_path / "missing.npy")
    with pytest.raises(DatasetError, match="no file"):
        Dataset.from_csv(str(tmp_path / "*.csv"), [int])
    with pytest.raises(DatasetError, match="at least one file"):
        Dataset.from_npy([])
    for wrong in ([3], np.array([3]), Dataset.range(3)):
        with pytest.raises(ArgumentTypeError, match="must be a str or"):
            Dataset.from_npy(wrong)
    names = Dataset.from_tensor_slices([str(tmp_path / "*.npy")])
    with pytest.raises(DatasetError, match="has no end"):
        Dataset.from_npy(names.repeat())


def test_paths_come_from_datasets_too(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.array([number, number]))
    names = [str(tmp_path / f"{number}.npy") for number in (2, 0, 1)]
    for some in (names, [name.encode() for name in names]):
        dataset = Dataset.from_npy(Dataset.from_tensor_slices(some).take(2))
        assert [int(x) for x in dataset] == [2, 2, 0, 0]
    assert [int(x) for x in Dataset.from_npy(np.array(names[1:]))] == [0, 0, 1, 1]


# -- CSV -----------------------------------------------------------------------------------------------------


def write(tmp_path, text, name="a.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_by_name(tmp_path):
    path = write(tmp_path, '\ufeffid, name,x,ok\n1,"a, b",1.5,true\n\n2,"c ""d""\nnew line",nan,0\n')
    dataset = Dataset.from_csv(path, {"x": np.float32, "id": np.uint8, "name": str, "ok": bool})
    first, second = dataset
    assert (first["id"], first["x"], first["name"], first["ok"]) == (1, 1.5, "a, b", True)
    assert first["x"].dtype == np.float32
    assert second["name"] == 'c "d"\nnew line'
    assert np.isnan(second["x"])
    assert not second["ok"]
    assert dataset.element_spec["id"] == TensorSpec([], np.uint8)
    assert dataset.element_spec["name"] == TensorSpec([], str)
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    [batch] = dataset.batch(2)
    assert batch["id"].tolist() == [1, 2]


def test_columns_in_order(tmp_path):
    path = write(tmp_path, "1;2020-01-02\n2;2021-01-02\n")
    dataset = Dataset.from_csv(path, [np.int16, "datetime64[D]"], delimiter=";")
    assert [(int(a), str(b)) for a, b in dataset] == [(1, "2020-01-02"), (2, "2021-01-02")]


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
        ),
        max_size=5,
    )
)
def test_what_csv_writes_is_read(tmp_path_factory, rows):
    import csv

    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    read = [(int(a), float(b), str(c)) for a, b, c in Dataset.from_csv(path, [np.int64, float, str])]
    assert read == rows


@pytest.mark.parametrize(
    ("text", "line", "match"),
    [
        ("a,b\n1,2\n1,x\n", 3, "column b should be int32, found 'x'"),
        ("a,b\n1,2\n1\n", 3, "expected 2 fields, found 1"),
        ("a,b\n1,3000000000\n", 2, "column b should be int32, found '3000000000'"),
        ("a,b\n1,1.5\n", 2, "column b should be int32"),
        ('a,b\n"1\n",2\n1,2,3\n', 4, "expected 2 fields, found 3"),
        ("", 1, "names of the columns"),
        ("a,c\n1,2\n", 1, "no column b; the file has a, c"),
        ('a,b\n1,"2\n', 2, "not valid CSV"),
        ("a,b\n" + "1" * 2_000_000, 2, "longer than 1048576 characters"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, line, match):
    path = write(tmp_path, text)
    with pytest.raises(FileFormatError, match=match) as caught:
        list(Dataset.from_csv(path, {"a": int, "b": np.int32}))
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert f"a.csv:{line}:" in str(caught.value)


def test_strings_are_not_cut_and_truth_is_not_guessed(tmp_path):
    path = write(tmp_path, "toolong,maybe\n")
    for columns in (["U3", str], ["S3", str], [str, bool]):
        with pytest.raises(FileFormatError, match=r"a\.csv:1: column"):
            list(Dataset.from_csv(path, columns))
    assert [a.tobytes() for a, _ in Dataset.from_csv(path, ["S7", str])] == [b"toolong"]


def test_text_of_another_encoding_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("é\n".encode("latin-1"))
    with pytest.raises(FileFormatError, match=r"a\.csv: the file is not utf-8-sig text"):
        list(Dataset.from_csv(path, [str]))
    assert [str(a) for (a,) in Dataset.from_csv(path, [str], encoding="latin-1")] == ["é"]


def test_columns_that_are_none_are_refused(tmp_path):
    path = write(tmp_path, "1\n")
    for columns in ({}, [], "int", 3, [object], ["nonsense"], {"a": np.void}):
        with pytest.raises(ArgumentTypeError):
            Dataset.from_csv(path, columns)
    with pytest.raises(ArgumentTypeError, match="one character"):
        Dataset.from_csv(path, [int], delimiter="::")
