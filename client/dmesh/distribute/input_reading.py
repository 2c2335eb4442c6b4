"""Reading of one worker's input for its replicas, in pace with the steps of the other workers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import islice
from typing import Any

from dmesh.data.batching import cut
from dmesh.data.elements import empty_like
from dmesh.data.iterator import DatasetIterator
from dmesh.data.pipeline import Node, transform, with_rows
from dmesh.data.prefetching import Prefetcher
from dmesh.distribute.input_sharding import with_entropy
from dmesh.distribute.input_workers import InputWorkers, Progress, WorkerFacts
from dmesh.errors import DatasetError
from dmesh.structure import flatten

__all__ = ["Reading", "WorkerInput"]

Step = tuple[list[Any], list[dict[str, Any]]]
"""An element for each replica of this worker, and the positions of its pipelines after them."""


class WorkerInput:
    """Input of one worker, which can be read many times.

    Args:
        workers: The workers that take part.
        pipelines: One, of which the worker's replicas take elements in turn, or one for each of them.
        facts: Facts that this worker tells the others.
        element_source: Pipeline whose elements are like a replica's, but for the number of rows.
        ahead: Number of steps that are made ahead; 0 for none.
        same_order: True if shuffles without a seed must have the same order on all workers.
    """

    def __init__(
        self,
        workers: InputWorkers,
        pipelines: Sequence[Node],
        facts: WorkerFacts,
        element_source: Node,
        ahead: int,
        same_order: bool,
    ) -> None:
        self.workers = workers
        self.ahead = ahead
        self._pipelines = tuple(pipelines)
        self._facts = facts
        self._element_source = element_source
        self._same_order = same_order
        self._spec: Any = None
        self._entropy: int | None = None

    def spec(self) -> Any:
        """Returns the structure of specs of one replica's elements."""
        if self._spec is None:
            spec = self._element_source.spec()
            self._spec = with_rows(spec, None) if self.workers.num_replicas_in_sync > 1 else spec
        return self._spec

    def begin(self, state: Mapping[str, Any] | None = None) -> Reading:
        """Agrees with the other workers on another reading, and begins it.

        Args:
            state: Result of `Reading.state`, to go on from there; None to begin with the first element.

        Raises:
            DatasetError: The inputs of the workers do not go together, or the state is that of another input.
        """
        facts = self._facts if state is None else self._facts._replace(epoch=state["epoch"], restored=1)
        said = self.workers.exchange(facts)
        self._facts = self._facts._replace(epoch=facts.epoch + 1)
        if self._entropy is None:
            # Also when nothing needs it: fresh pipelines count their readings from here, on all workers.
            self._entropy = said[0].entropy
            self._pipelines = tuple(self._fresh(pipeline, self._entropy) for pipeline in self._pipelines)
        readers = [DatasetIterator(pipeline) for pipeline in self._pipelines]
        if state is not None:
            progress, error = Progress.ELEMENTS, None
            try:
                self._restore(readers, state["pipelines"])
            except Exception as failure:  # noqa: BLE001 -- raised once the other workers know
                progress, error = Progress.FAILED, failure
            self.workers.go_on(progress, error)
        return Reading(self, readers, facts.epoch, endless=all(each.endless for each in said))

    @staticmethod
    def _restore(readers: Sequence[DatasetIterator], states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(readers):
            raise DatasetError(f"the state is of {len(states)} pipelines, but this worker has {len(readers)}")
        for reader, own in zip(readers, states, strict=True):
            reader.restore(own)

    def _fresh(self, pipeline: Node, entropy: int) -> Node:
        return with_entropy(pipeline, entropy) if self._same_order else transform(pipeline, lambda node: node)


class Reading:
    """One reading of a worker's input, in step with those of the other workers.

    Args:
        source: The input.
        readers: Iterators over its pipelines, for this reading.
        epoch: Number of readings before this one.
        endless: True if no worker's input has an end, so that they need not agree on each step.
    """

    def __init__(
        self, source: WorkerInput, readers: Sequence[DatasetIterator], epoch: int, *, endless: bool
    ) -> None:
        self._source = source
        self._endless = endless
        self._epoch = epoch
        self._like: Any = None
        """A read element, or None."""
        self._positions = [reader.state() for reader in readers]
        replicas = source.workers.replicas_per_worker
        # The thread must not hold this object, with which it ends.
        self._steps = (
            Prefetcher(lambda: _steps(readers, replicas), source.ahead, "dmesh-input")
            if source.ahead
            else _steps(readers, replicas)
        )

    def next(self) -> tuple[Any] | None:
        """Returns the distributed value of the next step, in a tuple; None if no worker has elements."""
        step: Step | None = None
        progress, error, value = Progress.ENDED, None, None
        positions = self._positions  # once all workers have made the step, those after it
        try:
            step = next(self._steps, None)
            if step is not None:
                parts, positions = step
                progress, value, self._like = (
                    Progress.ELEMENTS,
                    self._source.workers.assemble(parts),
                    parts[0],
                )
            elif not self._endless:
                progress, value = self._nothing()
        except Exception as failure:  # noqa: BLE001 -- raised once the other workers know
            progress, error = Progress.FAILED, failure
        if self._endless:
            if error is not None:
                raise error
            goes_on = step is not None
        else:
            goes_on = self._source.workers.go_on(progress, error)
        self._positions = positions
        return (value,) if goes_on else None

    def state(self) -> dict[str, Any]:
        """Returns the position after the last step."""
        return {"epoch": self._epoch, "pipelines": self._positions}

    def close(self) -> None:
        """Ends the reading and its thread."""
        if isinstance(self._steps, Prefetcher):
            self._steps.stop()
        else:
            self._steps.close()

    def _nothing(self) -> tuple[Progress, Any]:
        """Returns the distributed value of elements without rows, if possible."""
        workers = self._source.workers
        if workers.num_workers == 1:
            return Progress.ENDED, None  # there is no other worker
        try:
            like = self._source.spec() if self._like is None else self._like
        except DatasetError:
            return Progress.CANNOT_PAD, None
        if not all(leaf.shape for leaf in flatten(like)):
            return Progress.CANNOT_PAD, None
        return Progress.ENDED, workers.assemble([empty_like(like)] * workers.replicas_per_worker)


def _steps(readers: Sequence[DatasetIterator], replicas: int) -> Generator[Step, None, None]:
    """Yields steps, as long as there is an element for any replica."""
    try:
        while True:
            if len(readers) == replicas:
                parts = [next(reader, None) for reader in readers]
            else:
                [reader] = readers
                parts = [*islice(reader, replicas)]
                parts += [None] * (replicas - len(parts))
            present = [part for part in parts if part is not None]
            if not present:
                return
            if len(present) < replicas and not all(leaf.ndim for leaf in flatten(present[0])):
                raise DatasetError(
                    f"only {len(present)} elements are left for {replicas} replicas, and elements without "
                    "rows cannot be made empty for the others. Batch the dataset, or take() a multiple"
                )
            yield (
                [cut(present[0], 0, 0) if part is None else part for part in parts],
                [reader.state() for reader in readers],
            )
    finally:
        for reader in readers:
            reader.close()
