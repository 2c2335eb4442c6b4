"""Uvicorn inside the server's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn

from dmesh_server.listening import Acceptor, Address, bind
from dmesh_server.security.refusals import RefusalLog
from dmesh_server.security.shedding import LoadShedder
from dmesh_server.security.tls import ServerTls
from dmesh_server.web.gate import HttpGate
from dmesh_server.web.listener import BoundedProtocol, Connections, HttpLimits

_GRACE_SECONDS = 2


class WebServer:
    """A listening HTTP server."""

    def __init__(
        self, address: Address, ask_for_certificates: bool = True, limits: HttpLimits | None = None
    ) -> None:
        """Listen at once, so that a taken port is found before anything else is started.

        Args:
            address: Where.
            ask_for_certificates: Ask clients for certificates, if TLS knows an authority for them.
            limits: Bounds on connections; the defaults if None.

        Raises:
            AddressInUseError: The port is taken.
            ConfigurationError: The address is not this machine's.
        """
        self._sockets = bind(address)
        self._ask_for_certificates = ask_for_certificates
        self._limits = limits if limits is not None else HttpLimits()
        self.refusals = RefusalLog()
        """Log of refused connections."""
        self.shedder = LoadShedder(time.monotonic)
        """Bounds requests without a token, and the connections of hosts that send too many of them."""
        self.address = Address(address.host, self._sockets[0].getsockname()[1])
        self._server: _Server | None = None
        self._app: HttpGate | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: HttpGate, tls: ServerTls | None = None) -> None:
        """Serve the application; return when it accepts requests.

        Args:
            app: The application.
            tls: Encryption of connections; None for plaintext.
        """
        context = None if tls is None else tls.context(ask_for_certificates=self._ask_for_certificates)
        allowed = tls.allowed if tls is not None and self._ask_for_certificates else ()
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        app.recorder.start()
        self._app = app
        connections = Connections(self._limits, self.refusals, self.shedder, context, allowed)
        self._server = _Server(config, connections)
        self._task = asyncio.create_task(self._server.serve(self._sockets), name="dmesh-http")
        started = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await self._task

    async def stop(self) -> None:
        """End requests under way and close the port."""
        if self._app is not None:
            await self._app.recorder.stop()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            await self._server.connections.stop()
        for listener in self._sockets:
            listener.close()


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, bounds connections, and says when it listens."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.connections.make_protocol = lambda: BoundedProtocol(
            self.config, self.server_state, self.lifespan.state
        )
        self.servers = []
        self._acceptor = Acceptor(sockets or (), self.connections.accepted)
        self.started = True
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown(sockets)
