"""Placement of a step's tasks by Slurm: `srun --distribution`."""

from __future__ import annotations

import re

from dmesh.config.addresses import shown
from dmesh.errors import ResolverError


def place_tasks(
    counts: list[int], distribution: str | None, plane_size: int | None = None
) -> list[tuple[int, int]]:
    """Returns the place of every task, in order of their ranks.

    Args:
        counts: How many tasks each host has.
        distribution: As in `SLURM_DISTRIBUTION`: `block`, `cyclic` or `plane`, perhaps with more behind a
            colon or comma, which is about sockets and does not matter here; `block` if None.
        plane_size: As in `SLURM_DIST_PLANESIZE`: tasks of a plane.

    Returns:
        For each task the index of its host, and its index among the tasks there.

    Raises:
        ResolverError: It is another distribution.
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
            f"SLURM_DISTRIBUTION is {shown(distribution or '')}, by which it is not known here which task is "
            "on which host. Use srun --distribution=block, cyclic or plane=N"
        )
    places: list[tuple[int, int]] = []
    placed = [0] * len(counts)
    while len(places) < sum(counts):
        for host, count in enumerate(counts):
            for _ in range(min(at_a_time, count - placed[host])):
                places.append((host, placed[host]))
                placed[host] += 1
    return places
