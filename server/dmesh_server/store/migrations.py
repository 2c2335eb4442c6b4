"""Migrations of stored data from earlier formats to this one.

A version of the format, once released, never changes. A change of the tables (`database`) or the encoding
of records (`core.records`) is a new version, and needs a step here from the previous one. The oldest data
goes through all later steps. A migration is made before the server does anything else: all data is read
with the checks of its own version, converted, and written to a new file, which takes the old one's place.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.store import database
from dmesh_server.store.base import StoreFormatError


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: from one version of the format to a later one."""

    makes: int
    """The version that it makes."""
    convert: Callable[[Sequence[Record]], Sequence[Record]]
    """Makes the records of that version, in order."""
    read: Callable[[sqlite3.Connection, Path], database.Content] = database.read
    """Reads and checks the tables of the version from which it starts."""


MIGRATIONS: Mapping[int, Migration] = {}
"""The steps, by the version from which each starts. Empty: this version is the first that was released."""


def steps_from(version: int, path: Path) -> list[Migration]:
    """Return the steps from a version to this one; none if it is this one.

    Args:
        version: The version that was found.
        path: Where, for messages.

    Raises:
        StoreFormatError: The version is newer, or too old.
    """
    steps: list[Migration] = []
    at = version
    while at != database.VERSION:
        if at not in MIGRATIONS:
            age = "a newer" if version > database.VERSION else "an older"
            oldest = min(MIGRATIONS, default=database.VERSION)
            readable = f"formats {oldest} to {database.VERSION}" if MIGRATIONS else f"format {oldest}"
            raise StoreFormatError(
                f"{path} has format {version}, written by {age} version of dmesh; this one reads {readable}. "
                "Use that version, or another data directory."
            )
        steps.append(MIGRATIONS[at])
        at = MIGRATIONS[at].makes
    return steps
