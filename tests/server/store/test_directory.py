"""Whether the data directory itself survives a power failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmesh_server.core.effects import Record
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
