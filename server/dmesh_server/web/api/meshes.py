"""Meshes put together from members' announcements of their own devices' positions.

Pure functions. An announcement counts only for the member's own devices: a claim to a position that the mesh
gives to another task, or a claim about another task's devices, is ignored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice

from dmesh_server.core.model import Task
from dmesh_server.mesh_reports import MeshReport, OwnerRun

MOST_PLACED = 1 << 15
"""Devices of a mesh up to which they are shown one by one."""
MOST_RUNS = 5_000
"""Most runs of a placement; later ones are left out."""

UNKNOWN = -1
"""Owner or index of a device that no member announced."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A mesh as one member announced it."""

    task: Task
    present: bool
    """False if the member has departed; its announcement of its own devices still holds."""
    mesh: MeshReport


@dataclass(frozen=True, slots=True)
class Run:
    """Devices of one task that follow each other in a mesh, by rising index."""

    task: int
    """Its index, or UNKNOWN."""
    device: int
    """Index of the first among its devices of that type, or UNKNOWN: of none is the index known."""
    count: int
    """Number of devices."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A mesh of a job, as all its members announced it."""

    mesh: MeshReport
    """Its name, axes, type and owners."""
    job: str
    """Job of the mesh's devices."""
    by: tuple[Announcement, ...]
    """Announcements of the mesh, by task."""

    @property
    def present(self) -> int:
        """Number of announcing members that have not departed."""
        return sum(1 for one in self.by if one.present)


def gather(effect_logging: Iterable[Announcement]) -> Generator[None, None, list[Announced]]:
    """Return the meshes announced by members that have not departed, those of most members first.

    Runs in short steps, in time linear in the announcements: all of them may differ in their owners.
    """
    alike = defaultdict[tuple[object, ...], list[Announcement]](list)
    for one in effect_logging:
        mesh = one.mesh
        alike[one.task.job, mesh.name, mesh.axes, mesh.device_type].append(one)
        yield
    found = list[tuple[int, Announced]]()
    for ones in alike.values():
        variants = Counter[tuple[OwnerRun, ...]]()
        for one in ones:
            if one.mesh.owners:
                variants[one.mesh.owners] += 1
            yield
        # An announcement without owners joins the mesh of the others.
        usual = max(variants, key=variants.__getitem__, default=())
        by: dict[tuple[OwnerRun, ...], list[Announcement]] = {owners: [] for owners in variants or (usual,)}
        for one in ones:
            by[one.mesh.owners or usual].append(one)
            yield
        for owners, members in by.items():
            first = next(one.mesh for one in members if one.mesh.owners == owners)
            announced = Announced(first, ones[0].task.job, tuple(members))
            if present := announced.present:
                found.append((present, announced))
            yield
    found.sort(key=lambda one: -one[0])
    return [announced for _, announced in found]


def place(announced: Announced, slots: Mapping[str, int]) -> list[Run] | None:
    """Return the owners of a mesh's devices, in its order; None if not announced, or too many.

    Args:
        announced: The mesh.
        slots: Number of tasks in each job.
    """
    size, tasks = announced.mesh.size, slots.get(announced.job, 0)
    if size > MOST_PLACED:
        return None
    owners = announced.mesh.owners
    if any(max(run.task, run.last) >= tasks for run in owners):
        owners = ()
    holders = _spread(owners, size)
    # Of each device, its index less its place: along a run of neighbours it does not change.
    offsets: list[int | None] = [None] * size
    shares, room = Counter[int](holders), 2 * size
    for one in announced.by:
        claimed = sum(run.count for run in one.mesh.own)
        room -= claimed
        # However many members claim the whole of it, looking at it costs no more than twice its size.
        if claimed > shares[one.task.index] if owners else room < 0:
            continue
        for run in one.mesh.own:
            where = slice(run.place, run.last + 1, run.stride)
            expected = one.task.index if owners else UNKNOWN
            if holders[where].count(expected) != run.count:
                continue
            if not owners:
                holders[where] = [one.task.index] * run.count
            first = run.device - run.place
            last = run.device + run.count - 1 - run.last
            offsets[where] = range(first, last - 1, 1 - run.stride) if run.stride > 1 else [first] * run.count
    runs = list(islice(_runs(holders, offsets), MOST_RUNS))
    return runs if any(run.task != UNKNOWN for run in runs) else None


def _spread(owners: Iterable[OwnerRun], size: int) -> list[int]:
    holders = [
        run.task + run.step * number for run in owners for number in range(run.tasks) for _ in range(run.each)
    ]
    return holders or [UNKNOWN] * size


def _runs(holders: Iterable[int], offsets: Iterable[int | None]) -> Iterator[Run]:
    at = 0
    for (task, offset), devices in groupby(zip(holders, offsets, strict=True)):
        count = sum(1 for _ in devices)
        yield Run(task, UNKNOWN if offset is None else offset + at, count)
        at += count
