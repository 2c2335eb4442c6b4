"""Barriers over a mesh, and over all clients."""

from __future__ import annotations

from dmesh.collectives.communicator import Communicator
from dmesh.config.settings import Settings
from dmesh.coordination.agent_source import opened_agent
from dmesh.errors import ConfigurationError, MeshError
from dmesh.mesh import Mesh
from dmesh.protocol import RESERVED_PREFIX
from dmesh.runtime import context

_DAY_IN_MS = 24 * 60 * 60 * 1000
_LONGEST_NAME = 200


def barrier(
    mesh: Mesh | None = None, barrier_name: str | None = None, timeout_in_ms: int | None = None
) -> None:
    """Wait until every client that has devices in `mesh` has called this; without a mesh, every client.

    All clients of the mesh must call it, with equal names in equal order; clients outside of it must not.
    Every 10 seconds it reports which clients are missing. A name may be used again.

    ```python
    dmesh.barrier()  # all clients
    dmesh.barrier(mesh, "epoch")
    ```

    Args:
        mesh: The mesh whose clients meet; None for all clients.
        barrier_name: Names the barrier in messages, and tells barriers of several threads apart.
        timeout_in_ms: Time from the first arrival until it fails for all, milliseconds. Default: 24 hours.

    Raises:
        MeshError: This client has no device in `mesh`.
        BarrierTimeoutError: Time ran out; the error lists all clients that are missing.
        BarrierError: A client of the mesh left, failed or was lost.
        CollectiveError: Likewise, without a coordination service.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise MeshError(
            f"barrier() takes a Mesh, or nothing for all clients; got {mesh!r:.200}. A name goes into "
            "barrier_name="
        )
    name = "(barrier)" if barrier_name is None else barrier_name
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME:
        raise ConfigurationError(
            f"barrier_name must be a string of 1 to {_LONGEST_NAME} characters, got {name!r}"
        )
    limit = _DAY_IN_MS if timeout_in_ms is None else timeout_in_ms
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0:
        raise ConfigurationError(f"timeout_in_ms must be a positive number, got {timeout_in_ms!r}")
    state = context.current()
    settings = state.get(Settings)
    ranks = range(settings.num_clients) if mesh is None else mesh.client_ranks()
    if mesh is not None and settings.client_id not in ranks:
        raise MeshError(
            f"client {settings.client_id} has no device in mesh {mesh.name!r}, whose clients are "
            f"{list(ranks)}; only they can call its barrier"
        )
    if not settings.multi_client:
        return  # local mode: everybody is here
    agent = opened_agent()
    if agent is not None and mesh is None:
        agent.barrier(f"{RESERVED_PREFIX}world/{name}", timeout=limit / 1000)
    elif agent is not None:
        agent.barrier(f"{RESERVED_PREFIX}mesh/{name}", participants=ranks, timeout=limit / 1000)
    else:
        # A group of its own for each use: one that times out must not spoil the next.
        state.get(Communicator).new_group(ranks, f"barrier {name!r}").barrier(timeout=limit / 1000)
