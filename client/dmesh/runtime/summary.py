"""Summary of this process as a client: who, where, which devices, and what carries the world's arrays."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, fields

from dmesh._version import __version__
from dmesh.collectives.communicator import Communicator
from dmesh.config.host import own_nodes
from dmesh.config.settings import Settings
from dmesh.coordination.agent_source import opened_agent
from dmesh.coordination.explanation.text import ranks_text
from dmesh.devices.device import LogicalDevices, known_members, local_devices
from dmesh.native import core, reason
from dmesh.runtime import context, ranks

_NOT_CHOSEN = "chosen in the first collective of all clients, which has not been made"
_ALONE = "no other client"


@dataclass(frozen=True)
class Summary:
    """Facts about this process as a client; printed as a table. See `dmesh.summary`."""

    rank: int
    """This client's rank, from 0."""
    size: int
    """Number of clients."""
    local_rank: int
    """This client's index on its host."""
    local_size: int
    """Number of clients on its host."""
    hosts: dict[str, tuple[int, ...]]
    """Ranks on each host; empty where the clients do not know each other's processes."""
    task: str
    """This client's task, e.g. `/job:worker/task:0`."""
    host: str
    """Name of this host."""
    numa_nodes: tuple[int, ...]
    """NUMA nodes of this host on which this process may run; empty where the system does not say."""
    pid: int
    """Id of this process."""
    program: str
    """The program that runs."""
    cluster: str
    """Name of the cluster; empty in local mode."""
    coordinator: str
    """HOST:PORT of the coordination server; empty without one."""
    launcher: str
    """Source of the list of clients: an environment variable, a launcher or a cluster resolver."""
    device_type: str
    """Type of device that the program computes on: CPU, GPU or TPU."""
    devices: tuple[str, ...]
    """Names of this client's devices of that type."""
    backends: tuple[str, ...]
    """Backends that carry the world's arrays, the preferred one first; empty before the first collective."""
    reason: str
    """Why the world has these backends."""
    native: str
    """`in use`, or the reason why the native core is not."""
    version: str
    """Version of dmesh."""

    def __str__(self) -> str:
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        rows["hosts"] = "; ".join(f"{name}: {ranks_text(found)}" for name, found in self.hosts.items())
        rows["numa_nodes"] = ", ".join(map(str, self.numa_nodes))
        rows["devices"], rows["backends"] = ", ".join(self.devices), ", ".join(self.backends)
        width = max(map(len, rows))
        return "\n".join(
            f"{name.replace('_', ' '):{width}}  {'-' if value == '' else value}"
            for name, value in rows.items()
        )


def summary() -> Summary:
    """Return this client's rank, host and devices, and the backends of its arrays with the reasons.

    Does not communicate. The backends are those of the group of all clients, which chooses them in its first
    call.

    ```python
    dmesh.collectives.barrier()  # from now on, the backends are known
    print(dmesh.summary())
    assert dmesh.summary().size == dmesh.size()
    ```

    Returns:
        The facts, as fields; `print` shows them as a table.

    Raises:
        NotInitializedError: The system has not been initialized.
    """
    state = context.current()
    settings, logical = state.get(Settings), state.get(LogicalDevices)
    members, agent = known_members(), opened_agent()
    hosts: dict[str, tuple[int, ...]] = {}
    for member in members:
        name = member.process.host
        hosts[name] = (*hosts.get(name, ()), member.rank)
    backends, why = _backends(state.get(Communicator))
    return Summary(
        rank=ranks.rank(),
        size=ranks.size(),
        local_rank=ranks.local_rank(),
        local_size=ranks.local_size(),
        hosts=hosts,
        task=f"/job:{settings.job_name}/task:{settings.client_id}",
        host=socket.gethostname(),
        numa_nodes=tuple(own_nodes()),
        pid=os.getpid(),
        program=os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python",
        cluster=settings.cluster if settings.multi_client else "",
        coordinator="" if agent is None or not settings.multi_client else agent.address,
        launcher=settings.origins.get("jobs", "") if settings.multi_client else "none: one process",
        device_type=logical.type,
        devices=tuple(device.to_string() for device in local_devices(logical.type)),
        backends=backends,
        reason=why,
        native="in use" if core() is not None else str(reason()),
        version=__version__,
    )


def _backends(communicator: Communicator) -> tuple[tuple[str, ...], str]:
    """Return the names of the world's backends, and why it has them."""
    world = communicator.world
    if world.size == 1:
        return (), _ALONE
    connection = world.current.connection
    if connection is None:
        return (), _NOT_CHOSEN
    return (*(backend.name for backend in connection.backends), "messages"), connection.reason
