"""Meshes as members announce them, read from the wire and checked.

Reports are kept run-length encoded as they were sent: a few bytes can stand for a million devices, so runs
are never expanded here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dmesh.v1 import progress_pb2 as pb

MOST_DEVICES = 1 << 20
"""Devices of a mesh; larger ones are taken for nonsense."""

_AXES = 64
_RUNS = 64
_NAME = 256
_MOST_INDEX = 1 << 31


@dataclass(frozen=True, slots=True)
class OwnerRun:
    """Devices of a mesh that follow each other, of tasks at even distances, of each as many."""

    task: int
    """The first of the tasks."""
    tasks: int
    """Number of tasks."""
    step: int
    """From one task to the next."""
    each: int
    """Devices of each task."""

    @property
    def last(self) -> int:
        """The last of the tasks."""
        return self.task + self.step * (self.tasks - 1)


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """Devices of one member at even distances in a mesh, by rising index."""

    place: int
    """Place of the first, from 0, in the mesh's order."""
    stride: int
    """Places from one to the next."""
    device: int
    """Index of the first; the others count up from it."""
    count: int
    """Number of devices."""

    @property
    def last(self) -> int:
        """Place of the last."""
        return self.place + self.stride * (self.count - 1)


@dataclass(frozen=True, slots=True)
class MeshReport:
    """A mesh that a member's program has made."""

    name: str
    """Its name; may be empty."""
    axes: tuple[tuple[str, int], ...]
    """Name and size of each dimension."""
    device_type: str
    """CPU, GPU or TPU."""
    owners: tuple[OwnerRun, ...] = ()
    """Owners of its devices among the tasks of the member's job; empty if unknown."""
    own: tuple[PlaceRun, ...] = ()
    """Positions of the member's own devices; empty if unknown, or if it has none."""

    @property
    def size(self) -> int:
        """Number of its devices, at most `MOST_DEVICES`."""
        return math.prod(size for _, size in self.axes)


def read_mesh(message: pb.AnnouncedMesh) -> MeshReport | None:
    """Read a mesh; None if it is malformed. Malformed runs of devices are left out."""
    axes = tuple((axis.name[:_NAME], axis.size) for axis in message.axes)
    if not 0 < len(axes) <= _AXES or any(not 0 < size <= MOST_DEVICES for _, size in axes):
        return None
    size = math.prod(size for _, size in axes)
    if size > MOST_DEVICES:
        return None
    return MeshReport(
        message.name[:_NAME],
        axes,
        message.device_type[:_NAME],
        _owners(message, size),
        _own(message, size),
    )


def _owners(message: pb.AnnouncedMesh, size: int) -> tuple[OwnerRun, ...]:
    if len(message.owners) > _RUNS:
        return ()
    runs = tuple(OwnerRun(run.task, run.tasks, run.step, run.each) for run in message.owners)
    sound = all(
        run.tasks > 0 and run.each > 0 and run.task >= 0 and 0 <= run.last < _MOST_INDEX for run in runs
    )
    return runs if sound and sum(run.tasks * run.each for run in runs) == size else ()


def _own(message: pb.AnnouncedMesh, size: int) -> tuple[PlaceRun, ...]:
    if len(message.own) > _RUNS:
        return ()
    runs = tuple(PlaceRun(run.place, run.stride, run.device, run.count) for run in message.own)
    sound = all(
        run.place >= 0 and run.stride > 0 and run.count > 0 and run.device >= 0 and run.last < size
        # ... and below a device index's bound on the wire, so that no sum of them exceeds it
        and run.device + run.count <= _MOST_INDEX
        for run in runs
    )  # fmt: skip
    return runs if sound and sum(run.count for run in runs) <= size else ()
