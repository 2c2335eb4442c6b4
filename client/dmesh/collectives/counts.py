"""Collectives of blocks whose lengths differ per rank (`counts=`): their validation, layout and requests.

A count is a length along the call's axis. That axis is moved to the front, so that each block is contiguous:
what travels are the rows of a matrix. Where a rank cannot know all the lengths, the call begins with a small
collective that exchanges them (`Request.exchange`); `Request.resolve` makes the request of their result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from dmesh.collectives.request import (
    REDUCING,
    ROOTED,
    Array,
    Reduction,
    Request,
    describe_dtype,
    text_from,
)
from dmesh.collectives.schedules.blocks import JOINING, Blocks, lay_out, spans_of
from dmesh.collectives.validation import (
    NUMPY,
    RequestBuilder,
    aliasing,
    as_input,
    as_integer,
    check_out,
    check_position,
)
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveValueError

EXCHANGE = "exchange"
"""The `counts` of a rank that does not know those of the others."""
_WORDS = 5  # that a rank tells each other rank before an all-to-all: see `Call.resolve_all_to_all`
_MOST = 2**48
"""Largest length that another rank may tell."""


class CountsRequestBuilder(RequestBuilder):
    """Validates the calls of one rank of a group, with and without `counts`; see `Requests`."""

    def with_counts(
        self, kind: str, x: Any, out: Any, counts: Any = None, recv_counts: Any = None,
        axis: Any = None, root: Any = None, op: Any = None,
    ) -> Request:  # fmt: skip
        """Check everything that a caller passed, and return the request."""
        if counts is None and recv_counts is not None:
            raise CollectiveValueError(f"recv_counts= of {kind} needs counts=, too")
        size, rank = self.size, self.rank
        root = check_position(root, size, "root", kind) if kind in ROOTED else 0
        if kind == "gather" and out is not None and rank != root:
            raise CollectiveValueError(
                f"out= of gather is for the root (position {root}) alone; this is position {rank}"
            )
        receives = kind == "scatter" and rank != root
        like = out if receives and x is None else x
        if like is None:
            raise CollectiveValueError(
                "scatter must know what it will receive: pass an array of its dtype and number of "
                "dimensions, or out=" if receives else f"{kind} must be given an array"
            )  # fmt: skip
        array = as_input(like, kind)
        axis = as_integer(0 if axis is None else axis, f"axis of {kind} must be an integer or None")
        if not -array.ndim <= axis < array.ndim:
            raise CollectiveValueError(
                f"axis={axis} of {kind} is out of range for an array of {array.ndim} dimensions"
            )
        axis %= array.ndim
        length = array.shape[axis]
        if counts is None:
            if not receives and length % size:
                raise CollectiveValueError(
                    f"{kind} divides axis {axis} among the group's {size} ranks, but its length {length} "
                    f"(shape {array.shape}) is not a multiple of {size}; counts= says how to divide it"
                )
            counts = recv_counts = (length if receives else length // size,) * size
        lengths = _check_counts(counts, size, "counts", kind)
        expected = None if recv_counts is None else _check_counts(recv_counts, size, "recv_counts", kind)
        if not receives:
            _check_length(lengths, array, axis, rank, kind)
        reduction = NUMPY.reduction(op, array.dtype, kind) if kind in REDUCING else None
        if reduction is not None and reduction.undivided:
            raise CollectiveValueError(
                f"{kind} along an axis needs an operation that may be called with pieces of the arrays: use "
                "dmesh.collectives.Op(function, elementwise=True)"
            )
        passed = None if receives else x
        call = Call(kind, size, rank, root, axis, array, passed, out, lengths, expected, reduction)
        return call.request()


def known_exchange(
    size: int, rank: int, source: Array, matrix: tuple[tuple[int, ...], ...], out: Array | None = None
) -> Request:
    """Return the request of an all-to-all of which every rank knows all lengths, so that none are exchanged.

    Args:
        size: Number of ranks in the group.
        rank: This rank's position.
        source: Flat array of the blocks for each rank, one after the other.
        matrix: Lengths of the blocks, by sender and receiver; the same on all ranks.
        out: Flat array for the blocks that arrive, one after the other; None for a new one.
    """
    call = Call("all_to_all", size, rank, 0, 0, source, source, out, matrix[rank], None, None)
    arrives = tuple(row[rank] for row in matrix)
    blocks = Blocks(
        spans_of(matrix[rank], 1), spans_of(arrives, 1), tuple(sum(row[:rank]) for row in matrix),
        max(map(sum, matrix)), max(map(max, matrix)), closes=any(0 in row for row in matrix),
    )  # fmt: skip
    digest = hashlib.blake2b(repr(matrix).encode(), digest_size=6).hexdigest()
    text = f"all_to_all(counts=#{digest}, {describe_dtype(source.dtype)})"
    return replace(call._laid_out(blocks, sum(arrives)), text=text)


@dataclass(frozen=True, slots=True)
class Call:
    """A validated call with `counts`; the lengths are None where this rank does not know them."""

    kind: str
    size: int
    rank: int
    root: int
    axis: int
    array: Array
    """The input, or an array like it on a rank that only receives."""
    passed: Any
    """The input as the caller passed it; None on a rank that only receives."""
    out: Any
    lengths: tuple[int, ...] | None
    """Lengths of all ranks' arrays, or of the blocks into which the array is cut, by rank."""
    expected: tuple[int, ...] | None
    """Lengths of the blocks that an all-to-all receives, if the caller gave them."""
    reduction: Reduction | None

    @property
    def gets_result(self) -> bool:
        """True if this rank gets a result."""
        return self.kind != "gather" or self.rank == self.root

    @property
    def contributes(self) -> bool:
        """True if this rank sends anything."""
        return self.kind != "scatter" or self.rank == self.root

    def request(self) -> Request:
        """Return the request, with an exchange of lengths if it needs one."""
        self._check_out(None)
        source = self.array if self.contributes else None
        match self.kind:
            case "all_gather" | "gather" if self.lengths is None:
                words = np.array([self.array.shape[self.axis]], np.int64)
                exchange = self._exchange("all_gather", words, (self.size,), 1)
                return self._request(source, exchange=exchange, resolve=self.resolve_gather)
            case "scatter":
                words = np.array(self.lengths or (0,) * self.size, np.int64)
                exchange = self._exchange("broadcast", words, (self.size,), self.size)
                return self._request(source, exchange=exchange, resolve=self.resolve_scatter)
            case "all_to_all":
                exchange = self._exchange(
                    "all_to_all", self._lengths_to_send(), (self.size * _WORDS,), _WORDS
                )
                return self._request(source, exchange=exchange, resolve=self.resolve_all_to_all)
        assert self.lengths is not None
        return self._resolved(self.lengths, exchanged=False)

    # -- after the exchange ----------------------------------------------------------------------------------

    def resolve_gather(self, words: Array) -> Request:
        """Return the request of an all-gather or gather, now that the lengths of all arrays are known."""
        return self._resolved(_checked(words), exchanged=True)

    def resolve_scatter(self, words: Array) -> Request:
        """Return the request of a scatter, now that the root has sent its counts."""
        lengths = _checked(words)
        if self.lengths is not None and self.lengths != lengths:
            raise CollectiveMismatchError(
                f"position {self.rank} called scatter with counts={_listed(self.lengths)}, the root "
                f"(position {self.root}) with counts={_listed(lengths)}"
            )
        return self._resolved(lengths, exchanged=True)

    def resolve_all_to_all(self, words: Array) -> Request:
        """Return the request of an all-to-all; each rank has sent five numbers.

        They are the length of its block for this rank, where that begins, the sum and the maximum of all of
        its lengths, and whether it compares what comes with its `recv_counts`.
        """
        assert self.lengths is not None
        lengths, starts, totals, largest, compares = (
            _checked(column) for column in words.reshape(self.size, _WORDS).T
        )
        if self.expected is not None and self.expected != lengths:
            other = next(at for at in range(self.size) if self.expected[at] != lengths[at])
            raise CollectiveMismatchError(
                f"position {other} called all_to_all with counts that send {lengths[other]} to position "
                f"{self.rank}, which expects {self.expected[other]} (recv_counts={_listed(self.expected)})"
            )
        width = self._width
        blocks = Blocks(
            spans_of(self.lengths, width), spans_of(lengths, width), tuple(start * width for start in starts),
            max(totals) * width, max(largest) * width, closes=any(compares),
        )  # fmt: skip
        return self._laid_out(blocks, sum(lengths))

    def _resolved(self, lengths: tuple[int, ...], *, exchanged: bool) -> Request:
        """Return the request with the lengths of all ranks' arrays, or of the array that is divided."""
        blocks = lay_out(self.kind, self.size, self.rank, self.root, lengths, self._width, exchanged)
        return self._laid_out(blocks, sum(lengths) if self.kind in JOINING else lengths[self.rank])

    def _laid_out(self, blocks: Blocks, length: int) -> Request:
        """Return the request of known blocks; the result has `length` along the axis."""
        self._check_out(length)
        shape, axis = self.array.shape, self.axis
        moved = (length, *shape[:axis], *shape[axis + 1 :])
        joined = (*shape[:axis], length, *shape[axis + 1 :])

        def arrange(flat: Array) -> Array:
            return np.moveaxis(flat.reshape(moved), 0, axis).copy(order="C")

        source = self._source() if self.contributes else None
        travels = blocks.total if self.array.itemsize else 0
        itemsize = self.array.itemsize if self.reduction is None else self.reduction.wire.itemsize
        aliased, needs_copy = False, False
        if source is not None and self.out is not None:
            spans = blocks.receives if self.kind in JOINING else blocks.sends
            own = spans[self.rank][0] * itemsize
            aliased, needs_copy = aliasing(self.kind, source, self.out, own)
        return self._request(
            source,
            nbytes_per_rank=blocks.total * itemsize,
            count=travels,
            shape=joined if self.gets_result else None,
            arrange=arrange if axis else None,
            aliased=aliased,
            needs_copy=needs_copy,
            blocks=blocks,
        )

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """Elements of a row: of everything along the other axes."""
        shape = self.array.shape
        return math.prod(shape[: self.axis] + shape[self.axis + 1 :])

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self.array.dtype if self.reduction is None else self.reduction.result

    def _source(self) -> Array:
        moved = np.moveaxis(self.array, self.axis, 0) if self.axis else self.array
        travels = moved if self.reduction is None else self.reduction.contribution(moved, self.rank)
        return as_input(travels, self.kind)

    def _request(self, source: Array | None, **more: Any) -> Request:
        return Request(
            self.kind,
            self._text,
            root=self.root,
            reduction=self.reduction,
            contributes=self.contributes,
            dtype=self._dtype,
            source=source,
            out=self.out,
            **more,
        )

    @property
    def _text(self) -> str:
        """The wire descriptor."""
        op = "" if self.reduction is None else self.reduction.op
        root = self.root if self.kind in ROOTED else None
        lengths = self.lengths if self.kind not in ("scatter", "all_to_all") else None
        return _text(self.kind, op, root, lengths, self.axis, self.array.dtype, self.array.shape)

    def _exchange(self, kind: str, words: Array, shape: tuple[int, ...], count: int) -> Request:
        """Return the call in which the ranks tell each other lengths."""
        contributes = kind != "broadcast" or self.rank == self.root
        return Request(
            kind,
            self._text,
            nbytes_per_rank=words.nbytes,
            count=count,
            root=self.root,
            contributes=contributes,
            dtype=words.dtype,
            source=words if contributes else None,
            shape=shape,
            precedes=True,
        )

    def _lengths_to_send(self) -> Array:
        """Return what this rank tells each other rank before an all-to-all; see `resolve_all_to_all`."""
        assert self.lengths is not None
        more = sum(self.lengths), max(self.lengths), self.expected is not None
        starts = accumulate(self.lengths, initial=0)
        return np.array(
            [[n, start, *more] for n, start in zip(self.lengths, starts, strict=False)], np.int64
        ).reshape(-1)

    def _check_out(self, length: int | None) -> None:
        """Raise if the result cannot be put into `out`; its length is not known before the exchange."""
        out, shape = self.out, self.array.shape
        if not self.gets_result:
            return
        if length is None:
            fits = isinstance(out, np.ndarray) and out.ndim == len(shape)
            length = out.shape[self.axis] if fits else shape[self.axis]
        check_out(
            out, self._dtype, (*shape[: self.axis], length, *shape[self.axis + 1 :]), self.passed, self.kind
        )


