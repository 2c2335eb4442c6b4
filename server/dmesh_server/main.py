"""The standalone server: everything composed, from the first port to the last signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from dmesh.errors import ConfigurationError, MissingExtraError
from dmesh_server import event_loop, failpoints
from dmesh_server.core.quotas import Quotas
from dmesh_server.core.records import RecordError
from dmesh_server.rpc.server import RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.audit import AuditLog
from dmesh_server.security.issued_tokens import IssuedTokens
from dmesh_server.security.setup import kept_current, names_token, server_access
from dmesh_server.security.tls import ServerTls
from dmesh_server.settings import ServerSettings, Setting
from dmesh_server.store.base import Store, StoreError, StoreRefusedError
from dmesh_server.store.memory import MemoryStore
from dmesh_server.telemetry import logs, loop_lag
from dmesh_server.web.logins import LoginCodes

if TYPE_CHECKING:
    from dmesh_server.listening import Address
    from dmesh_server.security.access import Access
    from dmesh_server.security.refusals import RefusalLog
    from dmesh_server.telemetry.tracing import Traces
    from dmesh_server.web.gate import HttpGate
    from dmesh_server.web.server import WebServer

EXIT_DATA_REFUSED = 3
"""Exit code for a data directory that is damaged or of another format, and was left unchanged."""

_GC_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of the garbage collector. With Python's own, a server of thousands of sessions spends an
eighth of its time looking for reference cycles."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(settings: ServerSettings, announce: Callable[[str], None] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT and return the process's exit code.

    A second signal ends the process at once.

    Args:
        settings: How it is set.
        announce: Called with the line that says that the server is ready; prints it on stdout by default.

    Raises:
        AddressInUseError: A port is taken.
        ConfigurationError: An address or the data directory cannot be used.
    """
    logs.configure(sys.stderr, settings.log_format, logging.DEBUG if settings.verbose else logging.INFO)
    # gRPC's own remarks about connections would stand between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _raise_file_limit()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        failpoints.configure(os.environ.get(failpoints.VARIABLE, ""))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if failpoints.enabled():
        logs.warning("failpoints_enabled", points=", ".join(failpoints.enabled()))
    try:
        event_loop.run(_serve(settings, announce or _print_line))
    except StoreRefusedError as error:
        sys.stderr.write(f"dmesh serve: error: --data-dir {settings.data_dir} is refused: {error}\n")
        return EXIT_DATA_REFUSED
    return 0


def serve_flags(flags: argparse.Namespace) -> int:
    """Run a server as the command line says; see `serve` and `ServerSettings.from_flags`."""
    return serve(ServerSettings.from_flags(flags))


