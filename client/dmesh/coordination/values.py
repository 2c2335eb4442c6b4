"""Keys and values between Python and the wire: bytes, `str` as UTF-8, and what is read together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from dmesh.errors import ConfigurationError, KeyTypeError
from dmesh.v1 import key_value_pb2 as pb

Value: TypeAlias = str | bytes

INT64 = range(-(1 << 63), 1 << 63)
"""Integers of 64 bits."""


class Snapshot(dict[str, bytes]):
    """Keys and values that were read together, in order of the answer: a `dict` that knows its revision.

    `watch(prefix, from_revision=snapshot.revision + 1)` continues where it ends.

    Attributes:
        revision: Revision of the store at which all of them were read.
        revisions: Revision of each key's last change.
        create_revisions: Revision at which each key came into being.
    """

    def __init__(self, kvs: Iterable[pb.KeyValue] = (), revision: int = 0) -> None:
        listed = tuple(kvs)
        super().__init__((kv.key, kv.value) for kv in listed)
        self.revision = revision
        self.revisions = {kv.key: kv.mod_revision for kv in listed}
        self.create_revisions = {kv.key: kv.create_revision for kv in listed}

    def text(self, encoding: str = "utf-8") -> dict[str, str]:
        """Return the values as text."""
        return {key: decode_value(value, key, encoding) for key, value in self.items()}


def encode_key(key: str, what: str = "key") -> str:
    """Check a key or prefix.

    Raises:
        ConfigurationError: It is not a non-empty string that has an encoding in UTF-8.
    """
    if not isinstance(key, str) or (not key and what == "key"):
        raise ConfigurationError(f"a {what} is a non-empty string, not {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{what} {key!r} cannot be encoded as UTF-8: {error.reason}") from error
    return key


def encode_value(value: Value, key: str) -> bytes:
    """Convert a value to bytes.

    Raises:
        KeyTypeError: It is neither `str` nor `bytes`.
        ConfigurationError: The string has no encoding in UTF-8.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"the value for key {key!r} cannot be encoded as UTF-8: {error.reason}"
            ) from error
    raise KeyTypeError(
        f"the value for key {key!r} must be str or bytes, not {type(value).__name__}; encode it, for example "
        "with json"
    )


def decode_value(value: bytes, key: str, encoding: str) -> str:
    """Convert a value to text.

    Raises:
        ConfigurationError: There is no such encoding, or the value is not text in it.
    """
    try:
        return value.decode(encoding)
    except LookupError as error:
        raise ConfigurationError(f"unknown encoding {encoding!r}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the value of key {key!r} ({len(value)} bytes) is not {encoding} text: {error.reason} at byte "
            f"{error.start}. Read it without `encoding` to get the bytes."
        ) from error


def encode_amount(amount: int) -> int:
    """Check an integer that is added to a key.

    Raises:
        KeyTypeError: It is no integer.
        ConfigurationError: It does not fit 64 bits.
    """
    if isinstance(amount, bool) or not hasattr(amount, "__index__"):
        raise KeyTypeError(f"amount must be an integer, not {amount!r}")
    if (number := amount.__index__()) not in INT64:
        raise ConfigurationError(f"amount {number} does not fit 64 bits")
    return number


def check_timeout(timeout: float | None) -> None:
    """Check a time to wait; None for no limit.

    Raises:
        ConfigurationError: It is not a number of seconds from 0.
    """
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf
    ):
        raise ConfigurationError(
            f"timeout must be a number of seconds from 0, or None for no limit; not {timeout!r}"
        )
