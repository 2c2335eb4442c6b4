"""File sources of a pipeline: `.npy`, `.npz` and CSV files. `AutoShardPolicy.FILE` divides their lists.

Nothing of a file is executed: object arrays are refused. Files are read as they are needed: those of
NumPy are mapped into memory, CSV line by line.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import math
import os
import struct
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dmesh.data.batching import cut, row_of
from dmesh.data.elements import TensorSpec, spec_of, stack
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Elements, Node
from dmesh.errors import ArgumentTypeError, DatasetError, FileFormatError
from dmesh.structure import map_structure

__all__ = ["as_files", "CsvFiles", "FileSource", "NpyFiles", "NpzFiles"]

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, a pattern such as `data/*.npy`, or several of them."""

MOST_UNPACKED = 1 << 30
"""Bytes of a compressed array in a `.npz` file that are unpacked into memory, unless more are allowed."""
LONGEST_LINE = 1 << 20
"""Characters that a line of a CSV file may have."""

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of the header of a `.npy` file, by version of the format."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member of a zip file: the lengths of the name and of the extra field that follow it."""


def as_files(files: Files) -> tuple[str, ...]:
    """Returns the paths that are meant; a pattern stands for what it matches, sorted.

    Raises:
        ArgumentTypeError: A path is none.
        DatasetError: A file does not exist, or there is none.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: list[str] = []
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"a path must be a str or os.PathLike, got {type(path).__name__}")
        name = os.fspath(path)
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise DatasetError(f"there is no file {name!r:.500}")
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
        """Returns this source for other files."""
        return dataclasses.replace(self, files=files)

    def elements(self) -> Elements:
        """Yields the rows of all files."""
        for path in self.files:
            yield from self.rows(path)

    @abstractmethod
    def rows(self, path: str) -> Iterator[Any]:
        """Yields the rows of one file."""


class _ArrayFiles(FileSource):
    """Files that hold whole arrays, whose rows are the elements."""

    @abstractmethod
    def load(self, path: str) -> Any:
        """Returns the arrays of one file, mapped into memory where that can be done."""

    def rows(self, path: str) -> Iterator[Any]:
        """Yields the rows, as views that cannot be written."""
        arrays, rows = self._checked(path)
        for row in range(rows):
            yield row_of(arrays, row)

    def batches(self, size: int, drop_remainder: bool) -> Elements:
        """Yields copies of consecutive rows, across the borders of files."""
        rest: list[Any] = []
        for path in self.files:
            arrays, rows = self._checked(path)
            start = 0
            while start < rows and rest:
                rest.append(row_of(arrays, start))
                start += 1
                if len(rest) == size:
                    yield stack(rest)
                    rest = []
            while rows - start >= size:
                yield map_structure(np.array, cut(arrays, start, start + size))
                start += size
            rest += [row_of(arrays, row) for row in range(start, rows)]
        if rest and not drop_remainder:
            yield stack(rest)

    def cardinality(self) -> int:
        """Returns the number of rows in all files; their headers say it."""
        return sum(self._checked(path)[1] for path in self.files)

    def sample(self) -> Any:
        """Returns a row of the first file; of zeros, if it has none."""
        arrays, rows = self._checked(self.files[0])
        if rows:
            return row_of(arrays, 0)
        return map_structure(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), arrays)

    def spec(self) -> Any:
        """Returns the specs of a row of the first file."""
        return spec_of(self.sample())

    def _checked(self, path: str) -> tuple[Any, int]:
        arrays = self.load(path)
        parts = arrays.items() if isinstance(arrays, dict) else [("the array", arrays)]
        lengths = {name: array.shape[0] if array.ndim else None for name, array in parts}
        if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
            raise FileFormatError(
                f"{path}: expected arrays of equal first lengths, whose rows are the elements; found "
                f"{lengths}",
                path,
            )
        [rows] = set(lengths.values())
        assert rows is not None
        return arrays, rows


@dataclass(frozen=True, eq=False)
class NpyFiles(_ArrayFiles):
    """`.npy` files."""

    def load(self, path: str) -> Any:
        """Returns the file's array, mapped into memory."""
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise FileFormatError(f"{path}: this cannot be read as a .npy file: {error}", path) from error


