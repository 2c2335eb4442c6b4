"""One rank of a launch, in its process: joins the cluster, calls the function, leaves, reports."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dmesh.config import host
from dmesh.engines.serialization import name_file, survives
from dmesh.errors import CoordinationError
from dmesh.runtime import context, exits, tracebacks
from dmesh.runtime.membership import Client
from dmesh.runtime.system import initialize_accelerator_system


@dataclass(frozen=True)
class Place:
    """Process that runs a rank."""

    host: str
    """Name of its host."""
    pid: int
    """Its process id there."""
    network: str = ""
    """Identity of its kernel and network namespace. Processes with equal ones share a loopback interface."""
    address: str = ""
    """Address of its host; empty if the engine does not know it."""
    started: int = 0
    """Start time of the process in its kernel's clock ticks. It tells processes of containers apart."""

    @property
    def process(self) -> tuple[str, int, int]:
        """Identity of the process."""
        return self.host, self.pid, self.started

    def shares_loopback(self, other: Place) -> bool:
        """Return whether both processes share a loopback interface."""
        if self.network and other.network:
            return self.network == other.network
        return self.host == other.host


@dataclass(frozen=True)
class Call:
    """A launch: the function that all ranks call, and how they are started."""

    function: Callable[..., object]
    """The user's function."""
    args: tuple[object, ...] = ()
    """Its positional arguments."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Its keyword arguments."""
    ranks: int = 4
    """Number of ranks."""
    initialize: bool = True
    """True if the rank joins the cluster before the call; False if the function does."""
    max_restarts: int = 0
    """Maximum number of restarts of each rank."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables of all ranks."""

    @property
    def file(self) -> str:
        """File that defines the function; empty if unknown."""
        return str(getattr(getattr(self.function, "__code__", None), "co_filename", ""))


@dataclass(frozen=True)
class Failure:
    """Exception that ended a rank's function."""

    summary: str
    """Its type and message in one line."""
    lines: tuple[str, ...]
    """Its traceback, without the frames of dmesh."""
    error: BaseException | None = None
    """The exception itself; None if it cannot be pickled."""
    exit_code: int = 1
    """Exit code of a process that ends with it."""


@dataclass(frozen=True)
class Report:
    """A rank's result or failure."""

    value: object = None
    """Result of the function."""
    failure: Failure | None = None
    """Its failure, if it raised an exception."""


def own_place(address: str = "") -> Place:
    """Return this process as a place.

    Args:
        address: Address of this host, if it is known.
    """
    boot, namespace = host.boot_id(), host.network_namespace()
    network = f"{boot} {namespace}" if boot and namespace else ""
    return Place(socket.gethostname(), os.getpid(), network, address, host.start_ticks(os.getpid()))


def run_rank(
    variables: Mapping[str, str],
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    initialize: bool,
    file: str = "",
) -> Report:
    """Join the cluster, call the function, leave the cluster.

    The process continues afterwards, and can run another rank.

    Args:
        variables: Environment variables that are set during the call.
        function: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        initialize: Whether to join the cluster before the call; False if the function does.
        file: File that defines the function.
    """
    value: object = None
    name_file(function, file)
    with _environment(variables):
        try:
            if initialize:
                initialize_accelerator_system()
            value = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - any exception is reported
            if not isinstance(error, SystemExit) or error.code:
                return Report(failure=failure_of(error, _leave(error)))
        _leave(None)
    return Report(value)


def abandon(cluster: str) -> None:
    """Make this process leave a cluster, if it is a rank of it, because the launch has ended.

    The rank's function continues until its next call of dmesh, which fails.
    """
    client = context.find(Client)
    if client is None or client.settings.cluster != cluster:
        return

    def leave() -> None:
        with contextlib.suppress(CoordinationError):  # no other client is left to notify
            client.leave("the launching process ended the launch")

    threading.Thread(target=leave, name="dmesh-abandon", daemon=True).start()


def _leave(error: BaseException | None) -> int | None:
    try:
        return exits.leave_after(error)
    finally:
        exits.uninstall()


def failure_of(error: BaseException, exit_code: int | None = None) -> Failure:
    """Return the report of an exception.

    Args:
        error: The exception.
        exit_code: Exit code for it; None for Python's own.
    """
    code = error.code if isinstance(error, SystemExit) else None
    summary = f"{type(error).__name__}: {error}".rstrip(": ")
    return Failure(
        summary=summary if code is None else f"SystemExit: {code}",
        lines=tuple(tracebacks.folded(error)),
        error=error if survives(error) else None,
        exit_code=exit_code or (code & 0xFF if isinstance(code, int) else 0) or 1,
    )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while entered."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
