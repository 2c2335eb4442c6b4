"""Linear equations whose matrix is cut along the mesh, by conjugate gradients and by factors.

    dmesh run -n 2 --cpu-devices 2 examples/conjugate_gradient.py

Each device has some rows of the matrix. A step moves one vector and three numbers. Client 0 compares the
solutions with NumPy's.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import dmesh

TOLERANCE, MOST = 1e-10, 500


def conjugate_gradient(a: Any, b: Any) -> tuple[Any, int]:
    """Return the solution of a x = b, and the number of steps; `a` is symmetric and positive definite."""
    x, residual = b * 0, b * 1
    direction, size = residual * 1, float(residual @ residual)
    for step in range(MOST):
        if size < TOLERANCE**2:
            return x, step
        image = a @ direction
        length = size / float(direction @ image)
        x, residual = x + direction * length, residual - image * length
        before, size = size, float(residual @ residual)
        direction = residual + direction * (size / before)
    return x, MOST


def main() -> None:
    """Solve the equations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=401)
    n = parser.parse_args().size

    def element(i: Any, j: Any) -> Any:
        """Return an element of the matrix: it falls off with the distance from the diagonal."""
        return np.exp(-np.abs(i - j) / 2) + (i == j)

    with dmesh.session() as me:
        mesh = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))])
        a = dmesh.from_function(element, (n, n), layout=dmesh.Layout(["x", dmesh.UNSHARDED], mesh))
        b = dmesh.linspace(-1, 1, n, layout=dmesh.Layout(["x"], mesh))
        found, steps = conjugate_gradient(a, b)
        found, solved = found.full(), np.linalg.solve(a, b).full()
        if me.rank == 0:
            expected = np.linalg.solve(np.fromfunction(element, (n, n)), np.linspace(-1, 1, n))
            equal = np.allclose(found, expected) and np.allclose(solved, expected)
            print(f"{n} equations in {steps} steps, the largest error {np.abs(found - expected).max():.1e}")
            print(f"equals NumPy's: {'yes' if equal else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
