"""TFRecord files: what TensorFlow wrote is read, what is written is read again, damage is an error."""

import base64
import gzip
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dmesh
from dmesh.data import (
    Dataset,
    FixedLenFeature,
    TFRecordDataset,
    VarLenFeature,
    parse_single_example,
    serialize_example,
)
from dmesh.data.checksums import crc32c, masked_crc32c
from dmesh.data.experimental import AutoShardPolicy, TFRecordWriter
from dmesh.errors import ArgumentTypeError, DatasetError, FileFormatError
from dmesh.testing import FakeCluster


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # these three are in RFC 3720
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_checksums(data, crc):
    assert crc32c(data) == crc


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 4160, 8192, 12_345])
def test_checksums_of_long_data(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == slow_crc32c(data)
    assert crc32c(memoryview(data)) == crc32c(data)


def write(path, records, compression=None):
    TFRecordWriter(path, compression).write(records)
    return str(path)


@pytest.mark.parametrize("compression", [None, "", "GZIP", "ZLIB"])
def test_what_is_written_is_read_again(tmp_path, compression):
    records = [b"", b"one", bytes(100_000), b"\x00\xff"]
    path = write(tmp_path / "r", records, compression)
    dataset = TFRecordDataset(path, compression)
    assert [record.tobytes() for record in dataset] == records
    assert isinstance(dataset, Dataset)
    assert dataset.element_spec == dmesh.data.TensorSpec((None,), np.uint8)
    write(tmp_path / "again", dataset, compression)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "r").read_bytes()


FEATURES = {
    "label": FixedLenFeature((), np.int64),
    "image": FixedLenFeature((2, 2), np.uint8),
    "weights": FixedLenFeature((3,), np.float32),
    "name": FixedLenFeature((), np.str_),
    "tags": VarLenFeature(np.str_),
    "boxes": VarLenFeature(np.float64),
    "more": FixedLenFeature((2,), np.int32, default_value=7),
}


def test_examples(tmp_path):
    pixels = np.array([[1, 2], [3, 255]], np.uint8)
    path = write(
        tmp_path / "x",
        [
            {
                "label": 3,
                "image": pixels.tobytes(),
                "weights": [1.0, 2.5, -1.0],
                "name": "eins",
                "tags": ["a", "ü"],
                "boxes": [0.5],
            },
            {"label": -1, "image": pixels, "weights": np.zeros(3), "name": b"two", "more": [8, 9]},
        ],
    )
    first, second = Dataset.from_tfrecord(path, FEATURES)
    assert int(first["label"]) == 3
    assert first["image"].tolist() == second["image"].tolist() == pixels.tolist()
    assert (first["image"].dtype, first["more"].dtype) == (np.uint8, np.int32)
    assert first["weights"].tolist() == [1.0, 2.5, -1.0]
    assert (str(first["name"]), str(second["name"])) == ("eins", "two")
    assert first["tags"].tolist() == ["a", "ü"]
    assert (second["tags"].tolist(), second["boxes"].tolist()) == ([], [])
    assert (first["more"].tolist(), second["more"].tolist()) == ([7, 7], [8, 9])
    [batch] = Dataset.from_tfrecord(path, {key: FEATURES[key] for key in ("image", "label")}).batch(2)
    assert batch["image"].shape == (2, 2, 2)
    mapped = TFRecordDataset(path).map(lambda record: parse_single_example(record, FEATURES)["label"])
    assert [int(label) for label in mapped] == [3, -1]


