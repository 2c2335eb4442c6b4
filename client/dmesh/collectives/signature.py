"""The text by which ranks see that they call the same collective.

A signature names the operation and everything that all ranks must agree on: `all_reduce(sum, float32, shape
(3, 4))`. It is compared byte by byte and shown to people as it is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH = 1000
"""Characters of a signature. What is longer (a structured dtype can be) ends in a hash of the whole."""
TRANSFER = "transfer"
"""What `send` and `recv` are called in their common signature."""


def signature(operation: str, *arguments: str, like: NDArray[np.generic] | None = None) -> str:
    """Returns the signature of a call.

    Args:
        operation: Its name.
        *arguments: What else must agree, as short texts.
        like: An array whose dtype and shape must agree.
    """
    parts = list(arguments)
    if like is not None:
        parts += [describe_dtype(like.dtype), f"shape {like.shape}"]
    text = f"{operation}({', '.join(parts)})"
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


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Returns source and target pairs as text."""
    return "[" + ", ".join(f"{source}->{target}" for source, target in pairs) + "]"


def as_called(text: str, is_sender: bool | None) -> str:
    """A signature as its caller wrote it: a transfer is a `send` at one end, a `recv` at the other."""
    if is_sender is None or not text.startswith(TRANSFER + "("):
        return text
    return ("send" if is_sender else "recv") + text[len(TRANSFER) :]
