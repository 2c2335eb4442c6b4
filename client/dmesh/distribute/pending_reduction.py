"""Reduction of arrays that are handed over one by one, in buckets that travel while replicas compute.

A bucket is sent as soon as its last array is there and those before it have been sent. Buckets are filled
from the last array to the first, as gradients become ready in the order opposite to that of the layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dmesh.collectives.group import Group
from dmesh.distribute.agreement import Description, call_in_replicas
from dmesh.distribute.combining import Array, Combiner, Reduction, as_value, share_out
from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["PENDING_BYTES", "PendingReduction", "SharedReduction"]

PENDING_BYTES = 4 << 20
"""Bytes of a bucket, unless the caller says otherwise: the smaller, the earlier the first one is sent."""


class SharedReduction:
    """Reduction under way of all replicas of a client.

    Args:
        combiner: Exchange of the replicas' values.
        reduction: Reduction, compiled for the arrays.
        replicas: Number of this client's replicas.
        group: All clients, if there are several; for this and no other exchanges.
        timeout: Limit of each exchange in seconds; None for the cluster's.
    """

    def __init__(
        self,
        combiner: Combiner,
        reduction: Reduction,
        replicas: int,
        group: Group | None,
        timeout: float | None,
    ) -> None:
        self.reduction = reduction
        """Reduction, compiled for the arrays."""
        self._combiner, self._group, self._timeout = combiner, group, timeout
        buckets = reduction.buckets
        self._missing = [len(bucket) * replicas for bucket in buckets]
        self._parts: list[list[Any]] = [[None] * replicas for _ in buckets]
        self._spans: dict[int, tuple[int, int, int]] = {}
        self._sizes: list[int] = []
        for number, bucket in enumerate(buckets):
            end = 0
            for at in bucket:
                begin, end = end, end + math.prod(reduction.shapes[at])
                self._spans[at] = number, begin, end
            self._sizes.append(end)
        self._futures: list[Any] = []
        self._lock = threading.Lock()

    def put(self, replica: int, at: int, array: Array) -> None:
        """Take a replica's array; send the buckets that are complete."""
        number, begin, end = self._spans[at]
        parts, bucket = self._parts[number], self.reduction.buckets[number]
        if len(bucket) == 1:
            parts[replica] = array  # as it is
        else:
            if parts[replica] is None:
                parts[replica] = np.empty(self._sizes[number], array.dtype)
            parts[replica][begin:end] = array.reshape(-1)
        with self._lock:
            self._missing[number] -= 1
            while len(self._futures) < len(self._missing) and not self._missing[len(self._futures)]:
                self._send(len(self._futures))

    def _send(self, number: int) -> None:
        bucket, parts = self.reduction.buckets[number], self._parts[number]
        self._parts[number] = []
        self._futures.append(
            self._combiner.reduce_flat(
                self.reduction, bucket[0], parts, self._timeout,
                owned=len(bucket) > 1, group=self._group, later=True,
            )
        )  # fmt: skip

    def results(self) -> list[Array]:
        """Wait for all buckets, and return the reduced arrays, which cannot be written to."""
        results: list[Any] = [None] * len(self.reduction.rules)
        for bucket, future in zip(self.reduction.buckets, self._futures, strict=True):
            share_out(self.reduction, bucket, future.result(), results)
        return results


class PendingReduction:
    """All-reduce whose arrays are handed over one by one; `ReplicaContext.begin_all_reduce` returns it.

    ```python
    def step(rows):
        pending = dmesh.distribute.get_replica_context().begin_all_reduce("MEAN", like=weights)
        for layer in reversed(range(len(weights))):
            pending.put(layer, gradient_of(layer, rows))  # travels while the next one is computed
        return pending.result()
    ```

    Args:
        shared: Reduction of all replicas of this client.
        replica: Position of this replica among those of this client.
        like: List, tuple or dict of arrays.
        exchange: Waits for all replicas; see `ReplicaContext.exchange`.
        finished: Called when the result is there.
    """

    def __init__(
        self,
        shared: SharedReduction,
        replica: int,
        like: Any,
        exchange: Callable[..., Any],
        finished: Callable[[], None],
    ) -> None:
        keys = sorted(like) if isinstance(like, Mapping) else range(len(like))
        self._missing = {key: at for at, key in enumerate(keys)}
        self._dtypes = [rule.wire for rule in shared.reduction.rules]
        self._shared, self._replica, self._like = shared, replica, like
        self._exchange, self._finished = exchange, finished

    def __repr__(self) -> str:
        return f"<PendingReduction: {len(self._missing)} of {len(self._like)} arrays are missing>"

    def put(self, key: Any, value: Any) -> None:
        """Hand over an array. Leave it alone until the result is there.

        Args:
            key: Index of the array in a list, or its key in a dict.
            value: Array, of the shape and dtype of that in `like`.

        Raises:
            StrategyValueError: There is no such key, its array is there already, or has another shape.
            StrategyTypeError: The array has another dtype.
        """
        at = self._missing.get(key)
        if at is None:
            raise StrategyValueError(f"put got the key {key!r:.200}; missing are {self._names()}")
        array = as_value(value, "put")
        reduction = self._shared.reduction
        if array.shape != reduction.shapes[at]:
            raise StrategyValueError(
                f"put of {key!r:.200} needs the shape {reduction.shapes[at]}, got {array.shape}"
            )
        if array.dtype != self._dtypes[at]:
            raise StrategyTypeError(f"put of {key!r:.200} needs {self._dtypes[at]}, got {array.dtype}")
        del self._missing[key]
        self._shared.put(self._replica, at, array)

    def result(self) -> Any:
        """Wait for all replicas, and return the reduced arrays in the structure of `like`.

        Returns:
            Arrays that cannot be written to: replicas of one client share them.

        Raises:
            StrategyValueError: An array is missing.
            ReplicaError: A replica failed, did not come, or made another call.
            CollectiveError: A client is lost, or did not come.
        """
        if self._missing:
            raise StrategyValueError(f"result() needs all arrays; missing are {self._names()}")
        shared = self._shared

        def perform(values: Sequence[Any]) -> list[Any]:
            return [shared.results()] * len(values)

        results = self._exchange(_end_of(shared.reduction), perform, None)
        self._finished()
        return shared.reduction.rebuild(self._like, results)

    def _names(self) -> str:
        return ", ".join(map(repr, list(self._missing)[:16])) or "none"


def _end_of(reduction: Reduction) -> Description:
    return call_in_replicas(f"result of {reduction.description.state.text}")