BY_TENSORFLOW = {
    "": (
        "XgAAAAAAAADYsG68ClwKEQoFaW1hZ2USCAoGCgQBAgP/ChcKBWxhYmVsEg4aDAoK/f//////////AQoRCgR0YWdzEg"
        "kKBwoBYQoCw7wKGwoHd2VpZ2h0cxIQEg4KDAAAgD8AACBAAACAv/aAUWAAAAAAAAAAACkDmAfY6oKiDgAAAAAAAADF"
        "5Wk/bm90IGFuIGV4YW1wbGV2551l"
    ),
    "GZIP": (
        "H4sIAAAAAAAAA4tjgIAbG/L2cMVwCXKxZuYmpqcKcXCxcbEwMjH/5xLnYs1JTErNEeKT4uHi+vsfChiBallKEtOLhT"
        "i52LkYE7mYDu/hkuZiL0/NTM8oKRYSEOLj4mFgaLBnYFBwANL7vzUEJkAtY9BknsF+41XTIj4o/+jTTPu8/BKFxDyF"
        "1IrE3IKc1LLnc1MBrUyD6ZwAAAA="
    ),
    "ZLIB": (
        "eJyLY4CAGxvy9nDFcAlysWbmJqanCnFwsXGxMDIx/+cS52LNSUxKzRHik+Lh4vr7HwoYgWpZShLTi4U4udi5GBO5mA"
        "7v4ZLmYi9PzUzPKCkWEhDi4+JhYGiwZ2BQcADS+781BCZALWPQZJ7BfuNV0yI+KP/o00z7vPwShcQ8hdSKxNyCnNSy"
        "53NTAcFFLCY="
    ),
}
"""Files of three records (an example, nothing, some bytes) by `tf.io.TFRecordWriter` of TensorFlow 2.21."""


@pytest.mark.parametrize("compression", BY_TENSORFLOW)
def test_files_that_tensorflow_wrote(tmp_path, compression):
    (tmp_path / "x").write_bytes(base64.b64decode(BY_TENSORFLOW[compression]))
    first, second, third = TFRecordDataset(tmp_path / "x", compression)
    assert (second.tobytes(), third.tobytes()) == (b"", b"not an example")
    example = parse_single_example(
        first,
        {
            "label": FixedLenFeature((), np.int64),
            "image": FixedLenFeature((2, 2), np.uint8),
            "weights": VarLenFeature(np.float32),
            "tags": FixedLenFeature((2,), np.str_),
        },
    )
    assert int(example["label"]) == -3
    assert example["image"].tolist() == [[1, 2], [3, 255]]
    assert example["weights"].tolist() == [1.0, 2.5, -1.0]
    assert example["tags"].tolist() == ["a", "ü"]
    again = {"label": -3, "image": bytes([1, 2, 3, 255]), "weights": [1.0, 2.5, -1.0], "tags": ["a", "ü"]}
    if not compression:
        write(tmp_path / "y", [again, b"", b"not an example"])
        assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


