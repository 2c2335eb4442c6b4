"""A real server on a real port, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from tests.server.raw_client import PATIENT, RawClient

from dmesh_server.core.model import Limits
from dmesh_server.listening import Address
from dmesh_server.rpc.server import RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.limits import PeerLimits
from dmesh_server.store.memory import MemoryStore


@dataclass
class Served:
    """A running server."""

    runtime: Runtime
    rpc: RpcServer
    address: str


@pytest.fixture
def limits() -> Limits:
    """Parametrize to change what the server allows."""
    return PATIENT


@pytest.fixture
def peer_limits() -> PeerLimits:
    """Parametrize to change what one peer may take."""
    return PeerLimits()


@pytest.fixture
async def served(limits: Limits, peer_limits: PeerLimits) -> AsyncIterator[Served]:
    runtime = Runtime(MemoryStore(), limits)
    await runtime.start()
    rpc = RpcServer(runtime, peer_limits=peer_limits, health=True, reflection=True)
    address = await rpc.start(Address("127.0.0.1", 0))
    yield Served(runtime, rpc, str(address))
    await runtime.shutdown()
    await rpc.stop(0.0)
    await runtime.close()


@pytest.fixture
async def make_client(served: Served) -> AsyncIterator[Callable[..., RawClient]]:
    """Makes clients of the server; their connections are closed at the end."""
    made: list[RawClient] = []

    def make(index: int | None = 0, **options: object) -> RawClient:
        made.append(RawClient(served.address, index, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        await client.channel.close()
