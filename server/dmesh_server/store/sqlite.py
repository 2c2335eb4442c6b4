"""A store in a directory: one SQLite database in WAL mode, synced to the disk at every commit.

    dmesh.sqlite3        the database (`database`)
    dmesh.sqlite3-wal    its log, where commits go first (`wal`)
    dmesh.sqlite3-marker what was acknowledged (`commit_marker`)
    lock                 who uses the directory (`directory`)

docs/durability.md says what survives what.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dmesh_server import failpoints
from dmesh_server.core.effects import Record
from dmesh_server.store import database, directory, migrations, wal
from dmesh_server.store.base import StoreDamagedError, StoreError
from dmesh_server.store.commit_marker import CommitMarker, page_sums
from dmesh_server.telemetry import logs

DATABASE = "dmesh.sqlite3"
"""Name of the database in the data directory."""
LOG = f"{DATABASE}-wal"
"""Name of its log."""
MARKER = f"{DATABASE}-marker"
"""Name of its commit marker."""

_NEW = f"{DATABASE}.new"
"""A database that has not got its name yet."""
_PAGE_SIZE = 4096
_LOG_LIMIT = 8 << 20
_HUGE = 8
"""Multiple of its limit at which the log's length is worth a warning."""
_COMPACT_FROM = 1 << 20
_PROBE_MARGIN = 64 << 10
_NAMED_PAGES = 8


