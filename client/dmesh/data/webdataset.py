"""WebDataset tar files as a source: a sample is a run of adjacent files with one base name.

Finding samples reads only the members' headers. The data of a sample is read when it is needed.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.cursors import Cursor, Streamed, Table
from dmesh.data.files import FileSource
from dmesh.data.pipeline import UNKNOWN_CARDINALITY
from dmesh.errors import FileFormatError

__all__ = ["TarFiles"]

LARGEST_MEMBER = 1 << 30
"""Maximum size of a file in a tar file, bytes."""

_Sample = tuple[str, dict[str, Any]]
"""A sample: its base name, and position and size of its files, or their bytes, by extension."""


@dataclass(frozen=True, eq=False)
class TarFiles(FileSource):
    """Tar files of samples."""

    extensions: tuple[str, ...] | None
    """Extensions of the files to read, all of which each sample must have; None for all files."""

    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the samples of one file."""
        return Streamed(lambda: self._samples(path), _Samples(path, self.extensions))

    def _samples(self, path: str) -> Iterator[_Sample]:
        try:
            packed = _is_packed(path)
            size = os.path.getsize(path)
            if not packed and size % tarfile.BLOCKSIZE:
                raise EOFError("it ends within a block")
            with tarfile.open(path, "r|*" if packed else "r:") as archive:
                key, members = None, dict[str, Any]()
                for member in archive:
                    if not member.isfile():
                        continue
                    name, extension = _parted(member.name)
                    if name != key and key is not None:
                        yield key, members
                        members = {}
                    key = name
                    if self.extensions is None or extension in self.extensions:
                        if member.size > LARGEST_MEMBER:
                            raise tarfile.TarError(
                                f"{member.name} has {member.size} bytes, more than {LARGEST_MEMBER}"
                            )
                        if not packed and member.offset_data + member.size > size:
                            raise EOFError(f"it ends within {member.name}")
                        members[extension] = (
                            _bytes_of(archive, member) if packed else (member.offset_data, member.size)
                        )
                if key is not None:
                    yield key, members
        except (tarfile.TarError, EOFError, OSError) as error:
            raise FileFormatError(f"{path}: cannot be read as a tar file: {error}", path) from error

    def cardinality(self) -> int:
        """Return UNKNOWN_CARDINALITY: counting would take reading the files."""
        return UNKNOWN_CARDINALITY


def _is_packed(path: str) -> bool:
    """Return whether a file is not a plain tar file, and so may be compressed."""
    with open(path, "rb") as file:
        try:
            tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError:
            return True
    return False


def _parted(name: str) -> tuple[str, str]:
    """Return base name and extension, which begins at the first dot of the last part of a path."""
    folder, slash, file = name.rpartition("/")
    base, _, extension = file.partition(".")
    return folder + slash + base, extension


def _bytes_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


class _Samples(Table):
    """Samples of a tar file.

    Args:
        path: Path of the file.
        extensions: Extensions that each sample must have; None for any.
    """

    def __init__(self, path: str, extensions: tuple[str, ...] | None) -> None:
        self._path = path
        self._extensions = extensions

    def get(self, key: Any) -> Any:
        """Return a sample as a dict of arrays."""
        name, members = key
        missing = [extension for extension in self._extensions or () if extension not in members]
        if missing:
            raise FileFormatError(f"{self._path}: the sample {name} has no {', '.join(missing)}", self._path)
        element = {"__key__": np.asarray(name)}
        for extension in self._extensions or members:
            data = members[extension]
            if not isinstance(data, bytes):
                with open(self._path, "rb") as file:
                    file.seek(data[0])
                    data = file.read(data[1])
            try:
                element[extension] = _decoded(extension, data)
            except (ValueError, EOFError) as error:
                raise FileFormatError(
                    f"{self._path}: {name}.{extension} cannot be read: {error}", self._path
                ) from error
        return element


def _decoded(extension: str, data: bytes) -> NDArray[Any]:
    match extension.rpartition(".")[2].lower():
        case "npy":
            array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
            return array
        case "cls" | "cls2" | "index":
            return np.asarray(int(data))
        case "txt" | "text":
            return np.asarray(data.decode())
    return np.frombuffer(data, np.uint8)
