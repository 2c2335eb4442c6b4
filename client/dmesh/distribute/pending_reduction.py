"""Reduction of arrays that are added one by one, in buckets that are sent while replicas compute.

A bucket is sent as soon as its last array is there and those before it have been sent. Buckets are filled
from the last array to the first, as gradients become ready in the order opposite to that of the layers.

Where a client has no core to spare, and nothing to wait for but clients of the same host, buckets that travel
beside the computation would only slow it down: they are reduced at once, like any other exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dmesh._locks import Lock
from dmesh.collectives.group import Group
from dmesh.distribute.agreement import call_in_replicas
from dmesh.distribute.combining import Array, Combiner, Reduction, as_value, share_out
from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["PENDING_BYTES", "Buckets", "PendingReduction"]

PENDING_BYTES = 4 << 20
"""Default size of a bucket, bytes. Smaller buckets are sent earlier."""


class Buckets:
    """Buckets of one reduction of all replicas of a client.

    Args:
        combiner: Exchange of the replicas' values.
        reduction: Reduction, compiled for the arrays.
        replicas: Number of this client's replicas.
        group: All clients, for buckets that travel beside the computation; None if none do.
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
        self.overlap = group is not None
        """True if the exchange of buckets overlaps with the computation."""
        self._combiner, self._group, self._timeout = combiner, group, timeout
        self._missing = [replicas] * len(reduction.buckets)
        self._parts: list[list[Any]] = [[None] * replicas for _ in reduction.buckets]
        self._reduced: list[Any] = []  # arrays, or futures of them
        self._lock = Lock()

    def add(self, number: int, replica: int, part: Array) -> None:
        """Add a replica's part of a bucket; send complete buckets, if they overlap with the computation."""
        self._parts[number][replica] = part
        with self._lock:
            self._missing[number] -= 1
            while len(self._reduced) < len(self._missing) and not self._missing[len(self._reduced)]:
                number = len(self._reduced)
                self._reduced.append(self._reduce(number, self._parts[number]))
                self._parts[number] = []

    def perform(self, number: int, parts: Sequence[Array]) -> list[None]:
        """Reduce a bucket at once, in an exchange of all replicas."""
        self._reduced.append(self._reduce(number, parts))
        return [None] * len(parts)

    def _reduce(self, number: int, parts: Sequence[Array]) -> Any:
        first = self.reduction.buckets[number][0]
        return self._combiner.reduce_flat(
            self.reduction, first, parts, self._timeout, owned=True, group=self._group, later=self.overlap
        )

    def finish(self, replicas: Sequence[Any]) -> list[list[Array]]:
        """Wait for all buckets, and return the reduced arrays for each replica, read-only."""
        results: list[Any] = [None] * len(self.reduction.rules)
        for bucket, reduced in zip(self.reduction.buckets, self._reduced, strict=True):
            share_out(self.reduction, bucket, reduced.result() if self.overlap else reduced, results)
        return [results] * len(replicas)


class PendingReduction:
    """All-reduce of arrays that are added one by one; returned by `ReplicaContext.begin_all_reduce`.

    ```python
    def step(rows):
        pending = dmesh.distribute.get_replica_context().begin_all_reduce("MEAN", like=weights)
        for layer in reversed(range(len(weights))):
            pending.put(layer, gradient_of(layer, rows))  # travels while the next one is computed
        return pending.result()
    ```

    Args:
        buckets: Buckets of all replicas of this client.
        replica: Position of this replica among those of this client.
        like: List, tuple or dict of arrays.
        exchange: Waits for all replicas; see `ReplicaContext.exchange`.
        finished: Called when the result is there.
    """

    def __init__(
        self,
        buckets: Buckets,
        replica: int,
        like: Any,
        exchange: Callable[..., Any],
        finished: Callable[[], None],
    ) -> None:
        keys = sorted(like) if isinstance(like, Mapping) else range(len(like))
        self._missing = {key: at for at, key in enumerate(keys)}
        self._buckets, self._replica, self._like = buckets, replica, like
        self._exchange, self._finished = exchange, finished
        reduction = self._reduction = buckets.reduction
        self._spans: dict[int, tuple[int, int, int]] = {}  # bucket, begin and end of each array
        self._sizes: list[int] = []
        for number, bucket in enumerate(reduction.buckets):
            end = 0
            for at in bucket:
                begin, end = end, end + math.prod(reduction.shapes[at])
                self._spans[at] = number, begin, end
            self._sizes.append(end)
        self._parts: list[Any] = [None] * len(reduction.buckets)
        self._left = [len(bucket) for bucket in reduction.buckets]
        self._sent = 0

    def __repr__(self) -> str:
        return f"<PendingReduction: {len(self._missing)} of {len(self._like)} arrays are missing>"

    def put(self, key: Any, value: Any) -> None:
        """Add an array. The reduction overwrites its memory, and may use it for the result.

        Args:
            key: Index of the array in a list, or its key in a dict.
            value: Array, of the shape and dtype of that in `like`.

        Raises:
            StrategyValueError: There is no such key, its array is there already, or has another shape.
            StrategyTypeError: The array has another dtype.
            ReplicaError: As for `result`.
        """
        at = self._missing.get(key)
        if at is None:
            raise StrategyValueError(f"put got the key {key!r:.200}; missing are {self._names()}")
        array, reduction = as_value(value, "put"), self._reduction
        if array.shape != reduction.shapes[at]:
            raise StrategyValueError(
                f"put of {key!r:.200} needs the shape {reduction.shapes[at]}, got {array.shape}"
            )
        if array.dtype != reduction.rules[at].wire:
            raise StrategyTypeError(
                f"put of {key!r:.200} needs {reduction.rules[at].wire}, got {array.dtype}"
            )
        del self._missing[key]
        number, begin, end = self._spans[at]
        if len(reduction.buckets[number]) == 1:
            self._parts[number] = array
        else:
            if self._parts[number] is None:
                self._parts[number] = np.empty(self._sizes[number], array.dtype)
            self._parts[number][begin:end] = array.reshape(-1)
        self._left[number] -= 1
        while self._sent < len(self._left) and not self._left[self._sent]:
            self._send(self._sent)
            self._sent += 1

    def _send(self, number: int) -> None:
        part, self._parts[number] = self._parts[number], None
        if self._buckets.overlap:
            self._buckets.add(number, self._replica, part)
        else:
            text = f"bucket {number} of {self._reduction.description.state.text}"
            self._exchange(call_in_replicas(text), partial(self._buckets.perform, number), part)

    def result(self) -> Any:
        """Wait for all replicas, and return the reduced arrays in the structure of `like`.

        Returns:
            Arrays, read-only because the replicas of one client share them.

        Raises:
            StrategyValueError: An array is missing.
            ReplicaError: A replica failed, did not come, or made another call.
            CollectiveError: A client was lost, or did not arrive in time.
        """
        if self._missing:
            raise StrategyValueError(f"result() needs all arrays; missing are {self._names()}")
        text = f"result of {self._reduction.description.state.text}"
        results = self._exchange(call_in_replicas(text), self._buckets.finish, None)
        self._finished()
        return self._reduction.rebuild(self._like, results)

    def _names(self) -> str:
        return ", ".join(map(repr, list(self._missing)[:16])) or "none"
