"""Trace file of a client's calls, for Chrome's tracing page and Perfetto (`DMESH_TRACE`).

One event a line, so that the file can be read after a crash.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dmesh._log import logger
from dmesh.collectives.events import CallRecord, EventReader
from dmesh.errors import ConfigurationError

FORMAT = 1
"""Version of the head event."""
HEAD = "dmesh_trace"
"""Name of the first event, which identifies the client."""
MOST_BYTES = 64 << 20
"""Size of a trace; later events are left out."""


class Trace(EventReader):
    """Writer of a client's trace file.

    Args:
        directory: Directory of the file; made if it is missing.
        rank: The client's id, which is part of the file's name.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, directory: str, rank: int) -> None:
        super().__init__()
        self.path = Path(directory) / f"rank-{rank:05d}.json"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("wb")
        except OSError as error:
            raise ConfigurationError(
                f"DMESH_TRACE is {directory!r}, but {self.path} cannot be written: {error.strerror}. Name a "
                "directory that can, or unset it"
            ) from error
        self._rank = rank
        self._size = 0
        self._left_out = 0
        self._broken = False
        self._threads: dict[int, int] = {}

    def start(self, host: str, boot_id: str, run: str) -> None:
        """Write the head, for people and `dmesh trace merge`. Calls follow, see `EventRing.add_reader`.

        Args:
            host: The host's name.
            boot_id: Id of the running kernel: processes with the same one have the same clock.
            run: Id of the run, the same for all its clients.
        """
        clocks = {"monotonic": time.monotonic(), "wall": time.time()}
        process = {"host": host, "pid": os.getpid(), "boot_id": boot_id, "run": run}
        self._describe(HEAD, {"format": FORMAT, "rank": self._rank, **clocks, **process})
        self._describe("process_name", {"name": f"rank {self._rank} (host {host}, pid {os.getpid()})"})
        self._describe("process_sort_index", {"sort_index": self._rank})

    def close(self) -> None:
        """Write the calls that are left, and end the file. Idempotent."""
        super().close()
        self._file.close()

    def read(self, calls: Sequence[CallRecord]) -> None:
        """Write calls."""
        self._save(lambda: list(map(self._add, calls)))

    def finish(self) -> None:
        """Write the end."""
        self._save(self._end)

    def _end(self) -> None:
        self._describe("dmesh_trace_end", {"left_out": self._left_out, "lost": self.lost})
        self._file.write(b"\n]\n")

    def _save(self, write: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            write()
            self._file.flush()
        except OSError as error:
            self._broken = True
            logger.warning("the trace %s was stopped: %s", self.path, error.strerror)

    def _add(self, record: CallRecord) -> None:
        if self._size >= MOST_BYTES:
            if not self._left_out:
                logger.warning("the trace %s is full: later calls are not recorded", self.path)
            self._left_out += 1
            return
        assert record.began is not None
        assert record.ended is not None
        stream, group = record.stream, record.group or "barriers"
        arguments: dict[str, Any] = {
            "call": record.call, "group": group, "lane": f"{stream:016x}", "sequence": record.sequence,
            "nbytes": record.nbytes,
        }  # fmt: skip
        if record.timed:
            arguments["waited_us"] = round(record.waited * 1e6, 3)
        if record.error:
            arguments["error"] = record.error[:200]
        self._write(
            {
                "name": (record.call.partition("(")[0] or record.call) if stream else "barrier",
                "cat": "collective" if stream else "barrier",
                "ph": "X",
                "ts": round(record.began * 1e6, 3),
                "dur": round((record.ended - record.began) * 1e6, 3),
                "pid": self._rank,
                "tid": self._thread_of(stream, group),
                "args": arguments,
            }
        )

    def _thread_of(self, stream: int, group: str) -> int:
        if stream not in self._threads:
            self._threads[stream] = len(self._threads) + 1
            self._describe("thread_name", {"name": group}, self._threads[stream])
        return self._threads[stream]

    def _describe(self, name: str, about: Mapping[str, object], thread: int = 0) -> None:
        self._write({"name": name, "ph": "M", "pid": self._rank, "tid": thread, "args": about})

    def _write(self, event: Mapping[str, object]) -> None:
        line = (b",\n" if self._size else b"[\n") + json.dumps(event, separators=(",", ":")).encode()
        self._file.write(line)
        self._size += len(line)
