"""Audit log: operators' actions and refused callers, one JSON object a line, append-only and bounded.

In the data directory it is `audit.jsonl`, with older entries in `audit.jsonl.1` and so on; a server without
one keeps the latest entries in memory. Nothing in it is a secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from itertools import islice
from logging.handlers import RotatingFileHandler
from pathlib import Path

from dmesh_server.core.errors import CoreError
from dmesh_server.telemetry import logs

FILE = "audit.jsonl"
"""Name of the file in the data directory."""

_LARGEST = 8 << 20
_OLDER = 7
_IN_MEMORY = 10_000
_LONGEST = 1_000
_REFUSALS = frozenset({"unauthenticated", "permission_denied", "certificate_refused"})


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit log."""

    number: int
    """Grows by one with each entry, also across restarts."""
    time: float
    """Unix time."""
    who: str
    """Token's fingerprint, name and id, as far as it has them; never the token."""
    remote: str
    """Host that the request came from."""
    action: str
    """E.g. `evict_member`, `create_token`, `unauthenticated`."""
    target: str
    """Object of the action."""
    outcome: str
    """`done`, `unchanged`, `refused`, the kind of error; `unknown` if the server failed or the call ended."""
    detail: str = ""
    """Anything else worth knowing, such as a reason."""


@dataclass(slots=True)
class Record:
    """An entry while its action is under way."""

    target: str
    """Object of the action."""
    outcome: str = "done"
    """As in `AuditEntry`."""
    detail: str = ""
    """As in `AuditEntry`."""


class AuditLog:
    """Append-only log of entries, written by a thread of its own."""

    def __init__(
        self,
        directory: Path | None,
        *,
        wall_clock: Callable[[], float] = time.time,
        largest: int = _LARGEST,
        older: int = _OLDER,
    ) -> None:
        """Continue the log of a directory.

        Args:
            directory: Data directory; None to keep entries in memory.
            wall_clock: Unix time.
            largest: Size at which a file is rotated, bytes.
            older: Number of rotated files that are kept.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._wall_clock = wall_clock
        self._memory: deque[AuditEntry] = deque(maxlen=_IN_MEMORY)
        self._thread = ThreadPoolExecutor(1, "dmesh-audit")
        self._file = None if directory is None else _File(directory / FILE, largest, older)
        last = next(self._file.newest_first(), None) if self._file is not None else None
        self._number = 0 if last is None else last.number

    def note(
        self, action: str, *, who: str, remote: str, target: str = "", outcome: str = "done", detail: str = ""
    ) -> Future[None]:
        """Add an entry; the future is done when it is durable."""
        self._number += 1
        texts = [text[:_LONGEST] for text in (who, remote, action, target, outcome, detail)]
        entry = AuditEntry(self._number, self._wall_clock(), *texts)
        if self._file is None:
            self._memory.append(entry)
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._thread.submit(self._file.add, entry)

    @asynccontextmanager
    async def record(self, action: str, *, who: str, remote: str, target: str) -> AsyncIterator[Record]:
        """Add an entry about the operation in the `with` block; it is durable when the block ends.

        Args:
            action: As in `AuditEntry`, like the other arguments.
            who: Caller.
            remote: Host of the caller.
            target: Object of the action.
        """
        entry = Record(target)
        try:
            yield entry
        except CoreError as error:
            entry.outcome = error.kind.name
            raise
        except BaseException:
            entry.outcome = "unknown"
            raise
        finally:
            written = self.note(
                action,
                who=who,
                remote=remote,
                target=entry.target,
                outcome=entry.outcome,
                detail=entry.detail,
            )
            await asyncio.wrap_future(written)

    def note_refusal(self, event: str, peer: str, fields: dict[str, object]) -> None:
        """Add an entry for a line of a `RefusalLog`, which bounds the number of lines."""
        if event in _REFUSALS:
            who = " ".join(
                str(fields[name]) for name in ("fingerprint", "token", "names") if fields.get(name)
            )
            target = str(fields.get("method") or fields.get("what") or "")
            detail = str(fields.get("reason") or "")
            self.note(event, who=who, remote=peer, target=target, outcome="refused", detail=detail)

    async def latest(
        self, limit: int, *, before: int | None = None, action: str | None = None, who: str | None = None
    ) -> list[AuditEntry]:
        """Return entries, the newest first.

        Args:
            limit: Most entries.
            before: Only entries with a smaller number.
            action: Only entries of this action.
            who: Only entries of this token, by its fingerprint, name or id.
        """

        def wanted(entry: AuditEntry) -> bool:
            return (
                (before is None or entry.number < before)
                and (action is None or entry.action == action)
                and (who is None or who in entry.who.replace("(", " ").replace(")", " ").split())
            )

        def find(entries: Iterable[AuditEntry]) -> list[AuditEntry]:
            return list(islice(filter(wanted, entries), limit))

        if self._file is None:
            return find(reversed(self._memory))
        file = self._file
        return await asyncio.wrap_future(self._thread.submit(lambda: find(file.newest_first())))

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()
        if self._file is not None:
            try:
                self._file.close()
            except OSError:  # each entry was synced when it was made, or reported then
                logs.error("audit_not_synced", exc_info=True)


class _File(RotatingFileHandler):
    """The log's files: private, and synced after each entry."""

    def __init__(self, path: Path, largest: int, older: int) -> None:
        super().__init__(path, maxBytes=largest, backupCount=older, encoding="ascii")

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        stream = os.fdopen(descriptor, "a", encoding="ascii")
        if stream.tell() and not Path(self.baseFilename).read_bytes().endswith(b"\n"):
            stream.write("\n")  # after half a line that a crash has left
        return stream

    def add(self, entry: AuditEntry) -> None:
        """Append an entry."""
        self.emit(logging.makeLogRecord({"msg": json.dumps(asdict(entry)).replace("%", "\\u0025")}))

    def flush(self) -> None:
        super().flush()
        if self.stream is not None and not self.stream.closed:
            os.fsync(self.stream.fileno())

    def handleError(self, record: logging.LogRecord) -> None:
        """Log an entry that could not be written; the server goes on."""
        logs.error("audit_not_written", exc_info=True, entry=record.msg)

    def newest_first(self) -> Iterator[AuditEntry]:
        """Yield all entries, the newest first; lines that a crash cut short are skipped."""
        older = (f"{self.baseFilename}.{number}" for number in range(1, self.backupCount + 1))
        for path in (self.baseFilename, *older):
            try:
                lines = Path(path).read_text("ascii", errors="replace").splitlines()
            except FileNotFoundError:
                continue
            for line in reversed(lines):
                try:
                    yield AuditEntry(**json.loads(line))
                except (ValueError, TypeError):
                    continue
