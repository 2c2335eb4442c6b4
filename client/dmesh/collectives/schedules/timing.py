"""Simulated time of schedules: the work of each rank, and when it ends, by the cost model's figures.

Nothing is computed, so groups of thousands of ranks can be simulated. A rank's connections carry one message
after the other, in each direction; sends go on while the rank does something else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dmesh.collectives.schedules.cost import Model
from dmesh.collectives.schedules.program import (
    Await,
    Copy,
    Finish,
    Flush,
    Fold,
    Program,
    Receive,
    Send,
)


class Load(NamedTuple):
    """Work of one rank."""

    messages: int
    """Messages that it sends."""
    elements: int
    """Elements that it sends; the byte of a token counts as one."""
    local: int
    """Elements that it folds or copies."""
    peers: int
    """Ranks with which it exchanges anything."""


def load(program: Program) -> Load:
    """Return the work of one rank."""
    sends = [item for item in program.instructions if isinstance(item, Send)]
    local = (len(item.source) for item in program.instructions if isinstance(item, Copy | Fold | Finish))
    peers = {item.peer for item in program.instructions if isinstance(item, Send | Receive)}
    return Load(len(sends), sum(len(item.source) for item in sends), sum(local), len(peers))


class _Rank:
    """One rank under way; times in picoseconds."""

    def __init__(self, program: Program) -> None:
        self.instructions = program.instructions
        self.at = 0
        self.clock = 0
        self.out_free = 0
        self.in_free = 0
        self.receives: list[tuple[int, int]] = []
        """(peer, step) of each receive."""
        self.arrived: dict[tuple[int, int], int] = {}
        """When each message was there."""
        self.missing: set[tuple[int, int]] = set()


def finish_times(programs: Sequence[Program], model: Model, width: int) -> list[int]:
    """Return when each rank of a group ends, in picoseconds; all begin at 0.

    `programs` are those of the ranks in their order, `width` the bytes of an element. Opening connections is
    not part of the time.
    """
    ranks = [_Rank(program) for program in programs]
    ready = [(0, number) for number in range(len(ranks))]
    while ready:
        _, number = heapq.heappop(ready)
        rank = ranks[number]
        # As far as no other rank is behind: connections take messages in the order of time.
        while not ready or (rank.clock, number) <= ready[0]:
            if rank.at == len(rank.instructions) or not _execute(ranks, number, ready, model, width):
                break
        else:
            heapq.heappush(ready, (rank.clock, number))
    assert all(rank.at == len(rank.instructions) for rank in ranks)
    return [max(rank.clock, rank.out_free) for rank in ranks]


def _execute(
    ranks: Sequence[_Rank], number: int, ready: list[tuple[int, int]], model: Model, width: int
) -> bool:
    """Execute a rank's next instruction; False if it must wait for a message."""
    rank = ranks[number]
    match rank.instructions[rank.at]:
        case Send(peer, step, source):
            rank.clock += 1000 * model.message
            begin, length = max(rank.clock, rank.out_free), len(source) * width * model.byte
            rank.out_free = begin + length
            target = ranks[peer]
            target.in_free = max(begin + 1000 * model.latency, target.in_free) + length
            target.arrived[number, step] = target.in_free
            if (number, step) in target.missing:
                target.missing.remove((number, step))
                if not target.missing:
                    heapq.heappush(ready, (target.clock, peer))
        case Receive(peer, step, _):
            rank.receives.append((peer, step))
        case Await(numbers):
            awaited = [rank.receives[at] for at in numbers]
            rank.missing = {key for key in awaited if key not in rank.arrived}
            if rank.missing:
                return False
            rank.clock = max(rank.clock, *(rank.arrived[key] for key in awaited))
        case Flush():
            rank.clock = max(rank.clock, rank.out_free)
        case Copy(source, _) | Fold(source, _, _) | Finish(source, _):
            rank.clock += len(source) * width * model.local
    rank.at += 1
    return True
