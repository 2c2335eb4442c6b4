"""Data of other versions of the format: brought to this one, or refused.

This format is the first that was released, so older ones are made up: their tables are the same, and the
values of their records differ.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from dmesh_server import failpoints
from dmesh_server.core.effects import Record
from dmesh_server.store import migrations
from dmesh_server.store.base import StoreDamagedError, StoreError, StoreFormatError
from dmesh_server.store.database import VERSION
from dmesh_server.store.migrations import MIGRATIONS, Migration, steps_from
from dmesh_server.store.sqlite import DATABASE, SqliteStore

OLDER, OLDEST = VERSION - 1, VERSION - 2


def turned(records: Sequence[Record]) -> list[Record]:
    return [Record(r.cluster, r.kind, r.key, (r.value or b"")[::-1]) for r in records if r.key != "dropped"]


def marked(records: Sequence[Record]) -> list[Record]:
    return [Record(r.cluster, r.kind, r.key, b">" + (r.value or b"")) for r in records]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {OLDEST: Migration(OLDER, marked), OLDER: Migration(VERSION, turned)}
    monkeypatch.setattr(migrations, "MIGRATIONS", made)


def store_of(directory: Path, version: int) -> list[Record]:
    """Makes a store of an older version; its latest change is in its log only."""
    store = SqliteStore(directory)
    store.commit([Record("c", "key", "dropped", b"x"), Record("c", "key", "a", b"123")])
    store.close()
    with sqlite3.connect(directory / DATABASE) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return [Record("c", "key", "a", b"321" if version == OLDER else b"321>")]


@pytest.mark.parametrize("version", [OLDER, OLDEST])
def test_older_data_is_brought_to_this_format(
    directory: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dmesh_server")
    expected = store_of(directory, version)
    before = (directory / DATABASE).read_bytes()
    store = SqliteStore(directory)
    assert list(store.load()) == expected
    [told] = [r.fields for r in caplog.records if r.getMessage() == "store_migrated"]  # type: ignore[attr-defined]
    kept = directory / f"{DATABASE}.format-{version}"
    assert (told["before"], told["after"], told["kept"]) == (version, VERSION, kept)
    assert kept.read_bytes() == before, "the data as it was, for those who go back"
    store.commit([Record("c", "key", "b", b"new")])
    store.close()
    caplog.clear()
    again = SqliteStore(directory)
    assert list(again.load()) == [*expected, Record("c", "key", "b", b"new")]
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
    again.close()


@pytest.mark.parametrize("point", ["store.before_rename", "store.after_rename"])
def test_a_failure_in_between_leaves_one_or_the_other(directory: Path, point: str) -> None:
    expected = store_of(directory, OLDER)
    failpoints.configure(f"{point}=error:EIO:times=1")
    try:
        with pytest.raises(StoreError):
            SqliteStore(directory)
    finally:
        failpoints.configure("")
    store = SqliteStore(directory)
    assert list(store.load()) == expected
    store.close()


def test_damaged_older_data_is_refused_as_it_is(directory: Path) -> None:
    store_of(directory, OLDER)
    path = directory / DATABASE
    content = bytearray(path.read_bytes())
    content[content.index(b"123")] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="is altered"):
        SqliteStore(directory)
    assert path.read_bytes() == content


@pytest.mark.parametrize("version", [VERSION + 1, VERSION + 1000, OLDEST - 1])
def test_other_versions_are_refused(directory: Path, version: int) -> None:
    store_of(directory, version)
    before = (directory / DATABASE).read_bytes()
    with pytest.raises(StoreFormatError) as caught:
        SqliteStore(directory)
    age = "newer" if version > VERSION else "older"
    assert f"has format {version}, written by a{'n' if age == 'older' else ''} {age} version" in str(
        caught.value
    )
    assert f"formats {OLDEST} to {VERSION}" in str(caught.value)
    assert (directory / DATABASE).read_bytes() == before


def test_each_migration_leads_to_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "MIGRATIONS", MIGRATIONS)
    for version in MIGRATIONS:
        assert steps_from(version, Path())[-1].makes == VERSION
