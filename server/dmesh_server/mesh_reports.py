"""Meshes as members announce them: read from the wire, with nothing in them that could not be a mesh.

What is kept is as short as what was sent: runs are never spread out here, for a few bytes can stand for a
million devices.
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
    """How many tasks."""
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
    """How many devices."""

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
    """Whose its devices are, of the member's job; empty if it did not say."""
    own: tuple[PlaceRun, ...] = ()
    """Where the member's own devices are; empty if it did not say, or has none."""

    @property
    def size(self) -> int:
        """How many devices there are in it, at most `MOST_DEVICES`."""
        return math.prod(size for _, size in self.axes)


def read_mesh(message: pb.AnnouncedMesh) -> MeshReport | None:
    """Reads a mesh; None if there cannot be one. What it says of its devices is left out if it is wrong."""
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
        # ... and below what a device index can be on the wire, so that no sum of theirs is beyond it
        and run.device + run.count <= _MOST_INDEX
        for run in runs
    )  # fmt: skip
    return runs if sound and sum(run.count for run in runs) <= size else ()
