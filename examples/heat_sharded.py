"""The heat equation on a plate cut along both dimensions of a mesh: `dmesh.shard_map` with halos.

    dmesh run -n 2 --cpu-devices 2 examples/heat_sharded.py

`step` is NumPy's, for a plate with a margin of one point. `shard_map` runs it on each device's block, whose
margin is its neighbors' points, those beyond the corners included; no send or receive is written here. The
edges of the plate are joined. Client 0 compares the result with NumPy's, which must be the same in every bit.
`heat_halo.py` writes the exchange by hand, for a rod.
"""

from __future__ import annotations

import numpy as np

import dmesh

RATE = 0.2  # of diffusion, in squares of a point's width per step; beyond 0.25 the scheme is unstable
SHAPE, STEPS = (150, 101), 200


def step(plate: np.ndarray) -> np.ndarray:
    """Return the points within the margin, a step later."""
    inner = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    return inner + RATE * (around - 4 * inner)


def main() -> None:
    """Compute the plate on all devices, and compare it with what NumPy computes."""
    rows, columns = np.ogrid[: SHAPE[0], : SHAPE[1]]
    values = np.exp(-((rows - 40) ** 2 + (columns - 90) ** 2) / 200)
    with dmesh.session("CPU") as me:
        devices = dmesh.num_global_devices("CPU")
        mesh = dmesh.create_distributed_mesh([("x", me.size), ("y", devices // me.size)])
        layout = dmesh.Layout(["x", "y"], mesh)
        sharded_step = dmesh.shard_map(
            step, in_layouts=layout, out_layouts=layout, halo=[(1, 1)], boundary="wrap"
        )
        plate = dmesh.copy_to_mesh(values, layout, uneven=True)
        with dmesh.debug.bytes_moved() as moved:
            for _ in range(STEPS):
                plate = sharded_step(plate)
        heat = float(plate.sum())
        later = plate.full()
        if me.rank == 0:
            alone = values
            for _ in range(STEPS):
                alone = step(np.pad(alone, 1, mode="wrap"))
            same = np.array_equal(later, alone)
            print(f"{STEPS} steps of {SHAPE[0]} x {SHAPE[1]} points on {devices} devices, heat {heat:.3f}")
            print(
                f"{moved.total // STEPS:,} bytes came to client 0's devices in a step, of {values.nbytes:,}"
            )
            print(f"equals NumPy's: {'yes' if same else 'NO'}", flush=True)
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
