"""Base of all file sources, which `AutoShardPolicy.FILE` divides by file; `.npy` and `.npz` files.

Object arrays are refused, because unpickling them could execute code. Arrays that are not compressed are
mapped into memory.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import struct
import zipfile
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.cursors import Count, Cursor
from dmesh.data.elements import spec_of
from dmesh.data.pipeline import INFINITE_CARDINALITY, Node, Reading
from dmesh.data.sources import Rows
from dmesh.data.tables import Arrays, Chunks, chained
from dmesh.errors import ArgumentTypeError, DatasetError, FileFormatError

__all__ = ["as_files", "Files", "FileSource", "NpyFiles", "NpzFiles"]

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str] | NDArray[Any]]
"""A path, a pattern such as `data/*.npy`, or several of them, of which a `Dataset` may consist, too."""

MOST_UNPACKED = 1 << 30
"""Default of the maximum size of an unpacked array of a `.npz` file, bytes."""

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of the header of a `.npy` file, by version of the format."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a member of a zip file: the lengths of the name and of the extra field that follow it."""


def as_files(files: Files) -> tuple[str, ...]:
    """Return paths, with each pattern replaced by its sorted matches.

    Raises:
        ArgumentTypeError: A path is none.
        DatasetError: A file does not exist, there is none, or their dataset has no end.
    """
    if getattr(files, "cardinality", int)() == INFINITE_CARDINALITY:
        raise DatasetError("the dataset of files has no end: repeat() the dataset of what they hold instead")
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: list[str] = []
    for path in given:
        if isinstance(path, np.ndarray | np.bytes_):
            path = os.fsdecode(path.item()) if path.dtype.kind == "S" and not path.ndim else path.tolist()
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"a path must be a str or os.PathLike, got {type(path).__name__}")
        name = os.fspath(path)
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise DatasetError(f"no file matches {name!r:.500}")
        found += matches
    if not found:
        raise DatasetError("a dataset of files needs at least one file")
    return tuple(found)


@dataclass(frozen=True, eq=False)
class FileSource(Node):
    """The rows of files, one file after the other."""

    files: tuple[str, ...]
    """Their paths."""

    def with_files(self, files: tuple[str, ...]) -> FileSource:
        """Return this source with other files."""
        return dataclasses.replace(self, files=files)

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that opens one file after the other."""
        if len(self.files) == 1:
            return self.open_file(self.files[0])
        return Chunks([(None, partial(self.open_file, path)) for path in self.files])

    @abstractmethod
    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the rows of one file."""


class _ArrayFiles(FileSource):
    """Files of arrays whose rows are the elements."""

    @abstractmethod
    def load(self, path: str) -> Any:
        """Return the arrays of one file, mapped into memory if possible."""

    def packed(self, path: str) -> bool:
        """Return whether a file must be unpacked to be read."""
        return False

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor with random access to the rows of all files, unless they must be unpacked."""
        if any(self.packed(path) for path in self.files):
            return super().open(reading)
        tables = reading.once(self, lambda: [self._checked(path) for path in self.files])
        return chained([Count(Arrays(*checked), checked[1]) for checked in tables])

    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the rows of one file, as read-only views."""
        arrays, rows = self._checked(path)
        return Count(Arrays(arrays, rows), rows)

    def cardinality(self) -> int:
        """Return the number of rows of all files, read from their headers."""
        return sum(self._checked(path)[1] for path in self.files)

    def sample(self) -> Any:
        """Return a row of the first file, or zeros if it has no rows."""
        return Rows(Arrays(*self._checked(self.files[0])), self.name).sample()

    def spec(self) -> Any:
        """Return the specs of a row of the first file."""
        return spec_of(self.sample())

    def _checked(self, path: str) -> tuple[Any, int]:
        arrays = self.load(path)
        parts = arrays.items() if isinstance(arrays, dict) else [("the array", arrays)]
        lengths = {name: array.shape[0] if array.ndim else None for name, array in parts}
        if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
            raise FileFormatError(
                f"{path}: the rows of the arrays are the elements, so expected arrays of equal first "
                f"lengths; found {lengths}",
                path,
            )
        [rows] = set(lengths.values())
        assert rows is not None
        return arrays, rows


@dataclass(frozen=True, eq=False)
class NpyFiles(_ArrayFiles):
    """`.npy` files."""

    def load(self, path: str) -> Any:
        """Return the file's array, mapped into memory."""
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise FileFormatError(f"{path}: cannot be read as a .npy file: {error}", path) from error


@dataclass(frozen=True, eq=False)
class NpzFiles(_ArrayFiles):
    """`.npz` files."""

    names: tuple[str, ...] | None
    """Names of the arrays to read; None for all."""
    most_unpacked: int
    """Maximum size of an unpacked array, bytes."""

    def packed(self, path: str) -> bool:
        """Return whether one of the arrays is compressed."""
        if not zipfile.is_zipfile(path):
            return False  # load() raises the error
        with zipfile.ZipFile(path) as archive:
            return any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist())

    def load(self, path: str) -> Any:
        """Return the file's arrays by name: mapped into memory, or unpacked if they are compressed."""
        try:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                names = tuple(members) if self.names is None else self.names
                missing = [name for name in names if name not in members]
                if missing:
                    raise FileFormatError(
                        f"{path}: no array {', '.join(missing)}; the file has {', '.join(members)}",
                        path,
                    )
                return {name: self._member(file, archive, members[name]) for name in names}
        except FileFormatError:
            raise
        except (
            ValueError,
            EOFError,
            OSError,
            zipfile.BadZipFile,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise FileFormatError(f"{path}: cannot be read as a .npz file: {error}", path) from error

    def _member(self, file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
        if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
            return _mapped(file, info)
        if info.file_size > self.most_unpacked:
            raise FileFormatError(
                f"{file.name}: the array {info.filename} has {info.file_size} bytes unpacked, more than "
                f"max_unpacked_bytes={self.most_unpacked}. Write it with numpy.savez, which does not "
                "compress, or raise the limit",
                str(file.name),
            )
        with archive.open(info) as packed:
            shape, fortran, dtype, _ = _header(packed, info)
            array: NDArray[Any] = np.frombuffer(packed.read(), dtype, math.prod(shape))
        return array.reshape(shape, order="F" if fortran else "C")


def _mapped(file: IO[bytes], info: zipfile.ZipInfo) -> NDArray[Any]:
    """Map an array that is stored uncompressed in a zip file."""
    file.seek(info.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    file.seek(start)
    shape, fortran, dtype, length = _header(file, info)
    if 0 in shape or dtype.itemsize == 0:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", start + length, shape, "F" if fortran else "C")


def _header(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read the header of a `.npy` file; return shape, Fortran order, dtype and the header's length."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"{info.filename} has version {version} of the format, which is not supported")
    shape, fortran, dtype = _HEADERS[version](file)
    length = file.tell() - start
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects, which are not supported")
    if length + dtype.itemsize * math.prod(shape) > info.file_size:
        raise ValueError(f"{info.filename} has less data than its header declares")
    return shape, fortran, dtype, length
