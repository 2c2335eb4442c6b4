"""Principal components of handwritten digits, whose rows are cut along the mesh.

    dmesh run -n 2 --cpu-devices 2 examples/pca_sharded.py

The singular values come from a QR of each block, and one of all their R: no device gets the matrix. Client 0
compares the result with NumPy's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import dmesh

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
COMPONENTS, COPIES = 8, 20


def components(x: Any) -> tuple[Any, Any]:
    """Return the first principal components, and the share of the variance of each."""
    centered = x - x.mean(axis=0)
    _, s, v = np.linalg.svd(centered, full_matrices=False)
    variance = s**2
    return v[:COMPONENTS], variance[:COMPONENTS] / variance.sum()


def main() -> None:
    """Find the components."""
    values = np.loadtxt(DATA, delimiter=",")[:, :-1]
    values = np.tile(values, (COPIES, 1)) + np.random.default_rng(0).normal(size=(COPIES * len(values), 64))
    with dmesh.session() as me:
        mesh = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))])
        x = dmesh.copy_to_mesh(values, dmesh.Layout(["x", dmesh.UNSHARDED], mesh), uneven=True)
        planned = dmesh.explain(components, x).bytes
        axes, shares = (one.full() for one in components(x))
        if me.rank == 0:
            expected, theirs = components(values)
            same = np.abs((axes * expected).sum(axis=1))  # a component's sign is not determined
            equal = np.allclose(same, 1) and np.allclose(shares, theirs)
            print(f"{COMPONENTS} of {values.shape[1]} components have {shares.sum():.1%} of the variance")
            print(f"{planned} bytes moved, of {values.nbytes} that there are")
            print(f"equals NumPy's: {'yes' if equal else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
