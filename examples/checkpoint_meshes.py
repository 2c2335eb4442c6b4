"""A checkpoint moved between meshes: a fit starts on one, is saved there, and ends on another.

    dmesh run -n 2 --cpu-devices 2 examples/checkpoint_meshes.py

The first half of the steps runs on a mesh of one dimension, where samples are cut by rows and the weights
are whole on every device. The second half starts from the checkpoint, on a mesh of two dimensions, where
weights and features are cut too. Each client reads the blocks that its devices need. Client 0 compares the
weights with those of NumPy's run, which was not interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from typing import Any

import numpy as np

import dmesh
from dmesh import UNSHARDED, Layout

SAMPLES, FEATURES, STEPS = 1001, 30, 40


def step(samples: Any, targets: Any, weights: Any, velocity: Any) -> tuple[Any, Any]:
    """Return weights and velocity after a step of gradient descent, of arrays of either kind."""
    gradient = samples.T @ (samples @ weights - targets) / SAMPLES
    velocity = 0.9 * velocity - 0.05 * gradient
    return weights + velocity, velocity


def fit(samples: Any, targets: Any, state: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the state half of the steps later, with weights and velocity in a layout."""
    weights, velocity = state["weights"], state["velocity"]
    for _ in range(STEPS // 2):
        weights, velocity = (
            dmesh.relayout(x, layout, uneven=True) for x in step(samples, targets, weights, velocity)
        )
    return {"weights": weights, "velocity": velocity, "step": state["step"] + STEPS // 2}


def main() -> None:
    """Fit, save, load elsewhere, fit on, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where to save: all clients must see it; default: a new one")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(SAMPLES, FEATURES))
    targets = samples @ rng.normal(size=FEATURES) + 0.1 * rng.normal(size=SAMPLES)

    with dmesh.session("CPU") as me:
        made = tempfile.mkdtemp() if me.rank == 0 and arguments.directory is None else None
        directory = arguments.directory or dmesh.collectives.broadcast_object(made)
        devices = dmesh.num_global_devices("CPU")

        line = dmesh.create_distributed_mesh([("batch", devices)])
        by_rows = Layout(["batch", UNSHARDED], line)
        whole = Layout([UNSHARDED], line)
        zeros = dmesh.zeros(FEATURES, layout=whole)
        state = fit(
            dmesh.copy_to_mesh(samples, by_rows, uneven=True),
            dmesh.copy_to_mesh(targets, Layout(["batch"], line), uneven=True),
            {"weights": zeros, "velocity": zeros, "step": 0},
            whole,
        )
        dmesh.checkpoint.save(directory, state, step=state["step"])

        plane = dmesh.create_distributed_mesh([("batch", me.size), ("model", devices // me.size)])
        cut = Layout(["model"], plane)
        state = dmesh.checkpoint.load(directory, layouts={"weights": cut, "velocity": cut})
        print(f"client {me.rank} goes on from step {state['step']} with weights cut {cut.sharding_specs}")
        state = fit(
            dmesh.copy_to_mesh(samples, Layout(["batch", "model"], plane), uneven=True),
            dmesh.copy_to_mesh(targets, Layout(["batch"], plane), uneven=True),
            state,
            cut,
        )
        weights = state["weights"].full()
        dmesh.barrier()
        if me.rank == 0:
            if made is not None:
                shutil.rmtree(made)
            alone = velocity = np.zeros(FEATURES)
            for _ in range(STEPS):
                alone, velocity = step(samples, targets, alone, velocity)
            same = np.allclose(weights, alone, rtol=1e-9, atol=1e-12)
            print(f"{state['step']} steps on two meshes of {devices} devices")
            print(f"equals NumPy's: {'yes' if same else 'NO'}", flush=True)
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
