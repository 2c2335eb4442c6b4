"""Measurement of the tuning that is best for a cluster; each rank of `dmesh tune` runs it.

Each alternative gets a group of all clients with a tuning of its own. The alternatives take turns, round by
round, so that other load of the machines affects all of them. A call's time is the slowest rank's time. All
ranks see the same figures, and so choose the same values.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dmesh.collectives.backends.hierarchical import HierarchicalBackend
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.collectives.schedules.choice import FLAT_TOTAL_LIMIT, MOST_DIRECT
from dmesh.collectives.tuning import LEAST_ROWS, MOST_BYTES, MOST_COST, SHIPPED, Tuning
from dmesh.errors import CollectiveError, CollectiveValueError

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]

_KIB = 1024
_ROUNDS = 5
_MOST_CALLS = 1000
"""Largest number of calls of one alternative and size in one round."""
_MARGIN = 1.05
"""Speed-up that other pieces need over those of 0, which adapt to the size of the group."""
_STREAMS_MARGIN = 1.1
"""Speed-up that more streams need over fewer, which cost fewer connections."""
_STREAMS = (1, 2, 4)
_PIECES = tuple(32 * _KIB << shift for shift in range(6))
_LARGE = (1024 * _KIB, 4096 * _KIB, 16384 * _KIB)
"""Bytes of the arrays that pieces are compared with."""
_SMALLEST = _KIB
_ROWS = tuple(16 * _KIB << shift for shift in range(7))
"""Bytes for each rank of a host."""
_TREES = tuple(4 * _KIB << shift for shift in range(9))
"""Bytes of the arrays that are broadcast."""
_PARTS = 8
"""Parts of the time: two for pieces, one for each other value, and one for the cost model."""
_LONG = 1024 * _KIB
"""Bytes of the arrays that tell the cost of a byte."""


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times of some alternatives."""

    title: str
    ways: tuple[str, ...]
    seconds: Mapping[int, tuple[float, ...]]
    """Median of a call with each alternative, by bytes of the array."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table for people, in microseconds."""
        yield f"{self.title}, us"
        yield "".join(f"{name:>12}" for name in ("bytes", *self.ways))
        for nbytes, row in self.seconds.items():
            yield f"{nbytes:>12}" + "".join(f"{1e6 * seconds:>12.1f}" for seconds in row)

    def columns(self) -> list[tuple[float, ...]]:
        """Return the seconds of each alternative, by rising sizes."""
        return list(zip(*self.seconds.values(), strict=True))

    def limit(self) -> int:
        """Return the largest bytes for which the first of two alternatives is better; 0 if there are none."""
        count = crossover(*self.columns())
        return list(self.seconds)[count - 1] if count else 0


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of the measurement of one table."""

    title: str
    done: int
    total: int


Report = Callable[[str | Table | Step], None]
_FLAT_ONLY = Tuning(rows=MOST_BYTES)
"""Uses dedicated connections alone, even if hierarchical all-reduces are possible."""


def measure(communicator: Communicator, seconds: float, report: Report) -> Tuning:
    """Measure, and return the best tuning; all clients must call this.

    Args:
        communicator: Of this client.
        seconds: Approximate duration; rank 0's value counts. Each alternative runs a few times in any case.
        report: Gets lines and tables of the outcome, and the progress; a program prints them on one rank.

    Raises:
        CollectiveError: The clients share memory, so there is nothing to tune.
        CollectiveValueError: There is but one client.
    """
    before, shared_memory = communicator.tuning, communicator.shared_memory
    if communicator.world.size == 1:
        raise CollectiveValueError("there is only one client; measuring collectives needs two or more")
    race = _Race(communicator, seconds / _PARTS, report)
    try:
        endpoint = race.group(_FLAT_ONLY).endpoint
        if endpoint is None:
            tuning = SHIPPED
            race.report(
                f"flat = {SHIPPED.flat}, piece = {SHIPPED.piece}, rows = {SHIPPED.rows}, "
                f"streams = {SHIPPED.streams}: shipped defaults, not measured: the clients have no dedicated "
                "connections, and exchange messages. A log line of level INFO says why"
            )
        elif not endpoint.over_tcp:
            raise CollectiveError(
                "the clients share memory, so there is nothing to tune; DMESH_SHARED_MEMORY=0 turns "
                "shared memory off"
            )
        else:
            tuning = _measure_connections(race, endpoint.slot_bytes)
        # Groups without shared memory and dedicated connections exchange messages.
        communicator.shared_memory = None
        return _measure_costs(race, _measure_messages(race, tuning))
    finally:
        communicator.tuning, communicator.shared_memory = before, shared_memory


class _Race:
    """Measures alternatives in turns, for `part` seconds each time; see `measure`."""

    def __init__(self, communicator: Communicator, part: float, report: Report) -> None:
        self.world = communicator.world
        self._communicator = communicator
        self._part = part
        self._report = report

    def report(self, *what: str | Table) -> None:
        """Tell what came out, and end the paragraph."""
        for item in (*what, ""):
            self._report(item)

    def group(self, tuning: Tuning) -> Group:
        """Make a group of all clients, with a tuning."""
        self._communicator.tuning = tuning
        group = self._communicator.new_group(self.world.ranks, "tune")
        group.barrier()  # a group's first call chooses its backends
        return group

    def run(
        self,
        title: str,
        tunings: Mapping[str, Tuning],
        sizes: Sequence[int],
        *,
        parts: int = 1,
        broadcast: bool = False,
    ) -> Table:
        """Measure all-reduces, or broadcasts, of arrays of some sizes with each tuning."""
        groups = [self.group(tuning) for tuning in tunings.values()]
        slot = parts * self._part / (_ROUNDS * len(groups) * len(sizes))
        times: dict[int, list[list[float]]] = {nbytes: [[] for _ in groups] for nbytes in sizes}
        total = (_ROUNDS + 1) * len(sizes)
        for turn in range(_ROUNDS + 1):
            for number, nbytes in enumerate(sizes):
                self._report(Step(title, turn * len(sizes) + number, total))
                x = np.ones(nbytes // 4, np.float32)
                for group, found in zip(groups, times[nbytes], strict=True):
                    first = _batch(group, x, 1, broadcast)
                    mine = max(1, min(_MOST_CALLS, int(slot / first)))
                    count = int(self.world.broadcast(np.array(mine)))
                    each = _batch(group, x, count, broadcast)
                    if turn:  # the first round warms up
                        found.append(each)
        medians = np.array([[statistics.median(found) for found in times[nbytes]] for nbytes in sizes])
        slowest = self.world.all_reduce(medians, "max").tolist()
        return Table(title, tuple(tunings), dict(zip(sizes, map(tuple, slowest), strict=True)))

    def calls(self, tuning: Tuning, calls: Mapping[str, Callable[[Group], object]]) -> dict[str, float]:
        """Return the median seconds of some calls of one group, on the slowest rank."""
        group = self.group(tuning)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(_ROUNDS + 1):
            self._report(Step("cost of messages", turn, _ROUNDS + 1))
            for name, call in calls.items():
                first = _seconds(group, call, 1)
                mine = max(1, min(_MOST_CALLS, int(self._part / (_ROUNDS * len(calls)) / first)))
                each = _seconds(group, call, int(self.world.broadcast(np.array(mine))))
                if turn:
                    times[name].append(each)
        medians = np.array([statistics.median(found) for found in times.values()])
        return dict(zip(calls, self.world.all_reduce(medians, "max").tolist(), strict=True))


def _seconds(group: Group, call: Callable[[Group], object], count: int) -> float:
    """Return the seconds of one call, as the mean of some calls in a row."""
    group.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call(group)
    return (time.perf_counter() - began) / count


def _batch(group: Group, x: Floats, count: int, broadcast: bool) -> float:
    """Return the seconds of one call, as the mean of some calls in a row."""
    if broadcast:
        return _seconds(group, lambda group: group.broadcast(x, 0, out=x), count)
    return _seconds(group, lambda group: group.all_reduce(x, "max", out=x), count)


def _measure_connections(race: _Race, share: int) -> Tuning:
    """Return the best values for dedicated connections, where a piece of 0 stands for `share` bytes."""
    others = race.world.size - 1
    tunings = {"0": _FLAT_ONLY} | {str(p): replace(_FLAT_ONLY, piece=p) for p in _PIECES if p != share}
    pieces = race.run("all-reduce by bytes of a piece", tunings, _LARGE, parts=2)
    piece = int(pieces.ways[best(pieces.columns(), _MARGIN)])
    suits = "" if piece else f": chosen by the number of members, here {share}"
    race.report(pieces, f"piece = {piece}{suits}")

    tunings = {str(count): replace(_FLAT_ONLY, piece=piece, streams=count) for count in _STREAMS}
    counts = race.run("all-reduce by streams for each pair", tunings, _LARGE[1:])
    streams = _STREAMS[most_worth(counts.columns(), _STREAMS_MARGIN)]
    race.report(counts, f"streams = {streams}: connections between each pair of ranks")

    cut = replace(_FLAT_ONLY, piece=piece, streams=streams)
    tunings = {"one step": replace(cut, flat=MOST_BYTES), "two steps": replace(cut, flat=0)}
    steps = race.run("all-reduce in one step and in two", tunings, _doublings(piece or share))
    flat = steps.limit() * others
    race.report(steps, f"flat = {flat}: bytes to all of {others} others, up to which it is one step")
    tuning = replace(cut, flat=flat)
    return replace(tuning, rows=_measure_hierarchy(race, tuning))


def _measure_hierarchy(race: _Race, tuning: Tuning) -> int:
    tunings = {"flat": tuning, "hierarchical": replace(tuning, rows=LEAST_ROWS)}
    hierarchy = race.group(tunings["hierarchical"]).backend("hierarchical")
    if not isinstance(hierarchy, HierarchicalBackend):
        race.report(
            f"rows = {SHIPPED.rows}: shipped default, not measured: hierarchical all-reduces need several "
            "hosts, and two clients on one of them"
        )
        return SHIPPED.rows
    members = hierarchy.largest_host
    title = "all-reduce, flat and hierarchical (intra-host, then inter-host)"
    table = race.run(title, tunings, [nbytes * members for nbytes in _ROWS])
    count = crossover(*table.columns())
    rows = _ROWS[count] if count < len(_ROWS) else 2 * _ROWS[-1]
    race.report(
        table,
        f"rows = {rows}: bytes for each of {members} ranks of a host, from which on it is hierarchical",
    )
    return rows


def _measure_messages(race: _Race, tuning: Tuning) -> Tuning:
    """Return a tuning with the best values for messages."""
    size = race.world.size
    if size == 2:
        race.report(
            f"message_flat = {SHIPPED.message_flat}, message_tree = {SHIPPED.message_tree}: shipped "
            "defaults, not measured: between two clients, all alternatives send equally much"
        )
        return tuning
    tunings = {
        "one step": replace(tuning, message_flat=MOST_BYTES),
        "two steps": replace(tuning, message_flat=0),
    }
    sizes = _doublings(max(_SMALLEST, FLAT_TOTAL_LIMIT // (size - 1)))
    steps = race.run("all-reduce by messages, in one step and in two", tunings, sizes)
    flat = steps.limit()
    race.report(steps, f"message_flat = {flat}: bytes of an array, up to which it is one step")
    tunings = {
        "tree": replace(tuning, message_tree=MOST_BYTES),
        "dealt out": replace(tuning, message_tree=0),
    }
    title = "broadcast by messages, through a tree and dealt out"
    trees = race.run(title, tunings, _TREES, broadcast=True)
    tree = trees.limit()
    race.report(trees, f"message_tree = {tree}: bytes of an array, up to which it goes through a tree")
    return replace(tuning, message_flat=flat, message_tree=tree)


def _measure_costs(race: _Race, tuning: Tuning) -> Tuning:
    """Return a tuning with the figures of the cost model for messages (`schedules.cost`)."""
    size = race.world.size
    if size > MOST_DIRECT:
        race.report(
            f"latency, message, byte, local: as before, not measured with more than {MOST_DIRECT} clients"
        )
        return tuning
    short, long = np.ones(1), np.ones(_LONG // 4, np.float32)
    copied = long.copy()
    found = race.calls(
        tuning,
        {
            "barrier": lambda group: group.barrier(),
            "short": lambda group: group.all_gather(short),
            "long": lambda group: group.all_gather(long),
            "local": lambda _: np.add(copied, long, out=copied),
        },
    )
    costs = costs_of(size, found["barrier"], found["short"], found["long"], found["local"])
    race.report(*(f"{name} = {value}" for name, value in costs.items()))
    latency, message, byte, local = costs.values()
    return replace(tuning, latency=latency, message=message, byte=byte, local=local)


def costs_of(size: int, barrier: float, short: float, long: float, local: float) -> dict[str, int]:
    """Return the fields of the cost model.

    Of `size` ranks that exchange directly, it takes the seconds of a barrier, of an all-gather of 8 bytes and
    of 1 MiB, and of a fold of 1 MiB.
    """
    hop = barrier / (size - 1).bit_length()  # a latency and a message
    message = (short - hop) / (size - 2) if size > 2 else hop / 2
    message = min(max(message, hop / 20), 0.95 * hop)
    byte = max(long - short, 0.0) / ((size - 1) * _LONG)
    figures = {
        "latency": 1e9 * (hop - message),
        "message": 1e9 * message,
        "byte": 1e12 * byte,
        "local": 1e12 * local / _LONG,
    }
    return {name: max(1, min(MOST_COST, round(value))) for name, value in figures.items()}


def _doublings(most: int) -> list[int]:
    """Return sizes of arrays from the smallest one on."""
    sizes = (_SMALLEST << shift for shift in itertools.count())
    return list(itertools.takewhile(lambda nbytes: nbytes <= most, sizes))


def crossover(small: Sequence[float], large: Sequence[float]) -> int:
    """Return the number of sizes for which the alternative for small arrays is better, by rising sizes.

    The choice has the least product of times, so one badly measured size does not move it far.
    """
    gains = [math.log(s) - math.log(b) for s, b in zip(small, large, strict=True)]
    costs = list(itertools.accumulate(gains, initial=0.0))
    return min(range(len(costs)), key=costs.__getitem__)


def best(times: Sequence[Sequence[float]], margin: float) -> int:
    """Return the fastest alternative, by the geometric mean, among those clearly faster than the first one.

    If none has the speed-up `margin` over it at each size, return the first one.
    """
    clear = [way for way, found in enumerate(times) if _beats(found, times[0], margin)]
    return min(clear, key=lambda way: statistics.geometric_mean(times[way]), default=0)


def most_worth(times: Sequence[Sequence[float]], margin: float) -> int:
    """Return the last alternative that is clearly faster than the choice without it.

    Each is more costly than the one before, so it needs the speed-up `margin` at each size.
    """
    taken = 0
    for way, found in enumerate(times):
        if _beats(found, times[taken], margin):
            taken = way
    return taken


def _beats(times: Sequence[float], others: Sequence[float], margin: float) -> bool:
    return all(its * margin < other for its, other in zip(times, others, strict=True))
