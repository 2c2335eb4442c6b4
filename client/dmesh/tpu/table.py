"""A TPU system in the table of all clients' devices: who has which core, and what follows from that.

Each client registers its own cores as devices of type TPU whose description says where they are. The table is
the same for all clients, and so is the topology that they make of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dmesh.coordination.members import Device, Member
from dmesh.errors import TopologyError
from dmesh.tpu.accelerator import Coordinates, TpuSystem
from dmesh.tpu.topology import RANK, Topology

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator

_DESCRIPTION = re.compile(
    r"(\S{1,32}) core ([0-9]{1,5}),([0-9]{1,5}),([0-9]{1,5}),([0-9]{1,5})"
    r" of ([0-9]{1,5})x([0-9]{1,5})x([0-9]{1,5})x([0-9]{1,5})",
    re.ASCII,
)


def devices_of(system: TpuSystem, client: int, num_clients: int) -> tuple[Device, ...]:
    """Returns one client's share of a TPU system, as the devices that it registers with.

    Raises:
        TopologyError: So many clients cannot share the system.
    """
    return tuple(
        Device("TPU", index, _describe(system.accelerator_type, place, system.mesh_shape))
        for index, place in enumerate(system.share(client, num_clients))
    )


def topology_of(members: Sequence[Member]) -> Topology:
    """Returns the topology of the TPU devices that clients have registered with.

    Args:
        members: All clients, by rank.

    Raises:
        TopologyError: Their devices do not make a TPU system; the message says whose.
    """
    places = [_places(member) for member in members]
    first = members[0]
    shape = places[0][0]
    for member, (own_shape, coordinates) in zip(members, places, strict=True):
        if own_shape != shape or len(coordinates) != len(places[0][1]):
            raise TopologyError(
                f"{member.describe()} has {_count(own_shape, coordinates)}, but {first.describe()} has "
                f"{_count(shape, places[0][1])}; describe the same TPU system to all clients, with "
                "TPU_ACCELERATOR_TYPE or the argument tpu"
            )
    return Topology(mesh_shape=shape, device_coordinates=[coordinates for _, coordinates in places])


def exchange(
    communicator: Communicator, members: Sequence[Member], own: Sequence[Device], timeout: float
) -> tuple[Member, ...]:
    """Tells all clients of each other's cores where no coordination service has them in its table.

    Args:
        communicator: The data plane; all its clients call this.
        members: All clients, by rank.
        own: This client's TPU devices.
        timeout: Seconds to wait for the others.

    Returns:
        The clients with the TPU devices that they have reported.

    Raises:
        TopologyError: They do not have equally many.
        CollectiveError: A client is lost, or does not come.
    """
    words = [device.description.encode() for device in own]
    longest = max(map(len, words), default=0)
    lengths = communicator.world.all_gather(np.array([len(words), longest], np.int64), timeout=timeout)
    if len({count for count, _ in lengths.tolist()}) > 1:
        counts = ", ".join(
            f"{member.task} {count}" for member, (count, _) in zip(members, lengths.tolist(), strict=True)
        )
        raise TopologyError(
            f"the clients have different numbers of TPU devices ({counts:.500}); describe the same TPU "
            "system to all of them"
        )
    width = int(lengths[:, 1].max())
    mine = np.frombuffer(b"".join(word.ljust(width) for word in words), np.uint8)
    table = communicator.world.all_gather(mine, timeout=timeout).reshape(len(members), len(words), width)
    return tuple(
        _with_tpus(member, (row.tobytes().decode("ascii", "replace").rstrip() for row in rows))
        for member, rows in zip(members, table, strict=True)
    )


def without_tpus(members: Sequence[Member]) -> tuple[Member, ...]:
    """Returns the clients without the TPU devices that they have."""
    return tuple(_with_tpus(member, ()) for member in members)


def _with_tpus(member: Member, descriptions: Iterable[str]) -> Member:
    """Gives a client other TPU devices, and at least as many CPU devices beside them."""
    tpus = [Device("TPU", index, description) for index, description in enumerate(descriptions)]
    cpus = sum(device.type == "CPU" for device in member.devices)
    return replace(
        member,
        devices=(
            *(device for device in member.devices if device.type != "TPU"),
            *(Device("CPU", index) for index in range(cpus, len(tpus))),
            *tpus,
        ),
    )


def _describe(accelerator_type: str, place: Coordinates, mesh_shape: Coordinates) -> str:
    return f"{accelerator_type} core {','.join(map(str, place))} of {'x'.join(map(str, mesh_shape))}"


def _places(member: Member) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the shape of the TPU system that a client has cores of, and their coordinates by device."""
    shapes: set[tuple[int, ...]] = set()
    coordinates: list[tuple[int, ...]] = []
    for device in member.devices:
        if device.type != "TPU":
            continue
        match = _DESCRIPTION.fullmatch(device.description)
        if match is None or device.index != len(coordinates):
            raise TopologyError(
                f"{member.describe()} does not say where its device TPU:{device.index} is: it describes it "
                f"as {device.description!r:.200}"
            )
        numbers = [int(number) for number in match.groups()[1:]]
        coordinates.append(tuple(numbers[:RANK]))
        shapes.add(tuple(numbers[RANK:]))
    if len(shapes) > 1:
        raise TopologyError(f"{member.describe()} has cores of {len(shapes)} TPU systems; expected one")
    return (shapes.pop() if shapes else ()), coordinates


def _count(shape: Sequence[int], coordinates: Sequence[Sequence[int]]) -> str:
    if not coordinates:
        return "no TPU devices"
    return f"{len(coordinates)} TPU devices of a system of shape {list(shape)}"
