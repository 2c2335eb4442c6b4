"""Description of a TPU system, like `tf.tpu.experimental.TPUSystemMetadata`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dmesh.coordination.members import Member
from dmesh.devices.device import DeviceSpec
from dmesh.errors import ResolverError

if TYPE_CHECKING:
    from dmesh.tpu.topology import Topology


class TPUSystemMetadata(NamedTuple):
    """Size and devices of a TPU system."""

    num_cores: int
    """Number of cores of all hosts."""
    num_hosts: int
    """Hosts."""
    num_of_cores_per_host: int
    """Number of cores of each host."""
    topology: Topology | None
    """Positions of the cores; None if not requested."""
    devices: tuple[DeviceSpec, ...]
    """All devices: the CPU and the cores of each host."""


def describe_system(
    job: str, hosts: int, cores_per_host: int, topology: Topology | None = None
) -> TPUSystemMetadata:
    """Return the metadata of a system of equal hosts.

    Args:
        job: Job of the hosts.
        hosts: Number of hosts.
        cores_per_host: Number of cores of each host.
        topology: Positions of the cores, if known.
    """
    devices = tuple(
        DeviceSpec(job=job, replica=0, task=task, device_type=kind, device_index=index)
        for task in range(hosts)
        for kind, count in (("CPU", 1), ("TPU", cores_per_host))
        for index in range(count)
    )
    return TPUSystemMetadata(hosts * cores_per_host, hosts, cores_per_host, topology, devices)


def cores_per_member(members: Sequence[Member]) -> int | None:
    """Return the number of TPU cores of each member of an initialized system.

    Returns:
        The number; None if there are no cores at all.

    Raises:
        ResolverError: The members have different numbers of cores.
    """
    counts = {member.index: sum(device.type == "TPU" for device in member.devices) for member in members}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"task {task}: {count}" for task, count in list(counts.items())[:20])
        raise ResolverError(
            f"the hosts of the TPU system have different numbers of cores ({listed}). Initialize all of them "
            "with the same device_type and accelerator type"
        )
    return next(iter(counts.values()), None) or None
