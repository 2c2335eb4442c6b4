"""Small file systems that can fill up, become read-only, and have space again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def missing() -> str:
    """Why file systems cannot be mounted here; empty if they can."""
    return "" if os.geteuid() == 0 else "mounting a small tmpfs needs root (run `sudo make faults`)"


class SmallDisk:
    """A tmpfs of a fixed size, mounted until `close`."""

    def __init__(self, path: Path, size: str = "1m") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "dmesh-faults", str(path))

    def resize(self, size: str) -> None:
        """Gives it another size, e.g. "64k"."""
        _run("mount", "-o", f"remount,size={size}", str(self.path))

    def read_only(self, yes: bool = True) -> None:
        """Refuses writes, or takes them again. A file open for writing may be in the way (EBUSY)."""
        _run("mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self.path))

    def fill(self) -> Path:
        """Fills what is free with a file; returns it."""
        ballast = self.path / "ballast"
        with ballast.open("ab", buffering=0) as file:
            for block in (65536, 4096, 1):
                try:
                    while True:
                        file.write(b"x" * block)
                except OSError:
                    continue
        return ballast

    def free(self) -> None:
        """Removes what `fill` wrote."""
        (self.path / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts it, even if files in it are open."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
