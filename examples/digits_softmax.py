"""Data-parallel softmax regression: several processes learn to read handwritten digits together.

    dmesh run -n 4 examples/digits_softmax.py

Each client computes the gradient on its shard of every batch. An all-reduce adds up the shards' gradients, so
all clients take the same step. At the end, client 0 repeats the training alone and compares the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dmesh

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
CLASSES, HELD_OUT, BATCH, RATE, SEED = 10, 360, 128, 0.5, 0

Array = NDArray[np.float64]


def load() -> tuple[Array, Array, Array, Array]:
    """Return images and one-hot digits to train on, then held-out images and one-hot digits."""
    table = np.loadtxt(DATA, delimiter=",")
    table = table[np.random.default_rng(SEED).permutation(len(table))]
    images = np.column_stack([table[:, :-1] / 16.0, np.ones(len(table))])  # the last column is for the bias
    digits = np.eye(CLASSES)[table[:, -1].astype(int)]
    return images[HELD_OUT:], digits[HELD_OUT:], images[:HELD_OUT], digits[:HELD_OUT]


def predict(weights: Array, images: Array) -> Array:
    """Return the probability of each digit for each image."""
    scores: Array = images @ weights
    likelihoods: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    totals: Array = likelihoods.sum(axis=1, keepdims=True)
    return likelihoods / totals


def batches(count: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield the row numbers of each batch of an epoch, the same on every client."""
    order = np.random.default_rng([SEED, epoch]).permutation(count)
    yield from np.split(order, range(BATCH, count, BATCH))


def train(
    images: Array,
    digits: Array,
    epochs: int,
    position: int,
    shards: int,
    add_up: Callable[[Array], Array],
    after_epoch: Callable[[int, float], None],
    delay: float = 0.0,
) -> Array:
    """Train on shard `position` of the `shards` of every batch; `add_up` sums over the shards."""
    weights = np.zeros((images.shape[1], CLASSES))
    for epoch in range(epochs):
        loss = 0.0
        for rows in batches(len(images), epoch):
            mine = np.array_split(rows, shards)[position]
            probabilities = predict(weights, images[mine])
            loss -= np.log(probabilities[digits[mine] == 1.0]).sum()
            gradient = images[mine].T @ (probabilities - digits[mine])
            weights -= RATE / len(rows) * add_up(gradient)
            time.sleep(delay)
        after_epoch(epoch + 1, float(add_up(np.array(loss))) / len(images))
    return weights


def main() -> int:
    """Train together, then alone for comparison; return 0 if both agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step")
    options = parser.parse_args()

    dmesh.initialize_accelerator_system("CPU")
    mesh = dmesh.create_distributed_mesh([("batch", dmesh.num_global_devices("CPU"))], device_type="CPU")
    group = mesh.group("batch")
    first = dmesh.client_id() == 0
    images, digits, test_images, test_digits = load()

    def report(epoch: int, loss: float) -> None:
        if first:
            print(f"epoch {epoch:2d}/{options.epochs}  loss {loss:.4f}")

    if first:
        print(f"{group.size} clients share {len(images)} images, {len(test_images)} are held out")
    started = time.perf_counter()
    weights = train(
        images, digits, options.epochs, group.rank, group.size, group.all_reduce, report, options.step_delay
    )
    seconds = time.perf_counter() - started

    equal = True
    if first:
        accuracy = np.mean(predict(weights, test_images).argmax(axis=1) == test_digits.argmax(axis=1))
        print(f"trained in {seconds:.1f} s; accuracy on the held-out images: {accuracy:.1%}")
        alone = train(images, digits, options.epochs, 0, 1, lambda x: x, lambda epoch, loss: None)
        difference = float(np.abs(weights - alone).max())
        equal = difference <= 1e-6
        print(
            f"equals the single-process run to 1e-6: {'yes' if equal else 'NO'} (difference {difference:.1e})"
        )
    dmesh.shutdown_accelerator_system()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
