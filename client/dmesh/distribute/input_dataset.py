"""`DistributedDataset` and its iterator: in each step an element for every replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmesh.data.elements import TensorSpec
from dmesh.data.optional import Optional
from dmesh.distribute.input_reading import Reading, WorkerInput
from dmesh.distribute.values import PerReplica
from dmesh.errors import ArgumentTypeError, DatasetError, OutOfRangeError, StrategyValueError
from dmesh.structure import map_structure

__all__ = ["DistributedDataset", "DistributedIterator"]


class DistributedDataset:
    """Dataset that is divided among the replicas; made by a strategy.

    Iterating gives distributed values for `Strategy.run`, the same number of steps on all workers. When a
    worker or a replica has nothing more while another one has, it gets elements without rows. It may be
    iterated again and again; the workers must do so equally often.

    Args:
        source: Input of this worker.
    """

    def __init__(self, source: WorkerInput) -> None:
        self._source = source

    @property
    def element_spec(self) -> Any:
        """Structure of specs of the distributed values: for each replica a `dmesh.data.TensorSpec`."""
        workers = self._source.workers
        return workers.assemble([self._source.spec()] * workers.replicas_per_worker)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._source, self)

    def __repr__(self) -> str:
        return f"<DistributedDataset for {self._source.workers}>"


class DistributedIterator(Iterator[Any]):
    """Iterator over a `DistributedDataset`.

    The first step agrees with the other workers; every step does, unless the input of all workers is known to
    have no end.
    """

    def __init__(self, source: WorkerInput, dataset: DistributedDataset) -> None:
        self._source = source
        self._dataset = dataset
        self._reading: Reading | None = None
        self._over = False
        self._state: Mapping[str, Any] | None = None
        """Position to begin at, or the last one after the end."""

    @property
    def element_spec(self) -> Any:
        """Structure of specs of the distributed values: for each replica a `dmesh.data.TensorSpec`."""
        return self._dataset.element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        value = self.get_next_as_optional()
        if not value.has_value():
            raise StopIteration
        return value.get_value()

    def next(self) -> Any:
        """Returns the next element, as `next(iterator)` does."""
        return self.__next__()

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: No worker has one.
        """
        value = self.get_next_as_optional()
        if not value.has_value():
            raise OutOfRangeError("the distributed dataset has no more elements")
        return value.get_value()

    def state(self) -> dict[str, Any]:
        """Returns this worker's position after the last step.

        Returns:
            A dict that `json.dumps` takes, for the `restore` of the same worker.
        """
        if self._reading is None:
            return dict(self._state or {})
        return self._reading.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `state` returned. Must be called before the first step.

        All workers must do so, each with its own state of the same step, and be as many as then.

        Raises:
            ArgumentTypeError: It is no such state.
            DatasetError: This iterator has begun.
        """
        if self._reading is not None or self._over:
            raise DatasetError("restore() takes a new iterator: iter(dataset) makes one")
        if not isinstance(state, Mapping) or (state and not {"epoch", "pipelines"} <= set(state)):
            raise ArgumentTypeError(f"state must be what an iterator's state() returned, got {state!r:.80}")
        self._state = state or None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or an `Optional` without a value if no worker has one.

        Raises:
            StrategyValueError: It was called inside of a replica's function.
            RemoteInputError: Another worker's input failed.
            PeerLostError: Another worker is gone.
        """
        if self._source.workers.in_replica():
            raise StrategyValueError(
                "next(iterator) was called inside of a replica's function, where every replica would take "
                "a step of its own. Call it outside: strategy.run(replica_fn, args=(next(iterator),))"
            )
        if self._over:
            return self._nothing()
        try:
            if self._reading is None:
                self._reading = self._source.begin(self._state)
            value = self._reading.next()
        except BaseException:
            self.close()
            raise
        if value is None:
            self.close()
            return self._nothing()
        return Optional(value, lambda: map_structure(_spec_of_parts, value[0]))

    def _nothing(self) -> Optional:
        return Optional((), lambda: self.element_spec)

    def close(self) -> None:
        """Ends the reading and its thread. Idempotent."""
        reading, self._reading, self._over = self._reading, None, True
        if reading is not None:
            self._state = reading.state()
            reading.close()


def _spec_of_parts(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return PerReplica(map(TensorSpec.from_tensor, leaf.values))
    return TensorSpec.from_tensor(leaf)
