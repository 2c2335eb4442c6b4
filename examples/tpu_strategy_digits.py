"""`TPUStrategy` on the eight logical cores of a TPU system: softmax regression on handwritten digits.

    dmesh run -n 2 examples/tpu_strategy_digits.py

The clients share the cores, and NumPy computes. Each core is a replica, which computes the gradient on its
part of every batch. The weights are a variable that adds up the replicas' values, so all copies take the same
step. At the end, client 0 repeats the training with a single replica and compares the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
from digits_softmax import BATCH, CLASSES, RATE, SEED, Array, load, predict

import dmesh
from dmesh import distribute
from dmesh.data import Dataset


def train(
    strategy: distribute.Strategy, images: Array, digits: Array, epochs: int, delay: float, report: bool
) -> dmesh.Variable:
    """Train on all replicas of a strategy; return the weights."""
    with strategy.scope():
        weights = dmesh.Variable(
            np.zeros((images.shape[1], CLASSES)), name="weights", aggregation=dmesh.VariableAggregation.SUM
        )
    dataset = Dataset.from_tensor_slices((images, digits)).shuffle(len(images), seed=SEED).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(dataset)

    def step(part: tuple[Array, Array]) -> Any:
        mine, wanted = part
        probabilities = predict(weights.read_value(), mine)
        context = distribute.get_replica_context()
        assert context is not None
        count, loss = context.all_reduce("SUM", (len(mine), -np.log(probabilities[wanted == 1.0]).sum()))
        weights.assign_sub(RATE / count * (mine.T @ (probabilities - wanted)))
        return loss

    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in batches:
            losses = strategy.run(step, args=(batch,))
            total += float(strategy.experimental_local_results(losses)[0])
            time.sleep(delay)
        if report:
            print(f"epoch {epoch:2d}/{epochs}  loss {total / len(images):.4f}", flush=True)
    return weights


def main() -> int:
    """Train on all replicas, then on one for comparison; return 0 if both agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step")
    options = parser.parse_args()

    dmesh.initialize_accelerator_system("TPU", tpu="v2-8")
    strategy = distribute.TPUStrategy()
    first = dmesh.client_id() == 0
    images, digits, test_images, test_digits = load()
    if first:
        print(f"{strategy!r} share {len(images)} images, {len(test_images)} are held out", flush=True)
    started = time.perf_counter()
    weights = train(strategy, images, digits, options.epochs, options.step_delay, first)
    seconds = time.perf_counter() - started

    equal = all(
        np.array_equal(copy, weights.numpy()) for copy in strategy.experimental_local_results(weights)
    )
    if first:
        accuracy = np.mean(predict(weights.numpy(), test_images).argmax(axis=1) == test_digits.argmax(axis=1))
        print(f"trained in {seconds:.1f} s; accuracy on the held-out images: {accuracy:.1%}")
        alone = train(distribute.OneDeviceStrategy("CPU:0"), images, digits, options.epochs, 0.0, False)
        difference = float(np.abs(weights.numpy() - alone.numpy()).max())
        equal = equal and difference <= 1e-6
        print(
            f"equals the run of a single replica to 1e-6: {'yes' if equal else 'NO'} "
            f"(difference {difference:.1e})"
        )
    dmesh.shutdown_accelerator_system()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
