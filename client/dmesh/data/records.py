"""TFRecord files: records of any bytes, each with its length and checksums; and `tf.train.Example` in them.

A record is its length (8 bytes, little-endian), the masked CRC-32C of these 8 bytes, the data, and the data's
masked CRC-32C. Files may be compressed as a whole. The checksum of the length is verified when a record is
read, that of the data only when the data is needed: not for skipped records, nor for those of other workers.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dmesh.data.checksums import masked_crc32c
from dmesh.data.cursors import Cursor, Streamed, Table
from dmesh.data.elements import TensorSpec
from dmesh.data.examples import FixedLenFeature, VarLenFeature, example_of, features_of
from dmesh.data.files import FileSource
from dmesh.data.pipeline import UNKNOWN_CARDINALITY
from dmesh.errors import ArgumentTypeError, DatasetError, FileFormatError
from dmesh.structure import map_structure

__all__ = ["RecordFiles", "TFRecordWriter", "checked_compression"]

LONGEST_RECORD = 1 << 30
"""Maximum size of a record, bytes."""
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_CHUNK = 1 << 16

_Record = tuple[int, bytes, int]
"""A record: its number, its data, and the data's checksum."""


class _Reads(Protocol):
    """A file, or a decompressor with the interface of one."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes; fewer at the end only."""


class _Inflating:
    """Decompresses a ZLIB file.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unpacker = zlib.decompressobj()
        self._ready = bytearray()

    def read(self, size: int, /) -> bytes:
        """Return the next bytes; fewer at the end only."""
        while len(self._ready) < size and not self._unpacker.eof:
            packed = self._unpacker.unconsumed_tail or self._file.read(_CHUNK)
            if not packed:
                raise EOFError("the compressed data ends early")
            self._ready += self._unpacker.decompress(packed, max(_CHUNK, size - len(self._ready)))
        if self._unpacker.unused_data:
            raise ValueError("bytes follow the compressed data")
        data = bytes(self._ready[:size])
        del self._ready[:size]
        return data


def checked_compression(compression: str | None) -> str:
    """Return TensorFlow's name of a compression type.

    Raises:
        DatasetError: There is no such type.
    """
    if compression in (None, ""):
        return ""
    if compression not in ("GZIP", "ZLIB"):
        raise DatasetError(f"compression_type must be '', 'GZIP' or 'ZLIB', got {compression!r:.80}")
    return compression


@dataclass(frozen=True, eq=False)
class RecordFiles(FileSource):
    """TFRecord files."""

    compression: str
    """GZIP, ZLIB, or empty for none."""
    features: Mapping[str, FixedLenFeature | VarLenFeature] | None
    """Features to read of a `tf.train.Example` in each record; None for the records' bytes."""

    def open_file(self, path: str) -> Cursor:
        """Return a cursor over the records of one file, which are checked and parsed when needed."""
        return Streamed(lambda: self._read(path), _Parsed(path, self.features))

    def _read(self, path: str) -> Iterator[_Record]:
        number = 0
        try:
            with open(path, "rb") as file:
                for number, (data, checksum) in enumerate(_records(self._unpacked(file)), 1):
                    yield number, data, checksum
        except (ValueError, EOFError, OSError, zlib.error) as error:
            raise _unreadable(path, number + 1, error) from error

    def _unpacked(self, file: IO[bytes]) -> _Reads:
        if self.compression == "GZIP":
            return gzip.GzipFile(fileobj=file)
        return _Inflating(file) if self.compression else file

    def cardinality(self) -> int:
        """Return UNKNOWN_CARDINALITY: counting would take reading the files."""
        return UNKNOWN_CARDINALITY

    def spec(self) -> Any:
        """Return the specs of a record."""
        if self.features is None:
            return TensorSpec((None,), np.uint8)
        return {name: feature.spec for name, feature in self.features.items()}

    def sample(self) -> Any:
        """Return a record of zeros."""
        return map_structure(
            lambda spec: np.zeros([length or 0 for length in spec.shape], spec.dtype), self.spec()
        )


class _Parsed(Table):
    """Records of a file; a key is a raw record.

    Args:
        path: Path of the file, for messages.
        features: Features to read of an example; None for the bytes.
    """

    def __init__(self, path: str, features: Mapping[str, FixedLenFeature | VarLenFeature] | None) -> None:
        self._path = path
        self._features = features

    def get(self, key: Any) -> Any:
        """Verify a record's checksum; return its example or its bytes."""
        number, data, checksum = key
        try:
            if checksum != masked_crc32c(data):
                raise ValueError("its data has a wrong checksum: the file is damaged")
            return (
                np.frombuffer(data, np.uint8) if self._features is None else features_of(data, self._features)
            )
        except ValueError as error:
            raise _unreadable(self._path, number, error) from error


