"""A disk that fails, or forgets what was never synced: see failing_disk.c, which a server preloads."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
SECTOR = 512


class FailingDisk:
    """Says how the files of a data directory fail.

    Args:
        directory: The data directory.
        scratch: Where the library and the shadow go.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler for the library that makes a disk fail")
        self.directory = directory
        self.shadow = scratch / "shadow"
        self.shadow.mkdir(parents=True)
        self._order = scratch / "error"
        library = scratch / "failing_disk.so"
        subprocess.run(
            [
                compiler,
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Werror",
                "-o",
                library,
                SOURCE,
                "-ldl",
                "-lpthread",
            ],
            check=True,
        )
        self.environ = {
            "LD_PRELOAD": str(library),
            "FAILING_DISK": str(directory),
            "FAILING_DISK_SHADOW": str(self.shadow),
            "FAILING_DISK_ERROR": str(self._order),
        }

    def fail(self, call: str, number: int, name: str) -> None:
        """Lets every `call` ("write" or "sync") for files whose name ends like that fail with an errno."""
        replacement = self._order.with_suffix(".new")
        replacement.write_text(f"{call} {number} {name}")
        replacement.rename(self._order)

    def work(self) -> None:
        """Lets nothing fail any more."""
        self._order.unlink(missing_ok=True)

    def kill_at(self, call: str, count: int, name: str) -> dict[str, str]:
        """Returns the variables with which a server dies at the Nth such call, a write half done."""
        return {**self.environ, "FAILING_DISK_KILL": f"{call} {count} {name}"}

    def settle(self) -> None:
        """Takes what is in the directory as synced: it was changed by a process without the library."""
        shutil.rmtree(self.shadow)
        self.shadow.mkdir()
        for path in self.directory.glob("dmesh.sqlite3*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, self.shadow)

    def lose_power(self, chance: random.Random) -> None:
        """Leaves of every file what was synced, and some sectors of the rest. No process may run."""
        for path in list(self.directory.glob("dmesh.sqlite3*")):
            if path.name.endswith("-shm"):
                path.unlink()
                continue
            synced = self.shadow / path.name
            if not synced.exists():
                path.unlink()
                continue
            now, then = path.read_bytes(), synced.read_bytes()
            size = chance.choice([len(now), len(then)])
            mixed = bytearray(then[:size].ljust(size, b"\0"))
            share = chance.choice([0.0, 0.1, 0.5, 0.9])
            for at in range(0, min(size, len(now)), SECTOR):
                if chance.random() < share:
                    mixed[at : at + SECTOR] = now[at : at + SECTOR]
            path.write_bytes(mixed)
            synced.write_bytes(mixed)
