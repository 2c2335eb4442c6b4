"""Parquet files as a source, through pyarrow: one row group in memory after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dmesh.data.cursors import Count, Cursor, Table
from dmesh.data.files import FileSource
from dmesh.data.pipeline import Reading
from dmesh.data.tables import Arrays, Chunks
from dmesh.errors import FileFormatError, MissingExtraError

__all__ = ["ParquetFiles"]


@dataclass(frozen=True, eq=False)
class ParquetFiles(FileSource):
    """Parquet files."""

    columns: tuple[str, ...] | None
    """Names of the columns to read; None for all."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that reads one row group at a time, and no skipped ones."""
        return Chunks([part for path in self.files for part in self._groups(path)])

    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the rows of one file."""
        return Chunks(self._groups(path))

    def _groups(self, path: str) -> list[tuple[int, partial[Cursor]]]:
        file = self._opened(path)
        sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        return [(size, partial(self._group, path, file, index, size)) for index, size in enumerate(sizes)]

    def _opened(self, path: str) -> Any:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingExtraError(
                f"Dataset.from_parquet() needs pyarrow ({error}): pip install 'dmesh[parquet]'"
            ) from error
        try:
            file = parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise FileFormatError(f"{path}: cannot be read as a Parquet file: {error}", path) from error
        known = file.schema_arrow.names
        missing = [name for name in self.columns or () if name not in known]
        if missing:
            raise FileFormatError(
                f"{path}: no column {', '.join(missing)}; the file has {', '.join(known)}"[:500], path
            )
        return file

    def _group(self, path: str, file: Any, index: int, size: int) -> Cursor:
        import pyarrow

        try:
            read = file.read_row_group(index, columns=None if self.columns is None else list(self.columns))
        except (pyarrow.ArrowException, OSError) as error:
            raise FileFormatError(f"{path}: row group {index} cannot be read: {error}", path) from error
        names = read.column_names if self.columns is None else self.columns
        columns = {name: _column(path, name, read.column(name)) for name in names}
        ragged = any(isinstance(column, list) for column in columns.values())
        return Count(_Ragged(columns) if ragged else Arrays(columns, size), size)

    def cardinality(self) -> int:
        """Return the number of rows, read from the files' metadata."""
        return sum(int(self._opened(path).metadata.num_rows) for path in self.files)


class _Ragged(Table):
    """Rows of columns some of which have arrays of different lengths."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def get(self, key: Any) -> Any:
        """Return a row as a dict."""
        return {name: np.asarray(column[key]) for name, column in self._columns.items()}


def _column(path: str, name: str, column: Any) -> Any:
    """Return a column as an array of its rows; as a list of arrays, if their lengths differ."""
    import pyarrow
    from pyarrow import types

    values, kind = column.combine_chunks(), column.type
    if isinstance(values, pyarrow.ChunkedArray):
        values = pyarrow.concat_arrays(values.chunks) if values.num_chunks else pyarrow.array([], kind)
    if values.null_count:
        raise FileFormatError(
            f"{path}: column {name} has {values.null_count} null values, which arrays cannot hold. Omit the "
            "column with columns=[...], or fill them",
            path,
        )
    if types.is_fixed_size_list(kind):
        return _numbers(path, name, values.flatten()).reshape(len(values), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        ends = values.offsets.to_numpy() - values.offsets[0].as_py()
        flat = _numbers(path, name, values.flatten())
        lengths = set(np.diff(ends).tolist())
        return flat.reshape(len(values), lengths.pop()) if len(lengths) == 1 else np.split(flat, ends[1:-1])
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array(values.to_pylist(), np.str_)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return [np.frombuffer(value, np.uint8) for value in values.to_pylist()]
    return _numbers(path, name, values)


def _numbers(path: str, name: str, values: Any) -> Any:
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind == "O" or values.null_count:
        raise FileFormatError(
            f"{path}: column {name} is {values.type}, of which no array can be made. Leave it out "
            "with columns=[...]",
            path,
        )
    return array
