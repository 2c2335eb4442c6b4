"""Measures which tuning suits the machines of a cluster: what `dmesh tune` does on each rank.

Each way of doing a collective gets a group of its own, of all clients, with its own tuning. The ways take
turns, round by round, so that whatever else the machines do meets all of them. What a call takes is what it
takes the slowest rank. All ranks see the same figures, and so choose the same.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dmesh.collectives.algorithms import FLAT_TOTAL_LIMIT
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.collectives.tuning import LEAST_ROWS, MOST_BYTES, SHIPPED, Tuning
from dmesh.errors import CollectiveError, CollectiveValueError

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]

_KIB = 1024
_ROUNDS = 5
_MOST_CALLS = 1000
"""Of one way and size in one round."""
_MARGIN = 1.05
"""How many times as fast other pieces must be than those of 0, which suit groups of other sizes, too."""
_STREAMS_MARGIN = 1.1
"""How many times as fast more streams must be than fewer, which cost fewer connections."""
_STREAMS = (1, 2, 4)
_PIECES = tuple(32 * _KIB << shift for shift in range(6))
_LARGE = (1024 * _KIB, 4096 * _KIB, 16384 * _KIB)
"""Arrays by which pieces are judged."""
_SMALLEST = _KIB
_ROWS = tuple(16 * _KIB << shift for shift in range(7))
"""Bytes for each member of a row."""
_TREES = tuple(4 * _KIB << shift for shift in range(9))
"""Arrays that are broadcast."""
_PARTS = 7
"""Of the time: two for pieces, one for each of the others."""


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured of some ways."""

    title: str
    ways: tuple[str, ...]
    seconds: Mapping[int, tuple[float, ...]]
    """Median of a call in each of them, by bytes of the array."""

    def lines(self) -> Iterator[str]:
        """Yields it as people read it, in microseconds."""
        yield f"{self.title}, us"
        yield "".join(f"{name:>12}" for name in ("bytes", *self.ways))
        for nbytes, row in self.seconds.items():
            yield f"{nbytes:>12}" + "".join(f"{1e6 * seconds:>12.1f}" for seconds in row)

    def column(self, way: int) -> list[float]:
        """Returns the seconds of one way, by rising sizes."""
        return [row[way] for row in self.seconds.values()]


@dataclass(frozen=True, slots=True)
class Step:
    """How far it is with one table."""

    title: str
    done: int
    total: int
    """Steps that are done, and that there are."""


Tell = Callable[[str | Table | Step], None]


def measure(communicator: Communicator, seconds: float, tell: Tell) -> Tuning:
    """Measures, and returns what to use; must be called by all clients.

    Args:
        communicator: Of this client.
        seconds: About how long, as rank 0 has it. Each way is tried a few times even if that takes longer.
        tell: Told what came out, lines and tables, and how far it is; a program prints it on one rank.

    Raises:
        CollectiveError: The clients share memory, so there is nothing to tune.
        CollectiveValueError: There is but one client.
    """
    before = communicator.tuning
    if communicator.world.size == 1:
        raise CollectiveValueError("there is but one client; collectives are measured between two or more")
    part = seconds / _PARTS
    try:
        # By wires alone, whether or not there are rows.
        suiting = _group(communicator, Tuning(rows=MOST_BYTES))
        port = suiting._term.port
        if port is None:
            tell(
                f"flat = {SHIPPED.flat}, piece = {SHIPPED.piece}, rows = {SHIPPED.rows}, "
                f"streams = {SHIPPED.streams}: not measured, but shipped; the clients have no wires, and "
                "exchange messages. A log line of level INFO says why"
            )
            tell("")
            wires = SHIPPED
        elif not port.wired:
            raise CollectiveError(
                "the clients share memory, so there is nothing to tune; DMESH_SHARED_MEMORY=0 keeps clients "
                "of one host from it"
            )
        else:
            wires = _measure_wires(communicator, port.room, part, tell)
        return _measure_messages(communicator, wires, part, tell)
    finally:
        communicator.tuning = before


