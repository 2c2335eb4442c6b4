"""Envelopes of transfers: what a receiver asks for, and what a sender says of its array."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from dmesh.collectives.request import DTYPES, SYNCHRONOUS, TRANSFER, describe, describe_dtype
from dmesh.errors import CollectiveTypeError

MAX_TAG: Final = 2**31 - 1
"""Largest tag."""
_TEXT = re.compile(rf"{TRANSFER}\((.+), shape \(([0-9, ]*)\)(?:, tag=([0-9]+)({SYNCHRONOUS})?)?\)", re.DOTALL)
_SIMPLE = re.compile(r"[a-z][a-z0-9_]*(\[[0-9a-zA-Z]+\])?|[<>|=][SUV][0-9]+")
_NAMED = {describe_dtype(dtype): dtype for dtype in DTYPES}
_ESCAPE = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<mark>[\[\](){{}},:])|(?P<number>\d+)|(?P<true>True)|"""
    rf"""(?P<quote>['"])(?P<string>(?:{_ESCAPE}|(?!(?P=quote))[^\\])*)(?P=quote))\s*"""
)
_ENDS = {"[": "]", "(": ")", "{": "}"}


class Wildcard(enum.Enum):
    """Values of `src`, `dst` and `tag` that are no positions and no tags."""

    ANY_SOURCE = "any source"
    ANY_TAG = "any tag"
    NULL_PEER = "null peer"

    def __repr__(self) -> str:
        return self.name


ANY_SOURCE: Final[Literal[Wildcard.ANY_SOURCE]] = Wildcard.ANY_SOURCE
"""As `src`: receive from whichever rank has sent."""
ANY_TAG: Final[Literal[Wildcard.ANY_TAG]] = Wildcard.ANY_TAG
"""As `tag` of a receive: any tag."""
NULL_PEER: Final[Literal[Wildcard.NULL_PEER]] = Wildcard.NULL_PEER
"""As `src` or `dst`, at the edge of a mesh: nothing is sent, and nothing received."""


@dataclass(slots=True)
class Status:
    """Description of a received, or receivable, array."""

    source: int | None = None
    """Position of the sender; None before the receive, and for one from `NULL_PEER`."""
    tag: int | None = None
    """Tag of the sender."""
    dtype: np.dtype[Any] | None = None
    """Dtype of the array."""
    shape: tuple[int, ...] = ()
    """Shape of the array."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    def fill(self, source: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Describe an array."""
        self.source, self.tag, self.dtype, self.shape = source, tag, dtype, shape


class Envelope(NamedTuple):
    """Description of an array that waits to be received."""

    source: int
    """Position of the sender."""
    tag: int
    number: int
    """Of a transfer without a tag, its number in the stream of its pair; else its place among all transfers
    from that sender."""
    text: str
    """Wire descriptor."""


@lru_cache(maxsize=512)
def parse(text: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and tag of a transfer of some descriptor.

    Raises:
        CollectiveTypeError: The descriptor does not say all of it, or the dtype is unknown here.
    """
    found = _TEXT.fullmatch(text)
    if found is not None:
        name, lengths, tag, synchronous = found.groups()
        try:
            shape = tuple(int(length) for length in lengths.split(",") if length.strip())
            dtype = _NAMED.get(name) or _dtype(name)
            where = f"tag={tag}{synchronous or ''}" if tag else ""
            said = describe(TRANSFER, dtype, shape, where=where)[0]
            if said == text and not dtype.hasobject and int(tag or 0) <= MAX_TAG:
                return dtype, shape, int(tag or 0)
        except (TypeError, ValueError, LookupError, SyntaxError, RecursionError, MemoryError, StopIteration):
            pass
    raise CollectiveTypeError(
        f"recv cannot allocate an array for the message, {text}: pass an array of its dtype and shape"
    )


@lru_cache(maxsize=512)
def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a description; literals alone are read from a structured one."""
    if _SIMPLE.fullmatch(name):
        return np.dtype(name)
    tokens = _tokens(name)
    dtype: np.dtype[Any] = np.dtype(_literal(next(tokens), tokens))
    if next(tokens, None) is not None:
        raise ValueError(f"{name} goes on after its end")
    return dtype


def _tokens(text: str) -> Iterator[str | int]:
    """Yield a mark as it is, a number or True as an integer, and a string after a quote.

    `ast.literal_eval` is not used: before CPython 3.13 it fails at random, with SystemError, while another
    thread compiles anything.
    """
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise ValueError(f"{text} has no literal at {place}")
        place = found.end()
        if found["string"] is not None:
            yield "'" + found["string"].encode("latin-1", "backslashreplace").decode("unicode_escape")
        elif found["number"]:
            yield int(found["number"])
        else:
            yield found["mark"] or True


def _literal(token: str | int, tokens: Iterator[str | int]) -> Any:
    """Return the literal that begins with a token: a number, a string, a list, a tuple, or a dict."""
    if isinstance(token, int):
        return token
    if token[0] == "'":
        return token[1:]
    end = _ENDS[token]
    items = []
    while (token := next(tokens)) != end:
        items.append(_literal(token, tokens))
        if (mark := next(tokens)) == end:
            break
        if mark not in (",", ":"):
            raise ValueError(f"{mark!r} stands between two literals")
    if end == "}":
        return dict(zip(items[::2], items[1::2], strict=True))
    return items if end == "]" else tuple(items)


def is_synchronous(text: str) -> bool:
    """Return whether a descriptor is that of a synchronous send."""
    return text.endswith(f"{SYNCHRONOUS})")


def tag_of(text: str) -> int:
    """Return the tag in a descriptor."""
    found = _TEXT.fullmatch(text)
    return int(found[3] or 0) if found else 0
