"""CSV files of typed columns as a source, read line by line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dmesh.data.cursors import Cursor, Streamed
from dmesh.data.elements import TensorSpec
from dmesh.data.files import FileSource
from dmesh.data.pipeline import UNKNOWN_CARDINALITY
from dmesh.errors import ArgumentTypeError, FileFormatError
from dmesh.structure import map_structure

__all__ = ["csv_columns", "CsvFiles"]

LONGEST_LINE = 1 << 20
"""Maximum number of characters of a line."""


@dataclass(frozen=True, eq=False)
class CsvFiles(FileSource):
    """CSV files of typed columns."""

    columns: Mapping[str, np.dtype[Any]] | tuple[np.dtype[Any], ...]
    """The dtype of each column: by name, from files with a header line, or in order, from files without."""
    delimiter: str
    """Separator of fields."""
    encoding: str
    """Encoding of the files."""

    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the lines of one file."""
        return Streamed(lambda: self._rows(path))

    def _rows(self, path: str) -> Iterator[Any]:
        """Yield a dict of arrays without dimensions for each line, or a tuple if columns have no names."""
        try:
            with open(path, encoding=self.encoding, newline="") as file:
                yield from self._read(
                    path, csv.reader(_lines(path, file), delimiter=self.delimiter, strict=True)
                )
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: the file is not {self.encoding} text: {error}", path) from error

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
            raise FileFormatError(f"{path}:{line}: not valid CSV: {error}", path, line) from error

    def _wanted(self, path: str, reader: Any) -> tuple[int, list[tuple[str, int, np.dtype[Any]]]]:
        """Return the number of fields of a line, and name, position and dtype of the wanted ones."""
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
                f"{path}:1: no column {', '.join(missing)}; the file has {', '.join(names)}"[:500],
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
        """Return UNKNOWN_CARDINALITY: counting would take reading the files."""
        return UNKNOWN_CARDINALITY

    def spec(self) -> Any:
        """Return the specs of a line."""
        if isinstance(self.columns, Mapping):
            return {name: TensorSpec((), dtype) for name, dtype in self.columns.items()}
        return tuple(TensorSpec((), dtype) for dtype in self.columns)

    def sample(self) -> Any:
        """Return a line of zeros."""
        return map_structure(lambda spec: np.zeros((), spec.dtype), self.spec())


def csv_columns(columns: Mapping[str, DTypeLike] | Sequence[DTypeLike]) -> Any:
    """Return the columns in the form of `CsvFiles.columns`.

    Raises:
        ArgumentTypeError: `columns` is neither a dict nor a list, or a field cannot be read as a dtype.
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
            raise ArgumentTypeError(f"{dtype!r:.80} is not a dtype") from error
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
    """Yield the lines of a file, of limited length."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise FileFormatError(
                f"{path}:{number}: the line is longer than {LONGEST_LINE} characters", path, number
            )
        yield line
