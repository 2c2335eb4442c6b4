"""Tar files of samples: what is read, and what is refused."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from dmesh.data import Dataset
from dmesh.errors import FileFormatError


def write(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def samples(count):
    return {
        name: data
        for index in range(count)
        for name, data in {
            f"train/{index}.npy": array(np.full(2, index)), f"train/{index}.cls": b"%d" % index,
            f"train/{index}.seg.png": b"png",
        }.items()
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_neighbors_of_one_name_are_a_sample(tmp_path, mode):
    path = write(tmp_path / "a.tar", samples(4), mode)
    dataset = Dataset.from_webdataset(path)
    first = next(iter(dataset))
    assert list(first) == ["__key__", "npy", "cls", "seg.png"]
    assert (str(first["__key__"]), int(first["cls"]), bytes(first["seg.png"])) == ("train/0", 0, b"png")
    chosen = Dataset.from_webdataset(path, [".npy", "cls"]).shuffle(3, seed=1).repeat(2).batch(3)
    rows = [(x.tolist(), int(y)) for batch in chosen for x, y in zip(batch["npy"], batch["cls"], strict=True)]
    assert sorted(rows) == sorted(2 * [([index] * 2, index) for index in range(4)])
    iterator = iter(chosen)
    next(iterator)
    again = iter(chosen)
    again.restore(iterator.state())
    assert repr(list(again)) == repr(list(iterator))


def test_files_of_samples_that_are_skipped_are_not_decoded(tmp_path):
    files = samples(3)
    files["train/1.npy"] = b"no array"
    path = write(tmp_path / "a.tar", files)
    assert [int(row["cls"]) for row in Dataset.from_webdataset(path).shard(2, 0)] == [0, 2]
    with pytest.raises(FileFormatError, match=r"a.tar: train/1.npy cannot be read"):
        list(Dataset.from_webdataset(path))


def test_what_is_no_tar_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    whole = write(tmp_path / "whole", samples(9)).read_bytes()
    (tmp_path / "short").write_bytes(whole[:1300])
    (tmp_path / "cut").write_bytes(whole[:512])
    objects = write(tmp_path / "objects", {"a.npy": b""})
    for path in (tmp_path / "text", tmp_path / "short", tmp_path / "cut", objects):
        with pytest.raises(FileFormatError, match=path.name):
            list(Dataset.from_webdataset(path))
    with pytest.raises(FileFormatError, match="the sample train/0 has no jpg"):
        list(Dataset.from_webdataset(tmp_path / "whole", ["jpg"]))
