"""Plan of a `dmesh run`: everything is checked and decided before the first process starts."""

from __future__ import annotations

import importlib.machinery
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dmesh.config.settings import JOB_NAME_PATTERN, Settings, split_address
from dmesh.errors import ConfigurationError
from dmesh.launcher.binding import BINDINGS, check_binding
from dmesh.launcher.ports import LOOPBACK

_PYTHON = re.compile(r"python(?:3(?:\.\d+)?t?)?")


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a `dmesh run`."""

    clients: int
    """Number of clients to start; at least 1."""
    command: tuple[str, ...]
    """The script or module, then its own arguments; before them, if the user says which, the interpreter."""
    module: bool = False
    """`command[0]` is a module, as after `python -m`."""
    cpu_devices: int | None = None
    """Logical CPU devices of each client, unless its script says otherwise; at least 1."""
    bind: str = ""
    """CPU binding of each client on its host: `core` or `numa`, see `binding`; empty for none."""
    coordinator: str | None = None
    """HOST:PORT of a standalone coordination server; None for the environment's, else one in client 0."""
    cluster: str | None = None
    """The cluster's name at that server; None for the environment's, or else a fresh one."""
    timeout_after_failure: float = 3.0
    """Seconds for the others to end by themselves after the first failure."""
    terminate_grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""
    max_restarts: int = 0
    """Restarts of each client that fails; it takes its own place in the running job."""
    labels: bool = True
    """True if lines of standard output are labeled `[rank]`; lines of standard error always are."""


@dataclass(frozen=True)
class ClientPlan:
    """One process to start."""

    rank: int
    """Its client id."""
    command: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str] = field(repr=False)
    """Its whole environment; holds the run's token."""
    restarts: int = 0
    """Number of restarts if it fails."""
    labeled: bool = True
    """True if its standard output is labeled."""
    bind: str = ""
    """CPU binding on its host: `core` or `numa`; empty for none."""
    descriptors: tuple[int, ...] = ()
    """The launcher's open files that it inherits, beside the standard ones."""
    host: str = ""
    """Name of its host; empty for this machine."""


@dataclass(frozen=True)
class Place:
    """Index of a client on its host."""

    local_rank: int
    """Its index there."""
    local_size: int
    """Number of clients there."""
    host: str = ""
    """Name of the host; empty for this machine."""


@dataclass(frozen=True)
class LaunchPlan:
    """A job that can be started."""

    clients: tuple[ClientPlan, ...]
    """By rank."""
    options: LaunchOptions
    """Options that it was made from."""


def check_options(options: LaunchOptions, environment: Mapping[str, str], *, elsewhere: bool = False) -> None:
    """Refuse what cannot work.

    Args:
        options: What the user asked for.
        environment: The launcher's own environment.
        elsewhere: Whether the program is on other hosts, so that it is looked for there.

    Raises:
        ConfigurationError: With one line that says what is wrong and what to do.
    """
    if options.clients < 1:
        raise ConfigurationError(f"-n must be at least 1, got {options.clients}")
    if options.cpu_devices is not None and options.cpu_devices < 1:
        raise ConfigurationError(f"--cpu-devices must be at least 1, got {options.cpu_devices}")
    if options.bind and options.bind not in BINDINGS:
        raise ConfigurationError(f"--bind must be {' or '.join(BINDINGS)}, got {options.bind!r}")
    if options.bind and not elsewhere:
        check_binding()
    for flag, seconds in (
        ("--timeout-after-failure", options.timeout_after_failure),
        ("--terminate-grace", options.terminate_grace),
    ):
        if not 0 <= seconds < float("inf"):
            raise ConfigurationError(f"{flag} must be a number of seconds of 0 or more, got {seconds:g}")
    if options.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts must be at least 0, got {options.max_restarts}")
    policy = environment.get("DMESH_RESTART_POLICY", "").strip()
    if options.max_restarts and policy.lower() not in ("", "rejoin"):
        raise ConfigurationError(
            f"--max-restarts needs DMESH_RESTART_POLICY=rejoin, but it is {policy!r}, under which a client "
            "that fails ends the job for all. Unset the variable, or leave --max-restarts out"
        )
    if options.coordinator is not None:
        split_address(options.coordinator, "--coordinator")
    elif environment.get("DMESH_COORDINATOR"):
        split_address(environment["DMESH_COORDINATOR"], "DMESH_COORDINATOR")
    if options.cluster is not None and not JOB_NAME_PATTERN.fullmatch(options.cluster):
        raise ConfigurationError(
            f"--cluster must be 1-128 letters, digits, dots, dashes or underscores, got {options.cluster!r}"
        )
    if not options.command:
        raise ConfigurationError("no script given. Example: dmesh run -n 4 script.py")
    if not elsewhere:
        check_command(options)


def check_command(options: LaunchOptions) -> None:
    """Refuse a program that is not on this machine.

    Raises:
        ConfigurationError: With one line that says what is wrong.
    """
    target = options.command[0]
    if _names_interpreter(options):
        _check_interpreter(options.command)
    elif options.module:
        if not _module_exists(target):
            raise ConfigurationError(f"there is no module {target!r} here or among this Python's packages")
    elif not Path(target).exists():
        raise ConfigurationError(f"there is no script {target!r} (looked in {Path.cwd()})")
    elif not os.access(target, os.R_OK):
        raise ConfigurationError(f"the script {target!r} is not readable")


