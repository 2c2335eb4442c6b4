"""Encoding of plain values for the object collectives: MessagePack with extension types.

| value | extension type | content |
|---|---|---|
| None, bool, int of 64 bits, float, str, bytes, list, dict | - | as MessagePack has them |
| tuple, set, frozenset | 0, 1, 2 | the elements as a list |
| larger int, complex | 3, 4 | two's complement, little-endian; two float64, little-endian |
| NumPy array, NumPy scalar | 5, 6 | a list of dtype and shape, after its length; elements in C order |
| datetime, date, time | 7, 8, 9 | a list: ISO 8601, and the fold of an hour that there is twice |
| timedelta | 10 | a list: days, seconds, microseconds |

Types are preserved exactly, and instances of subclasses refused, but for memory: bytearray and memoryview
arrive as bytes. Decoding runs no code of the sender's, and allocates no more than a small multiple of the
bytes that came.
"""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from dmesh.collectives.request import describe_type
from dmesh.errors import CollectiveTypeError, CollectiveValueError, MissingExtraError

MOST_NESTED = 32
"""Largest number of extension types inside one another. Lists and dicts may be nested more deeply."""

_LENGTH = struct.Struct("<I")
_TUPLE, _SET, _FROZENSET, _INT, _COMPLEX, _ARRAY, _SCALAR = range(7)
_DATETIME, _DATE, _TIME, _TIMEDELTA = range(7, 11)
_COLLECTIONS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MOMENTS: dict[type, int] = {datetime.datetime: _DATETIME, datetime.date: _DATE, datetime.time: _TIME}
_ML_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_PLAIN = "?bhilqBHILQefdgFDGSUVmM"  # codes of NumPy's own dtypes of fixed size


def encode(value: object) -> bytes:
    """Return a value as bytes.

    Raises:
        CollectiveTypeError: It is not a plain value, or contains one that is not.
        CollectiveValueError: It is nested too deeply, or too large.
        MissingExtraError: The package msgpack is missing.
    """
    return _encode(value, 0)


def decode(data: bytes | memoryview) -> Any:
    """Return the value of some bytes.

    Raises:
        CollectiveValueError: They are not the encoding of a plain value.
        MissingExtraError: The package msgpack is missing.
    """
    try:
        return _decode(bytes(data), 0)
    except CollectiveValueError:
        raise
    except (ValueError, TypeError, SyntaxError, ArithmeticError, struct.error, RecursionError) as error:
        raise CollectiveValueError(f"a received object cannot be decoded: {error}") from error


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MissingExtraError(
            "collectives of objects need the package msgpack: pip install msgpack"
        ) from error
    return msgpack


def _encode(value: object, depth: int) -> bytes:
    msgpack = _msgpack()
    if depth > MOST_NESTED:
        raise CollectiveValueError(
            f"an object has tuples or sets that are nested more than {MOST_NESTED} deep, and cannot be sent"
        )

    def extend(found: object) -> Any:
        code, content = _extension(found)
        if not isinstance(content, bytes):
            content = _encode(content, depth + 1)
        return msgpack.ExtType(code, content)

    packer = msgpack.Packer(default=extend, strict_types=True, unicode_errors="surrogatepass")
    try:
        packed: bytes = packer.pack(value)
    except CollectiveTypeError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, CollectiveValueError):
            raise
        raise CollectiveValueError(f"an object cannot be sent: {error}") from error
    return packed


def _extension(value: object) -> tuple[int, Any]:
    """Return the extension type of a value and its content."""
    kind = type(value)
    if (code := _COLLECTIONS.get(kind)) is not None:
        return code, list(value)  # type: ignore[call-overload]
    if (code := _MOMENTS.get(kind)) is not None:
        zone = getattr(value, "tzinfo", None)
        if zone is None or type(zone) is datetime.timezone:
            return code, [value.isoformat(), getattr(value, "fold", 0)]  # type: ignore[attr-defined]
        raise CollectiveTypeError(
            f"the time zone {zone} cannot be sent; convert it, e.g. with x.astimezone(datetime.timezone.utc)"
        )
    if isinstance(value, int) and kind is int:
        return _INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, complex) and kind is complex:
        return _COMPLEX, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, datetime.timedelta) and kind is datetime.timedelta:
        return _TIMEDELTA, [value.days, value.seconds, value.microseconds]
    if isinstance(value, np.generic):
        return _SCALAR, _encode_array(np.asarray(value))
    if kind is np.ndarray:
        return _ARRAY, _encode_array(value)  # type: ignore[arg-type]
    raise CollectiveTypeError(
        f"an object of type {describe_type(value)} cannot be sent: only None, bool, int, float, complex, "
        "str, bytes, list, tuple, dict, set, dates and NumPy arrays can. Convert it, or pass serializer="
    )


