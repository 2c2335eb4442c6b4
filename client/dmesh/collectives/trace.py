"""A trace of this client's calls as a file that Chrome's tracing page and Perfetto read (`DMESH_TRACE`).

One event a line, so that what was written before a crash can be read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from dmesh._log import logger
from dmesh.collectives.following import Followed, Follower
from dmesh.errors import ConfigurationError

FORMAT = 1
"""Version of what stands in the head."""
HEAD = "dmesh_trace"
"""Name of the event that says whose trace it is."""
MOST_BYTES = 64 << 20
"""Size of a trace; what comes later is left out."""


class Trace(Follower):
    """Writes what a client calls into a file.

    Args:
        directory: Where; made if it is not there.
        rank: The client's id, which the file is named after.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, directory: str, rank: int) -> None:
        super().__init__("dmesh-trace")
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
        self._written = 0
        self._left_out = 0
        self._threads: dict[int, int] = {}

    def start(self, head: Mapping[str, object]) -> None:
        """Writes whose trace it is, and begins to write events.

        Args:
            head: What else `dmesh trace merge` and people may want to know: host, process, run.
        """
        told = {
            "format": FORMAT,
            "rank": self._rank,
            "monotonic": time.monotonic(),
            "wall": time.time(),
            **head,
        }
        name = f"rank {self._rank} (host {head.get('host', '?')}, pid {head.get('pid', '?')})"
        self._write({"name": HEAD, "ph": "M", "pid": self._rank, "tid": 0, "args": told})
        self._write({"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": {"name": name}})
        order = {"sort_index": self._rank}
        self._write({"name": "process_sort_index", "ph": "M", "pid": self._rank, "tid": 0, "args": order})
        self.begin()

    def close(self) -> None:
        """Writes what is left, and ends the file. Idempotent."""
        if self.begun:
            super().close()
        else:
            self._file.close()  # closed already, or never begun

    def _full(self, calls: int) -> bool:
        full = self._size >= MOST_BYTES
        if full:
            self._left_out += calls
        return full

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            super()._run()
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self.path, error.strerror)
        finally:
            self._file.close()

    def _pause(self) -> None:
        self._file.flush()

    def _take(self, followed: Followed) -> None:
        lane, group, call, number, nbytes, began, elapsed, waited, error, *_ = followed
        if self._size >= MOST_BYTES:
            if not self._left_out:
                logger.warning("the trace %s is full: later calls are left out", self.path)
            self._left_out += 1
            return
        arguments: dict[str, Any] = {
            "call": call, "group": group, "lane": f"{lane:016x}", "sequence": number, "nbytes": nbytes,
        }  # fmt: skip
        if waited is not None:
            arguments["waited_us"] = round(waited * 1e6, 3)
        if error:
            arguments["error"] = error[:200]
        self._write(
            {
                "name": (call.partition("(")[0] or call) if lane else "barrier",
                "cat": "collective" if lane else "barrier",
                "ph": "X",
                "ts": round(began * 1e6, 3),
                "dur": round(elapsed * 1e6, 3),
                "pid": self._rank,
                "tid": self._thread_of(lane, group),
                "args": arguments,
            }
        )

    def _thread_of(self, lane: int, group: str) -> int:
        number = self._threads.get(lane)
        if number is None:
            number = self._threads[lane] = len(self._threads) + 1
            name = {"name": group}
            self._write({"name": "thread_name", "ph": "M", "pid": self._rank, "tid": number, "args": name})
        return number

    def _end(self) -> None:
        told = {"left_out": self._left_out, "lost": self._lost}
        self._write({"name": "dmesh_trace_end", "ph": "M", "pid": self._rank, "tid": 0, "args": told})
        self._file.write(b"\n]\n")

    def _write(self, event: Mapping[str, object]) -> None:
        line = (b",\n" if self._written else b"[\n") + json.dumps(event, separators=(",", ":")).encode()
        self._file.write(line)
        self._written += 1
        self._size += len(line)


def head_of(rank: int, host: str, boot_id: str, run: str) -> dict[str, object]:
    """Returns what a trace says of its process.

    Args:
        rank: The client's id.
        host: Its host's name.
        boot_id: Of the running kernel: processes of one have the same clock.
        run: The same for all clients of one run, and for no other run.
    """
    return {"rank": rank, "host": host, "pid": os.getpid(), "boot_id": boot_id, "run": run}
