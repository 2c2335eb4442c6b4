"""A small store to damage, and what may come of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.store.base import StoreError, StoreRefusedError
from dmesh_server.store.sqlite import DATABASE, LOG, MARKER, SqliteStore

PAGE = 512
FILES = (DATABASE, LOG, MARKER)


@dataclass
class Example:
    """The files of a store as a kill leaves them, and what was acknowledged."""

    files: dict[str, bytes]
    acknowledged: list[Record]
    before_last: list[Record]
    """Without the last commit."""
    end_before_last: int
    """Where the last commit begins in the log."""

    def write(self, directory: Path, **changes: bytes | None) -> None:
        """Writes the files, some of them changed: database=, log=, marker=; None for none."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        named = {"database": DATABASE, "log": LOG, "marker": MARKER}
        changed = {named[name]: content for name, content in changes.items()}
        for name, content in {**self.files, **changed}.items():
            if content is not None:
                (directory / name).write_bytes(content)
                (directory / name).chmod(0o600)


def make_example(directory: Path, *, settled: bool = False) -> Example:
    """Makes a store whose database has records from before a checkpoint, and whose log has four commits.

    Args:
        directory: Where.
        settled: Let the database have all of them.
    """
    store = SqliteStore(directory, page_size=PAGE)
    expected: dict[str, bytes] = {}

    def commit(**values: bytes | None) -> None:
        store.commit([Record("c", "key", key, value) for key, value in values.items()])
        for key, value in values.items():
            expected.pop(key, None)
            if value is not None:
                expected[key] = value

    def records() -> list[Record]:
        return [Record("c", "key", key, value) for key, value in expected.items()]

    for number in range(6):
        commit(**{f"old{number}": bytes([65 + number]) * 40})
    store.close()
    store = SqliteStore(directory, page_size=PAGE)
    commit(old1=b"replaced")
    commit(old2=None, new=b"n" * 30)
    commit(old3=b"r" * 20)
    before, end = records(), (directory / LOG).stat().st_size
    commit(last=b"the last one", old1=b"again")
    if settled:
        store.close()
    files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).exists()}
    example = Example(files, records(), before, end)
    store.close()
    return example


def outcome(directory: Path) -> Sequence[Record] | StoreRefusedError:
    """Opens a store and returns what it holds, or how it refuses. Any other error is the test's."""
    try:
        store = SqliteStore(directory, page_size=PAGE)
    except StoreRefusedError as error:
        return error
    except StoreError as error:
        raise AssertionError(f"neither read nor refused: {error}") from error
    try:
        return store.load()
    finally:
        store.close()


def flipped(content: bytes, at: int, bit: int) -> bytes:
    """Returns the content with one bit flipped."""
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)
