"""Layout of the database, and the checksums that show missing or altered records.

SQLite protects a database against crashes, not against disks: a flipped bit in a value is read as another
value, and a page that never reached the disk as what stood there before. So every record has a checksum, over
its address, its place and its value, and one row has the number of all records and the sum of all checksums.
Triggers keep that row right within each transaction. A record that was altered, that vanished or that came
back does not add up.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.core.records import FORMAT
from dmesh_server.store.base import StoreDamagedError, StoreError, StoreFormatError

LAYOUT = 2
"""Version of the tables."""
VERSION = LAYOUT * 1000 + FORMAT
"""Version in the database's header: the versions of the tables and of the records in them."""

_APPLICATION = 0x646D6573
_SCHEMA = (
    """CREATE TABLE record (
    cluster TEXT NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    written INTEGER NOT NULL,
    value BLOB NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY (cluster, kind, key)
) WITHOUT ROWID""",
    """CREATE TABLE digest (
    id INTEGER PRIMARY KEY,
    commits INTEGER NOT NULL,
    records INTEGER NOT NULL,
    total INTEGER NOT NULL
)""",
    """CREATE TRIGGER record_added AFTER INSERT ON record BEGIN
    UPDATE digest SET records = records + 1, total = total + new.sum WHERE id = 0;
END""",
    """CREATE TRIGGER record_replaced AFTER UPDATE ON record BEGIN
    UPDATE digest SET total = total + new.sum - old.sum WHERE id = 0;
END""",
    """CREATE TRIGGER record_removed AFTER DELETE ON record BEGIN
    UPDATE digest SET records = records - 1, total = total - old.sum WHERE id = 0;
END""",
)
_UPSERT = """INSERT INTO record (cluster, kind, key, written, value, sum) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET written = excluded.written, value = excluded.value, sum = excluded.sum"""
_DELETE = "DELETE FROM record WHERE cluster = ? AND kind = ? AND key = ?"

_MAGIC = b"SQLite format 3\0"
_HEAD = struct.Struct(">16sHBB40xI4xI28x")
_CACHE_KIB = 16384

_CIRCUMSTANCES = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
)
"""Complaints of SQLite that do not mean a damaged database."""

Address = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a database."""

    records: list[Record]
    """In the order of their last writing."""
    written: int
    """Place of the last one."""
    commits: int
    """Number of commits in it."""


@dataclass(frozen=True, slots=True)
class Head:
    """Header of a database."""

    page_size: int
    """Size of its pages, bytes."""
    version: int
    """Version of the tables and of the records in them, as in `VERSION`."""


def read_head(path: Path) -> Head:
    """Read and check the header of a database that no connection has open.

    Raises:
        StoreDamagedError: It is empty, cut short or no database.
        StoreFormatError: It is another program's.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        what = "is empty" if not head else f"ends at offset {len(head)}, within its header"
        raise damaged(path, 0, f"it {what}; dmesh never writes such a database")
    magic, page_size, write_version, read_version, version, application = _HEAD.unpack(head)
    page_size = 65536 if page_size == 1 else page_size
    if magic != _MAGIC:
        raise damaged(path, 0, "it does not begin with a database header")
    if page_size < 512 or page_size & (page_size - 1):
        raise damaged(path, 16, f"a page size of {page_size} bytes is impossible")
    if {write_version, read_version} - {1, 2}:
        raise damaged(path, 18, f"versions {write_version} and {read_version} of its format are unknown")
    if application != _APPLICATION:
        raise StoreFormatError(f"{path} is a database of another program; give dmesh a directory of its own")
    return Head(page_size, version)


