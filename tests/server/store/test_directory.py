"""Whether the data directory itself survives a power failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dmesh_server.core.effects import Record
from dmesh_server.store.base import StoreError
from dmesh_server.store.sqlite import SqliteStore


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, set[str]]]:
    """The directories that were synced so far, each with the names that it had then."""
    found: list[tuple[Path, set[str]]] = []
    sync = os.fsync

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            found.append((path, set(os.listdir(path))))

    monkeypatch.setattr(os, "fsync", noted_sync)
    return found


def test_every_new_directory_is_on_the_disk_before_anything_is_acknowledged(
    tmp_path: Path, synced: list[tuple[Path, set[str]]]
) -> None:
    store = SqliteStore(tmp_path / "var" / "dmesh" / "data")
    store.commit([Record("c", "key", "a", b"1")])
    for parent, name in ((tmp_path, "var"), (tmp_path / "var", "dmesh"), (tmp_path / "var/dmesh", "data")):
        assert any(path == parent and name in names for path, names in synced), f"{name} may be lost"
    store.close()


def test_a_directory_that_is_there_is_not_synced_into_its_parent_again(
    tmp_path: Path, synced: list[tuple[Path, set[str]]]
) -> None:
    SqliteStore(tmp_path / "data").close()
    synced.clear()
    SqliteStore(tmp_path / "data").close()
    assert tmp_path not in [path for path, _ in synced]


def test_data_that_a_failing_disk_hides_is_not_replaced_by_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path)
    store.commit([Record("c", "key", "a", b"1")])
    store.close()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    stat, lstat = os.stat, os.lstat

    def failing(look: Any) -> Any:
        def look_at(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if Path(str(path)).name in {each.name for each in files}:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return look(path, *arguments, **options)

        return look_at

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing(stat))
        patched.setattr(os, "lstat", failing(lstat))
        with pytest.raises((OSError, StoreError)):
            SqliteStore(tmp_path)
    assert {path: path.read_bytes() for path in files} == files
    store = SqliteStore(tmp_path)
    assert [record.value for record in store.load()] == [b"1"]
    store.close()