@dataclass(frozen=True, eq=False)
class NpzFiles(_ArrayFiles):
    """`.npz` files."""

    names: tuple[str, ...] | None
    """Names of the arrays to read; None for all."""
    most_unpacked: int
    """Bytes of a compressed array that are unpacked into memory."""

    def load(self, path: str) -> Any:
        """Returns the file's arrays by name: mapped into memory, or unpacked if they are compressed."""
        try:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                names = tuple(members) if self.names is None else self.names
                missing = [name for name in names if name not in members]
                if missing:
                    raise FileFormatError(
                        f"{path}: there is no array {', '.join(missing)}; there are {', '.join(members)}",
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
            raise FileFormatError(f"{path}: this cannot be read as a .npz file: {error}", path) from error

    def _member(self, file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
        if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
            return _mapped(file, info)
        if info.file_size > self.most_unpacked:
            raise FileFormatError(
                f"{file.name}: the array {info.filename} would be {info.file_size} bytes unpacked, more "
                f"than the {self.most_unpacked} that max_unpacked_bytes allows. Write it with numpy.savez, "
                "which does not compress, or allow more",
                str(file.name),
            )
        with archive.open(info) as packed:
            shape, fortran, dtype, _ = _header(packed, info)
            array: NDArray[Any] = np.frombuffer(packed.read(), dtype, math.prod(shape))
        return array.reshape(shape, order="F" if fortran else "C")


def _mapped(file: IO[bytes], info: zipfile.ZipInfo) -> NDArray[Any]:
    """Maps an array that is stored in a zip file as it is."""
    file.seek(info.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    file.seek(start)
    shape, fortran, dtype, length = _header(file, info)
    if 0 in shape or dtype.itemsize == 0:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", start + length, shape, "F" if fortran else "C")


def _header(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads the header of a `.npy` file in a zip file; returns shape, order, dtype and its own length."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"{info.filename} is of version {version} of the format, which is not read")
    shape, fortran, dtype = _HEADERS[version](file)
    length = file.tell() - start
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects, which are not read")
    if length + dtype.itemsize * math.prod(shape) > info.file_size:
        raise ValueError(f"{info.filename} is shorter than its header says")
    return shape, fortran, dtype, length


@dataclass(frozen=True, eq=False)
class CsvFiles(FileSource):
    """CSV files of typed columns."""

    columns: Mapping[str, np.dtype[Any]] | tuple[np.dtype[Any], ...]
    """The dtype of each column: by name, from files with a header line, or in order, from files without."""
    delimiter: str
    """Separator of fields."""
    encoding: str
    """Of the files."""

    def rows(self, path: str) -> Iterator[Any]:
        """Yields a dict of arrays without dimensions for each line, or a tuple if columns have no names."""
        try:
            with open(path, encoding=self.encoding, newline="") as file:
                yield from self._read(
                    path, csv.reader(_lines(path, file), delimiter=self.delimiter, strict=True)
                )
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: this is not {self.encoding} text: {error}", path) from error

    def _read(self, path: str, reader: Any) -> Iterator[Any]:
        line = 1
        try:
            wanted = self._wanted(path, reader)
            line = reader.line_num + 1
            for fields in reader:
                if fields:  # an empty line has none
                    yield self._element(path, line, fields, wanted)
                line = reader.line_num + 1
        except csv.Error as error:
            raise FileFormatError(f"{path}:{line}: this is no CSV: {error}", path, line) from error

    def _wanted(self, path: str, reader: Any) -> tuple[int, list[tuple[str, int, np.dtype[Any]]]]:
        """Returns how many fields a line has, and name, position and dtype of those that are wanted."""
        if not isinstance(self.columns, Mapping):
            wanted = [(f"{index}", index, dtype) for index, dtype in enumerate(self.columns)]
            return len(wanted), wanted
        header = next(reader, None)
        if not header:
            raise FileFormatError(f"{path}:1: expected a line with the names of the columns", path, 1)
        names = [name.strip() for name in header]
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise FileFormatError(
                f"{path}:1: there is no column {', '.join(missing)}; there are {', '.join(names)}"[:500],
                path,
                1,
            )
        return len(names), [(name, names.index(name), dtype) for name, dtype in self.columns.items()]

    def _element(
        self,
        path: str,
        line: int,
        fields: list[str],
        wanted: tuple[int, list[tuple[str, int, np.dtype[Any]]]],
    ) -> Any:
        number, columns = wanted
        if len(fields) != number:
            raise FileFormatError(f"{path}:{line}: expected {number} fields, found {len(fields)}", path, line)
        values = {}
        for name, position, dtype in columns:
            try:
                values[name] = _parse(fields[position], dtype)
            except (ValueError, OverflowError, TypeError):
                raise FileFormatError(
                    f"{path}:{line}: column {name} should be {dtype}, found {fields[position]!r:.80}",
                    path,
                    line,
                ) from None
        return values if isinstance(self.columns, Mapping) else tuple(values.values())

    def cardinality(self) -> int:
        """Returns that it is not known: files would have to be read."""
        return UNKNOWN_CARDINALITY

    def spec(self) -> Any:
        """Returns the specs of a line."""
        if isinstance(self.columns, Mapping):
            return {name: TensorSpec((), dtype) for name, dtype in self.columns.items()}
        return tuple(TensorSpec((), dtype) for dtype in self.columns)

    def sample(self) -> Any:
        """Returns a line of zeros."""
        return map_structure(lambda spec: np.zeros((), spec.dtype), self.spec())


def csv_columns(columns: Mapping[str, DTypeLike] | Sequence[DTypeLike]) -> Any:
    """Returns the columns as `CsvFiles` takes them.

    Raises:
        ArgumentTypeError: They are none, or a dtype is none that a field can be read as.
    """
    named = isinstance(columns, Mapping)
    if isinstance(columns, str) or not (named or isinstance(columns, Sequence)) or not columns:
        raise ArgumentTypeError(
            "columns must be a dict from the names of columns to dtypes, or a list of dtypes for files "
            f"without a header line; got {columns!r:.80}"
        )
    dtypes = []
    for dtype in columns.values() if isinstance(columns, Mapping) else columns:
        try:
            checked = np.dtype(dtype)
        except TypeError as error:
            raise ArgumentTypeError(f"{dtype!r:.80} is no dtype") from error
        if checked.kind not in "biufcUSM":
            raise ArgumentTypeError(f"a field of a CSV file cannot be read as {checked}")
        dtypes.append(checked)
    return dict(zip(columns, dtypes, strict=True)) if named else tuple(dtypes)


def _parse(field: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    match dtype.kind:
        case "b":
            truth = {"true": True, "1": True, "false": False, "0": False}.get(field.strip().lower())
            if truth is None:
                raise ValueError(field)
            return np.asarray(truth)
        case "i" | "u":
            number = int(field)
            limits = np.iinfo(dtype)
            if not limits.min <= number <= limits.max:
                raise OverflowError(field)
            return np.asarray(number, dtype)
        case "f":
            return np.asarray(float(field), dtype)
        case "c":
            return np.asarray(complex(field.strip()), dtype)
        case "S" | "U":
            text = np.asarray(field if dtype.kind == "U" else field.encode())
            if 0 < dtype.itemsize < text.itemsize:
                raise ValueError(field)  # it would be cut off
            return text.astype(dtype)
        case _:
            return np.asarray(field, dtype)


def _lines(path: str, file: IO[str]) -> Iterator[str]:
    """Yields the lines of a file, none of which may be without end."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise FileFormatError(
                f"{path}:{number}: the line is longer than {LONGEST_LINE} characters", path, number
            )
        yield line