def _check_length(lengths: tuple[int, ...] | None, array: Array, axis: int, rank: int, what: str) -> None:
    """Compare the lengths that a caller passed with the array that is joined or cut."""
    length, shape = array.shape[axis], array.shape
    if what in JOINING:
        if lengths is not None and lengths[rank] != length:
            raise CollectiveValueError(
                f"counts of {what} give the array of this rank (position {rank}) length {lengths[rank]} "
                f"along axis {axis}, but its shape is {shape}"
            )
    elif lengths is None:
        raise CollectiveValueError(
            f"counts of {what} cannot be {EXCHANGE!r} here: pass the lengths of the {shape} array's blocks"
        )
    elif sum(lengths) != length:
        raise CollectiveValueError(
            f"the counts of {what} are {sum(lengths)} in all, but the length of axis {axis} is {length} "
            f"(shape {shape})"
        )


def _listed(lengths: Sequence[int]) -> str:
    return f"[{', '.join(map(str, lengths))}]"


@lru_cache(maxsize=256)
def _text(
    kind: str, op: str, root: int | None, lengths: tuple[int, ...] | None, axis: int, dtype: np.dtype[Any],
    shape: tuple[int, ...],
) -> str:  # fmt: skip
    lengths_of = ["*" if at == axis else str(n) for at, n in enumerate(shape)]
    arguments = [op] if op else []
    if root is not None:
        arguments.append(f"root={root}")
    arguments.append("counts=" + (EXCHANGE if lengths is None else _listed(lengths)))
    shape_text = ", ".join(lengths_of) + "," * (len(shape) == 1)
    arguments += [f"axis={axis}", describe_dtype(dtype), f"shape ({shape_text})"]
    return text_from(kind, arguments, None, ())


def _checked(words: Array) -> tuple[int, ...]:
    """Return lengths that the ranks sent, if they are possible ones."""
    found = tuple(map(int, words))
    if any(not 0 <= number <= _MOST for number in found):
        raise CollectiveError(f"a rank sent impossible lengths: {found}")
    return found


def _check_counts(counts: Any, size: int, name: str, what: str) -> tuple[int, ...] | None:
    """Return the lengths that a caller passed; None if they are to be exchanged."""
    if isinstance(counts, str) and counts == EXCHANGE:
        return None
    wrong = f"{name} of {what} must be a list of {size} lengths, one for each rank, or {EXCHANGE!r}"
    try:
        found = [] if isinstance(counts, str) else list(counts)
    except TypeError:
        found = []
    if len(found) != size:
        raise CollectiveValueError(f"{wrong}, got {counts!r}")
    lengths = tuple(as_integer(number, wrong) for number in found)
    if min(lengths) < 0:
        raise CollectiveValueError(f"{wrong}; none may be negative, got {counts!r}")
    return lengths
