"""k-means on a sharded array: the points are divided over the mesh, the centers are on every device.

    dmesh run -n 2 --cpu-devices 2 examples/kmeans_sharded.py

The program is plain NumPy. Only the layout of the points makes it run on all devices. Each step moves nothing
but the sums of the clusters, as `dmesh.explain` predicts. Client 0 compares the result with NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import dmesh

CLUSTERS, STEPS = 4, 10


def step(points: Any, centers: Any) -> Any:
    """Return for each center the mean of its nearest points; arrays may be sharded or NumPy's."""
    distances = ((points[:, None, :] - centers[None, :, :]) ** 2).sum(axis=2)
    nearest = distances == distances.min(axis=1, keepdims=True)
    return (nearest.T.astype(float) @ points) / nearest.sum(axis=0)[:, None]


def main() -> None:
    """Run k-means."""
    rng = np.random.default_rng(0)
    blobs = rng.normal(size=(CLUSTERS, 2)) * 5
    values = blobs[rng.integers(0, CLUSTERS, 10_001)] + rng.normal(size=(10_001, 2))
    with dmesh.session() as me:
        mesh = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))])
        points = dmesh.copy_to_mesh(values, dmesh.Layout(["x", dmesh.UNSHARDED], mesh), uneven=True)
        everywhere = dmesh.Layout.replicated(mesh, 2)
        centers, alone = dmesh.copy_to_mesh(values[:CLUSTERS], everywhere), values[:CLUSTERS]
        planned = dmesh.explain(step, points, centers).bytes
        for _ in range(STEPS):
            centers, alone = dmesh.relayout(step(points, centers), everywhere), step(values, alone)
        if me.rank == 0:
            equal = np.allclose(centers.numpy(), alone)
            print(f"centers {centers.numpy().round(1).tolist()}")
            print(f"each step moves {planned} bytes; the points have {values.nbytes}")
            print(f"equals NumPy's: {'yes' if equal else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
