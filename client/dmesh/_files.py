"""Files and directories that may be missing, as distinct from those that cannot be read.

`Path.exists` and its like answer False for both from Python 3.14 on: a checkpoint on a disk that fails, or in
a directory of another user, would pass for none.
"""

from __future__ import annotations

import os


def status(path: os.PathLike[str]) -> os.stat_result | None:
    """Return a file's or directory's status; None if there is none. Raises any other OSError."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def names_in(directory: os.PathLike[str]) -> list[str]:
    """Return the names in a directory; none if it does not exist. Raises any other OSError."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