def plan_launch(options: LaunchOptions, ports: Sequence[int], environment: Mapping[str, str]) -> LaunchPlan:
    """Decide the clients' commands and environments.

    Args:
        options: What the user asked for.
        ports: One free loopback port a client.
        environment: The launcher's own environment, which the clients inherit.

    Raises:
        ConfigurationError: The options cannot work.
    """
    check_options(options, environment)
    if len(ports) != options.clients:
        raise ConfigurationError(f"{options.clients} clients need a port each, but got {len(ports)} ports")
    command = command_of(options)
    jobs = [f"{LOOPBACK}:{port}" for port in ports]
    places = [Place(rank, options.clients) for rank in range(options.clients)]
    # Each client's linear algebra would start a thread for every core, N times as many as there are.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.clients))}
    given = {name: value for name, value in environment.items() if value or name not in threads}
    clients = plan_clients(options, command, jobs, places, {**threads, **given})
    Settings.load(clients[0].environment)  # one error here instead of a traceback from every client
    return LaunchPlan(clients, options)


def command_of(options: LaunchOptions) -> tuple[str, ...]:
    """Return program and arguments of a client on this machine."""
    if _names_interpreter(options):
        return (_interpreter(options.command[0]), *options.command[1:])
    return (sys.executable, *(("-m",) if options.module else ()), *options.command)


def plan_clients(
    options: LaunchOptions,
    command: Sequence[str],
    jobs: Sequence[str],
    places: Sequence[Place],
    environment: Mapping[str, str],
) -> tuple[ClientPlan, ...]:
    """Decide what each client is given.

    Args:
        options: What the user asked for.
        command: Program and arguments of each client.
        jobs: HOST:PORT of each client.
        places: Where each of them is.
        environment: What all of them inherit.
    """
    shared = _shared_environment(options, jobs, environment)
    # The coordination server dies with its host, and its clients' places with it.
    lasting = [bool(shared.get("DMESH_COORDINATOR")) or rank > 0 for rank in range(len(jobs))]
    return tuple(
        ClientPlan(
            rank,
            tuple(command),
            {
                **shared, "DTENSOR_CLIENT_ID": str(rank), "RANK": str(rank),
                "LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.local_size),
            },
            options.max_restarts if lasting[rank] else 0,
            options.labels,
            options.bind,
            host=place.host,
        )
        for rank, place in enumerate(places)
    )  # fmt: skip


def own_settings(name: str) -> bool:
    """Return whether a variable of the launcher's environment is for clients on all hosts."""
    return name.startswith(("DMESH_", "DTENSOR_", "OTEL_", "TPU_")) or name == "PYTHONFAULTHANDLER"


def _shared_environment(
    options: LaunchOptions, jobs: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    result = dict(environment)
    result["DTENSOR_JOBS"] = ",".join(jobs)
    result["WORLD_SIZE"] = str(options.clients)
    result["PYTHONUNBUFFERED"] = "1"  # a line is seen when it is printed, not after the crash
    defaults = {
        "DTENSOR_JOB_NAME": "worker",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a traceback, too
    }
    if options.coordinator is not None:
        result["DMESH_COORDINATOR"] = options.coordinator
    if result.get("DMESH_COORDINATOR"):
        defaults["DMESH_CLUSTER"] = f"run-{secrets.token_hex(4)}"
    elif not result.get("DMESH_TOKEN_FILE"):
        # Client 0 hosts the server, and nobody but this run's clients has to get in. A coordinator that runs
        # already has a token of its own, which the clients find as any client does.
        defaults["DMESH_TOKEN"] = secrets.token_hex(32)
    if options.max_restarts:
        defaults["DMESH_RESTART_POLICY"] = "rejoin"
    if options.cluster is not None:
        result["DMESH_CLUSTER"] = options.cluster
    if options.cpu_devices is not None:
        result["DMESH_NUM_CPU_DEVICES"] = str(options.cpu_devices)
    for name, value in defaults.items():
        if not result.get(name):
            result[name] = value
    return result


def _names_interpreter(options: LaunchOptions) -> bool:
    """Return whether the command begins with a Python, as after `mpirun`."""
    name = options.command[0]
    return not options.module and bool(_PYTHON.fullmatch(Path(name).name)) and not _is_text(Path(name))


def _is_text(path: Path) -> bool:
    """Return whether a file without execute permission lies there: a script."""
    return path.is_file() and not os.access(path, os.X_OK)


def _interpreter(name: str) -> str:
    """Return the path of the user's Python; `python` is the interpreter of `dmesh run`."""
    if name in ("python", "python3"):
        return sys.executable
    found = shutil.which(name)
    return "" if found is None else str(Path(found).absolute())  # not resolved: a link says which environment


def _check_interpreter(command: Sequence[str]) -> None:
    """Refuse a Python that is not there, and a script of it that is not.

    Raises:
        ConfigurationError: With one line that says what is wrong and what to do.
    """
    name, *rest = command
    if not _interpreter(name):
        raise ConfigurationError(f"there is no interpreter {name!r} here or on the PATH")
    if not rest:
        raise ConfigurationError(f"no script given. Example: dmesh run -n 4 {name} script.py")
    if not rest[0].startswith("-") and not Path(rest[0]).exists():
        raise ConfigurationError(f"there is no script {rest[0]!r} (looked in {Path.cwd()})")


def _module_exists(name: str) -> bool:
    # Only the top level: finding a submodule would import, that is run, its package inside the launcher.
    top = name.partition(".")[0]
    if not top.isidentifier():
        return False
    path = [str(Path.cwd()), *sys.path]  # `python -m` searches the working directory first
    return top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, path) is not None
