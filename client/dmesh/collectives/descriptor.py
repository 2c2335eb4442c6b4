"""Wire descriptor of a call: everything that all ranks must agree on, as text and in numbers.

The text names the operation, its arguments, dtype and shape: `all_reduce(sum, float32, shape (3, 4))`. It is
compared byte by byte and shown to people as it is. Calls whose dtype and number of dimensions the native core
knows have a descriptor in numbers, too; native endpoints compare a hash of that, the same on all machines, or
of the text. The numbers are those of the native core's headers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MAX_LENGTH = 1000
"""Characters of the text. A longer one (a structured dtype can be) ends in a hash of the whole."""
TRANSFER = "transfer"
"""Kind of a `send` and of its `recv`, which have one descriptor."""
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "transfer",
    "permute",
)
"""By number."""
OPS = ("sum", "prod", "min", "max", "mean", "any", "all", "bitwise_and", "bitwise_or", "bitwise_xor")
"""By number."""
DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name)
    for name in (
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        ml_dtypes.bfloat16,
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
)
"""By number."""
MOST_DIMENSIONS = 8
"""Largest number of dimensions of a descriptor in numbers."""

_REDUCING = frozenset(KINDS.index(kind) for kind in ("all_reduce", "reduce", "reduce_scatter"))
_ROOTED = frozenset(KINDS.index(kind) for kind in ("reduce", "broadcast", "gather", "scatter"))
_SCATTERING = KINDS.index("reduce_scatter")
_WORD = 2**64 - 1


class Descriptor(NamedTuple):
    """Wire descriptor of a call in numbers."""

    kind: int
    """Index into `KINDS`."""
    op: int
    """Index into `OPS`; 0 where nothing is folded."""
    argument: int
    """The root; of a reduce-scatter the axis + 1, or 0 without one."""
    dtype: int
    """Index into `DTYPES`; 0 for a barrier."""
    shape: tuple[int, ...]
    """Of the array that is passed (a scatter's: of a row)."""


def descriptor_of(
    kind: str, op: str, argument: int, dtype: np.dtype[Any] | None, shape: tuple[int, ...] = ()
) -> Descriptor | None:
    """Return the descriptor of a call in numbers; None if it has none."""
    if dtype is None:
        return Descriptor(KINDS.index(kind), 0, 0, 0, ())
    number = _number_of(dtype)
    if number is None or len(shape) > MOST_DIMENSIONS:
        return None
    return Descriptor(KINDS.index(kind), OPS.index(op) if op else 0, argument, number, shape)


@lru_cache(maxsize=512)
def describe(
    kind: str, arguments: tuple[str, ...], dtype: np.dtype[Any] | None, shape: tuple[int, ...], number: int
) -> tuple[str, Descriptor | None]:
    """Return the descriptor of a call as text and in numbers; no numbers for dtypes that have none.

    Args:
        kind: Operation.
        arguments: Arguments that must agree, as short texts; of a reduction, its op comes first.
        dtype: Dtype that must agree; None if there is no array.
        shape: Shape that must agree.
        number: The root, or the axis + 1 of a reduce-scatter.
    """
    op = arguments[0] if arguments and arguments[0] in OPS else ""
    numbers = None if kind == "permute" else descriptor_of(kind, op, number, dtype, shape)
    return text_from(kind, arguments, dtype, shape), numbers


def text_from(
    kind: str,
    arguments: Sequence[str],
    dtype: np.dtype[Any] | None = None,
    shape: tuple[int, ...] = (),
) -> str:
    """Return the text of a call; see `describe`."""
    parts = list(arguments)
    if dtype is not None:
        parts += [describe_dtype(dtype), f"shape {shape}"]
    text = f"{kind}({', '.join(parts)})"
    if len(text) > MAX_LENGTH:
        digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        text = f"{text[: MAX_LENGTH - 30]}... #{digest}"
    return text


@lru_cache(maxsize=512)
def describe_dtype(dtype: np.dtype[np.generic]) -> str:
    """Returns a dtype as text; equal texts mean equal memory."""
    if dtype.kind in "SUV" and dtype.type.__module__ == "numpy":
        return str(dtype)  # the name of a structured dtype says nothing of its fields
    swapped = sys.byteorder == "big" and dtype.itemsize > 1
    return f"{dtype.name} (big-endian)" if swapped else dtype.name


@lru_cache(maxsize=512)
def text_of(descriptor: Descriptor) -> str:
    """Returns the signature of a call of that descriptor as text; the same as `signature.signature` makes."""
    kind = KINDS[descriptor.kind]
    if kind == "barrier":
        return "barrier()"
    parts = []
    if descriptor.kind in _REDUCING:
        parts.append(OPS[descriptor.op])
    if descriptor.kind in _ROOTED:
        parts.append(f"root={descriptor.argument}")
    if descriptor.kind == _SCATTERING and descriptor.argument:
        parts.append(f"axis={descriptor.argument - 1}")
    parts += [describe_dtype(DTYPES[descriptor.dtype]), f"shape {descriptor.shape}"]
    return f"{kind}({', '.join(parts)})"


def hash_of(descriptor: Descriptor) -> int:
    """Returns the 64 bits by which members see whether they agree; see `dmesh_signature` in `call.c`."""
    number = 0x9E3779B97F4A7C15
    for word in (
        descriptor.kind | descriptor.op << 32,
        descriptor.argument | descriptor.dtype << 32,
        len(descriptor.shape),
        *descriptor.shape,
    ):
        number = ((number ^ word) * 0xBF58476D1CE4E5B9) & _WORD
        number ^= number >> 29
    return number


def hash_of_text(text: str) -> int:
    """Returns such bits for a call without a descriptor."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"dmesh call").digest(), "big")


@lru_cache(maxsize=512)
def _number_of(dtype: np.dtype[Any]) -> int | None:
    # By value: NumPy has two types of 8 bytes on many systems, and compares them as equal.
    return next((number for number, known in enumerate(DTYPES) if known == dtype), None)


def as_called(text: str, is_sender: bool | None) -> str:
    """A signature as its caller wrote it: a transfer is a `send` at one end, a `recv` at the other."""
    if is_sender is None or not text.startswith(TRANSFER + "("):
        return text
    return ("send" if is_sender else "recv") + text[len(TRANSFER) :]
