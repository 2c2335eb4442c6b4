"""What every store does, and what only a directory can do wrong."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh_server.core.effects import Record
from dmesh_server.store.base import Store, StoreDamagedError, StoreError, StoreFormatError
from dmesh_server.store.database import VERSION
from dmesh_server.store.directory import LOCK
from dmesh_server.store.memory import MemoryStore
from dmesh_server.store.sqlite import DATABASE, SqliteStore

Open = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store at every call, after closing it."""
    memory = MemoryStore()
    opened: list[Store] = []

    def again() -> Store:
        for store in opened:
            store.close()
        opened[:] = [memory if request.param == "memory" else SqliteStore(tmp_path / "data")]
        return opened[0]

    yield again
    for store in opened:
        store.close()


class TestEveryStore:
    """The contract of `Store`."""

    def test_a_new_store_is_empty(self, reopen: Open) -> None:
        assert list(reopen().load()) == []

    def test_what_was_committed_is_there_again(self, reopen: Open) -> None:
        records = [
            Record("c", "key", "a", b"1"),
            Record("c", "key", "a\n/\u00e9\U0001f600", bytes(range(256))),
            Record("c", "member", "a", b"2"),
            Record("d", "key", "a", b""),
            Record("", "cluster", "", b"3"),
        ]
        reopen().commit(records)
        assert list(reopen().load()) == records

    def test_a_later_value_replaces_an_earlier_one(self, reopen: Open) -> None:
        store = reopen()
        store.commit([Record("c", "key", "a", b"1"), Record("c", "key", "a", b"2")])
        assert list(store.load()) == [Record("c", "key", "a", b"2")]
        store.commit([Record("c", "key", "a", b"3")])
        assert list(reopen().load()) == [Record("c", "key", "a", b"3")]

    def test_a_record_without_a_value_is_forgotten(self, reopen: Open) -> None:
        store = reopen()
        store.commit(
            [Record("c", "key", "a", b"1"), Record("c", "key", "b", b"1"), Record("c", "key", "b", None)]
        )
        store.commit([Record("c", "key", "a", None), Record("c", "key", "never", None)])
        store.commit([Record("c", "key", "x", None), Record("c", "key", "x", b"1")])
        assert list(reopen().load()) == [Record("c", "key", "x", b"1")]

    def test_records_come_in_the_order_of_their_last_writing(self, reopen: Open) -> None:
        store = reopen()
        for key in ("a", "b", "c", "a"):
            store.commit([Record("c", "key", key, b"")])
        assert [record.key for record in reopen().load()] == ["b", "c", "a"]

    def test_an_empty_commit_is_fine(self, reopen: Open) -> None:
        reopen().commit([])
        assert list(reopen().load()) == []

    def test_a_large_commit_is_one(self, reopen: Open) -> None:
        records = [Record("c", "key", f"{number:05}", bytes(100)) for number in range(20_000)]
        reopen().commit(records)
        assert list(reopen().load()) == records

    def test_closing_twice_is_fine(self, reopen: Open) -> None:
        store = reopen()
        store.close()
        store.close()


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.text(max_size=2), st.none() | st.binary(max_size=3)),
            max_size=5,
        ),
        max_size=8,
    )
)
def test_both_stores_keep_the_same(
    tmp_path_factory: pytest.TempPathFactory, commits: list[list[tuple[str, str, bytes | None]]]
) -> None:
    directory = tmp_path_factory.mktemp("data")
    memory, sqlite = MemoryStore(), SqliteStore(directory)
    try:
        for commit in commits:
            records = [Record("c", kind, key, value) for kind, key, value in commit]
            memory.commit(records)
            sqlite.commit(records)
        assert list(memory.load()) == list(sqlite.load())
    finally:
        sqlite.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_only_the_user_can_read_the_files(directory: Path) -> None:
    old = os.umask(0)
    try:
        store = SqliteStore(directory)
        store.commit([Record("c", "key", "a", b"1")])
    finally:
        os.umask(old)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert set(files) >= {DATABASE, LOCK, f"{DATABASE}-wal"}
    assert set(files.values()) == {0o600}
    store.close()


def test_a_second_server_is_refused_by_name(directory: Path) -> None:
    first = SqliteStore(directory)
    with pytest.raises(StoreError) as caught:
        SqliteStore(directory)
    assert f"{directory} is in use by another dmesh server (pid {os.getpid()})" in str(caught.value)
    first.close()
    SqliteStore(directory).close()


def test_a_directory_that_others_can_write_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        SqliteStore(directory)
    assert list(directory.iterdir()) == []


def test_a_newer_format_is_refused(directory: Path) -> None:
    SqliteStore(directory).close()
    with sqlite3.connect(directory / DATABASE) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    with pytest.raises(StoreFormatError) as caught:
        SqliteStore(directory)
    assert f"has format {VERSION + 1}, written by a newer version of dmesh" in str(caught.value)
    assert DATABASE in str(caught.value)


def test_another_programs_database_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with sqlite3.connect(directory / DATABASE) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(StoreFormatError, match="another program"):
        SqliteStore(directory)


def test_a_file_that_is_no_database_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / DATABASE).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreDamagedError, match="at offset 0: it does not begin with a database header"):
        SqliteStore(directory)
    # The refusal let go of the directory.
    (directory / DATABASE).unlink()
    SqliteStore(directory).close()


def test_a_damaged_database_is_refused(directory: Path) -> None:
    store = SqliteStore(directory)
    store.commit([Record("c", "key", f"{number:05}", bytes(200)) for number in range(1000)])
    store.close()
    path = directory / DATABASE
    content = bytearray(path.read_bytes())
    content[4096 * 3 : 4096 * 20] = b"\xa5" * (4096 * 17)
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError) as caught:
        SqliteStore(directory)
    assert "page 4 (offset 12288), page 5 (offset 16384)" in str(caught.value)
    assert path.read_bytes() == content, "what is refused is not touched"


def test_a_database_behind_a_symbolic_link_is_refused(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / DATABASE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=DATABASE):
        SqliteStore(directory)
    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_commit_changes_nothing_and_can_be_made_again(directory: Path) -> None:
    store = SqliteStore(directory)
    store.commit([Record("c", "key", "a", b"1")])
    # Another connection holds the database, as a backup tool might: the commit fails and is made again later.
    other = sqlite3.connect(directory / DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    records = [Record("c", "key", "a", None), Record("c", "key", "b", b"2")]
    with pytest.raises(StoreError, match="2 records cannot be written"):
        store.commit(records)
    other.execute("ROLLBACK")
    other.close()
    assert list(store.load()) == [Record("c", "key", "a", b"1")]
    store.commit(records)
    assert list(store.load()) == [Record("c", "key", "b", b"2")]
    store.close()


def test_a_closed_store_says_so(directory: Path) -> None:
    store = SqliteStore(directory)
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.commit([Record("c", "key", "a", b"1")])