def _encode_array(array: np.ndarray[Any, Any]) -> bytes:
    header = _msgpack().packb([_encode_dtype(array.dtype), list(array.shape)])
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""
    return b"".join((_LENGTH.pack(len(header)), header, elements))


def _encode_dtype(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as text, or as a list if it has fields or is a subarray."""
    if dtype.subdtype is not None:
        return [_encode_dtype(dtype.subdtype[0]), list(dtype.subdtype[1])]
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        formats = [_encode_dtype(field[0]) for field in fields]
        return [list(dtype.names), formats, [field[1] for field in fields], dtype.itemsize]
    if dtype.name in _ML_DTYPES and _ML_DTYPES[dtype.name] == dtype:
        return dtype.name
    if dtype.char in _PLAIN:
        return dtype.str
    raise CollectiveTypeError(f"arrays of dtype {dtype} cannot be sent: dmesh never pickles")


def _decode(data: bytes, depth: int) -> Any:
    msgpack = _msgpack()
    if depth > MOST_NESTED:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
    # First without making anything of it: so no length is larger than what came.
    scanner = msgpack.Unpacker(max_buffer_size=max(len(data), 1), strict_map_key=False)
    scanner.feed(data)
    try:
        scanner.skip()
    except msgpack.OutOfData:
        raise ValueError("it is truncated") from None
    if scanner.tell() != len(data):
        raise ValueError("bytes follow it")

    def extend(code: int, content: bytes) -> Any:
        return _value_of(code, content, depth)

    return msgpack.unpackb(data, ext_hook=extend, strict_map_key=False, unicode_errors="surrogatepass")


def _value_of(code: int, content: bytes, depth: int) -> Any:
    if code == _INT:
        return int.from_bytes(content, "little", signed=True)
    if code in (_ARRAY, _SCALAR):
        array = _decode_array(content, depth)
        return array if code == _ARRAY else array[()]
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", content))
    makers: dict[int, Callable[..., Any]] = {
        _TUPLE: lambda *items: items,
        _SET: lambda *items: set(items),
        _FROZENSET: lambda *items: frozenset(items),
        _DATETIME: lambda text, fold: datetime.datetime.fromisoformat(text).replace(fold=fold),
        _DATE: lambda text, fold: datetime.date.fromisoformat(text),
        _TIME: lambda text, fold: datetime.time.fromisoformat(text).replace(fold=fold),
        _TIMEDELTA: lambda days, seconds, micros: datetime.timedelta(days, seconds, micros),
    }
    if code not in makers:
        raise ValueError(f"it has a value of the unknown type {code}")
    content_list = _decode(content, depth + 1)
    if type(content_list) is not list:
        raise ValueError(f"a value of type {code} is not a list")
    return makers[code](*content_list)


def _decode_array(content: bytes, depth: int) -> np.ndarray[Any, Any]:
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    dtype, shape = _decode(content[_LENGTH.size : start], depth + 1)
    made, lengths = _decode_dtype(dtype), _lengths(shape)
    endless = made.itemsize == 0 and made.kind in "SU"  # of which NumPy makes strings of length 1
    if endless or math.prod(lengths) * made.itemsize != len(content) - start:
        raise ValueError(f"an array of {made}, shape {tuple(lengths)}, does not match its number of bytes")
    array = np.empty(lengths, made)
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[...] = np.frombuffer(content, np.uint8, offset=start)
    return array


def _decode_dtype(found: Any) -> np.dtype[Any]:
    match found:
        case str() if found in _ML_DTYPES:
            return _ML_DTYPES[found]
        case str():
            dtype = np.dtype(found)
            if dtype.char in _PLAIN and dtype.str == found:
                return dtype
        case [base, shape]:
            return np.dtype((_decode_dtype(base), tuple(_lengths(shape))))
        case [list(names), list(formats), list(offsets), int(itemsize)]:
            members = [_decode_dtype(item) for item in formats]
            fields = {"names": names, "formats": members, "offsets": offsets, "itemsize": itemsize}
            return np.dtype(fields)  # type: ignore[call-overload, no-any-return]
    raise ValueError(f"the dtype {found!r} is unknown")


def _lengths(shape: Any) -> list[int]:
    if type(shape) is not list or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"the shape {shape!r} is invalid")
    return shape
