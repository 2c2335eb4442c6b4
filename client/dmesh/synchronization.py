"""Meeting at a barrier over a mesh."""

from __future__ import annotations

from dmesh import context
from dmesh.errors import ConfigurationError, MeshError
from dmesh.mesh import Mesh

_DAY_IN_MS = 24 * 60 * 60 * 1000


def barrier(mesh: Mesh, barrier_name: str | None = None, timeout_in_ms: int | None = None) -> None:
    """Waits until every client that has devices in `mesh` has called this.

    All clients of the mesh must call it, with equal names in equal order; clients outside of it must not.
    Says every 10 seconds who is missing. A name may be used again.

    Args:
        mesh: The mesh whose clients meet.
        barrier_name: Names the barrier in messages, and tells barriers of several threads apart.
        timeout_in_ms: Time from the first arrival until it fails for all, milliseconds. Default: 24 hours.

    Raises:
        MeshError: This client has no device in `mesh`.
        BarrierTimeoutError: Time ran out; the error lists everybody who is missing.
        BarrierError: A client of the mesh left, failed or was lost.
        CollectiveError: Likewise, without a coordination service.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"barrier() needs a Mesh, got {mesh!r}")
    if timeout_in_ms is not None and not timeout_in_ms > 0:
        raise ConfigurationError(f"timeout_in_ms must be positive, got {timeout_in_ms!r}")
    state = context.current()
    ranks = mesh.client_ranks()
    if state.settings.client_id not in ranks:
        raise MeshError(
            f"client {state.settings.client_id} has no device in mesh {mesh.name!r}, whose clients are "
            f"{list(ranks)}; "
            "only they may meet at its barrier"
        )
    timeout = (timeout_in_ms or _DAY_IN_MS) / 1000
    if state.client is None:
        return  # local mode: everybody is here
    if state.agent is not None:
        state.agent.barrier(f"mesh/{barrier_name or '(barrier)'}", participants=ranks, timeout=timeout)
    else:
        state.mesh_group(mesh.fingerprint, "", ranks).barrier(timeout=timeout)
