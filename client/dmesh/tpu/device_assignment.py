"""Assignment of a TPU system's cores to the replicas of a program."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmesh.errors import TopologyError
from dmesh.tpu.rings import chip_ring
from dmesh.tpu.topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """Order in which `DeviceAssignment.build` assigns cores."""

    AUTO = 0
    """As rings where the replicas fill the system, as a mesh elsewhere."""
    RING = 1
    """Replicas, and the chips of each replica, along rings."""
    MESH = 2
    """Replicas, and the chips of each replica, row by row."""


class DeviceAssignment:
    """Maps the logical cores of each replica of a computation to the cores of a TPU system.

    `DeviceAssignment.build` finds such a mapping.

    Args:
        topology: The TPU system.
        core_assignment: Coordinates of the core for each replica and logical core: integers of shape
            `[replicas, cores per replica, 4]`.

    Raises:
        TopologyError: The arguments are invalid, or no device is at some of the coordinates.
    """

    __slots__ = ("_core_assignment", "_replicas", "_topology")

    def __init__(self, topology: Topology, core_assignment: ArrayLike) -> None:
        if not isinstance(topology, Topology):
            raise TopologyError(
                f"topology must be a Topology, as initialize_tpu_system() returns it; got {topology!r:.200}"
            )
        cores = _integers("core_assignment", core_assignment)
        if cores.ndim != 3:
            raise TopologyError(
                "core_assignment must have 3 dimensions, [replicas, cores per replica, "
                f"{topology.mesh_rank}]; got shape {list(cores.shape)}"
            )
        if cores.shape[2] != topology.mesh_rank:
            raise TopologyError(
                f"the last dimension of core_assignment must be {topology.mesh_rank}, the rank of the "
                f"topology; got shape {list(cores.shape)}"
            )
        self._topology = topology
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, row in enumerate(cores.tolist()):
            for core, place in enumerate(row):
                task = topology.task_ordinal_at_coordinates(place)
                self._replicas.setdefault((task, core), []).append(replica)
        self._core_assignment = cores.astype(np.int32)
        self._core_assignment.flags.writeable = False

    @property
    def topology(self) -> Topology:
        """The TPU system."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """Number of logical cores of each replica."""
        return int(self._core_assignment.shape[1])

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(self._core_assignment.shape[0])

    @property
    def core_assignment(self) -> NDArray[np.int32]:
        """The coordinates of each core: int32 of shape `[num_replicas, num_cores_per_replica, 4]`."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates x, y, z and core of a logical core of a replica.

        Raises:
            IndexError: There is no such replica or logical core.
        """
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas, in ascending order, whose logical core `logical_core` is in a task.

        Raises:
            TopologyError: There is none.
        """
        replicas = self._replicas.get((task_id, logical_core))
        if replicas is None:
            raise TopologyError(
                f"no replica has its logical core {logical_core} in task {task_id}; there are "
                f"{self.num_replicas} replicas of {self.num_cores_per_replica} cores in "
                f"{len({task for task, _ in self._replicas})} of {self._topology.num_tasks} tasks"
            )
        return list(replicas)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number, within its task, of the device that is a logical core of a replica.

        Raises:
            IndexError: There is no such replica or logical core.
        """
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the CPU beside a logical core of a replica.

        Raises:
            IndexError: There is no such replica or logical core.
        """
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the device that is a logical core of a replica.

        Raises:
            IndexError: There is no such replica or logical core.
        """
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: Sequence[int] | NDArray[np.integer] | None = None,
        computation_stride: Sequence[int] | NDArray[np.integer] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Packs replicas into a TPU system, each a compact block of cores.

        Args:
            topology: The TPU system, or its serialized form.
            computation_shape: Sizes of a replica's block along x, y, z and core; one core if None.
            computation_stride: Distances of a block's neighbours along x, y, z and core; 1 each if None.
            num_replicas: How many replicas there are.
            device_order_mode: The order in which cores are handed out.

        Raises:
            TopologyError: The arguments are invalid, or the replicas do not fit.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        if not isinstance(topology, Topology):
            raise TopologyError(f"topology must be a Topology or its serialized bytes; got {topology!r:.200}")
        blocks = _Blocks(topology, computation_shape, computation_stride, num_replicas)
        cores = blocks.in_order(_checked_mode(device_order_mode))
        return DeviceAssignment(topology, cores)

    def __repr__(self) -> str:
        return (
            f"<DeviceAssignment of {self.num_replicas} replicas with {self.num_cores_per_replica} cores each>"
        )


class _Blocks:
    """Blocks of cores, of equal shape, that are packed into a topology."""

    def __init__(
        self,
        topology: Topology,
        computation_shape: Sequence[int] | NDArray[np.integer] | None,
        computation_stride: Sequence[int] | NDArray[np.integer] | None,
        num_replicas: int,
    ) -> None:
        self.topology = topology
        mesh = topology.mesh_shape.tolist()
        shape = _vector("computation_shape", computation_shape, len(mesh))
        stride = _vector("computation_stride", computation_stride, len(mesh))
        for name, values in (("computation_shape", shape), ("computation_stride", stride)):
            if min(values) < 1:
                raise TopologyError(f"{name} must be positive integers; got {values}")
        footprint = [size * step for size, step in zip(shape, stride, strict=True)]
        if any(size > available for size, available in zip(footprint, mesh, strict=True)):
            raise TopologyError(
                f"a replica takes {footprint} cores (computation_shape {shape} * computation_stride "
                f"{stride}), which does not fit into a TPU system of shape {mesh}"
            )
        # Blocks with a stride leave room for others between their cores.
        counts = [
            available // size * step for available, size, step in zip(mesh, footprint, stride, strict=True)
        ]
        self.mesh, self.shape, self.stride, self.footprint, self.counts = (
            mesh,
            shape,
            stride,
            footprint,
            counts,
        )
        self.num_replicas = _checked_replicas(num_replicas)
        if self.num_replicas > math.prod(counts):
            raise TopologyError(
                f"{num_replicas} replicas are asked for, but only {math.prod(counts)} of shape {shape} with "
                f"computation_stride {stride} fit into a TPU system of shape {mesh}"
            )

    def in_order(self, mode: DeviceOrderMode) -> NDArray[np.int64]:
        """Returns the coordinates of each replica's cores: `[replicas, cores, 4]`."""
        if len(self.topology.missing_devices):
            return self._around_missing_devices()
        ring = (
            self.shape[-1] == self.mesh[-1]
            and math.prod(self.stride) == 1
            and self.num_replicas == math.prod(self.counts)
        )
        if mode == DeviceOrderMode.RING and not ring:
            raise TopologyError(
                "DeviceOrderMode.RING is for replicas that fill the TPU system, without a stride and with "
                f"all cores of their chips; {self.num_replicas} replicas of shape {self.shape} with stride "
                f"{self.stride} in a system of shape {self.mesh} are not that. Use DeviceOrderMode.AUTO"
            )
        if ring and mode != DeviceOrderMode.MESH:
            return self._along_rings()
        return self._row_by_row()

    def _along_rings(self) -> NDArray[np.int64]:
        cores = range(self.shape[-1])
        block = np.array([(*chip, core) for chip in chip_ring(self.shape[:3]) for core in cores])
        corners = np.array([(*place, 0) for place in chip_ring(self._replica_shape()[:3])])
        cores_of_replicas: NDArray[np.int64] = corners[:, np.newaxis] * np.array(self.shape) + block
        return cores_of_replicas

    def _row_by_row(self) -> NDArray[np.int64]:
        steps = [range(0, size, step) for size, step in zip(self.footprint, self.stride, strict=True)]
        block = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, len(steps))
        x, y, z, cores = self._replica_shape()
        # The core varies fastest, then x, y and z.
        numbers = np.arange(self.num_replicas)
        core, chip = numbers % cores, numbers // cores
        places = np.stack([chip % x, chip // x % y, chip // x // y % z, core], axis=-1)
        corners = places // self.stride * self.footprint + places % self.stride
        cores_of_replicas: NDArray[np.int64] = corners[:, np.newaxis] + block
        return cores_of_replicas

    def _around_missing_devices(self) -> NDArray[np.int64]:
        """Hands out the devices that there are, task by task."""
        if math.prod(self.stride) != 1:
            raise TopologyError(
                f"computation_stride {self.stride} needs a complete TPU system, but "
                f"{len(self.topology.missing_devices)} of its devices are missing; leave the stride out"
            )
        devices = self.topology.device_coordinates.reshape(-1, self.topology.mesh_rank).astype(np.int64)
        per_replica = math.prod(self.shape)
        if self.num_replicas * per_replica > len(devices):
            raise TopologyError(
                f"{self.num_replicas} replicas of {per_replica} cores are asked for, but only {len(devices)} "
                f"devices are left of the TPU system of shape {self.mesh}"
            )
        return devices[: self.num_replicas * per_replica].reshape(self.num_replicas, per_replica, -1)

    def _replica_shape(self) -> list[int]:
        """Returns how many replicas lie along each axis: as near to a cube as the system allows.

        The shortest axes come first, because they allow the least; among equal ones the core, so that a
        chip's cores belong together, then x, y and z.
        """
        sides = [1] * len(self.counts)
        left = self.num_replicas
        order = sorted(range(len(sides)), key=lambda axis: (self.counts[axis], (axis + 1) % len(sides)))
        for done, axis in enumerate(order):
            side = math.ceil(left ** (1 / (len(sides) - done)))
            sides[axis] = max(1, min(side, self.counts[axis]))
            left = -(-left // sides[axis])
        return sides


def _checked_mode(mode: object) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(mode)  # type: ignore[arg-type]  # whether it is one is the question
    except ValueError:
        raise TopologyError(
            f"device_order_mode is {mode!r:.200}; expected DeviceOrderMode.AUTO, RING or MESH"
        ) from None


def _checked_replicas(num_replicas: object) -> int:
    try:
        number = -1 if isinstance(num_replicas, bool) else operator.index(num_replicas)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise TopologyError(f"num_replicas is {num_replicas!r:.200}; expected an integer from 0 up")
    return number


def _vector(name: str, values: object, rank: int) -> list[int]:
    vector = np.ones(rank, np.int64) if values is None else _integers(name, values)
    if vector.shape != (rank,):
        raise TopologyError(
            f"{name} must be {rank} integers, for x, y, z and core; got shape {list(vector.shape)}"
        )
    return [int(value) for value in vector.tolist()]


def _integers(name: str, values: object) -> NDArray[np.int64]:
    """Reads an array of integers of any shape."""
    try:
        array: NDArray[np.generic] = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise TopologyError(f"{name} must be integers in rows of equal length: {error}") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TopologyError(f"{name} must be integers; got dtype {array.dtype}")
    return array.astype(np.int64)
