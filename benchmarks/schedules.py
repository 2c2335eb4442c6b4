"""Table of the schedules of large groups: messages, bytes and peers of the busiest rank, and the time.

    python benchmarks/schedules.py [--sizes 64,1000,4096] [--bytes 1048576]

Nothing is measured. The counts are those of the programs that ranks execute. The times are those of the
simulator (`dmesh.collectives.schedules.timing`), or of the cost model (marked with ~) where a simulation
would take too long. Their parameters come from the tuning file, or else from the shipped one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

from dmesh.collectives import tuning
from dmesh.collectives.schedules.choice import OTHER_ORDERS, SCHEDULES, choose, pieces_of
from dmesh.collectives.schedules.cost import Model, cost
from dmesh.collectives.schedules.direct import all_reduce_flat, all_reduce_scattered
from dmesh.collectives.schedules.program import Program, make
from dmesh.collectives.schedules.timing import finish_times, load

MOST_SIMULATED = 1_000_000
"""Largest number of instructions, of all ranks, that are simulated."""
BLOCKS = ("all_to_all", "reduce_scatter", "scatter")
WITH_ROOT = ("broadcast", "gather", "reduce", "scatter")
WIDTH = 4
"""Bytes of an element."""


def main() -> None:
    """Print a table for each kind of collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="64,1000,4096", help="numbers of ranks")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="bytes of an array, including all blocks")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    found = tuning.find(os.environ.get("DMESH_TUNING"))
    model = Model(found.latency, found.message, found.byte, found.local, found.connection)
    print(f"| {options.bytes:,} bytes | {' | '.join(f'{size:,} ranks' for size in sizes)} |")
    print("|---|" + "---|" * len(sizes))
    for kind, schedules in SCHEDULES.items():
        direct = (all_reduce_flat, all_reduce_scattered) if kind == "all_reduce" else ()
        for schedule in (*direct, *schedules, *OTHER_ORDERS.get(kind, ())):
            cells = [cell(kind, schedule, size, options.bytes, model) for size in sizes]
            name = f"{schedule.__module__.rpartition('.')[2]}.{schedule.__name__}"
            print(f"| `{name}` | {' | '.join(cells)} |")


def cell(kind: str, schedule: Callable[..., None], size: int, nbytes: int, model: Model) -> str:
    """Return what a schedule takes with some number of ranks, as text."""
    count = max(1, nbytes // WIDTH // (size if kind in BLOCKS else 1))
    total = count * (size if kind in BLOCKS else 1)
    pieces = min(
        pieces_of(schedule, count * WIDTH),
        key=lambda pieces: cost(schedule, size, count, *pieces).picoseconds(model, WIDTH),
    )
    chosen = any(
        choose(kind, size, count, total * WIDTH, model, pinned)[0] is schedule for pinned in (True, False)
    )
    arguments = [*((0,) if kind in WITH_ROOT else ()), count, *pieces]
    loads = [load(make(schedule, size, rank, *arguments)) for rank in sample(size)]
    messages, elements, _, peers = map(max, zip(*loads, strict=True))
    time = milliseconds(schedule, size, count, pieces, arguments, model)
    arrays = elements / total
    text = f"{messages:,} · {arrays:{',.0f' if arrays >= 100 else '.3g'}} · {peers:,} · {time}"
    return f"**{text}**" if chosen else text


def sample(size: int) -> Iterator[int]:
    """Yield some ranks, the busiest among them."""
    yield from sorted({0, 1, 2, 3, size // 2, size - 2, size - 1} & set(range(size)))


def milliseconds(
    schedule: Callable[..., None],
    size: int,
    count: int,
    pieces: tuple[int, ...],
    arguments: list[int],
    model: Model,
) -> str:
    """Return the time until the last rank has finished, once all are connected."""
    # Connections that exist already: what opening them takes is paid once.
    model = model._replace(connection=0)

    def program(rank: int) -> Program:
        return make(schedule, size, rank, *arguments)

    if len(program(size // 2).instructions) * size <= MOST_SIMULATED:
        mark, picoseconds = "", max(finish_times([program(rank) for rank in range(size)], model, WIDTH))
    else:
        mark, picoseconds = "~", cost(schedule, size, count, *pieces).picoseconds(model, WIDTH)
    found = picoseconds / 1e9
    return f"{mark}{found:{',.0f' if found >= 100 else '.3g'}} ms"


if __name__ == "__main__":
    main()
