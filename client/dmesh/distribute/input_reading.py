"""Reading of one worker's input for its replicas, in pace with the steps of the other workers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

from dmesh.data.batching import cut
from dmesh.data.elements import empty_like
from dmesh.data.pipeline import Node, opened, transform, uneven
from dmesh.data.prefetching import Prefetcher
from dmesh.distribute.input_sharding import with_entropy
from dmesh.distribute.input_workers import InputWorkers, Progress, WorkerFacts
from dmesh.errors import DatasetError
from dmesh.structure import flatten

__all__ = ["Reading", "WorkerInput"]

Step = list[Any]
"""An element for each replica of this worker."""


class WorkerInput:
    """Input of one worker, which can be read again and again.

    Args:
        workers: Who takes part.
        pipelines: One, of which the worker's replicas take elements in turn, or one for each of them.
        facts: What this worker tells the others.
        element_source: What a replica's elements look like, but for the number of rows.
        ahead: How many steps are made ahead; 0 for none.
        same_order: Whether shuffles without a seed must have the same order on all workers.
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
            self._spec = uneven(spec) if self.workers.num_replicas_in_sync > 1 else spec
        return self._spec

    def begin(self) -> Reading:
        """Agrees with the other workers on another reading, and begins it.

        Raises:
            DatasetError: The inputs of the workers do not go together.
        """
        said = self.workers.exchange(self._facts)
        self._facts = self._facts._replace(epoch=self._facts.epoch + 1)
        if self._entropy is None:
            # Also when nothing needs it: fresh pipelines count their readings from here, on all workers.
            self._entropy = said[0].entropy
            self._pipelines = tuple(self._fresh(pipeline, self._entropy) for pipeline in self._pipelines)
        return Reading(self, self._pipelines, endless=all(facts.endless for facts in said))

    def _fresh(self, pipeline: Node, entropy: int) -> Node:
        return with_entropy(pipeline, entropy) if self._same_order else transform(pipeline, lambda node: node)


class Reading:
    """One reading of a worker's input, in step with those of the other workers.

    Args:
        source: What is read.
        pipelines: Its pipelines, for this reading.
        endless: Whether no worker's input has an end, so that they need not agree on each step.
    """

    def __init__(self, source: WorkerInput, pipelines: Sequence[Node], *, endless: bool) -> None:
        self._source = source
        self._endless = endless
        self._last: Step | None = None
        replicas = source.workers.replicas_per_worker
        # The thread must not hold this object, with which it ends.
        self._steps = (
            Prefetcher(lambda: _steps(pipelines, replicas), source.ahead, "dmesh-input")
            if source.ahead
            else _steps(pipelines, replicas)
        )

    def next(self) -> tuple[Any] | None:
        """Returns the distributed value of the next step, in a tuple; None if no worker has elements."""
        parts: Step | None = None
        progress, error, value = Progress.ENDED, None, None
        try:
            parts = next(self._steps, None)
            if parts is not None:
                progress, value, self._last = Progress.ELEMENTS, self._source.workers.assemble(parts), parts
            elif not self._endless:
                progress, value = self._nothing()
        except Exception as failure:  # noqa: BLE001 -- raised once the other workers know
            progress, error = Progress.FAILED, failure
        if self._endless:
            if error is not None:
                raise error
            return None if parts is None else (value,)
        return (value,) if self._source.workers.go_on(progress, error) else None

    def close(self) -> None:
        """Ends the reading and its thread."""
        if isinstance(self._steps, Prefetcher):
            self._steps.stop()
        else:
            self._steps.close()

    def _nothing(self) -> tuple[Progress, Any]:
        """Returns the distributed value of elements without rows, if there can be one."""
        workers = self._source.workers
        if workers.num_workers == 1:
            return Progress.ENDED, None  # nobody goes on without this worker
        try:
            like = self._source.spec() if self._last is None else self._last[0]
        except DatasetError:
            return Progress.CANNOT_PAD, None
        if not all(leaf.shape for leaf in flatten(like)):
            return Progress.CANNOT_PAD, None
        return Progress.ENDED, workers.assemble([empty_like(like)] * workers.replicas_per_worker)


def _steps(pipelines: Sequence[Node], replicas: int) -> Generator[Step, None, None]:
    """Yields an element for each replica, as long as there is one for any of them."""
    with ExitStack() as stack:
        readings = [stack.enter_context(opened(pipeline)) for pipeline in pipelines]
        while True:
            if len(readings) == replicas:
                parts = [next(reading, None) for reading in readings]
            else:
                [reading] = readings
                parts = [*islice(reading, replicas)]
                parts += [None] * (replicas - len(parts))
            present = [part for part in parts if part is not None]
            if not present:
                return
            if len(present) < replicas and not all(leaf.ndim for leaf in flatten(present[0])):
                raise DatasetError(
                    f"only {len(present)} elements are left for {replicas} replicas, and elements without "
                    "rows cannot be made empty for the others. Batch the dataset, or take() a multiple"
                )
            yield [cut(present[0], 0, 0) if part is None else part for part in parts]
