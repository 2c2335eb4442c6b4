"""The functions that distribute input. `Strategy` has them as methods."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from dmesh.data.dataset import Dataset
from dmesh.data.options import AutoShardPolicy
from dmesh.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, walk
from dmesh.distribute.input_dataset import DistributedDataset
from dmesh.distribute.input_options import InputContext, InputOptions, InputReplicationMode, ValueContext
from dmesh.distribute.input_reading import WorkerInput
from dmesh.distribute.input_sharding import divide, effective_policy
from dmesh.distribute.input_workers import BY_FUNCTION, InputWorkers, WorkerFacts
from dmesh.distribute.values import PerReplica
from dmesh.errors import ArgumentTypeError, DatasetError, InputModeError
from dmesh.structure import map_structure

__all__ = [
    "distribute_datasets_from_function",
    "experimental_distribute_dataset",
    "experimental_distribute_values_from_function",
]

_AHEAD = 2
"""Default number of prefetched steps."""


def experimental_distribute_dataset(
    workers: InputWorkers, dataset: Any, options: InputOptions | None = None
) -> DistributedDataset:
    """Divides a dataset of global batches among all replicas.

    Args:
        workers: Workers that take part.
        dataset: A `dmesh.data.Dataset`, or anything else that yields structures of NumPy arrays each time
            it is iterated. Every element is a batch for all replicas together.
        options: Options of its distribution.

    Returns:
        Iterable that yields a distributed value in each step.

    Raises:
        InputModeError: The options ask for a pipeline for each replica.
        ArgumentTypeError: The argument is not a dataset, or can be read only once.
        ShardingError: The dataset cannot be divided as its own options ask.
    """
    options = _checked(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InputModeError(
            "InputReplicationMode.PER_REPLICA can be had with distribute_datasets_from_function only, not "
            "for a dataset that is divided"
        )
    node = Dataset.from_iterable(dataset).node
    given = Dataset(node).options().experimental_distribute.auto_shard_policy
    policy = effective_policy(node, given, workers.num_workers)
    mine = divide(node, policy, workers.num_workers, workers.replicas_per_worker, workers.worker_index)
    source = WorkerInput(
        workers,
        [mine],
        _facts(workers, [mine], policy, node.batch_size()),
        element_source=node,
        ahead=_ahead(options),
        same_order=policy in (AutoShardPolicy.DATA, AutoShardPolicy.HINT),
    )
    return DistributedDataset(source)


def distribute_datasets_from_function(
    workers: InputWorkers, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
) -> DistributedDataset:
    """Distributes the datasets that a function makes: one for each worker.

    Nothing is divided: in each step, every replica takes the next element of its worker's dataset.

    Args:
        workers: Workers that take part.
        dataset_fn: Function that is called once, with an `InputContext`, and returns a dataset whose
            elements are batches for one replica.
        options: Options of their distribution.

    Returns:
        Iterable that yields a distributed value in each step.

    Raises:
        InputModeError: The options ask for a pipeline for each replica, which this strategy does not have.
        DatasetError: The options contradict each other.
        ArgumentTypeError: `dataset_fn` is no function, or did not return a dataset.
    """
    options = _checked(options)
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and not (workers.allow_per_replica and workers.num_workers == 1):
        raise InputModeError(
            "InputReplicationMode.PER_REPLICA needs a strategy of a single worker without TPUs; use "
            "PER_WORKER"
        )
    if options.experimental_place_dataset_on_device:
        if not per_replica:
            raise DatasetError(
                "experimental_place_dataset_on_device needs InputReplicationMode.PER_REPLICA, so that each "
                "device has a dataset"
            )
        if options.experimental_fetch_to_device:
            raise DatasetError(
                "experimental_place_dataset_on_device and experimental_fetch_to_device exclude each other: "
                "set the latter to False"
            )
    if not callable(dataset_fn):
        raise ArgumentTypeError(
            f"dataset_fn must be a function that takes an InputContext, got {type(dataset_fn).__name__}"
        )
    replicas = workers.replicas_per_worker
    pipelines, index = (replicas, 0) if per_replica else (workers.num_workers, workers.worker_index)
    nodes: list[Node] = []
    for pipeline in range(index, replicas) if per_replica else (index,):
        made = dataset_fn(InputContext(pipelines, pipeline, workers.num_replicas_in_sync))
        if made is None:
            raise ArgumentTypeError("dataset_fn returned None; it must return a dataset")
        nodes.append(Dataset.from_iterable(made).node)
    source = WorkerInput(
        workers,
        nodes,
        _facts(workers, nodes, BY_FUNCTION, None),
        element_source=nodes[0],
        ahead=_ahead(options),
        same_order=False,
    )
    return DistributedDataset(source)


def experimental_distribute_values_from_function(
    workers: InputWorkers, value_fn: Callable[[ValueContext], Any]
) -> Any:
    """Returns the distributed value that a function makes, called once for each replica of this worker.

    Args:
        workers: Workers that take part.
        value_fn: Function that takes a `ValueContext` and returns the replica's value or structure of values.

    Raises:
        ArgumentTypeError: It is no function.
    """
    if not callable(value_fn):
        raise ArgumentTypeError(
            f"value_fn must be a function that takes a ValueContext, got {type(value_fn).__name__}"
        )
    first = workers.worker_index * workers.replicas_per_worker
    values = [
        value_fn(ValueContext(replica, workers.num_replicas_in_sync))
        for replica in range(first, first + workers.replicas_per_worker)
    ]
    if len(values) > 1:
        return workers.assemble(values)
    return map_structure(lambda leaf: PerReplica((leaf,)), values[0])


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise ArgumentTypeError(
            f"options must be dmesh.distribute.InputOptions, got {type(options).__name__}"
        )
    return options


def _ahead(options: InputOptions) -> int:
    if not options.experimental_fetch_to_device:
        return 0
    size = options.experimental_per_replica_buffer_size
    return _AHEAD if size < 0 else size


def _has_no_end(node: Node) -> bool:
    """Returns whether a pipeline surely has no end. A repetition ends if its source turns out to be empty."""
    sizes = [below.cardinality() for below in walk(node)]
    return sizes[0] == INFINITE_CARDINALITY and UNKNOWN_CARDINALITY not in sizes


def _facts(workers: InputWorkers, nodes: list[Node], way: int, batch_size: int | None) -> WorkerFacts:
    return WorkerFacts(
        replicas=workers.replicas_per_worker,
        endless=int(all(map(_has_no_end, nodes))),
        way=way,
        batch_size=-1 if batch_size is None else batch_size,
        epoch=0,
        entropy=secrets.randbits(63),
    )
