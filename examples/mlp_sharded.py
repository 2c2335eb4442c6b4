"""A perceptron on a 2-D mesh: batches are cut along one dimension, the hidden layer along the other.

    dmesh run -n 2 --cpu-devices 2 examples/mlp_sharded.py

It learns to read handwritten digits. The gradients are NumPy's, written by hand, and are the same lines for
sharded arrays and plain ones. Client 0 does the training again with plain ones, and compares.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import dmesh
from dmesh import UNSHARDED, Layout

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
CLASSES, HIDDEN, HELD_OUT, BATCH, RATE = 10, 32, 361, 96, 0.5


def predict(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> tuple[Any, Any]:
    """Return the hidden layer, and each image's probability of being each digit."""
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    likelihoods = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, likelihoods / likelihoods.sum(axis=1, keepdims=True)


def gradients(x: Any, y: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> list[Any]:
    """Return the gradients of the weights; those of a sharded batch are partial sums."""
    hidden, probabilities = predict(x, w1, b1, w2, b2)
    error = (probabilities - y) / BATCH
    back = (error @ w2.T) * (hidden > 0)
    return [x.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def load() -> tuple[Any, Any, Any, Any]:
    """Return images and one-hot digits to train on, then images and digits held out."""
    table = np.loadtxt(DATA, delimiter=",")
    images, digits = table[:, :-1] / 16.0, table[:, -1].astype(int)
    return images[HELD_OUT:], np.eye(CLASSES)[digits[HELD_OUT:]], images[:HELD_OUT], digits[:HELD_OUT]


def initial(features: int) -> list[Any]:
    """Return the weights to begin with, the same on every client."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(size=(features, HIDDEN)) * np.sqrt(2 / features)
    w2 = rng.normal(size=(HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)
    return [w1, np.zeros(HIDDEN), w2, np.zeros(CLASSES)]


def main() -> None:
    """Train together, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    images, digits, new_images, new_digits = load()
    data = dmesh.data.Dataset.from_tensor_slices((images, digits))
    data = data.shuffle(len(images), seed=1, reshuffle_each_iteration=False)
    alone = initial(images.shape[1])
    with dmesh.session() as me:
        devices = dmesh.num_global_devices("CPU")
        model = 2 if devices % 2 == 0 else 1
        mesh = dmesh.create_distributed_mesh([("batch", devices // model), ("model", model)])
        rows = Layout(["batch", UNSHARDED], mesh)
        layouts = (
            Layout([UNSHARDED, "model"], mesh),
            Layout(["model"], mesh),
            Layout(["model", UNSHARDED], mesh),
            Layout([UNSHARDED], mesh),
        )
        weights = [dmesh.DVariable(w, layout=layout) for w, layout in zip(alone, layouts, strict=True)]
        batches = dmesh.DTensorDataset(
            data, mesh=mesh, layouts=(rows, rows), global_batch_size=BATCH, batch_dim="batch"
        )
        for _ in range(epochs):
            for x, y in batches:
                for w, gradient in zip(weights, gradients(x, y, *weights), strict=True):
                    w.assign_sub(gradient * RATE)
        together = [w.full() for w in weights]
        if me.rank == 0:
            for _ in range(epochs):
                for x, y in data.batch(BATCH, drop_remainder=True):
                    alone = [w - g * RATE for w, g in zip(alone, gradients(x, y, *alone), strict=True)]
            right = predict(new_images, *together)[1].argmax(axis=1) == new_digits
            equal = all(np.allclose(a, b) for a, b in zip(together, alone, strict=True))
            print(f"a mesh of {mesh.shape()}: {right.mean():.1%} of {HELD_OUT} new digits are read correctly")
            print(f"equals NumPy's: {'yes' if equal else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