async def _serve(settings: ServerSettings, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as undo:
        _handle_signals(stop)
        traces = _traces(settings, undo)
        # Ports first: if one is taken, the store was not touched.
        web, codes = _web_server(settings), None
        if web is not None:
            undo.push_async_callback(web.stop)
        asks = not settings.insecure or names_token(settings.token_file, os.environ)
        # The store's lock on the data directory protects these files, too.
        store = _open_store(settings)
        tls = None if settings.tls is None else ServerTls(settings.tls)
        issued = IssuedTokens(settings.data_dir)
        runtime = Runtime(store, settings.limits, quotas=Quotas(issued.quota))
        undo.push_async_callback(runtime.close)
        access = server_access(settings.token_file, os.environ, issued) if asks else None
        with _blame(settings):
            audit_log = AuditLog(settings.data_dir)
        undo.callback(audit_log.close)
        with _blame(settings):
            await runtime.start()
        await undo.enter_async_context(kept_current(access, tls))
        rpc = RpcServer(
            runtime,
            access=access,
            tls=tls,
            peer_limits=settings.peer_limits,
            session_port=settings.session_port,
            health=settings.health,
            reflection=settings.reflection,
            traces=traces,
            audit_log=audit_log,
        )
        undo.push_async_callback(rpc.stop, settings.shutdown_grace)
        address = await rpc.start(settings.listen)
        for refusing in (web, rpc, access):
            if refusing is not None:
                refusing.refusals.on_line = audit_log.note_refusal
        if web is not None and settings.http is not None:
            codes = LoginCodes(runtime.now)
            app = _web_app(
                settings, runtime, access, (web.refusals, rpc.refusals), address, web, audit_log, codes
            )
            await web.start(app, tls)
            undo.enter_context(loop_lag.watched(runtime.measures.lag))
        _warn_of_open_listeners(settings, access)
        logs.info(
            "server_ready",
            grpc=address,
            http=web.address if web else None,
            pid=os.getpid(),
            data_dir=settings.data_dir,
        )
        scheme = "http" if tls is None else "https"
        announce(f"dmesh-server ready grpc={address}" + (f" http={scheme}://{web.address}" if web else ""))
        if codes is not None and access is not None and web is not None and settings.log_format == "text":
            _offer_login(access, codes, f"{scheme}://{web.address.reachable()}")
        await stop.wait()
        await runtime.shutdown()
    logs.info("server_stopped")


def _offer_login(access: Access, codes: LoginCodes, url: str) -> None:
    """Print a link that logs a browser in once: for a person, so not where logs are for programs."""
    token = access.token_to_look()
    if token is None:
        return
    link = f"{url}/login?code={codes.issue(token.value)}"
    sys.stderr.write(
        f"The dashboard: {link}\n"
        f"  (logs one browser in, to look only; good once, for {codes.lifetime / 60:.0f} minutes)\n"
    )
    sys.stderr.flush()


def _traces(settings: ServerSettings, undo: contextlib.AsyncExitStack) -> Traces | None:
    """Return the maker of spans of calls, ended by `undo`; None without tracing."""
    if not settings.otel:
        return None
    from dmesh.telemetry import open_provider

    provider = open_provider("--otel", "dmesh-server")
    if provider is None:
        return None
    from dmesh_server.telemetry.tracing import Traces

    async def close() -> None:
        if problem := await asyncio.to_thread(provider.close):
            logs.warning("traces_lost", reason=problem)

    undo.push_async_callback(close)
    return Traces(provider)


def _web_server(settings: ServerSettings) -> WebServer | None:
    if settings.http is None:
        return None
    try:  # not without need: half of the time in which a server starts goes into these imports
        from dmesh_server.web.app import create_app  # noqa: F401 -- found missing before anything is opened
        from dmesh_server.web.listener import HttpLimits
        from dmesh_server.web.server import WebServer
    except ImportError as error:
        raise MissingExtraError(
            f"HTTP needs the server extra ({error}): pip install 'dmesh[server]', or pass --no-http"
        ) from error
    limits = HttpLimits(settings.http_connections, settings.http_connections_per_host)
    return WebServer(settings.http, settings.http_client_certs, limits)


def _web_app(
    settings: ServerSettings,
    runtime: Runtime,
    access: Access | None,
    refusals: Sequence[RefusalLog],
    listen: Address,
    web: WebServer,
    audit_log: AuditLog,
    codes: LoginCodes,
) -> HttpGate:
    from dmesh_server.web.api.server import Facts
    from dmesh_server.web.app import create_app

    token = None if access is None else access.origin
    facts = Facts(
        store="memory" if settings.data_dir is None else "sqlite",
        grpc=str(listen),
        http=str(web.address),
        settings=[
            *settings.describe(),
            Setting("token", "asked for" if token else "none", token or "--insecure"),
        ],
    )
    return create_app(
        runtime,
        web.address.host,
        access,
        facts=facts,
        refusals=refusals,
        open_metrics=settings.open_metrics,
        allowed_hosts=settings.allowed_hosts,
        shedder=web.shedder,
        audit_log=audit_log,
        codes=codes,
    )


def _warn_of_open_listeners(settings: ServerSettings, access: Access | None) -> None:
    for address in (settings.listen, settings.http):
        if address is None:
            continue
        if access is None:
            logs.warning("insecure", address=address, note="whoever reaches it may do everything")
        elif settings.tls is None and not address.is_loopback():
            logs.warning(
                "unencrypted",
                address=address,
                note="tokens and data can be read on the way; use --tls-cert and --tls-key",
            )


def _open_store(settings: ServerSettings) -> Store:
    if settings.data_dir is None:
        return MemoryStore()
    from dmesh_server.store.sqlite import SqliteStore

    with _blame(settings):
        return SqliteStore(settings.data_dir)


@contextlib.contextmanager
def _blame(settings: ServerSettings) -> Iterator[None]:
    """Report errors as faults of the data directory, which the operator has to mend."""
    try:
        yield
    except StoreRefusedError:
        raise
    except RecordError as error:
        raise StoreRefusedError(str(error)) from error
    except OSError as error:
        reason = str(error) if isinstance(error, StoreError) else error.strerror
        raise ConfigurationError(f"--data-dir {settings.data_dir} cannot be used: {reason}") from error


def _handle_signals(stop: asyncio.Event) -> None:
    def received(number: signal.Signals) -> None:
        if stop.is_set():
            _end_at_once(number)
        logs.info("signal_received", signal=number.name, note="a second signal ends the server at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, received, number)


def _end_at_once(number: int) -> NoReturn:
    os._exit(128 + number)


def _raise_file_limit() -> None:
    # Every client is a connection; the soft limit that shells hand out (1024) is too small for a large job.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
