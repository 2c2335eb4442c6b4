"""Uvicorn inside the server's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

from dmesh_server.listening import Address, bind
from dmesh_server.web.gate import HttpGate

_GRACE_SECONDS = 2


class WebServer:
    """A listening HTTP server."""

    def __init__(self, address: Address) -> None:
        """Listens at once, so that a taken port is found before anything else is started.

        Raises:
            AddressInUseError: The port is taken.
            ConfigurationError: The address is not this machine's.
        """
        self._sockets = bind(address)
        self.address = Address(address.host, self._sockets[0].getsockname()[1])
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: HttpGate) -> None:
        """Serves the application; returns when it accepts requests."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(self._sockets), name="dmesh-http")
        started = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await self._task

    async def stop(self) -> None:
        """Ends requests under way and closes the port."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        for listener in self._sockets:
            listener.close()


class _Server(uvicorn.Server):
    """Leaves the process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        self.listening.set()