def _unreadable(path: str, number: int, error: Exception) -> FileFormatError:
    return FileFormatError(f"{path}: record {number} cannot be read: {error}", path)


def _records(file: _Reads) -> Iterator[tuple[bytes, int]]:
    """Yield the data of the records of an open file, each with its stored checksum.

    Raises:
        ValueError: A length, or its checksum, is wrong.
        EOFError: The file ends within a record.
    """
    while head := file.read(_LENGTH.size + _CHECKSUM.size):
        if len(head) < _LENGTH.size + _CHECKSUM.size:
            raise EOFError("the file ends within it")
        length_bytes = head[: _LENGTH.size]
        if _CHECKSUM.unpack_from(head, _LENGTH.size)[0] != masked_crc32c(length_bytes):
            raise ValueError(
                "its length has a wrong checksum: the file is damaged, compressed in another way, or not a "
                "TFRecord file"
            )
        (length,) = _LENGTH.unpack(length_bytes)
        if length > LONGEST_RECORD:
            raise ValueError(f"it has {length} bytes, more than the limit of {LONGEST_RECORD}")
        body = file.read(length + _CHECKSUM.size)
        if len(body) < length + _CHECKSUM.size:
            raise EOFError("the file ends within it")
        yield body[:length], _CHECKSUM.unpack_from(body, length)[0]


class TFRecordWriter:
    """Writes a TFRecord file: a whole dataset, or record by record in a `with` block.

    ```python
    with dmesh.data.experimental.TFRecordWriter("digits.tfrecord") as writer:
        writer.write_record({"image": image, "label": 7})  # a tf.train.Example
    ```

    Args:
        filename: The file.
        compression_type: GZIP or ZLIB; None or empty for none.

    Raises:
        DatasetError: The compression type is unknown.
    """

    def __init__(self, filename: str | PathLike[str], compression_type: str | None = None) -> None:
        self._filename = filename
        self._compression = checked_compression(compression_type)
        self._file: IO[bytes] | None = None
        self._packed: Any = None

    def write(self, dataset: Iterable[Any]) -> None:
        """Write the file from a dataset, whose elements are as for `write_record`."""
        with self:
            for element in dataset:
                self.write_record(element)

    def write_record(self, record: bytes | NDArray[np.uint8] | Mapping[str, Any]) -> None:
        """Write one record: bytes; an array of bytes; or a dict, which becomes a `tf.train.Example`.

        Raises:
            ArgumentTypeError: `record` has another type.
            DatasetError: The file is not open.
        """
        if self._packed is None:
            raise DatasetError("the file is not open: use the writer in a `with` block, or write(dataset)")
        data = _as_bytes(record)
        length = _LENGTH.pack(len(data))
        for part in (
            length,
            _CHECKSUM.pack(masked_crc32c(length)),
            data,
            _CHECKSUM.pack(masked_crc32c(data)),
        ):
            self._packed.write(part)

    def close(self) -> None:
        """Finish the file."""
        packed, file = self._packed, self._file
        self._packed = self._file = None
        if packed is not None and packed is not file:
            packed.close()
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        self._file = open(self._filename, "wb")
        if self._compression == "GZIP":
            # No name and time in the header, so that equal records give equal files.
            self._packed = gzip.GzipFile("", fileobj=self._file, mode="wb", mtime=0)
        else:
            self._packed = _Deflating(self._file) if self._compression else self._file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file."""
        self.close()


class _Deflating:
    """Compresses a file with ZLIB.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._packer = zlib.compressobj()

    def write(self, data: bytes) -> None:
        """Write some bytes."""
        self._file.write(self._packer.compress(data))

    def close(self) -> None:
        """Write what is left."""
        self._file.write(self._packer.flush())


def _as_bytes(record: Any) -> bytes:
    if isinstance(record, Mapping):
        return example_of(record)
    if isinstance(record, np.ndarray) and record.dtype == np.uint8 and record.ndim == 1:
        return record.tobytes()
    if isinstance(record, bytes | bytearray | memoryview):
        return bytes(record)
    raise ArgumentTypeError(
        f"a record must be bytes, a one-dimensional array of uint8, or a dict for a tf.train.Example; got "
        f"{type(record).__name__}"
    )
