"""Endpoints in the memory that the ranks of a group share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dmesh.collectives.backends.shm.registry import SharedMemoryRegistry
from dmesh.collectives.backends.shm.segment import Ticket
from dmesh.collectives.backends.shm.setup import SharedMemoryGroup
from dmesh.native import Endpoint


class SharedMemoryEndpoints:
    """Opens the endpoints of a group that shares memory; see `generation.EndpointOpener`.

    Args:
        shm: Memory of the group.
        position: This client's position in the group.
        oversubscribed: Whether there are more ranks than cores.
        shared_memory: Of this client.
    """

    def __init__(
        self,
        shm: SharedMemoryGroup,
        position: int,
        oversubscribed: bool,
        shared_memory: SharedMemoryRegistry,
    ) -> None:
        assert shared_memory.core is not None
        self._shm = shm
        self._position = position
        self._oversubscribed = oversubscribed
        self._shared_memory = shared_memory
        self._core = shared_memory.core

    def open_collectives(self) -> Endpoint:
        """Open this rank's endpoint for collectives."""
        shm, sizes = self._shm, self._shm.sizes
        endpoint = self._core.Endpoint(
            shm.regions, shm.salts, self._position, sizes.slot, sizes.staging, self._oversubscribed
        )
        self._prepare(endpoint, shm.tickets)
        return endpoint

    def open_transfers(self, sender: int, receiver: int) -> Endpoint:
        """Open this rank's endpoint for transfers from one position to another, of which it is one."""
        shm, sizes = self._shm, self._shm.sizes
        (outgoing, at), (incoming, into) = shm.regions[sender], shm.regions[receiver]
        endpoint = self._core.Endpoint(
            [
                (outgoing, at + sizes.outbox(len(shm.regions), receiver)),
                (incoming, into + sizes.inbox(sender)),
            ],
            [shm.salts[sender], shm.salts[receiver]],
            int(self._position == receiver),
            sizes.p2p_slot,
            sizes.p2p_staging,
            self._oversubscribed,
            pipe=True,
        )
        self._prepare(endpoint, [shm.tickets[sender], shm.tickets[receiver]])
        return endpoint

    def _prepare(self, endpoint: Endpoint, tickets: Sequence[Ticket]) -> None:
        """Let the ranks at an endpoint access each other's large arrays in place."""
        shm, shared_memory = self._shm, self._shared_memory
        endpoint.keep_alive = shm  # during a call, no other group may get the memory

        def attach(member: int, nonce: bytes, nbytes: int, descriptor: int) -> None:
            mapping = shared_memory.attach_registered(
                replace(tickets[member], nonce=nonce, nbytes=nbytes, descriptor=descriptor)
            )
            if not any(mapping is known for known in shm.mappings):
                shm.mappings.append(mapping)

        retire = partial(shared_memory.retire, shm.region, tuple(ticket.pid for ticket in shm.tickets))
        processes = [ticket.pid for ticket in tickets] if shm.can_read_peers else []
        endpoint.advertise(shared_memory.registered, attach, retire, processes)
        if shared_memory.read_from is not None:
            endpoint.single_copy_from = shared_memory.read_from
