"""Positions of a TPU system's cores, and the tasks that have them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike, NDArray

from dmesh.errors import CoordinateError, TopologyError
from dmesh.v1 import topology_pb2

RANK = 4
"""Coordinates of a core: x, y and z of its chip, and its number on the chip."""

_MOST_CORES = 2**20
"""More than any TPU system has; what is read is refused before memory is reserved for more."""
_LONGEST_MESSAGE = 2**26


class Topology:
    """Cores of a TPU system: the shape of their mesh, and the task that owns each of them.

    Its bytes, `serialized()`, are those of TensorFlow's `TopologyProto`. Topologies are values: immutable,
    equal if shape and coordinates are, and usable as keys.

    Args:
        serialized: The bytes of a `TopologyProto`. If given, the other arguments are ignored.
        mesh_shape: How many chips lie along x, y and z, and how many cores each has: 4 positive integers.
        device_coordinates: The coordinates of every device: integers of shape `[tasks, devices, 4]`. Every
            task has equally many devices; places of the mesh that no device is at are missing devices.

    Raises:
        TopologyError: The arguments, or the bytes, describe no topology.
    """

    __slots__ = (
        "_device_coordinates",
        "_device_ordinals",
        "_mesh_shape",
        "_missing_devices",
        "_serialized",
        "_task_ordinals",
    )

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | NDArray[np.integer] | None = None,
        device_coordinates: ArrayLike | None = None,
    ) -> None:
        if serialized is not None:
            mesh_shape, device_coordinates = _parse(serialized)
            serialized = bytes(serialized)
        self._serialized = serialized
        self._mesh_shape = _checked_shape(mesh_shape)
        self._device_coordinates = _checked_coordinates(device_coordinates, self._mesh_shape)
        self._task_ordinals, self._device_ordinals = _ordinals(self._mesh_shape, self._device_coordinates)
        self._missing_devices = np.argwhere(self._task_ordinals < 0)
        for array in (
            self._mesh_shape,
            self._device_coordinates,
            self._task_ordinals,
            self._device_ordinals,
            self._missing_devices,
        ):
            array.flags.writeable = False

    @property
    def mesh_shape(self) -> NDArray[np.int32]:
        """Numbers of chips along x, y and z, and of cores of each: int32 of shape `[4]`."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> NDArray[np.int32]:
        """The coordinates x, y, z and core of every device: int32 of shape `[tasks, devices, 4]`."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> NDArray[np.int64]:
        """The places of the mesh that no device is at: int64 of shape `[missing, 4]`."""
        return self._missing_devices

    @property
    def num_tasks(self) -> int:
        """Number of tasks that share the devices."""
        return int(self._device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices of each task."""
        return int(self._device_coordinates.shape[1])

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int] | NDArray[np.integer]) -> int:
        """Returns the number of the task that has the device at some coordinates.

        Args:
            device_coordinates: x, y, z and core.

        Raises:
            CoordinateError: They are outside of the mesh, or the device there is missing.
        """
        return int(self._task_ordinals[self._place(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int] | NDArray[np.integer]
    ) -> int:
        """Returns the number, within its task, of the device at some coordinates.

        Args:
            device_coordinates: x, y, z and core.

        Raises:
            CoordinateError: They are outside of the mesh, or the device there is missing.
        """
        return int(self._device_ordinals[self._place(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int] | NDArray[np.integer], job: str | None = None
    ) -> str:
        """Returns the name of the CPU beside a core, such as `/job:worker/task:0/device:CPU:0`.

        Args:
            device_coordinates: x, y, z and core.
            job: The tasks' job name, left out of the name if None.

        Raises:
            CoordinateError: They are outside of the mesh, or the device there is missing.
        """
        return f"{_task_name(job, self.task_ordinal_at_coordinates(device_coordinates))}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int] | NDArray[np.integer], job: str | None = None
    ) -> str:
        """Returns the name of the device at some coordinates, such as `/job:worker/task:0/device:TPU:1`.

        Args:
            device_coordinates: x, y, z and core.
            job: The tasks' job name, left out of the name if None.

        Raises:
            CoordinateError: They are outside of the mesh, or the device there is missing.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return (
            f"{_task_name(job, task)}/device:TPU:{self.tpu_device_ordinal_at_coordinates(device_coordinates)}"
        )

    def serialized(self) -> bytes:
        """Returns the topology as a serialized `TopologyProto`; the bytes it was parsed from, if any."""
        if self._serialized is None:
            self._serialized = topology_pb2.TopologyProto(
                mesh_shape=self._mesh_shape.tolist(),
                num_tasks=self.num_tasks,
                num_tpu_devices_per_task=self.num_tpus_per_task,
                device_coordinates=self._device_coordinates.ravel().tolist(),
            ).SerializeToString(deterministic=True)
        return self._serialized

    def _place(self, coordinates: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
        """Checks that a device is at some coordinates."""
        shape = self._mesh_shape.tolist()
        try:
            place = tuple(operator.index(number) for number in coordinates)
        except TypeError as error:
            raise CoordinateError(
                f"{coordinates!r:.200} are not a core's coordinates; expected 4 integers: x, y, z and core"
            ) from error
        if len(place) != RANK or not all(0 <= at < size for at, size in zip(place, shape, strict=True)):
            raise CoordinateError(
                f"no core of this TPU system has the coordinates {list(place)}; the shape of its mesh "
                f"is {shape}"
            )
        if self._task_ordinals[place] < 0:
            raise CoordinateError(
                f"the device at the coordinates {list(place)} is missing: none of the {self.num_tasks} tasks "
                "has it"
            )
        return place

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return np.array_equal(self._mesh_shape, other._mesh_shape) and np.array_equal(
            self._device_coordinates, other._device_coordinates
        )

    def __hash__(self) -> int:
        return hash((self._mesh_shape.tobytes(), self._device_coordinates.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<Topology of {self.num_tasks} tasks with {self.num_tpus_per_task} devices each, "
            f"mesh_shape={self._mesh_shape.tolist()}>"
        )


def _parse(serialized: object) -> tuple[Sequence[int], NDArray[np.int64]]:
    """Reads the shape and the coordinates from the bytes of a `TopologyProto`."""
    if not isinstance(serialized, bytes | bytearray | memoryview):
        raise TopologyError(f"a serialized topology is bytes, got {type(serialized).__name__}")
    if len(serialized) > _LONGEST_MESSAGE:
        raise TopologyError(
            f"a serialized topology of {len(serialized)} bytes is refused; the most are {_LONGEST_MESSAGE}"
        )
    try:
        message = topology_pb2.TopologyProto.FromString(bytes(serialized))
    except DecodeError as error:
        raise TopologyError(
            f"these {len(serialized)} bytes are not a TopologyProto: {error}. They are what "
            "Topology.serialized() returns, here or in TensorFlow"
        ) from error
    shape = _checked_shape(message.mesh_shape)
    tasks, devices = message.num_tasks, message.num_tpu_devices_per_task
    if tasks < 0:
        raise TopologyError(f"the serialized topology has num_tasks={tasks}; expected 0 or more")
    if devices < 0:
        raise TopologyError(
            f"the serialized topology has num_tpu_devices_per_task={devices}; expected 0 or more"
        )
    if len(message.device_coordinates) != tasks * devices * RANK:
        raise TopologyError(
            f"the serialized topology has {len(message.device_coordinates)} numbers in device_coordinates, "
            f"but {tasks} tasks * {devices} devices * {RANK} coordinates are {tasks * devices * RANK}"
        )
    coordinates = np.array(message.device_coordinates, np.int64)
    return shape.tolist(), coordinates.reshape(tasks, devices, RANK)


def _checked_shape(mesh_shape: object) -> NDArray[np.int32]:
    problem = (
        f"mesh_shape is {mesh_shape!r:.200}; expected 4 positive integers: chips along x, y and z, cores"
    )
    try:
        sizes = [_integer(size) for size in mesh_shape]  # type: ignore[attr-defined]  # that is the question
    except TypeError as error:
        raise TopologyError(problem) from error
    if len(sizes) != RANK or min(sizes) < 1:
        raise TopologyError(problem)
    if math.prod(sizes) > _MOST_CORES:
        raise TopologyError(
            f"mesh_shape {sizes} has {math.prod(sizes)} cores; at most {_MOST_CORES} are supported"
        )
    return np.array(sizes, np.int32)


def _integer(value: SupportsIndex) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is no size")
    return operator.index(value)


def _checked_coordinates(device_coordinates: object, shape: NDArray[np.int32]) -> NDArray[np.int32]:
    problem = f"device_coordinates must be integers of shape [tasks, devices, {RANK}]; got "
    try:
        array: NDArray[np.generic] = np.asarray(device_coordinates)
    except ValueError as error:  # rows of different lengths
        raise TopologyError(f"{problem}{device_coordinates!r:.200}") from error
    if array.ndim != 3 or array.shape[2] != RANK:
        raise TopologyError(f"{problem}shape {list(array.shape)}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TopologyError(f"{problem}dtype {array.dtype}")
    if array.size // RANK > _MOST_CORES:
        raise TopologyError(f"device_coordinates has {array.size // RANK} devices; at most {_MOST_CORES}")
    coordinates = array.astype(np.int64)
    outside = np.argwhere(((coordinates < 0) | (coordinates >= shape)).any(axis=2))
    if len(outside):
        task, device = outside[0].tolist()
        raise TopologyError(
            f"device {device} of task {task} has the coordinates {coordinates[task, device].tolist()}, which "
            f"are outside of the mesh of shape {shape.tolist()}"
        )
    return coordinates.astype(np.int32)


def _ordinals(
    shape: NDArray[np.int32], coordinates: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns the task, and the device within it, at every place of the mesh; -1 where there is none."""
    tasks = np.full(shape, -1, np.int32)
    devices = np.full(shape, -1, np.int32)
    places = tuple(np.moveaxis(coordinates, -1, 0))
    numbers = np.indices(coordinates.shape[:2], np.int32)
    tasks[places], devices[places] = numbers
    clash = np.argwhere((tasks[places] != numbers[0]) | (devices[places] != numbers[1]))
    if len(clash):
        task, device = clash[0].tolist()
        place = tuple(coordinates[task, device].tolist())
        raise TopologyError(
            f"device {device} of task {task} and device {devices[place]} of task {tasks[place]} both have "
            f"the coordinates {list(place)}; each device needs a place of its own"
        )
    return tasks, devices


def _task_name(job: str | None, task: int) -> str:
    return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"
