"""Meshes put together from what members announced: each tells where its own devices are.

Pure functions. Whoever announces something can tell of its own devices alone: who says that it has a place
which the mesh gives to another, or that another one has, is not believed.
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
"""Runs of a placement; what comes after them is left out."""

UNKNOWN = -1
"""Of a device, whose owner or index nobody has told."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A mesh as one member announced it."""

    task: Task
    present: bool
    """Whether the member has not departed; what a departed one said of its devices still holds."""
    mesh: MeshReport


@dataclass(frozen=True, slots=True)
class Run:
    """Devices of one task that follow each other in a mesh, by rising index."""

    task: int
    """Its index, or UNKNOWN."""
    device: int
    """Index of the first among its devices of that type, or UNKNOWN: of none is the index known."""
    count: int
    """How many."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A mesh of a job, as all its members announced it."""

    mesh: MeshReport
    """Its name, axes, type and owners."""
    job: str
    """The job of those who have it."""
    by: tuple[Announcement, ...]
    """Who announced it, by task."""

    @property
    def present(self) -> int:
        """How many announced it that have not departed."""
        return sum(1 for one in self.by if one.present)


def gather(effect_logging: Iterable[Announcement]) -> Generator[None, None, list[Announced]]:
    """Returns the meshes that members announced which have not departed, those of most members first.

    In short steps, and in a time that grows with the announcements alone: all may differ in their owners.
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
        # Who does not say whose the devices are means the mesh of the others.
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
    """Returns who has a mesh's devices, in its order; None if nobody said, or there are too many.

    Args:
        announced: The mesh.
        slots: How many tasks each job has.
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
