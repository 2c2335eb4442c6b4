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
    """One on each worker, whose elements go to its replicas in turn."""
    PER_REPLICA = "PER_REPLICA"
    """One for each replica; with `distribute_datasets_from_function` on a single worker only."""


@dataclass(frozen=True)
class InputOptions:
    """Options of distributed input.

    Raises:
        ArgumentTypeError: An option has the wrong type.
        DatasetError: The buffer size is less than -1.
    """

    experimental_fetch_to_device: bool = True
    """True if elements are made ahead, in a thread, and wait for the replicas in buffers."""
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """Number of input pipelines."""
    experimental_place_dataset_on_device: bool = False
    """Accepted where TensorFlow accepts it; without effect, as devices compute on the host here."""
    experimental_per_replica_buffer_size: int = 1
    """Number of elements that may wait for each replica; 0 for none, -1 for a number that suits."""

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
    """Number of replicas, of all workers together."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns a replica's part of a batch of all replicas together.

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
    """Number of the replica that the value is for, from 0, counted through all workers."""
    num_replicas_in_sync: int = 1
    """Number of replicas, of all workers together."""

    def __str__(self) -> str:
        return (
            f"dmesh.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )

    __repr__ = __str__
