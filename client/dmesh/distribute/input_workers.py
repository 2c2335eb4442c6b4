"""Workers of a distributed input: their numbers of replicas, and their agreement.

A worker is a client with the replicas that it runs. This is all that the input knows of a strategy.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dmesh.collectives.group import Group
from dmesh.data.options import AutoShardPolicy
from dmesh.distribute.values import regroup
from dmesh.errors import CollectiveError, DatasetError, RemoteInputError

__all__ = ["BY_FUNCTION", "InputWorkers", "Progress", "WorkerFacts"]

BY_FUNCTION = 100
"""Placeholder for an `AutoShardPolicy` if a function creates each worker's dataset."""
_LONGEST_MESSAGE = 1000
"""Maximum size of an error that is sent to the other workers, bytes."""


class Progress(enum.IntEnum):
    """Progress of a worker in a step: the elements for its replicas."""

    ENDED = 0
    """At the end: empty elements, if others continue."""
    ELEMENTS = 1
    """Elements for at least one replica."""
    CANNOT_PAD = 2
    """At the end, without empty elements: elements have no rows, or their shape is unknown."""
    FAILED = 3
    """An error."""


class WorkerFacts(NamedTuple):
    """Facts that workers exchange about their input before they read it."""

    replicas: int
    """Number of the worker's replicas."""
    endless: int
    """1 if its input is known to have no end, else 0."""
    way: int
    """Division of the dataset: a number of `AutoShardPolicy`, or `BY_FUNCTION`."""
    batch_size: int
    """Rows of an element before they are divided; -1 if not known."""
    epoch: int
    """Number of earlier readings."""
    entropy: int
    """A random number."""
    restored: int = 0
    """1 if it goes on from a state, 0 if it begins with the first element."""


_MUST_AGREE = {
    "replicas": "every worker must have the same number of replicas",
    "way": "the workers must divide their input in the same way",
    "batch_size": "all workers must make batches of the same global size",
    "restored": "all workers must restore() a state, or none",
    "epoch": "the workers must iterate over a distributed dataset equally often",
}
"""Facts that must be equal, and the message if they are not."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class InputWorkers:
    """The workers of a strategy, as one of them sees them.

    Raises:
        DatasetError: The numbers contradict each other.
    """

    num_workers: int = 1
    """Number of workers."""
    worker_index: int = 0
    """Index of this worker."""
    replicas_per_worker: int = 1
    """Number of replicas of each."""
    group: Group | None = field(default=None, repr=False)
    """The workers in order, who agree through it; None if there is one only. Calls on it are made while the
    iterator is asked for its next element, by the thread that asks."""
    assemble: Callable[[Sequence[Any]], Any] = field(default=regroup, repr=False)
    """Makes a distributed value of one structure for each of this worker's replicas."""
    in_replica: Callable[[], bool] = field(default=_never, repr=False)
    """Function that returns whether the caller is a replica's function."""
    allow_per_replica: bool = False
    """True if `InputReplicationMode.PER_REPLICA` is possible."""

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.replicas_per_worker < 1:
            raise DatasetError("there must be at least one worker and one replica")
        if not 0 <= self.worker_index < self.num_workers:
            raise DatasetError(f"worker {self.worker_index} must be from 0 to {self.num_workers - 1}")
        size, rank = (1, 0) if self.group is None else (self.group.size, self.group.rank)
        if (size, rank) != (self.num_workers, self.worker_index):
            raise DatasetError(
                f"worker {self.worker_index} of {self.num_workers} has a group in which it is {rank} of "
                f"{size}"
            )

    @property
    def num_replicas_in_sync(self) -> int:
        """Total number of replicas of all workers."""
        return self.num_workers * self.replicas_per_worker

    def exchange(self, facts: WorkerFacts) -> list[WorkerFacts]:
        """Exchanges and compares the workers' facts about their input, before it is read.

        Returns:
            What all workers said, by index.

        Raises:
            DatasetError: The workers' inputs do not go together; on all of them.
        """
        everyone = [facts] if self.group is None else self._gather_facts(self.group, facts)
        for name, explanation in _MUST_AGREE.items():
            said: list[Any] = [getattr(other, name) for other in everyone]
            if len(set(said)) > 1:
                if name == "way":
                    said = ["a function" if way == BY_FUNCTION else AutoShardPolicy(way).name for way in said]
                listed = ", ".join(f"worker {worker} has {value}" for worker, value in enumerate(said))
                self._wait_for_all()
                raise DatasetError(f"{explanation}: {listed}")
        return everyone

    @staticmethod
    def _gather_facts(group: Group, facts: WorkerFacts) -> list[WorkerFacts]:
        rows = np.asarray(group.all_gather(np.array([facts], np.int64))).reshape(group.size, -1)
        return [WorkerFacts(*(int(number) for number in row)) for row in rows]

    def go_on(self, progress: Progress, error: BaseException | None = None) -> bool:
        """Exchanges the workers' progress.

        Args:
            progress: Progress of this worker in this step.
            error: Why it failed, if it did.

        Returns:
            Whether any worker has elements for this step.

        Raises:
            RemoteInputError: Another worker's input failed.
            DatasetError: A worker has no elements, while others go on, and cannot make empty ones.
        """
        if self.group is None:
            if error is not None:
                raise error
            return progress is Progress.ELEMENTS
        said = np.asarray(self.group.all_gather(np.array([int(progress)], np.int8))).reshape(-1).tolist()
        if Progress.FAILED in said:
            raise self._failure(self.group, said, error)
        if Progress.ELEMENTS not in said:
            return False
        if Progress.CANNOT_PAD in said:
            self._wait_for_all()
            who = ", ".join(str(worker) for worker, one in enumerate(said) if one == Progress.CANNOT_PAD)
            raise DatasetError(
                f"the input of worker {who} has ended while others continue, and empty elements "
                "cannot be made for it: its elements have no rows, or it had none to learn from. Batch the "
                "datasets, give each worker at least one element, or make the dataset with an "
                "output_signature"
            )
        return True

    def _failure(self, group: Group, said: list[int], error: BaseException | None) -> BaseException:
        """Returns the error for this worker if any has failed; the others get its reason."""
        error_row = np.zeros((1, _LONGEST_MESSAGE), np.uint8)
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode(errors="replace")[:_LONGEST_MESSAGE]
            error_row[0, : len(text)] = np.frombuffer(text, np.uint8)
        messages = np.asarray(group.all_gather(error_row)).reshape(group.size, -1)
        self._wait_for_all()
        if error is not None:
            return error
        worker = said.index(Progress.FAILED)
        text = bytes(messages[worker]).rstrip(b"\0")
        return RemoteInputError(
            f"the input of worker {worker} failed, so no worker can go on: {text.decode(errors='replace')}",
            worker,
        )

    def _wait_for_all(self) -> None:
        """Waits until all workers know of a failure, before the first one ends because of it."""
        if self.group is not None:
            with contextlib.suppress(CollectiveError):  # one has ended already; what is raised says more
                self.group.barrier()
