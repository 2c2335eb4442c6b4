"""Slurm's placement of a step's tasks: `srun --distribution`."""

from __future__ import annotations

import re

from dmesh.config.addresses import shown
from dmesh.errors import ResolverError


def place_tasks(
    counts: list[int], distribution: str | None, plane_size: int | None = None
) -> list[tuple[int, int]]:
    """Return the placement of every task, in order of ranks.

    Args:
        counts: Number of tasks of each host.
        distribution: Value of `SLURM_DISTRIBUTION`: `block`, `cyclic` or `plane`. A part after a colon or
            comma, which is about sockets, is ignored. None for `block`.
        plane_size: Value of `SLURM_DIST_PLANESIZE`: number of tasks of a plane.

    Returns:
        For each task, the index of its host and its index on that host.

    Raises:
        ResolverError: The distribution is another one.
    """
    across_hosts = re.split("[:,]", (distribution or "block").lower(), maxsplit=1)[0]
    if across_hosts in ("block", "*"):
        at_a_time = max(counts, default=1)
    elif across_hosts == "cyclic":
        at_a_time = 1
    elif across_hosts == "plane" and plane_size:
        at_a_time = plane_size
    else:
        raise ResolverError(
            f"SLURM_DISTRIBUTION is {shown(distribution or '')}, which dmesh does not support, so it cannot "
            "find the tasks' hosts. Use srun --distribution=block, cyclic or plane=N"
        )
    places: list[tuple[int, int]] = []
    placed = [0] * len(counts)
    while len(places) < sum(counts):
        for host, count in enumerate(counts):
            for _ in range(min(at_a_time, count - placed[host])):
                places.append((host, placed[host]))
                placed[host] += 1
    return places
