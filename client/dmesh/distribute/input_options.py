"""Options of the functions that distribute input, and the arguments of the user's functions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dmesh.data.elements import check_integer
from dmesh.errors import ArgumentTypeError, DatasetError

__all__ = ["InputContext", "InputOptions", "InputReplicationMode", "ValueContext"]


class InputReplicationMode(enum.Enum):
    """Number of input pipelines."""

    PER_WORKER = "PER_WORKER"
    """One pipeline on each worker, whose elements go to its replicas in turn."""
    PER_REPLICA = "PER_REPLICA"
    """One pipeline for each replica; only with `distribute_datasets_from_function` on a single worker."""


@dataclass(frozen=True)
class InputOptions:
    """Options of distributed input.

    Raises:
        ArgumentTypeError: An option has the wrong type.
        DatasetError: The buffer size is less than -1.
    """

    experimental_fetch_to_device: bool = True
    """True to prefetch elements in a thread, into buffers for the replicas."""
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """Number of input pipelines."""
    experimental_place_dataset_on_device: bool = False
    """Ignored; for compatibility with TensorFlow. dmesh's devices compute on the host."""
    experimental_per_replica_buffer_size: int = 1
    """Maximum number of prefetched elements for each replica; 0 for none, -1 for a number chosen by dmesh."""

    def __post_init__(self) -> None:
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise ArgumentTypeError(
                "experimental_replication_mode must be a dmesh.distribute.InputReplicationMode, got "
                f"{self.experimental_replication_mode!r:.80}"
            )
        check_integer(
            "experimental_per_replica_buffer_size", self.experimental_per_replica_buffer_size, least=-1
        )


@dataclass(frozen=True, repr=False)
class InputContext:
    """Argument of a function that makes a worker's dataset; see `distribute_datasets_from_function`."""

    num_input_pipelines: int = 1
    """Number of input pipelines: one for each worker."""
    input_pipeline_id: int = 0
    """Index of this pipeline, from 0."""
    num_replicas_in_sync: int = 1
    """Total number of replicas of all workers."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the size of a replica's part of a global batch.

        Raises:
            DatasetError: It cannot be divided evenly.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise DatasetError(
                f"global_batch_size {global_batch_size} cannot be divided by num_replicas_in_sync "
                f"{self.num_replicas_in_sync}; choose a multiple of it"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"dmesh.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class ValueContext:
    """Argument of a function that makes a replica's value."""

    replica_id_in_sync_group: int = 0
    """Index of the replica for which the value is, among all workers' replicas."""
    num_replicas_in_sync: int = 1
    """Total number of replicas of all workers."""

    def __str__(self) -> str:
        return (
            f"dmesh.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )

    __repr__ = __str__
