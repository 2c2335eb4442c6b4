"""Layout of blocks of data whose lengths differ per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

Span = tuple[int, int]
"""Begin and end of some elements of a buffer."""
JOINING = ("all_gather", "gather")
"""Kinds that join the arrays of all ranks; the others cut one."""
_NOTHING: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Layout of blocks whose lengths differ: what one rank sends to, and receives from, each rank."""

    sends: tuple[Span, ...]
    """Elements of the input for each rank."""
    receives: tuple[Span, ...]
    """Elements of the output that come from each rank; of a reduction the whole output."""
    origins: tuple[int, ...]
    """First element, in each rank's input, of its block for this rank."""
    total: int
    """Most elements that any rank contributes; the same on all ranks."""
    largest: int
    """Elements of the largest block of any rank; the same on all ranks."""
    closes: bool
    """True if a barrier must follow, because a rank might receive nothing of another."""


def spans_of(lengths: Sequence[int], width: int) -> tuple[Span, ...]:
    """Return the places of blocks that follow each other, of which each has some rows of `width` elements."""
    return tuple(pairwise(accumulate((n * width for n in lengths), initial=0)))


@lru_cache(maxsize=256)
def lay_out(
    kind: str, size: int, rank: int, root: int, lengths: tuple[int, ...], width: int, exchanged: bool
) -> Blocks:
    """Return the layout of a collective but all-to-all, in which all ranks know the same lengths.

    Args:
        kind: Name of the collective.
        size: Number of ranks.
        rank: Position of the rank whose layout it is.
        root: Position of the root, if there is one.
        lengths: Rows of each rank's array, or of the blocks of the one that is cut.
        width: Elements of a row.
        exchanged: True if the ranks have exchanged the lengths: then all of them have made the call.
    """
    spans, none = spans_of(lengths, width), (_NOTHING,) * size
    own: Span = (0, lengths[rank] * width)
    longest, total = max(lengths) * width, sum(lengths) * width
    # A rank may find out in a scatter that its counts are not the root's: that fails all ranks.
    closes = kind == "scatter" or (not exchanged and (kind == "gather" or 0 in lengths))
    with_root = tuple(own if at == root else _NOTHING for at in range(size))
    match kind:
        case "all_gather":
            return Blocks((own,) * size, spans, (0,) * size, longest, longest, closes)
        case "gather":
            return Blocks(with_root, spans if rank == root else none, (0,) * size, longest, longest, closes)
        case "scatter":
            origins = (spans[rank][0],) * size
            return Blocks(spans if rank == root else none, with_root, origins, total, longest, closes)
    return Blocks(spans, (own,) * size, (spans[rank][0],) * size, total, longest, closes)


@lru_cache(maxsize=256)
def join(spans: tuple[Span, ...], rank: int) -> Blocks:
    """Return the layout of an all-gather into an array of which each rank has one span already, its input."""
    lengths = [stop - start for start, stop in spans]
    others = [at != rank for at in range(len(spans))]
    sends = tuple((0, lengths[rank]) if other else _NOTHING for other in others)
    receives = tuple(span if other else _NOTHING for span, other in zip(spans, others, strict=True))
    return Blocks(sends, receives, (0,) * len(spans), max(lengths), max(lengths), closes=False)


@lru_cache(maxsize=256)
def exchange_of(given: tuple[Span, ...], wanted: tuple[Span, ...], rank: int) -> Blocks:
    """Return the layout of an all-to-all of an array of which each rank has one span, and wants another."""

    def overlap(a: Span, b: Span) -> Span:
        start, stop = max(a[0], b[0]), min(a[1], b[1])
        return (start, stop) if start < stop else _NOTHING

    def within(span: Span, part: Span) -> Span:
        return (part[0] - span[0], part[1] - span[0]) if part != _NOTHING else _NOTHING

    gives = [overlap(given[rank], theirs) for theirs in wanted]
    takes = [overlap(theirs, wanted[rank]) for theirs in given]
    origins = tuple(within(theirs, part)[0] for theirs, part in zip(given, takes, strict=True))
    return Blocks(
        tuple(within(given[rank], part) for part in gives),
        tuple(within(wanted[rank], part) for part in takes),
        origins,
        max(stop - start for start, stop in given),
        max(stop - start for a in given for b in wanted for start, stop in [overlap(a, b)]),
        closes=False,
    )
