"""Capability exchange of a group: in its first call, its members find out which backends all of them have.

The messages travel in the channel of the call itself, with its descriptor: a member that calls something
else, or does not come, is found out as in every call. Every decision follows from messages that all members
have, so all decide alike. Backends that the program has registered are preferred, then shared memory, then
MPI, then dedicated TCP connections; messages always work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dmesh._log import logger
from dmesh.collectives.backends import mpi_world
from dmesh.collectives.backends.endpoints import SharedMemoryBackend, TcpBackend
from dmesh.collectives.backends.hierarchical import find_hierarchy
from dmesh.collectives.backends.mpi import MpiBackend
from dmesh.collectives.backends.mpi_world import STEPS as MPI_STEPS
from dmesh.collectives.backends.registered import Membership, agree, any_registered
from dmesh.collectives.backends.shm.endpoint import SharedMemoryEndpoints
from dmesh.collectives.backends.shm.registry import MOST_MEMBERS
from dmesh.collectives.backends.shm.setup import FIRST_STEP, share_memory
from dmesh.collectives.backends.shm.setup import STEPS as SHM_STEPS
from dmesh.collectives.backends.tcp.dedicated import STEPS as TCP_STEPS
from dmesh.collectives.backends.tcp.dedicated import TcpEndpoints, open_connections
from dmesh.collectives.backends.tcp.exchange import Waits
from dmesh.collectives.backends.tcp.transport import Channel
from dmesh.collectives.generation import Connection, Generation
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.collectives.work import Members


def connect(members: Members, generation: Callable[[], Generation | None], channel: Channel) -> Waits[Tuning]:
    """Find out which backends a group has, and settle its generation.

    Args:
        members: The group.
        generation: Returns its generation.
        channel: Channel of its first call.

    Returns:
        The group's tuning.
    """
    made = generation()
    assert made is not None  # its first call is under way
    services, ranks, rank = members.services, members.ranks, members.rank
    if len(ranks) <= MOST_MEMBERS and (services.shared_memory is not None or any_registered()):
        # Clients without a registry of shared memory are threads of one process: all of them see the same.
        membership = Membership(members.group, made.number, ranks, rank)
        own = yield from agree(channel, membership, members.label, FIRST_STEP - 1)
        if own:
            made.settle(Connection(own))
            return SHIPPED
    shared_memory = services.shared_memory
    if shared_memory is None or len(ranks) > MOST_MEMBERS:
        # Without an exchange, members do not hear of each other's tuning.
        connection = Connection(tuning=services.tuning if shared_memory is None else SHIPPED)
        if shared_memory is not None or services.mpi is not None:
            mpi = yield from _find_mpi(members, made, channel)
            connection = connection if mpi is None else Connection((mpi,))
        made.settle(connection)
        return connection.tuning
    oversubscribed = services.neighbours > shared_memory.cores
    shared = yield from share_memory(channel, ranks, rank, shared_memory, made.freeze)
    settle = partial(Connection, sends_from=shared.sends_from, receives_from=shared.receives_from)
    if shared.memory is not None:
        opener = SharedMemoryEndpoints(shared.memory, rank, oversubscribed, shared_memory)
        made.settle(settle((SharedMemoryBackend(ranks, rank),), endpoints=opener))
        return SHIPPED
    mpi = yield from _find_mpi(members, made, channel)
    if mpi is not None:
        made.settle(settle((mpi,)))
        return SHIPPED
    step = FIRST_STEP + SHM_STEPS + MPI_STEPS
    connector, core = services.transport.connector, shared_memory.core
    found = yield from open_connections(channel, ranks, rank, connector, core, step, services.tuning)
    tuning = found.tuning
    tuned = "" if tuning == SHIPPED else f" with the tuning of rank {ranks[0]} ({tuning})"
    reason = f"It shares no memory: {shared.refusal}."
    if found.refusal:
        logger.info(
            "%s exchanges messages%s. %s It has no dedicated connections: %s",
            members.label, tuned, reason, found.refusal,
        )  # fmt: skip
        made.settle(Connection(tuning=tuning))
        return tuning
    assert core is not None
    endpoints = TcpEndpoints(core, rank, found)
    backend = TcpBackend(ranks, rank)
    hierarchy = yield from find_hierarchy(
        channel, members, shared_memory, connector, oversubscribed, step + TCP_STEPS, tuning
    )
    if isinstance(hierarchy, str):
        logger.info(
            "%s has dedicated connections%s. %s It is not hierarchical: %s",
            members.label, tuned, reason, hierarchy,
        )  # fmt: skip
        made.settle(settle((backend,), tuning, endpoints))
        return tuning
    endpoints.collectives.max_all_reduce = hierarchy.minimum
    logger.info(
        "%s has dedicated connections%s between hosts, and shared memory among the %d ranks of each host",
        members.label, tuned, len(hierarchy.intra_ranks),
    )  # fmt: skip
    made.settle(settle((hierarchy, backend), tuning, endpoints, hierarchy.endpoints))
    return tuning


def _find_mpi(members: Members, generation: Generation, channel: Channel) -> Waits[MpiBackend | None]:
    """Return the group's MPI backend, if it has one."""
    world, ranks, rank = members.services.mpi, members.ranks, members.rank
    name = f"{members.group} {generation.number}"
    comm = yield from mpi_world.connect(channel, ranks, rank, world, FIRST_STEP + SHM_STEPS, name)
    if isinstance(comm, str):
        if world is not None:
            logger.info("%s does not use MPI: %s", members.label, comm)
        return None
    assert world is not None
    logger.info("%s uses MPI", members.label)
    return MpiBackend(world, comm, ranks, rank)
