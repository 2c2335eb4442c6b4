"""Heat equation on a rod that is cut into parts: neighbors exchange edges while they compute inner points.

    dmesh run -n 4 examples/heat_halo.py

Client 0 compares the result with that of a single process.
"""

import argparse

import numpy as np

import dmesh
from dmesh.collectives import NULL_PEER

RATE = 0.4  # diffusion per step, in units of the squared point distance; above 0.5 the scheme is unstable


def advanced(u: np.ndarray) -> np.ndarray:
    """Return the inner points of `u` one step later."""
    return u[1:-1] + RATE * (u[2:] - 2 * u[1:-1] + u[:-2])


def alone(rod: np.ndarray, steps: int) -> np.ndarray:
    """Return the rod after `steps` steps, computed by one process. The ends stay at 0."""
    u = np.pad(rod, 1)
    for _ in range(steps):
        u[1:-1] = advanced(u)
    return u[1:-1]


def together(rod: np.ndarray, steps: int) -> np.ndarray:
    """Return the same, computed by all clients: each has a part, between copies of its neighbors' edges."""
    world = dmesh.collectives.world()
    parts = np.array_split(rod, world.size)
    u = np.pad(parts[world.rank], 1)  # u[0] and u[-1] are the neighbors' points, or the rod's ends
    left = world.rank - 1 if world.rank > 0 else NULL_PEER  # transfers with NULL_PEER do nothing
    right = world.rank + 1 if world.rank < world.size - 1 else NULL_PEER
    for _ in range(steps):
        transfers = [
            world.recv(None, left, out=u[:1], async_op=True),
            world.recv(None, right, out=u[-1:], async_op=True),
            world.send(u[1:2], left, async_op=True),
            world.send(u[-2:-1], right, async_op=True),
        ]
        inner = advanced(u[1:-1])  # needs no neighbor
        for transfer in transfers:
            transfer.result()  # like MPI's Wait: the halo has arrived, and sent points may be overwritten
        first, last = advanced(u[:3]), advanced(u[-3:])
        u[1:2], u[2:-2], u[-2:-1] = first, inner, last
    return world.all_gather(u[1:-1], counts=[len(part) for part in parts])


def main() -> None:
    """Compute the rod with all clients, and compare it with the result of one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    rod = np.sin(np.linspace(0, 3 * np.pi, arguments.points)) ** 2

    with dmesh.session("CPU") as me:
        if arguments.points < 3 * me.size:
            parser.error(f"--points must be at least 3 for each of {me.size} clients, got {arguments.points}")
        rod_later = together(rod, arguments.steps)
        if me.rank == 0:
            expected = alone(rod, arguments.steps)
            same = np.array_equal(rod_later, expected)
            print(f"{arguments.steps} steps of {arguments.points} points by {me.size} clients")
            print(f"equals the single-process run: {'yes' if same else 'no'}")
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
