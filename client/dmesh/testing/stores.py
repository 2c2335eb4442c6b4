"""Suite of tests that every store of the coordination server passes, to run on yours.

```python
from dmesh.testing.stores import StoreConformance

class TestMyStore(StoreConformance):
    def open_store(self, directory):
        return MyStore(directory / "data")
```

This is the one module of `dmesh.testing` that needs the server's code at import: who writes a store has it.
It does not import pytest; pytest finds the tests in the class that derives from this one.
"""

from __future__ import annotations

from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.store.base import Store


class StoreConformance:
    """The contract of `dmesh_server.store.base.Store`."""

    def open_store(self, directory: Path) -> Store:
        """Opens the store that is kept in `directory` (empty at first), or a new one if there is none.

        Called again on the same directory after the former store was closed: what was committed must be there
        again. A store in memory returns the same object at every call of one test.
        """
        raise NotImplementedError(f"{type(self).__name__} must define open_store(directory)")

    def test_a_new_store_is_empty(self, tmp_path: Path) -> None:
        """Nothing is there before the first commit."""
        store = self.open_store(tmp_path)
        assert list(store.load()) == []
        store.close()

    def test_what_was_committed_is_there_again(self, tmp_path: Path) -> None:
        """Addresses and values come back exactly, whatever characters and bytes they have."""
        records = [
            Record("c", "key", "a", b"1"),
            Record("c", "key", "a\n/\u00e9\U0001f600", bytes(range(256))),
            Record("c", "member", "a", b"2"),
            Record("d", "key", "a", b""),
            Record("", "cluster", "", b"3"),
        ]
        assert self._commit(tmp_path, records) == records

    def test_a_later_value_replaces_an_earlier_one(self, tmp_path: Path) -> None:
        """Within one commit and between commits."""
        store = self.open_store(tmp_path)
        store.commit([Record("c", "key", "a", b"1"), Record("c", "key", "a", b"2")])
        assert list(store.load()) == [Record("c", "key", "a", b"2")]
        store.close()
        assert self._commit(tmp_path, [Record("c", "key", "a", b"3")]) == [Record("c", "key", "a", b"3")]

    def test_a_record_without_a_value_is_forgotten(self, tmp_path: Path) -> None:
        """Also one that was never there; and what is set after that in the same commit is kept."""
        store = self.open_store(tmp_path)
        store.commit(
            [Record("c", "key", "a", b"1"), Record("c", "key", "b", b"1"), Record("c", "key", "b", None)]
        )
        store.commit([Record("c", "key", "a", None), Record("c", "key", "never", None)])
        store.close()
        last = [Record("c", "key", "x", None), Record("c", "key", "x", b"1")]
        assert self._commit(tmp_path, last) == [Record("c", "key", "x", b"1")]

    def test_records_come_in_the_order_of_their_last_writing(self, tmp_path: Path) -> None:
        """The server rebuilds its state in the order in which it came about."""
        store = self.open_store(tmp_path)
        for key in ("a", "b", "c", "a"):
            store.commit([Record("c", "key", key, b"")])
        store.close()
        assert [record.key for record in self._commit(tmp_path, [])] == ["b", "c", "a"]

    def test_a_large_commit_is_one(self, tmp_path: Path) -> None:
        """Twenty thousand records at once."""
        records = [Record("c", "key", f"{number:05}", bytes(100)) for number in range(20_000)]
        assert self._commit(tmp_path, records) == records

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """The second time has no effect."""
        store = self.open_store(tmp_path)
        store.close()
        store.close()

    def test_it_says_whether_it_blocks(self, tmp_path: Path) -> None:
        """The server asks before it decides on which thread to call it."""
        store = self.open_store(tmp_path)
        assert store.blocking in (True, False)
        store.close()

    def _commit(self, directory: Path, records: list[Record]) -> list[Record]:
        """Commits, closes, opens again; returns what is there."""
        store = self.open_store(directory)
        store.commit(records)
        store.close()
        store = self.open_store(directory)
        found = list(store.load())
        store.close()
        return found
