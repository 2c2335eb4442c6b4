"""Ownership of a mesh's devices by clients, and the groups that follow from it. Pure functions."""

from __future__ import annotations

import hashlib

import numpy as np

from dmesh.errors import MeshError
from dmesh.mesh.fields import MeshFields


def fingerprint(fields: MeshFields) -> str:
    """Returns a string that is equal for all clients of a mesh, though each has a local part of its own."""
    if fields.single_device is not None:
        return fields.single_device.to_string()
    dims = ",".join(f"{dim.name}={dim.size}" for dim in fields.dims)
    text = f"{dims}|{fields.first_id}|{fields.device_type}"
    if fields.global_devices:
        listed = "\n".join(device.to_string() for device in fields.global_devices)
        text += f"|{hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()}"
    return text


def owners(fields: MeshFields) -> list[int]:
    """Returns the client that holds each device, by position in the mesh.

    The devices' names say it, where they are all known. Otherwise this client knows the names of its own
    devices only, and takes the others to be distributed as `create_distributed_mesh` does it: client 0 has
    the first N devices, client 1 the next N, and so on.

    Raises:
        MeshError: The local part contradicts that, so the owners of the other devices are unknown.
    """
    if fields.single_device is not None:
        return [_task(fields.single_device.task)]
    if fields.global_devices:
        return [_task(device.task) for device in fields.global_devices]
    tasks = {
        i - fields.first_id: _task(d.task)
        for i, d in zip(fields.local_ids, fields.local_devices, strict=True)
    }
    if len(tasks) == fields.size:
        return [tasks[position] for position in range(fields.size)]
    share = len(tasks)
    if not share:
        return []
    own = min(tasks) // share
    block = range(own * share, (own + 1) * share)
    if set(tasks) != set(block) or set(tasks.values()) != {own}:
        raise MeshError(
            f"mesh {fields.name!r} does not tell which clients own its other devices: this client's {share} "
            f"devices belong to client {min(tasks.values())}, but are not the devices {own * share} to "
            f"{own * share + share - 1} of client {own}. Give the mesh all devices by name, in "
            "global_devices"
        )
    return [position // share for position in range(fields.size)]


def client_ranks(fields: MeshFields) -> tuple[int, ...]:
    """Returns the clients that hold devices of the mesh, in ascending order.

    Raises:
        MeshError: They are unknown, see `owners`.
    """
    return tuple(sorted(set(owners(fields))))


def group_along(fields: MeshFields, axis: int, client: int, num_clients: int, job: str) -> tuple[int, ...]:
    """Returns the clients along a dimension of the mesh through one client's devices, in its order.

    Every client of the group comes to the same result, or to an error: if the dimension's lines through a
    client meet different clients, that client would have to be in several groups at once.

    Args:
        fields: The mesh, as this client has it.
        axis: Index of the dimension.
        client: This client.
        num_clients: How many clients there are.
        job: The clients' job name.

    Raises:
        MeshError: There is no such group; the message says why.
    """
    _check_that_it_is_ours(fields, client, num_clients, job)
    holders = np.array(owners(fields)).reshape(fields.shape)
    name = fields.dims[axis].name
    groups: dict[int, dict[tuple[int, ...], None]] = {}  # of each client; dicts as ordered sets
    for line in np.moveaxis(holders, axis, -1).reshape(-1, fields.shape[axis]).tolist():
        members = tuple(dict.fromkeys(line))
        for member in members:
            groups.setdefault(member, {})[members] = None
    if client not in groups:
        raise MeshError(
            f"client {client} has no device in mesh {fields.name!r}, whose clients are {sorted(groups)}; "
            f"only they have a group along {name!r}"
        )
    mine = next(iter(groups[client]))
    for member in (client, *mine):
        if len(groups[member]) > 1:
            several = " and ".join(str(list(group)) for group in list(groups[member])[:2])
            raise MeshError(
                f"there is no single group of clients along {name!r} of mesh {fields.name!r} (shape "
                f"{list(fields.shape)}): the devices of client {member} lie on lines of different clients, "
                f"such as {several}. Choose sizes or an order of dimensions with which the {name!r} "
                "dimension meets the same clients at each of a client's devices"
            )
    return mine


def _check_that_it_is_ours(fields: MeshFields, client: int, num_clients: int, job: str) -> None:
    devices = fields.local_devices + fields.global_devices
    jobs = {device.job for device in devices}
    if jobs != {job}:
        raise MeshError(
            f"mesh {fields.name!r} is over devices of job {', '.join(sorted(map(str, jobs - {job})))}, but "
            f"this client belongs to job {job}; collectives reach only the clients of their own job"
        )
    strangers = sorted({_task(device.task) for device in fields.local_devices} - {client})
    if strangers:
        raise MeshError(
            f"the local devices of mesh {fields.name!r} belong to client {strangers[0]}, but this is client "
            f"{client}; each client must create the mesh itself"
        )
    if max(owners(fields)) >= num_clients:
        raise MeshError(
            f"mesh {fields.name!r} has devices of client {max(owners(fields))}, but the {num_clients} "
            f"clients are 0 to {num_clients - 1}"
        )


def _task(task: int | None) -> int:
    assert task is not None, "MeshFields.check lets only devices with full names pass"
    return task
