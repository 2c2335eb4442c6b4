"""The coordination server inside another process: hosted by client 0 if no server is named.

Needs nothing but the base distribution. The server lives on an event loop of its own in a daemon thread, so
that the host's program may block, compute and hold its own event loops as it likes.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmesh.coordination.channel import prepare_grpc
from dmesh.security.certificates import IdentityFiles
from dmesh.security.tokens import TokenSource
from dmesh_server import event_loop
from dmesh_server.core.model import Limits
from dmesh_server.listening import Address
from dmesh_server.rpc.server import RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.security.setup import kept_current, refuse_exposure
from dmesh_server.security.tls import ServerTls, TlsSettings
from dmesh_server.store.base import Store
from dmesh_server.store.memory import MemoryStore
from dmesh_server.telemetry import logs

if TYPE_CHECKING:
    from dmesh.telemetry.provider import Provider
    from dmesh_server.telemetry.tracing import Traces

_EXTRA = 5.0
"""Seconds beyond the grace that `stop` waits for the thread before it gives up on it."""


class EmbeddedServer:
    """A running server. Made by `start`."""

    def __init__(
        self,
        listen: Address,
        limits: Limits,
        store: Store,
        access: Access | None = None,
        tls: ServerTls | None = None,
        traces: Traces | None = None,
    ) -> None:
        """Make a server that does not run yet; see `start`."""
        self._traces = traces
        self._access = access
        self._tls = tls
        self._listen = listen
        self._limits = limits
        self._store = store
        self._started: Future[Address] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._grace = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dmesh-server", daemon=True)
        self.address = ""

    def stop(self, grace: float = 1.0) -> None:
        """Notify all sessions that the server stops, give calls under way `grace` seconds, and end it.

        Idempotent; may be called by any thread. Returns when the port is free again.
        """
        atexit.unregister(self.stop)
        with self._lock:
            if self._loop is not None and self._stop is not None and not self._stop.is_set():
                self._grace = grace
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(grace + _EXTRA)
        if self._thread.is_alive():
            logs.error("embedded_server_stuck", address=self.address)

    def _begin(self) -> None:
        prepare_grpc()  # for the client of this process, too, which comes later
        self._thread.start()
        self.address = str(self._started.result())
        # An interpreter that ends under a running event loop may crash; leaving first costs nothing.
        atexit.register(self.stop, 0.2)

    def _run(self) -> None:
        try:
            event_loop.run(self._serve())
        except BaseException as error:  # noqa: BLE001 -- this is the thread's last frame
            if self._started.done():
                logs.error("embedded_server_failed", exc_info=True, address=self.address)
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_quiet_about_shared_wakeups)
        stop = asyncio.Event()
        runtime = Runtime(self._store, self._limits)
        try:
            await runtime.start()
            server = RpcServer(runtime, access=self._access, tls=self._tls, traces=self._traces)
            try:
                async with kept_current(self._access, self._tls):
                    address = await server.start(self._listen)
                    with self._lock:
                        self._loop, self._stop = loop, stop
                    self._started.set_result(address)
                    await stop.wait()
                    await runtime.shutdown()
            finally:
                await server.stop(self._grace)
        finally:
            with self._lock:
                self._loop = None
            await runtime.close()


def start(
    listen: str,
    limits: Limits | None = None,
    store: Store | None = None,
    *,
    tokens: TokenSource | None = None,
    certificates: tuple[IdentityFiles, Path] | None = None,
    insecure: bool = False,
    traces: Provider | None = None,
) -> EmbeddedServer:
    """Start a server in this process and return when it accepts calls.

    Args:
        listen: HOST:PORT; port 0 for any free one.
        limits: Bounds and times; the defaults if None.
        store: Store of the state; memory if None.
        tokens: Accepted tokens; None: every caller that reaches the address may do everything.
        certificates: Certificate and key of the server, and the authority that must have signed those of the
            clients; None for connections that are not encrypted.
        insecure: Accept an address that other machines can reach without tokens, or without certificates.
        traces: Where spans of what it is asked go; None for none. Who passes it closes it, afterwards.

    Raises:
        AddressInUseError: The port is taken.
        ConfigurationError: `listen` is not an address, or not one of this machine's; the tokens cannot be
            read; other machines could reach a server without tokens.
    """
    address = Address.parse(listen, "the address to listen on")
    if not insecure and (tokens is None or certificates is None):
        missing = "DMESH_TLS_CA, DMESH_TLS_CERT and DMESH_TLS_KEY (see `dmesh certs`)"
        if tokens is None:
            missing = f"the same DMESH_TOKEN (or DMESH_TOKEN_FILE), and {missing}"
        refuse_exposure(
            address,
            "where the coordination server inside client 0 would listen",
            f"Give all clients {missing}; or set DMESH_INSECURE=1 in client 0 if you trust everyone on this "
            "network.",
            tokens=tokens is not None,
        )
    access = None if tokens is None else Access(tokens)
    tls = None
    if certificates is not None:
        files, ca = certificates
        tls = ServerTls(TlsSettings(files, ca, names=("DMESH_TLS_CERT/DMESH_TLS_KEY", "DMESH_TLS_CA")))
    spans = None
    if traces is not None:
        from dmesh_server.telemetry.tracing import Traces

        spans = Traces(traces)
    server = EmbeddedServer(
        address, limits if limits is not None else Limits(), store or MemoryStore(), access, tls, spans
    )
    server._begin()
    return server


def _quiet_about_shared_wakeups(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # If the host's program uses grpc.aio, too, its loop and ours are woken for each other's events, and
    # the second reader finds nothing to read (grpc/grpc#25364). Harmless, but asyncio would print a
    # traceback each time.
    if isinstance(context.get("exception"), BlockingIOError) and "_handle_events" in str(
        context.get("handle")
    ):
        return
    loop.default_exception_handler(context)