@given(
    st.dictionaries(st.text(max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=4)
)
def test_integers_of_all_sizes_come_back(values):
    wanted = {name: VarLenFeature(np.int64) for name in values}
    read = parse_single_example(
        serialize_example({name: np.array(v, np.int64) for name, v in values.items()}), wanted
    )
    assert {name: array.tolist() for name, array in read.items()} == values


@pytest.mark.parametrize(
    ("example", "feature", "message"),
    [
        ({"b": 1, "c": 2}, FixedLenFeature((), np.int64), "the example has no feature 'a'; it has b, c"),
        ({"a": 1}, FixedLenFeature((2,), np.int64), r"'a' has 1 values, expected shape \(2,\)"),
        (
            {"a": [1, 2]},
            VarLenFeature(np.float32),
            "is a int64_list of 2 values, which cannot be read as float",
        ),
        ({"a": [1.5]}, VarLenFeature(np.int64), "is a float_list of 1 values, which cannot be read as int64"),
        ({"a": 300}, FixedLenFeature((), np.uint8), "'a' has values out of the range of uint8"),
        (
            {"a": b"abc"},
            VarLenFeature(np.int32),
            "is a bytes_list of 1 values, which cannot be read as int32",
        ),
        ({"a": [b"a", b"b"]}, VarLenFeature(np.uint8), "is a bytes_list of 2 values"),
        ({"a": b"\xff\x00"}, FixedLenFeature((), np.str_), "can't decode"),
    ],
)
def test_an_example_that_is_not_as_expected(tmp_path, example, feature, message):
    path = write(tmp_path / "x", [{"n": 7}, example])
    wanted = {"n": FixedLenFeature((), np.int64, 0)}
    assert [int(row["n"]) for row in Dataset.from_tfrecord(path, wanted)] == [7, 0]
    write(tmp_path / "x", [example])
    with pytest.raises(FileFormatError, match=rf"x: record 1 cannot be read: .*{message}") as caught:
        list(Dataset.from_tfrecord(path, {"a": feature}))
    assert caught.value.path == path


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "d"
    write(path, [b"first", b"the second record"])
    whole = path.read_bytes()
    second = 12 + 5 + 4
    for at in range(second, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(
            FileFormatError, match=r"d: record 2 cannot be read: its (data|length) has a wrong checksum"
        ):
            list(TFRecordDataset(path))
        if at > second:
            path.write_bytes(whole[:at])
            with pytest.raises(FileFormatError, match="record 2 cannot be read: the file ends within it"):
                list(TFRecordDataset(path))
    path.write_bytes(whole[:second])
    assert len(list(TFRecordDataset(path))) == 1


@pytest.mark.parametrize(("compression", "pack"), [("GZIP", gzip.compress), ("ZLIB", zlib.compress)])
def test_damage_of_compressed_files_is_noticed(tmp_path, compression, pack):
    path = tmp_path / "d"
    write(path, [np.random.default_rng(1).bytes(5000)])
    packed = pack(path.read_bytes())
    for content in (
        packed[:-10],
        packed[:100],
        b"",
        packed[:50] + b"\x00" * 20 + packed[70:],
        packed + b"more",
    ):
        path.write_bytes(content)
        if compression == "GZIP" and content == b"":
            assert list(TFRecordDataset(path, compression)) == []
            continue
        with pytest.raises(FileFormatError, match="cannot be read"):
            list(TFRecordDataset(path, compression))
    write(path, [b"x"])
    with pytest.raises(FileFormatError, match="record 1 cannot be read"):
        list(TFRecordDataset(path, compression))


def test_a_record_of_an_absurd_length_is_refused_before_it_is_read(tmp_path):
    length = struct.pack("<Q", 1 << 50)
    (tmp_path / "d").write_bytes(length + struct.pack("<I", masked_crc32c(length)) + b"x")
    with pytest.raises(FileFormatError, match="it has 1125899906842624 bytes"):
        list(TFRecordDataset(tmp_path / "d"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TFRecordDataset("nothing.tfrecord"), DatasetError, "no file matches"),
        (lambda: TFRecordDataset(__file__, "BZIP"), DatasetError, "must be '', 'GZIP' or 'ZLIB', got 'BZIP'"),
        (lambda: TFRecordWriter("x", "BZIP"), DatasetError, "BZIP"),
        (lambda: TFRecordWriter("x").write_record(b""), DatasetError, "is not open"),
        (lambda: Dataset.from_tfrecord(__file__, {"a": np.int64}), ArgumentTypeError, "FixedLenFeatures and"),
        (lambda: FixedLenFeature((-1,), np.int64), DatasetError, "a length of a feature"),
        (
            lambda: FixedLenFeature((2,), np.int64, [1, 2, 3]),
            DatasetError,
            r"of shape \(2,\) has shape \(3,\)",
        ),
        (lambda: VarLenFeature("M8[s]"), ArgumentTypeError, "numbers or text"),
        (lambda: parse_single_example(b"\xff\xff", {}), DatasetError, "it is not a tf.train.Example"),
        (
            lambda: serialize_example({"a": object()}),
            ArgumentTypeError,
            "expected integers, floats, bytes or text",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_writer_refuses_what_is_no_record(tmp_path):
    with TFRecordWriter(tmp_path / "x") as writer, pytest.raises(ArgumentTypeError, match="got int"):
        writer.write_record(7)


def test_files_are_divided_among_workers(tmp_path):
    for number in range(4):
        write(tmp_path / f"{number}.tfrecord", [{"n": number * 10 + row} for row in range(4)])

    def program():
        strategy = dmesh.distribute.MultiWorkerMirroredStrategy()
        dataset = Dataset.from_tfrecord(
            str(tmp_path / "*.tfrecord"), {"n": FixedLenFeature((), np.int64)}
        ).batch(4)
        options = dmesh.data.Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
        steps = strategy.experimental_distribute_dataset(dataset.with_options(options))
        return [
            number for step in steps for number in strategy.experimental_local_results(step)[0]["n"].tolist()
        ]

    with FakeCluster(2, timeout=20.0) as cluster:
        first, second = cluster.run(program)
    assert first == [0, 1, 2, 3, 20, 21, 22, 23]
    assert second == [10, 11, 12, 13, 30, 31, 32, 33]
