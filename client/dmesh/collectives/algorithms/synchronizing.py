"""Schedules that only make ranks wait for each other."""

from __future__ import annotations

from functools import lru_cache

from dmesh.collectives.algorithms.program import TOKEN, Builder, Program


@lru_cache(maxsize=64)
def barrier(size: int, rank: int) -> Program:
    """Nobody passes before all have come."""
    builder = Builder()
    add_barrier(builder, size, rank)
    return builder.build()


def add_barrier(builder: Builder, size: int, rank: int) -> None:
    """Appends a dissemination barrier: in round k every rank tells the one 2**k after it what it has heard.

    It closes every collective in which some rank would not hear of all others otherwise, so that no rank
    finishes a collective that another has not called, or that failed there.
    """
    distance = 1
    while distance < size:
        step = builder.steps()
        received = builder.receive((rank - distance) % size, step, builder.token())
        builder.send((rank + distance) % size, step, TOKEN)
        builder.wait(received)
        distance *= 2
