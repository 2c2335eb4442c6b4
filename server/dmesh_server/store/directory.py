"""The data directory: its lock, and files that survive a power failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from dmesh_server.store.base import StoreError

LOCK = "lock"
"""Name of the file that the server using the directory holds a lock on; it has the server's process id."""

_PROBE = "space"
_COPIES = 8


def lock(directory: Path) -> int:
    """Lock the directory for this process, making it if necessary.

    Returns:
        The descriptor that holds the lock.

    Raises:
        StoreError: It is in use, or others can write to it.
        OSError: It cannot be used.
    """
    _make(directory)
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
    # Who holds it is said for people only: a disk that is full or read-only will show where it matters.
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _make(directory: Path) -> None:
    """Make a directory and its parents, and sync the name of each, so that a power failure removes none."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def has(path: Path) -> bool:
    """Return whether there is a file, or a symbolic link, of this name.

    Unlike `Path.exists` from Python 3.14 on it does not take a disk that fails for a missing file.

    Raises:
        OSError: The file system does not say.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def make_private(path: Path) -> None:
    """Make a file that only the user can read, unless it exists. SQLite gives its log the same mode.

    Raises:
        OSError: It cannot be made, or is a symbolic link.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk.

    Raises:
        OSError: They cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def probe(directory: Path, size: int) -> None:
    """Check that `size` bytes can be written and synced in a directory.

    Raises:
        OSError: They cannot.
    """
    path = directory / _PROBE
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, b"\1", size - 1)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()


def keep_copy(path: Path, start: int, length: int) -> Path:
    """Copy a part of a file beside it, as `NAME.broken-N`, and sync the copy.

    The latest few copies are kept.

    Raises:
        OSError: The copy cannot be written.
    """
    prefix = f"{path.name}.broken-"
    numbers = sorted(
        int(found.name.removeprefix(prefix))
        for found in path.parent.glob(f"{prefix}*")
        if found.name.removeprefix(prefix).isdecimal()
    )
    for number in numbers[: max(0, len(numbers) - _COPIES + 1)]:
        path.with_name(f"{prefix}{number}").unlink(missing_ok=True)
    copy = path.with_name(f"{prefix}{numbers[-1] + 1 if numbers else 1}")
    make_private(copy)
    with path.open("rb") as source, copy.open("r+b") as target:
        source.seek(start)
        target.write(source.read(length))
        target.flush()
        os.fsync(target.fileno())
    sync(path.parent)
    return copy
