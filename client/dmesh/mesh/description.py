"""Description of a mesh for the dashboard: its axes, and the devices along them. Pure.

A client knows the owners of all devices of its meshes, but the devices of others only if all are listed by
name. So it names the owner of each position, and the positions of its own devices. Both are encoded as runs,
of which a regular mesh has one or two, however large it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from dmesh.errors import MeshError
from dmesh.mesh.fields import MeshFields
from dmesh.mesh.ownership import owners
from dmesh.v1 import progress_pb2 as pb

_MOST_RUNS = 64
_MOST_DEVICES = 1 << 20
"""Devices of the largest mesh whose owners are listed; servers refuse larger ones."""
_LONGEST_NAME = 100


def describe(fields: MeshFields, job: str, client: int) -> pb.AnnouncedMesh:
    """Returns the message that describes a mesh to the server.

    Args:
        fields: The mesh, as this client has it.
        job: This client's job.
        client: This client's id.
    """
    message = pb.AnnouncedMesh(
        name=fields.name[:_LONGEST_NAME],
        axes=[pb.MeshAxis(name=dim.name[:_LONGEST_NAME], size=dim.size) for dim in fields.dims],
        device_type=fields.device_type,
    )
    devices = fields.global_devices or fields.local_devices
    if fields.size > _MOST_DEVICES or any(device.job != job for device in devices):
        return message
    try:
        holders = owner_runs(owners(fields))
    except MeshError:  # it does not say whose the other devices are, which is the program's affair
        holders = []
    if len(holders) <= _MOST_RUNS:
        message.owners.extend(holders)
    found = place_runs(
        (device_id - fields.first_id, device.device_index or 0)
        for device_id, device in zip(fields.local_ids, fields.local_devices, strict=True)
        if device.task == client
    )
    if len(found) <= _MOST_RUNS:
        message.own.extend(found)
    return message


def owner_runs(tasks: Iterable[int]) -> list[pb.OwnerRun]:
    """Returns a mesh's owners, by place, as runs: `[0, 0, 2, 2, 4, 4]` is one."""
    runs: list[pb.OwnerRun] = []
    for task, places in groupby(tasks):
        each = sum(1 for _ in places)
        run = runs[-1] if runs else None
        if run is None or run.each != each:
            runs.append(pb.OwnerRun(task=task, tasks=1, each=each))
            continue
        step = task - (run.task + run.step * (run.tasks - 1))
        if run.tasks > 1 and step != run.step:
            runs.append(pb.OwnerRun(task=task, tasks=1, each=each))
            continue
        run.step = step
        run.tasks += 1
    return runs


def place_runs(places: Iterable[tuple[int, int]]) -> list[pb.PlaceRun]:
    """Returns the places of devices as runs.

    Args:
        places: Place and index of each device, in any order.
    """
    runs: list[pb.PlaceRun] = []
    for place, device in sorted(places, key=lambda pair: (pair[1], pair[0])):
        run = runs[-1] if runs else None
        if run is not None and device == run.device + run.count:
            stride = place - (run.place + run.stride * (run.count - 1))
            if stride >= 1 and (run.count == 1 or stride == run.stride):
                run.stride = stride
                run.count += 1
                continue
        runs.append(pb.PlaceRun(place=place, stride=1, device=device, count=1))
    return runs
