"""Synchronization schedules: barriers, which move no data."""

from __future__ import annotations

from functools import lru_cache

from dmesh.collectives.schedules.program import TOKEN, Builder, Program


@lru_cache(maxsize=64)
def barrier(size: int, rank: int) -> Program:
    """Return the schedule of a barrier: no rank finishes before all have entered it."""
    builder = Builder()
    add_barrier(builder, size, rank)
    return builder.build()


def add_barrier(builder: Builder, size: int, rank: int) -> None:
    """Append a dissemination barrier: in round k, every rank sends a token to the rank 2**k after it.

    It ends every collective in which some rank would not hear from all others otherwise. So no rank finishes
    a collective that another rank has not called, or that has failed there.
    """
    distance = 1
    while distance < size:
        step = builder.steps()
        received = builder.receive((rank - distance) % size, step, builder.token())
        builder.send((rank + distance) % size, step, TOKEN)
        builder.wait(received)
        distance *= 2