def _measure_wires(communicator: Communicator, share: int, part: float, tell: Tell) -> Tuning:
    """Returns what suits wires.

    Args:
        communicator: Of this client.
        share: Bytes of the pieces that suit the number of members.
        part: Seconds for each of the values, twice for pieces.
        tell: Told what came out.
    """
    wired = Tuning(rows=MOST_BYTES)
    others = communicator.world.size - 1
    tunings = {"0": wired} | {str(p): replace(wired, piece=p) for p in _PIECES if p != share}
    groups = {way: _group(communicator, tuning) for way, tuning in tunings.items()}
    pieces = _race(communicator, tell, "all-reduce by bytes of a piece", groups, _LARGE, 2 * part)
    piece = int(pieces.ways[best([pieces.column(way) for way in range(len(pieces.ways))], _MARGIN)])
    suits = "" if piece else f": what suits the number of members, here {share}"
    _tell(tell, pieces, f"piece = {piece}{suits}")

    tunings = {str(count): replace(wired, piece=piece, streams=count) for count in _STREAMS}
    groups = {way: _group(communicator, tuning) for way, tuning in tunings.items()}
    counts = _race(communicator, tell, "all-reduce by streams of a wire", groups, _LARGE[1:], part)
    streams = _STREAMS[most_worth([counts.column(way) for way in range(len(_STREAMS))], _STREAMS_MARGIN)]
    _tell(tell, counts, f"streams = {streams}: connections of which a wire consists")

    cut = replace(wired, piece=piece, streams=streams)
    groups = {
        "one step": _group(communicator, replace(cut, flat=MOST_BYTES)),
        "two steps": _group(communicator, replace(cut, flat=0)),
    }
    sizes = _doublings(piece or share)
    steps = _race(communicator, tell, "all-reduce in one step and in two", groups, sizes, part)
    flat = _limit(steps) * others
    _tell(tell, steps, f"flat = {flat}: bytes to all of {others} others, up to which it is one step")
    rows = _measure_rows(communicator, replace(cut, flat=flat), part, tell)
    return replace(cut, flat=flat, rows=rows)


def _measure_rows(communicator: Communicator, tuning: Tuning, part: float, tell: Tell) -> int:
    groups = {
        "wires": _group(communicator, tuning),
        "by rows": _group(communicator, replace(tuning, rows=LEAST_ROWS)),
    }
    hierarchy = groups["by rows"]._term.hierarchy
    if hierarchy is None:
        tell(
            f"rows = {SHIPPED.rows}: not measured, but shipped; there are not several hosts with as many "
            "clients each, at least two"
        )
        tell("")
        return SHIPPED.rows
    members = len(hierarchy.row)
    sizes = [nbytes * members for nbytes in _ROWS]
    table = _race(communicator, tell, "all-reduce over wires, and by rows and columns", groups, sizes, part)
    count = crossover(table.column(0), table.column(1))
    rows = _ROWS[count] if count < len(_ROWS) else 2 * _ROWS[-1]
    _tell(tell, table, f"rows = {rows}: bytes for each of {members} members, from which on it goes by rows")
    return rows


