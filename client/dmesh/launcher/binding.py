"""CPUs that the clients of a host are bound to, by its cores and NUMA nodes as /sys shows them (Linux).

Clients of neighboring ranks are put on one node. Only CPUs that this process may use itself are considered,
as its cgroup and its own binding permit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dmesh.config.host import cores, own_nodes
from dmesh.errors import ConfigurationError

BINDINGS = ("core", "numa")
"""Kinds of CPU binding of a client: its share of the host's cores, or all CPUs of one NUMA node."""


def check_binding() -> None:
    """Refuse where the system binds no processes.

    Raises:
        ConfigurationError: It is not Linux.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("--bind needs Linux on the clients' hosts; leave it out")


def cpus_for(
    binding: str, place: int, clients: int, allowed: Collection[int], root: Path = Path("/")
) -> tuple[int, ...]:
    """Return the CPUs of a client.

    Args:
        binding: One of `BINDINGS`.
        place: Index of the client among those of its host.
        clients: Their number. If there are more than cores, or nodes, several share one.
        allowed: CPUs that may be used.
        root: The root of the file system.
    """
    nodes = list(own_nodes(root, allowed).values()) or [frozenset(allowed)]
    if binding == "numa":
        units: Sequence[Collection[int]] = nodes
        first, last = place * len(units) // clients, place * len(units) // clients + 1
    else:
        units = [core for cpus in nodes for core in cores(cpus, root)]
        first = place * len(units) // clients
        last = max(first + 1, (place + 1) * len(units) // clients)
    return tuple(sorted(cpu for unit in units[first:last] for cpu in unit))