def create(path: Path, page_size: int, content: Content | None = None) -> None:
    """Make a database, complete but not synced, in a file that is there and empty.

    Args:
        path: The file.
        page_size: Size of its pages, bytes.
        content: Content to write; none if None.

    Raises:
        sqlite3.Error: It cannot be written.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {page_size}")
        # Without a log, so that the file describes itself from the first moment; and without any care, since
        # the file has no name yet by which anybody would find it after a crash.
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN EXCLUSIVE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO digest (id, commits, records, total) VALUES (0, 0, 0, 0)")
        if content is not None:
            kept = [(r.cluster, r.kind, r.key, r.value) for r in content.records if r.value is not None]
            write(connection, (), kept, 0, content.commits)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        # The header says so; a connection that changed it later would change a page behind the marker's back.
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    finally:
        connection.close()


def connect_to_look(path: Path) -> sqlite3.Connection:
    """Open a database read-only: neither reading nor closing changes it or its log.

    Raises:
        sqlite3.Error: It cannot be opened.
    """
    return _connect(f"{path.absolute().as_uri()}?mode=ro")


def connect_to_write(path: Path) -> sqlite3.Connection:
    """Open a database so that every commit is synced before it returns.

    Raises:
        sqlite3.Error: It cannot be opened.
    """
    connection = _connect(f"{path.absolute().as_uri()}?mode=rw")
    try:
        for setting in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "fullfsync = ON",
            f"cache_size = -{_CACHE_KIB}",
            # The store says when the log is copied, because it has to note what that changes.
            "wal_autocheckpoint = 0",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def read(connection: sqlite3.Connection, path: Path) -> Content:
    """Read and verify all records.

    Raises:
        StoreDamagedError: Something is missing or altered.
        StoreError: It cannot be read.
    """
    try:
        _check_schema(connection, path)
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise damaged(path, None, str(found))
        rows = connection.execute("SELECT written, cluster, kind, key, value, sum FROM record").fetchall()
        summary = connection.execute("SELECT commits, records, total FROM digest WHERE id = 0").fetchall()
    except sqlite3.DatabaseError as error:
        if _is_damage(error):
            raise damaged(path, None, str(error)) from error
        raise StoreError(f"the database {path} cannot be read: {describe(error)}") from error
    except (UnicodeDecodeError, OverflowError) as error:
        raise damaged(path, None, str(error)) from error
    total = written = 0
    for row in rows:
        if not _is_right(row):
            _, cluster, kind, key, _, _ = row
            raise damaged(path, None, f"the {kind!r} record {key!r} of cluster {cluster!r} is altered")
        total += row[5]
        written = max(written, row[0])
    if len(summary) != 1 or summary[0][1:] != (len(rows), total):
        raise damaged(path, None, f"{len(rows)} records are there, which is not what was written")
    rows.sort(key=lambda row: row[0])
    return Content([Record(*row[1:5]) for row in rows], written, summary[0][0])


def write(
    connection: sqlite3.Connection,
    gone: Sequence[Address],
    kept: Sequence[tuple[str, str, str, bytes]],
    written: int,
    commits: int,
) -> None:
    """Write a change within a transaction.

    Args:
        connection: A connection that has begun a transaction.
        gone: Addresses of the records to delete.
        kept: Records to write, in order.
        written: Place of the last record that was written before.
        commits: Number of commits with this one.

    Raises:
        sqlite3.Error: It cannot be written.
    """
    if gone:
        connection.executemany(_DELETE, gone)
    if kept:
        connection.executemany(
            _UPSERT,
            [
                (cluster, kind, key, place, value, checksum(place, cluster, kind, key, value))
                for place, (cluster, kind, key, value) in enumerate(kept, written + 1)
            ],
        )
    connection.execute("UPDATE digest SET commits = ? WHERE id = 0", (commits,))


def checksum(written: int, cluster: str, kind: str, key: str, value: bytes) -> int:
    """Return the checksum of a record."""
    return zlib.crc32(value, zlib.crc32(f"{written}\0{cluster}\0{kind}\0{key}\0".encode()))


def describe(error: sqlite3.Error | OSError) -> str:
    """Return the message of an error of SQLite or the system."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    # "disk I/O error" has two dozen causes; the name tells which.
    name = getattr(error, "sqlite_errorname", None)
    return f"{error} ({name})" if name else str(error)


def damaged(path: Path, offset: int | None, reason: str) -> StoreDamagedError:
    """Return the refusal of a damaged file."""
    place = "" if offset is None else f" at offset {offset}"
    return StoreDamagedError(
        f"{path} is damaged{place}: {reason}. It is not used, and nothing was changed. Restore the directory "
        "from a copy; or move it away to begin anew."
    )


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    found = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema ORDER BY rowid")]
    if found != list(_SCHEMA):
        raise damaged(path, None, "its tables are not those of dmesh")


def _is_right(row: tuple[object, ...]) -> bool:
    match row:
        case (int(written), str(cluster), str(kind), str(key), bytes(value), int(total)):
            return checksum(written, cluster, kind, key, value) == total
    return False


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether an error means damaged content, not a failing machine."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a text that is none is found by Python, not by SQLite
        return True
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _CIRCUMSTANCES