def _measure_messages(communicator: Communicator, tuning: Tuning, part: float, tell: Tell) -> Tuning:
    """Returns a tuning with what suits messages."""
    size = communicator.world.size
    if size == 2:
        tell(
            f"message_flat = {SHIPPED.message_flat}, message_tree = {SHIPPED.message_tree}: not measured, "
            "but shipped; between two clients all ways send as much, among three or more they do not"
        )
        tell("")
        return tuning
    # Those who share nothing, as far as these groups know, exchange messages.
    neighbourhood, communicator.neighbourhood = communicator.neighbourhood, None
    try:
        groups = {
            "one step": _group(communicator, replace(tuning, message_flat=MOST_BYTES)),
            "two steps": _group(communicator, replace(tuning, message_flat=0)),
        }
        sizes = _doublings(max(_SMALLEST, FLAT_TOTAL_LIMIT // (size - 1)))
        steps = _race(
            communicator, tell, "all-reduce by messages, in one step and in two", groups, sizes, part
        )
        flat = _limit(steps)
        _tell(tell, steps, f"message_flat = {flat}: bytes of an array, up to which it is one step")
        groups = {
            "tree": _group(communicator, replace(tuning, message_tree=MOST_BYTES)),
            "dealt out": _group(communicator, replace(tuning, message_tree=0)),
        }
        title = "broadcast by messages, through a tree and dealt out"
        trees = _race(communicator, tell, title, groups, _TREES, part, _broadcast)
        tree = _limit(trees)
        _tell(tell, trees, f"message_tree = {tree}: bytes of an array, up to which it goes through a tree")
        return replace(tuning, message_flat=flat, message_tree=tree)
    finally:
        communicator.neighbourhood = neighbourhood


def _doublings(most: int) -> list[int]:
    """Returns sizes of arrays from the smallest one on."""
    sizes = (_SMALLEST << shift for shift in itertools.count())
    return list(itertools.takewhile(lambda nbytes: nbytes <= most, sizes))


def _limit(table: Table) -> int:
    """Returns up to how many bytes the first of two ways is to be taken; 0 if never."""
    count = crossover(table.column(0), table.column(1))
    return list(table.seconds)[count - 1] if count else 0


def crossover(small: Sequence[float], large: Sequence[float]) -> int:
    """Returns for how many of the first sizes a way for small arrays is to be taken, then one for large ones.

    The choice is that with the least product of times: one size that was measured badly does not move it far.

    Args:
        small: Seconds of the way for small arrays, by rising sizes.
        large: Of the other one.
    """
    gains = [math.log(s) - math.log(b) for s, b in zip(small, large, strict=True)]
    costs = list(itertools.accumulate(gains, initial=0.0))
    return min(range(len(costs)), key=costs.__getitem__)


def best(times: Sequence[Sequence[float]], margin: float) -> int:
    """Returns the way with the least geometric mean of times among those that clearly beat the first one.

    Args:
        times: Seconds of each way, by sizes.
        margin: How many times as fast as the first one another must be at each size; if none is, it is that.
    """
    clear = [
        way
        for way, found in enumerate(times)
        if all(its * margin < firsts for its, firsts in zip(found, times[0], strict=True))
    ]
    return min(clear, key=lambda way: statistics.geometric_mean(times[way]), default=0)


def most_worth(times: Sequence[Sequence[float]], margin: float) -> int:
    """Returns the last way that clearly beats the one that would be taken without it.

    Args:
        times: Seconds of each way, each more costly than the one before, by sizes.
        margin: How many times as fast a way must be at each size.
    """
    taken = 0
    for way, found in enumerate(times):
        if all(its * margin < former for its, former in zip(found, times[taken], strict=True)):
            taken = way
    return taken


def _group(communicator: Communicator, tuning: Tuning) -> Group:
    """Makes a group of all clients, with a tuning."""
    communicator.tuning = tuning
    group = communicator.new_group(communicator.world.ranks, "tune")
    group.barrier()  # a group's first call finds its way
    return group


def _all_reduce(group: Group, x: Floats) -> None:
    group.all_reduce(x, "max", out=x)


def _broadcast(group: Group, x: Floats) -> None:
    group.broadcast(x, 0, out=x)


def _race(
    communicator: Communicator,
    tell: Tell,
    title: str,
    groups: Mapping[str, Group],
    sizes: Sequence[int],
    seconds: float,
    do: Callable[[Group, Floats], None] = _all_reduce,
) -> Table:
    """Measures calls with arrays of some sizes in some groups, by turns."""
    slot = seconds / (_ROUNDS * len(groups) * len(sizes))
    times: dict[int, list[list[float]]] = {nbytes: [[] for _ in groups] for nbytes in sizes}
    total = (_ROUNDS + 1) * len(sizes)
    for turn in range(_ROUNDS + 1):
        for number, nbytes in enumerate(sizes):
            tell(Step(title, turn * len(sizes) + number, total))
            x = np.ones(nbytes // 4, np.float32)
            for group, found in zip(groups.values(), times[nbytes], strict=True):
                first = _batch(group, x, 1, do)
                mine = max(1, min(_MOST_CALLS, int(slot / first)))
                count = int(communicator.world.broadcast(np.array(mine)))
                each = _batch(group, x, count, do)
                if turn:  # the first round warms up
                    found.append(each)
    medians = np.array([[statistics.median(found) for found in times[nbytes]] for nbytes in sizes])
    slowest = communicator.world.all_reduce(medians, "max")
    seconds_of = {nbytes: tuple(row) for nbytes, row in zip(sizes, slowest.tolist(), strict=True)}
    return Table(title, tuple(groups), seconds_of)


def _batch(group: Group, x: Floats, count: int, do: Callable[[Group, Floats], None]) -> float:
    """Returns the seconds of one of some calls that follow each other."""
    group.barrier()
    began = time.perf_counter()
    for _ in range(count):
        do(group, x)
    return (time.perf_counter() - began) / count


def _tell(tell: Tell, table: Table, choice: str) -> None:
    for what in (table, choice, ""):
        tell(what)
