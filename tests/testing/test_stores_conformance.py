"""The public conformance tests pass for our stores, and fail for a store that breaks the contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dmesh.testing.stores import StoreConformance
from dmesh_server.core.effects import Record
from dmesh_server.store.base import Store
from dmesh_server.store.memory import MemoryStore
from dmesh_server.store.sqlite import SqliteStore


class TestMemoryStore(StoreConformance):
    def open_store(self, directory: Path) -> Store:
        self.store = getattr(self, "store", None) or MemoryStore()
        return self.store


class TestSqliteStore(StoreConformance):
    def open_store(self, directory: Path) -> Store:
        return SqliteStore(directory / "data")


class Forgetful(MemoryStore):
    """Forgets what a closed store kept."""

    def load(self) -> Sequence[Record]:
        return list(super().load())[:1]


class Sorted(MemoryStore):
    """Returns its records in another order."""

    def load(self) -> Sequence[Record]:
        return sorted(super().load(), key=lambda record: record.key)


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (Forgetful, "test_what_was_committed_is_there_again"),
        (Sorted, "test_records_come_in_the_order_of_their_last_writing"),
    ],
)
def test_a_broken_store_is_caught(broken: type[MemoryStore], caught_by: str, tmp_path: Path) -> None:
    class Suite(StoreConformance):
        store = broken()

        def open_store(self, directory: Path) -> Store:
            return self.store

    with pytest.raises(AssertionError):
        getattr(Suite(), caught_by)(tmp_path)


def test_it_asks_for_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="open_store"):
        StoreConformance().open_store(tmp_path)