class SqliteStore:
    """Records in a directory that one server at a time uses."""

    blocking = True
    """Every commit waits for the disk."""

    def __init__(self, path: Path | str, *, page_size: int = _PAGE_SIZE, log_limit: int = _LOG_LIMIT) -> None:
        """Open the directory, verify its data, and cut off a write that a crash left unfinished.

        Args:
            path: The data directory; made, for the user only, if it does not exist.
            page_size: Of a database that is made now, bytes.
            log_limit: How long the log may get before it is copied into the database, bytes.

        Raises:
            StoreRefusedError: What is in it is damaged, or not ours. Nothing was changed.
            StoreError: It is in use, or cannot be used.
            OSError: It cannot be used.
        """
        self.directory = Path(path)
        self._path = self.directory / DATABASE
        self._log_path = self.directory / LOG
        self._new_path = self.directory / _NEW
        self._page_size = page_size
        self._log_limit = log_limit
        self._connection: sqlite3.Connection | None = None
        self._log = -1
        self._checkpoint_at = log_limit
        self._copied: wal.Acknowledged | None = None
        self._written = 0
        self._noted = True
        self._found: Sequence[Record] | None = None
        self._marker: CommitMarker | None = None
        self._lock: int | None = directory.lock(self.directory)
        try:
            self._new_path.unlink(missing_ok=True)
            self._create_if_missing()
            self._marker = CommitMarker(self.directory / MARKER)
            self._found = self._open_database()
        except (sqlite3.Error, OSError) as error:
            self._release()
            raise self._unusable(error) from error
        except BaseException:
            self._release()
            raise

    @property
    def untidy(self) -> bool:
        """True if the log has grown long."""
        marker = self._marker
        return marker is not None and marker.acknowledged.end >= self._checkpoint_at

    def load(self) -> Sequence[Record]:
        """Return all records, in the order in which each was last written."""
        if self._found is not None:
            # They were read already, when they were checked.
            found, self._found = self._found, None
            return found
        try:
            return database.read(self._connected(), self._path).records
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error

    def commit(self, records: Sequence[Record]) -> None:
        """Keep these records, and forget those without a value: all or none, on the disk on return."""
        self._found = None
        # The last word on one address counts, and its place; SQLite need not see the others.
        latest: dict[database.Address, bytes | None] = {}
        for record in records:
            address = (record.cluster, record.kind, record.key)
            latest.pop(address, None)
            latest[address] = record.value
        if not latest:
            return
        gone = [address for address, value in latest.items() if value is None]
        kept = [(*address, value) for address, value in latest.items() if value is not None]
        try:
            connection = self._connected(sum(len(value) for *_, value in kept))
            self._transact(connection, gone, kept)
        except (sqlite3.Error, OSError) as error:
            # If somebody else, say a backup, holds the database, nothing was tried. In all other cases
            # nothing is certain of the connection any more.
            if not _is_busy(error):
                self._disconnect()
            raise StoreError(
                f"{len(records)} records cannot be written to {self._path}: {database.describe(error)}"
            ) from error
        except BaseException:
            self._disconnect()
            raise

    def _transact(
        self,
        connection: sqlite3.Connection,
        gone: Sequence[database.Address],
        kept: Sequence[tuple[str, str, str, bytes]],
    ) -> None:
        assert self._marker is not None
        failpoints.hit("store.before_write")
        connection.execute("BEGIN IMMEDIATE")
        commits = self._marker.commits + 1
        database.write(connection, gone, kept, self._written, commits)
        failpoints.hit("store.before_commit")
        connection.execute("COMMIT")
        self._noted = False
        self._written += len(kept)
        failpoints.hit("store.after_commit")
        self._note(commits)
        self._noted = True
        failpoints.hit("store.after_marker")

    def maintain(self) -> None:
        """Copy a log that has grown long into the database."""
        if not self.untidy or self._connection is None:
            return
        try:
            self._checkpoint(self._connection)
        except (sqlite3.Error, OSError) as error:
            # The log still has everything; but what this connection writes is not to be trusted any more.
            logs.error("store_checkpoint_failed", file=self._path, reason=database.describe(error))
            self._disconnect()

    def close(self) -> None:
        """Close the database and let another server use the directory."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                self._checkpoint(self._connection)
        self._release()

    def _connected(self, size: int = 0) -> sqlite3.Connection:
        """Return the connection; after a failure a new one, if the disk takes `size` bytes again."""
        if self._lock is None or self._marker is None:
            raise StoreError(f"the store in {self.directory} is closed")
        if self._connection is None:
            directory.probe(self.directory, size + _PROBE_MARGIN)
            if self._noted:
                self._drop_unacknowledged(self._marker)
            self._open_database()
            logs.info("store_reopened", file=self._path, commits=self._marker.commits)
        assert self._connection is not None
        return self._connection

    def _drop_unacknowledged(self, marker: CommitMarker) -> None:
        """Cut off what a failed commit may have left in the log.

        After a failed sync the kernel may hold pages as clean that never reached the disk: they read back
        complete, but the next sync would not write them. (If COMMIT returned, and only the commit marker
        could not be written, the log is synced and stays.)
        """
        try:
            descriptor = os.open(self._log_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            known = marker.acknowledged
            end = known.end if wal.salts_of(descriptor) == known.salts else 0
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _create_if_missing(self) -> None:
        if directory.has(self._path):
            return
        for name in (MARKER, LOG):
            if directory.has(self.directory / name):
                raise database.damaged(
                    self._path, 0, f"it is missing, though {name} says that it was there once"
                )
        directory.make_private(self._new_path)
        database.create(self._new_path, self._page_size)
        directory.sync(self._new_path)
        failpoints.hit("store.before_create")
        self._new_path.rename(self._path)
        directory.sync(self.directory)
        failpoints.hit("store.after_create")

    def _open_database(self) -> Sequence[Record]:
        """Verify the data, open the database for writing, and return the records."""
        assert self._marker is not None
        marker = self._marker
        os.close(os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        head = database.read_head(self._path)
        self._page_size = head.page_size
        steps = migrations.steps_from(head.version, self._path)
        log = self._inspect_log(marker)
        sums = page_sums(self._path, self._page_size)
        size = self._path.stat().st_size
        if size % self._page_size and len(sums) not in log.pages:
            raise database.damaged(self._path, size, f"it ends within a page of {self._page_size} bytes")
        altered = marker.altered_pages(sums, log.pages)
        content = self._read_and_judge(marker, altered, steps[0].read if steps else database.read)
        if log.torn:
            self._repair(log)
        if altered or marker.fault:
            logs.warning(
                "store_marker_renewed",
                file=self._path,
                reason=marker.fault or "pages differ from their checksums, but all records are right",
                pages=_places(altered, self._page_size),
            )
            marker.note_all_pages(sums)
        is_new = marker.fault is not None
        marker.note(content.commits, log.salts or bytes(8), log.end)
        if is_new:
            # Its first sector, too, or a power failure leaves an empty commit marker beside a log that may be
            # torn. If there is a log, the checkpoint below syncs that, and then the commit marker.
            if not log.end:
                marker.sync()
            directory.sync(self.directory)
        self._noted, self._copied = True, None
        self._written = max(self._written, content.written)
        self._connection = database.connect_to_write(self._path)
        try:
            self._checkpoint(self._connection)
            if steps:
                content = self._migrate(head.version, content, steps)
            else:
                self._compact_if_worth_it(self._connection, content)
        except BaseException:
            self._disconnect()
            raise
        return content.records

    def _inspect_log(self, marker: CommitMarker) -> wal.Log:
        log = wal.inspect(self._log_path, marked=not marker.fault)
        known = marker.acknowledged
        if not marker.fault and known.salts == log.salts and known.end > log.end:
            # The number of commits would show it as well, but not where.
            raise wal.damaged(
                self._log_path,
                log.right,
                f"it was acknowledged up to offset {known.end}, and is right up to {log.right} only",
            )
        return log

    def _read_and_judge(
        self,
        marker: CommitMarker,
        altered: Sequence[int],
        read: Callable[[sqlite3.Connection, Path], database.Content],
    ) -> database.Content:
        connection = database.connect_to_look(self._path)
        try:
            content = read(connection, self._path)
            if not marker.fault and content.commits < marker.commits:
                raise database.damaged(
                    self._path,
                    None,
                    f"it and its log end with commit {content.commits}, but {marker.commits} were "
                    f"acknowledged; the log {LOG} was lost or cut, or an older copy was put in place "
                    f"(if that was the purpose, remove {MARKER})",
                )
        except StoreDamagedError as error:
            if not altered:
                raise
            raise StoreDamagedError(
                f"{error} Not as they were written: {_places(altered, self._page_size)}."
            ) from error
        finally:
            connection.close()
        return content

    def _repair(self, log: wal.Log) -> None:
        copy = directory.keep_copy(self._log_path, log.end, log.torn)
        descriptor = os.open(self._log_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, log.end)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        logs.warning(
            "store_log_repaired",
            file=self._log_path,
            offset=log.end,
            dropped_bytes=log.torn,
            copy=copy,
            reason="a write was cut short, and not acknowledged",
        )

    def _note(self, commits: int) -> None:
        """Record a commit that has just returned in the commit marker."""
        assert self._marker is not None
        if self._log < 0:
            self._log = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
        known = self._marker.acknowledged
        start = known.end
        if wal.salts_of(self._log) != known.salts:
            start, self._checkpoint_at = 0, self._log_limit
        salts, end = wal.following_commit(self._log, start, self._page_size)
        self._marker.note(commits, salts, end)

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Copy the log into the database; the next commit overwrites it from the start."""
        assert self._marker is not None
        if self._marker.acknowledged in (self._copied, wal.Acknowledged(self._marker.acknowledged.salts, 0)):
            return
        failpoints.hit("store.before_checkpoint")
        sums = self._logged_sums(self._marker.acknowledged.end)
        busy, frames, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        failpoints.hit("store.mid_checkpoint")
        self._checkpoint_at = self._marker.acknowledged.end + self._log_limit
        if busy or frames != copied:
            # A reader, such as a backup, still needs older pages. The log goes on growing until it is done.
            if self._marker.acknowledged.end > _HUGE * self._log_limit:
                logs.warning("store_log_long", file=self._log_path, bytes=self._marker.acknowledged.end)
            return
        self._marker.note_pages(sums.items())
        self._copied = self._marker.acknowledged
        failpoints.hit("store.after_checkpoint")

    def _logged_sums(self, end: int) -> dict[int, int]:
        """Return the checksums of the pages in the log, as they will be in the database."""
        if not end:
            return {}
        if self._log < 0:
            self._log = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
        return {
            page: zlib.crc32(content)
            for page, content in wal.latest_pages(self._log, end, self._page_size).items()
        }

    def _compact_if_worth_it(self, connection: sqlite3.Connection, content: database.Content) -> None:
        pages, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        if free * self._page_size < _COMPACT_FROM or free * 2 < pages:
            return
        try:
            # A compact copy takes the database's place, atomically and durably.
            directory.make_private(self._new_path)
            connection.execute("VACUUM INTO ?", (str(self._new_path),))
            self._take_place(content)
        except (sqlite3.Error, OSError) as error:
            # What is there is as good as ever, only larger than it need be.
            logs.warning("store_not_compacted", file=self._path, reason=database.describe(error))
            with contextlib.suppress(OSError):
                self._new_path.unlink(missing_ok=True)
        else:
            logs.info("store_compacted", file=self._path, pages_before=pages, pages_free=free)
        if self._connection is None:
            self._connection = database.connect_to_write(self._path)

    def _migrate(
        self, version: int, content: database.Content, steps: Sequence[migrations.Migration]
    ) -> database.Content:
        """Replace a database of an older version, which is kept beside the new one."""
        for step in steps:
            content = replace(content, records=list(step.convert(content.records)))
        content = replace(content, written=len(content.records))
        directory.make_private(self._new_path)
        database.create(self._new_path, self._page_size, content)
        kept = self._path.with_name(f"{DATABASE}.format-{version}")
        self._take_place(content, kept)
        self._written = content.written
        self._connection = database.connect_to_write(self._path)
        logs.warning(
            "store_migrated", file=self._path, before=version, after=database.VERSION,
            records=len(content.records), kept=kept,
        )  # fmt: skip
        return content

    def _take_place(self, content: database.Content, kept: Path | None = None) -> None:
        """Verify that the new database holds `content`, and give it the old one's name."""
        assert self._marker is not None
        directory.sync(self._new_path)
        copy = database.connect_to_look(self._new_path)
        try:
            if database.read(copy, self._new_path) != content:
                raise StoreError("the copy differs from the original")
        finally:
            copy.close()
        database.read_head(self._new_path)
        failpoints.hit("store.before_rename")
        # The log belongs to the old file, and must be gone for good before the new one takes its name.
        self._disconnect()
        if directory.has(self._log_path):
            raise StoreError(f"{self._log_path} is in use")
        if kept is not None:
            kept.unlink(missing_ok=True)
            kept.hardlink_to(self._path)
        directory.sync(self.directory)
        self._new_path.replace(self._path)
        failpoints.hit("store.after_rename")
        directory.sync(self.directory)
        self._marker.note_all_pages(page_sums(self._path, self._page_size))

    def _unusable(self, error: sqlite3.Error | OSError) -> StoreError:
        if isinstance(error, StoreError):
            return error
        return StoreError(f"{self._path} cannot be used: {database.describe(error)}")

    def _disconnect(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _release(self) -> None:
        self._disconnect()
        if self._marker is not None:
            self._marker.close()
            self._marker = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _places(pages: Sequence[int], page_size: int) -> str:
    named = [f"page {page} (offset {(page - 1) * page_size})" for page in pages[:_NAMED_PAGES]]
    if len(pages) > _NAMED_PAGES:
        named.append(f"{len(pages) - _NAMED_PAGES} more")
    return ", ".join(named)
