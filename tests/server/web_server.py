"""A server with its HTTP side and tokens for each role, in the test's own event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.faults.secured import write_tokens
from tests.server.raw_client import PATIENCE

from dmesh.security import tokens
from dmesh_server.core.effects import Attached, Registered
from dmesh_server.core.events import Register
from dmesh_server.core.model import Caller, Device, Job, Process, Task
from dmesh_server.listening import Address
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.web.app import create_app
from dmesh_server.web.listener import HttpLimits
from dmesh_server.web.server import WebServer


@dataclass
class Web:
    """A running HTTP side."""

    runtime: Runtime
    server: WebServer
    access: Access
    tokens: dict[str, str]
    """By role."""

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    def client(self, role: str | None = "viewer", **headers: str) -> httpx.AsyncClient:
        """Returns a client that shows the token of a role, or none."""
        shown = {} if role is None else {"Authorization": f"Bearer {self.tokens[role]}"}
        return httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE, trust_env=False, headers=shown | headers
        )  # fmt: skip


@contextlib.asynccontextmanager
async def serving_web(
    runtime: Runtime, directory: Path, limits: HttpLimits | None = None
) -> AsyncIterator[Web]:
    """Serves a runtime over HTTP."""
    made = {role: tokens.generate() for role in ("viewer", "worker", "admin")}
    path = write_tokens(
        directory / "tokens", *(f"{value} role={role} name=the-{role}" for role, value in made.items())
    )
    access = Access(tokens.find(None, str(path)))
    server = WebServer(Address("127.0.0.1", 0), limits=limits)
    await server.start(
        create_app(runtime, "127.0.0.1", access, refusals=(server.refusals,), shedder=server.shedder)
    )
    try:
        yield Web(runtime, server, access, made)
    finally:
        await server.stop()


async def join_all(runtime: Runtime, count: int, cluster: str = "big", devices: int = 2) -> None:
    """Registers and attaches a cluster of workers without a network between."""
    jobs = (Job("worker", tuple(f"h{index}:1" for index in range(count))),)
    for index in range(count):
        caller = Caller(cluster, Task("worker", index), 1000 + index)
        event = Register(
            runtime.next_number(), caller, "register", jobs,
            Process(host=f"host{index // 8}", pid=index, program="train.py"),
            tuple(Device("CPU", number) for number in range(devices)), (f"h{index}:1",), 7, bytes(32),
        )  # fmt: skip
        await runtime.request(event, Registered)
        _, attached = await runtime.open_session(caller)
        assert isinstance(attached, Attached)
