"""Files of `dmesh backup`: lines of JSON with the keys of one cluster, versioned and checksummed.

The first line describes the backup, every further line is one key, and the last has the SHA-256 of all bytes
before it. docs/durability.md describes the format; no other program is needed to read it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from dmesh._version import __version__
from dmesh.errors import BackupFileError

VERSION = 1
"""Version of the format."""


@dataclass(frozen=True, slots=True)
class BackedUpKey:
    """One key of a backup."""

    key: str
    """Its name."""
    value: bytes
    """Its value."""
    create_revision: int
    """Revision at which it came into being."""
    mod_revision: int
    """Revision of its last change."""


@dataclass(frozen=True, slots=True)
class Description:
    """First line of a backup."""

    cluster: str
    """Name of the cluster."""
    incarnation: int
    """Incarnation of the cluster."""
    revision: int
    """Revision at which all keys were read."""
    keys: int
    """Number of keys."""
    created: str = ""
    """Wall-clock time of the backup, in UTC."""


def write(file: BinaryIO, description: Description, keys: Iterable[BackedUpKey]) -> int:
    """Writes a backup; returns the number of keys, which the caller compares with the description."""
    digest = hashlib.sha256()

    def put(line: dict[str, Any]) -> None:
        encoded = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        digest.update(encoded)
        file.write(encoded)

    put(
        {
            "dmesh_backup": VERSION,
            "dmesh_version": __version__,
            "cluster": description.cluster,
            "cluster_incarnation": f"{description.incarnation:016x}",
            "revision": description.revision,
            "keys": description.keys,
            "created": description.created or datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    count = 0
    for key in keys:
        count += 1
        put(
            {
                "key": key.key,
                "value": base64.b64encode(key.value).decode(),
                "create_revision": key.create_revision,
                "mod_revision": key.mod_revision,
            }
        )
    file.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")
    return count


def replace(path: Path, description: Description, keys: Iterable[BackedUpKey]) -> int:
    """Writes a backup to a file that only the user can read, and which is complete from the first moment.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            count = write(file, description, keys)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return count


def read(content: bytes, name: str) -> tuple[Description, list[BackedUpKey]]:
    """Reads a backup, and checks all of it.

    Args:
        content: The file's content.
        name: The file's name, for messages.

    Raises:
        BackupFileError: It is not a backup, is damaged, or is of a newer version.
    """
    lines = content.splitlines(keepends=True)
    head = _object(lines[0]) if lines else None
    if head is None or "dmesh_backup" not in head:
        raise BackupFileError(f"{name} is not a backup: its first line does not describe one")
    version = head["dmesh_backup"]
    if not isinstance(version, int) or version > VERSION:
        raise BackupFileError(
            f"{name} has format version {version}, written by dmesh {head.get('dmesh_version')}; this "
            f"dmesh reads versions up to {VERSION}. Restore it with that version."
        )
    _check_sum(lines, name)
    try:
        description = Description(
            cluster=str(head["cluster"]),
            incarnation=int(head["cluster_incarnation"], 16),
            revision=int(head["revision"]),
            keys=int(head["keys"]),
            created=str(head["created"]),
        )
        keys = list(_keys(lines[1:-1]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(name, f"a line is malformed ({error})") from error
    if len(keys) != description.keys:
        raise _damaged(name, f"it has {len(keys)} keys, its first line says {description.keys}")
    if len({key.key for key in keys}) != len(keys):
        raise _damaged(name, "a key is there twice")
    return description, keys


def _keys(lines: Iterable[bytes]) -> Iterator[BackedUpKey]:
    for line in lines:
        found = json.loads(line)
        key = found["key"]
        if not isinstance(key, str) or not key:
            raise ValueError(f"{key!r} is not a key")
        yield BackedUpKey(
            key,
            base64.b64decode(found["value"], validate=True),
            int(found["create_revision"]),
            int(found["mod_revision"]),
        )


def _check_sum(lines: list[bytes], name: str) -> None:
    last = _object(lines[-1])
    if last is None or last.keys() != {"sha256"} or not lines[-1].endswith(b"\n"):
        raise _damaged(name, f"it is truncated: it ends after {len(lines)} lines, without its checksum")
    digest = hashlib.sha256()
    for line in lines[:-1]:
        digest.update(line)
    if digest.hexdigest() != last["sha256"]:
        raise _damaged(name, "its content does not match the checksum in its last line")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _damaged(name: str, reason: str) -> BackupFileError:
    return BackupFileError(f"{name} is damaged: {reason}. Nothing was changed; restore another copy.")
