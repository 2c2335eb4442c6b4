"""Validated, immutable description of one call, for NumPy and GPU arrays, and its memory.

`validation` makes it in the caller's thread. Backends read it; none of them changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dmesh.collectives.descriptor import Descriptor, hash_of, hash_of_text
from dmesh.collectives.reduction import Reduction

Array = NDArray[Any]

_BYTE = np.dtype(np.uint8)


@dataclass(slots=True)
class Buffers:
    """Memory of one call: flat, contiguous arrays of the request's dtypes."""

    source: Array | None
    """This rank's contribution; None if it has none."""
    result: Array
    """Output; empty on a rank that gets no result."""
    in_place: bool
    """True if both are the same memory."""

    def source_bytes(self) -> NDArray[np.uint8] | None:
        """Return the contribution as bytes; None if there is none, or it is empty."""
        return _bytes(self.source)

    def result_bytes(self) -> NDArray[np.uint8] | None:
        """Return the output as bytes; None if it is empty."""
        return _bytes(self.result)


@dataclass(frozen=True, slots=True)
class Request:
    """Validated call of one rank: what all ranks must agree on, and this rank's arrays."""

    kind: str
    """Name of the operation."""
    text: str
    """Wire descriptor as text: everything that all ranks must agree on."""
    descriptor: Descriptor | None = None
    """Wire descriptor in numbers; None for dtypes and shapes that the native core does not know."""
    nbytes_per_rank: int = 0
    """Bytes that each contributing rank contributes."""
    count: int = 0
    """Elements of one rank's contribution to one other rank; 0 if nothing has to travel."""
    root: int = 0
    """Position of the root, or of the other rank of a transfer."""
    pairs: tuple[tuple[int, int], ...] = ()
    """(source, target) positions of a permutation."""
    reduction: Reduction | None = None
    """Reduction of the contributions; None if they are only moved."""
    contributes: bool = False
    """True if this rank contributes data."""
    dtype: np.dtype[Any] = _BYTE
    """Dtype of the output buffer."""
    source: Any = None
    """Input: contiguous, of native byte order, of the dtype that travels."""
    shape: tuple[int, ...] | None = None
    """Shape of the result; None if this rank gets none."""
    out: Any = None
    """Array that the caller wants the result in."""
    arrange: Callable[[Any], Any] | None = None
    """Makes the result of the flat output buffer, if that takes more than a reshape."""
    aliased: bool = False
    """True if `source` and `out` are the same memory."""
    needs_copy: bool = False
    """True if an aliased source must be copied first: data arrives over elements that are not sent yet."""
    zero_fill: bool = False
    """True if the output must be zeroed first: nothing is sent to this rank."""
    device: int | None = None
    """GPU of the arrays; None for NumPy's."""
    ready: Any = None
    """CUDA event after which the arrays may be used."""
    prepared: Buffers | None = None
    """Memory, if it had to be allocated on the caller's CUDA stream."""

    @property
    def hash(self) -> int:
        """Descriptor as 64 bits, by which native endpoints compare calls."""
        return hash_of_text(self.text) if self.descriptor is None else hash_of(self.descriptor)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of input and output."""
        source = 0 if self.source is None else int(self.source.nbytes)
        return max(source, 0 if self.shape is None else math.prod(self.shape) * self.dtype.itemsize)

    def allocate(self, empty: Callable[..., Any] = np.empty) -> Buffers:
        """Return the memory that the call works on; the result is made of it by `finish`."""
        if self.prepared is not None:
            return self.prepared
        source = None if self.source is None or not self.contributes else self.source.reshape(-1)
        aliased = self.aliased
        if aliased and self.needs_copy and source is not None:
            source, aliased = source.copy(), False
        into_out = self._into_out()
        if into_out:
            result = self.out.reshape(-1)
        else:
            result = empty(0 if self.shape is None else math.prod(self.shape), self.dtype)
        if self.zero_fill:
            result[...] = np.zeros((), self.dtype)
        return Buffers(source, result, aliased and into_out)

    def finish(self, buffers: Buffers) -> Any:
        """Return what the caller gets, once the output buffer is complete."""
        if self.shape is None:
            return None
        if self._into_out():
            return self.out
        flat = buffers.result
        shaped = flat.reshape(self.shape) if self.arrange is None else self.arrange(flat)
        if self.out is None:
            return shaped
        self.out[...] = shaped
        return self.out

    def _into_out(self) -> bool:
        """Return whether the output buffer is `out` itself."""
        out = self.out
        if out is None or self.arrange is not None or self.shape is None:
            return False
        return bool(out.flags.c_contiguous and (self.device is not None or out.flags.aligned))


class Arrays(Protocol):
    """Array library of a call: NumPy, or CuPy for arrays on GPUs."""

    def using(self, x: Any, what: str) -> AbstractContextManager[None]:
        """Enter the device of a call's array, after checking it."""

    def as_input(self, x: Any, what: str) -> Any:
        """Return an array in C order and native byte order: itself, or a copy."""

    def check_out(self, out: Any, dtype: Any, shape: tuple[int, ...], x: Any, what: str) -> None:
        """Raise if the result cannot be put into `out`."""

    def reduction(self, op: str, dtype: np.dtype[Any], what: str) -> Reduction:
        """Return how contributions are folded; raises where that has no meaning."""

    def describe(
        self, kind: str, arguments: list[str], like: Any, number: int
    ) -> tuple[str, Descriptor | None]:
        """Return the wire descriptor as text and in numbers."""

    def complete(self, request: Request) -> Request:
        """Return the request with what the array library must add in the caller's thread."""


def _bytes(array: Array | None) -> NDArray[np.uint8] | None:
    return None if array is None or not array.size else array.view(np.uint8)
