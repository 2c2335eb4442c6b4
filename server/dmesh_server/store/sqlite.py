"""A store in a directory: one SQLite database in WAL mode, synced to the disk at every commit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.core.records import FORMAT
from dmesh_server.store.base import StoreError

DATABASE = "dmesh.sqlite3"
"""Name of the database in the data directory."""
LOCK = "lock"
"""Name of the file whose lock says that a server uses the directory; it holds the server's process id."""

_APPLICATION = 0x646D6573
_SCHEMA = """
CREATE TABLE record (
    written INTEGER PRIMARY KEY,
    cluster TEXT NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    UNIQUE (cluster, kind, key)
)
"""


class SqliteStore:
    """Keeps records in a directory that belongs to one server at a time.

    Args:
        directory: The data directory; made, for the user only, if it does not exist.

    Raises:
        StoreError: The directory is in use, or what is in it cannot be used.
    """

    blocking = True
    """Every commit waits for the disk."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._path = self.directory / DATABASE
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = _lock(self.directory)
        try:
            self._connection = self._connect()
        except BaseException:
            self.close()
            raise

    def load(self) -> Sequence[Record]:
        """Returns all records, in the order in which each was last written."""
        try:
            rows = self._open().execute("SELECT cluster, kind, key, value FROM record ORDER BY written")
            return [Record(cluster, kind, key, bytes(value)) for cluster, kind, key, value in rows]
        except sqlite3.Error as error:
            raise StoreError(f"the database {self._path} cannot be read: {error}") from error

    def commit(self, records: Sequence[Record]) -> None:
        """Keeps these records, and forgets those without a value: all or none, on the disk on return."""
        # The last word on one address counts, and its place; SQLite need not see the others.
        latest: dict[tuple[str, str, str], bytes | None] = {}
        for record in records:
            address = (record.cluster, record.kind, record.key)
            latest.pop(address, None)
            latest[address] = record.value
        gone = [address for address, value in latest.items() if value is None]
        kept = [(*address, value) for address, value in latest.items() if value is not None]
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM record WHERE cluster = ? AND kind = ? AND key = ?", gone)
            # A replaced row gets a new place at the end, which keeps the order of writing.
            connection.executemany(
                "INSERT OR REPLACE INTO record (cluster, kind, key, value) VALUES (?, ?, ?, ?)", kept
            )
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # After a failed write or sync nothing is certain of this connection: the next commit opens one.
            self._disconnect()
            raise StoreError(f"{len(records)} records cannot be written to {self._path}: {error}") from error

    def close(self) -> None:
        """Closes the database and lets another server use the directory."""
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self) -> sqlite3.Connection:
        if self._lock is None:
            raise StoreError(f"the store in {self.directory} is closed")
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        # SQLite gives its other files the permissions of this one.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            self._prepare(connection)
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(
                f"{self._path} cannot be used: {error}. Restore it from a copy, or move it away to begin "
                "anew."
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        fresh = not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
        if not fresh and application != _APPLICATION:
            raise StoreError(
                f"{self._path} is a database of another program; give dmesh a directory of its own"
            )
        if not fresh and version != FORMAT:
            age = "newer" if version > FORMAT else "older"
            raise StoreError(
                f"{self._path} has format {version}, written by a {age} version of dmesh; this one reads "
                f"format {FORMAT}. Use that version, or another data directory."
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")
        if fresh:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("COMMIT")
            # The directory's own entries must survive, too.
            descriptor = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        else:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise StoreError(
                    f"{self._path} is damaged ({found}). Restore it from a copy, or move it away to begin "
                    "anew."
                )


def _lock(directory: Path) -> int:
    """Takes the directory for this process; returns the descriptor that holds the lock."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o022:
        raise StoreError(
            f"the data directory {directory} can be written by other users (mode {mode:04o}), who could "
            f"replace the database. Run `chmod 700 {directory}`, or use another directory."
        )
    path = directory / LOCK
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(
            f"the data directory {directory} is in use by another dmesh server (pid {holder}). "
            "Stop that server, or use another directory."
        ) from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
