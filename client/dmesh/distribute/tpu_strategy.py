"""Training in step on the cores of a TPU system, whose arithmetic is NumPy's on the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dmesh.devices.device import DeviceSpec, this_client
from dmesh.distribute.placement import Placement, Replica
from dmesh.distribute.replicas import Replicas, require_initialized_clients
from dmesh.distribute.strategy import Strategy
from dmesh.errors import StrategyError, StrategyTypeError, StrategyValueError, TpuNotFoundError
from dmesh.runtime import context
from dmesh.tpu.device_assignment import DeviceAssignment
from dmesh.tpu.topology import Topology

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver

__all__ = ["TPUStrategy"]

T = TypeVar("T")
A = TypeVar("A", bound=ArrayLike)


class TPUStrategy(Strategy):
    """Replicas on the cores of a TPU system, on all clients, that train in step.

    ```python
    resolver = dmesh.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    dmesh.config.experimental_connect_to_cluster(resolver)
    topology = dmesh.tpu.experimental.initialize_tpu_system(resolver)
    strategy = dmesh.distribute.TPUStrategy(resolver)
    ```

    All clients create it, after `initialize_tpu_system`. Each core is a replica, unless an assignment gives
    each replica several cores, its logical devices. NumPy computes on the host of the client that owns them:
    placing an array on a logical device, or splitting it among several, is checked but changes nothing.

    Args:
        tpu_cluster_resolver: Resolver that found the TPU system; kept for `cluster_resolver`.
        experimental_device_assignment: Assignment of cores to replicas.
        experimental_spmd_xla_partitioning: True if a compiler would place the parts of each replica; arrays
            are not assigned to logical devices one by one then.

    Raises:
        TpuNotFoundError: No TPU system is initialized.
        StrategyTypeError: An argument has the wrong type.
        StrategyValueError: The assignment is for another TPU system, a replica has cores of several clients,
            or the clients have different numbers of replicas.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        if tpu_cluster_resolver is not None and not hasattr(tpu_cluster_resolver, "cluster_spec"):
            raise StrategyTypeError(
                "tpu_cluster_resolver must be a cluster resolver, such as TPUClusterResolver, got "
                f"{type(tpu_cluster_resolver).__name__}"
            )
        assignment = experimental_device_assignment
        if assignment is not None and not isinstance(assignment, DeviceAssignment):
            raise StrategyTypeError(
                "the device assignment must be what DeviceAssignment.build returns, got "
                f"{type(assignment).__name__}"
            )
        require_initialized_clients()
        topology = context.find(Topology)
        if topology is None:
            raise TpuNotFoundError(
                "no TPU system is initialized: call dmesh.tpu.experimental.initialize_tpu_system() before "
                "making a TPUStrategy"
            )
        self._spmd = bool(experimental_spmd_xla_partitioning)
        super().__init__(Replicas(_placement(topology, assignment)), tpu_cluster_resolver)

    # -- logical devices -------------------------------------------------------------------------------------

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Note that a value is computed on one of the logical devices of each replica.

        Args:
            tensor: The value.
            logical_device_id: Number of the device.

        Returns:
            The value itself.

        Raises:
            StrategyValueError: The replicas have no such device, or a compiler would place the values.
        """
        if self._spmd:
            raise StrategyValueError(
                "a value cannot be assigned to one logical device if a compiler places the parts of each "
                "replica: make the TPUStrategy with experimental_spmd_xla_partitioning=False"
            )
        self.extended.check_logical_device(logical_device_id, "logical_device_id")
        return tensor

    def experimental_split_to_logical_devices(self, tensor: A, partition_dimensions: Sequence[int]) -> A:
        """Note that an array is split among the logical devices of each replica.

        Args:
            tensor: The array.
            partition_dimensions: Into how many parts each of its dimensions is split.

        Returns:
            The array itself.

        Raises:
            StrategyValueError: It cannot be split so evenly, or there are more or fewer parts than logical
                devices.
        """
        parts = [int(part) for part in partition_dimensions]
        shape = np.shape(tensor)
        if len(parts) != len(shape):
            raise StrategyValueError(
                f"partition_dimensions must have a number for each of the {len(shape)} dimensions of the "
                f"array, got {parts}"
            )
        for axis, (length, part) in enumerate(zip(shape, parts, strict=True)):
            if part < 1 or length % part:
                raise StrategyValueError(
                    f"dimension {axis} of the array has length {length}, which cannot be split into {part} "
                    f"equal parts, as partition_dimensions {parts} asks"
                )
        count = self.extended.num_logical_devices
        if np.prod(parts, dtype=int) != count:
            raise StrategyValueError(
                f"partition_dimensions {parts} makes {np.prod(parts, dtype=int)} parts, but each replica has "
                f"{count} logical devices; the numbers must be the same"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Note that a value is on all logical devices of each replica; returns the value itself."""
        return tensor


def _placement(topology: Topology, assignment: DeviceAssignment | None) -> Placement:
    """Return the placement of the replicas on clients."""
    if assignment is not None and assignment.topology != topology:
        raise StrategyValueError(
            f"the device assignment is for {assignment.topology!r}, but the initialized TPU system is "
            f"{topology!r}: build it for what initialize_tpu_system returned"
        )
    job, client, num_clients = this_client()
    if topology.num_tasks != num_clients:
        raise StrategyError(
            f"the TPU system has {topology.num_tasks} tasks, but there are {num_clients} clients: each "
            "of them must be one of its tasks"
        )
    cores = (
        topology.device_coordinates.reshape(-1, 1, topology.mesh_rank)
        if assignment is None
        else assignment.core_assignment
    )
    replicas = []
    for number, coordinates in enumerate(cores):
        owners = [topology.task_ordinal_at_coordinates(core) for core in coordinates]
        if len(set(owners)) > 1:
            raise StrategyValueError(
                f"replica {number} has cores of the clients {sorted(set(owners))}; a replica is computed by "
                "one client. Choose another computation_shape, or have fewer clients"
            )
        names = [
            DeviceSpec(job, 0, owner, "TPU", topology.tpu_device_ordinal_at_coordinates(core)).to_string()
            for owner, core in zip(owners, coordinates, strict=True)
        ]
        replicas.append(Replica(number, owners[0], tuple(names)))
    return Placement(tuple(replicas), client, num_clients)
