"""Settings of this process from the environment: one frozen object, checked as a whole before any use.

The `DTENSOR_*` variables have the meaning that TensorFlow documents; the `DMESH_*` variables are dmesh's.
Empty variables count as unset. Variables that `dmesh.config` reads one by one have their own functions here,
so that it does not fail because of another variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dmesh._log import announce
from dmesh.config import environment as values
from dmesh.config.addresses import BNS_PREFIX, check_bns_order, shown
from dmesh.config.addresses import split_address as split_address  # part of this module's interface
from dmesh.config.environment import JOB_NAME_PATTERN as JOB_NAME_PATTERN  # likewise
from dmesh.errors import ConfigurationError

RESTART_POLICIES = ("fail-fast", "rejoin")
"""Restart policies: a lost client fails the job, or another process may replace it."""

FOLDINGS = ("host", "rank", "any")
"""Orders of reductions; see `collectives.tuning.Tuning`."""

BACKENDS = ("tcp", "mpi")
"""Backends of the data plane."""

_LONGEST_LEASE = 3600.0
_MOST_SHARED_MEMORY = 2**24
MOST_CPU_DEVICES = 65_536
"""Maximum number of logical CPU devices of one client."""
MOST_CLIENTS = 100_000
"""Maximum of `DMESH_NUM_CLIENTS`: the capacity of a coordination server."""
_DEFAULT = "default"


@dataclass(frozen=True)
class Settings:
    """All settings that `initialize_accelerator_system` takes from the environment."""

    jobs: tuple[str, ...] = ()
    """`DTENSOR_JOBS`: HOST:PORT of every client, by client id. Empty in local mode."""
    own_address: str | None = None
    """Address of this client, if its launcher does not know all addresses."""
    client_id: int = 0
    """`DTENSOR_CLIENT_ID`: index of this process in `jobs`."""
    takes_any_task: bool = False
    """True if the coordinator chooses the client id; `client_id` is then provisional."""
    job_name: str = "localhost"
    """`DTENSOR_JOB_NAME`: the job part of device names; `localhost` in local mode, otherwise `worker`."""
    heartbeat: bool = True
    """`DTENSOR_ENABLE_HEARTBEAT`: result of `heartbeat_enabled()`. Heartbeats are always sent."""
    parallel_executor: str = ""
    """`DTENSOR_USE_PARALLEL_EXECUTOR`: `pw` requests Pathways, which dmesh does not have."""
    coordinator: str | None = None
    """`DMESH_COORDINATOR`: HOST:PORT of a standalone coordination server. None: client 0 hosts one."""
    cluster: str = "default"
    """`DMESH_CLUSTER`: name of the cluster on that server."""
    backend: str = "tcp"
    """`DMESH_BACKEND`: backend of the data plane, `tcp` or `mpi`."""
    data_port: int | None = None
    """`DMESH_DATA_PORT`: port on which client 0 listens for peers if it hosts the server. None: any port."""
    bind_host: str | None = None
    """`DMESH_BIND_HOST`: local address to listen on. None: the host of this client's `DTENSOR_JOBS` entry."""
    interfaces: tuple[str, ...] | None = None
    """`DMESH_INTERFACES`: network interfaces for arrays; empty for only that of this client's address. None:
    all interfaces of the same speed, if this client listens on all addresses."""
    token: str | None = field(default=None, repr=False)
    """`DMESH_TOKEN`: token for the coordination server; without a server, the shared secret of the clients.
    Never shown."""
    token_file: str | None = None
    """`DMESH_TOKEN_FILE`: file with the token. None: `~/.config/dmesh/token`, if it exists."""
    tls_ca: str | None = None
    """`DMESH_TLS_CA`: PEM file of the authority that signed all certificates. None: no TLS."""
    tls_cert: str | None = None
    """`DMESH_TLS_CERT`: PEM file of this process's own certificate."""
    tls_key: str | None = None
    """`DMESH_TLS_KEY`: PEM file of its private key."""
    tls_server_name: str | None = None
    """`DMESH_TLS_SERVER_NAME`: name in the coordinator's certificate, if it differs from the address."""
    peer_tls: bool = False
    """`DMESH_PEER_TLS`: whether to encrypt the traffic between peers, with the certificates above."""
    insecure: bool = False
    """`DMESH_INSECURE`: whether a server that other hosts can reach may run without TLS or a token."""
    num_cpu_devices: int | None = None
    """`DMESH_NUM_CPU_DEVICES`: default number of logical CPU devices. None: as many as needed."""
    native: bool | None = None
    """`DMESH_NATIVE`: whether to use the native core. None: use it if it is installed."""
    init_timeout: float = 300.0
    """`DMESH_INIT_TIMEOUT`: time limit for all clients to join, seconds."""
    shutdown_timeout: float = 60.0
    """`DMESH_SHUTDOWN_TIMEOUT`: time that a shutdown waits for the other clients, seconds."""
    collective_timeout: float = 300.0
    """`DMESH_COLLECTIVE_TIMEOUT`: default timeout of collectives, seconds."""
    shared_memory: int = 1024
    """`DMESH_SHARED_MEMORY`: maximum memory of this client that others on its host share, MiB; 0 for none."""
    tuning: str | None = None
    """`DMESH_TUNING`: file written by `dmesh tune`, or 0 for the built-in defaults. None:
    `~/.config/dmesh/tuning.json`, if it exists."""
    folding: str | None = None
    """`DMESH_FOLDING`: order of reductions, `rank`, `host` or `any`. None: that of the tuning."""
    restart_policy: str | None = None
    """`DMESH_RESTART_POLICY`: `fail-fast` or `rejoin`. None: the cluster's."""
    heartbeat_interval: float | None = None
    """`DMESH_HEARTBEAT_INTERVAL`: seconds between heartbeats. None: the cluster's."""
    lease: float | None = None
    """`DMESH_LEASE`: silence after which a client is blocked or lost, seconds. None: the cluster's."""
    stuck_after: float | None = None
    """`DMESH_STUCK_AFTER`: time others wait for a client before it counts as stuck, seconds; 0 to switch this
    off. None: the cluster's."""
    trace: str | None = None
    """`DMESH_TRACE`: directory into which each client writes a trace of its calls. None: no trace."""
    otel: bool = False
    """`DMESH_OTEL`: whether to make OpenTelemetry spans; the `OTEL_*` variables configure their export."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Origin of each field's value: `default`, `environment variable NAME`, `argument NAME`, or the name of a
    launcher or resolver."""

    @property
    def multi_client(self) -> bool:
        """True if there may be other clients, also with a job list of one entry, as in TensorFlow."""
        return bool(self.jobs)

    @property
    def num_clients(self) -> int:
        """Number of clients; 1 in local mode."""
        return len(self.jobs) or 1

    @property
    def address(self) -> str:
        """Address of this client: its entry of `jobs`, or `own_address`.

        Raises:
            ConfigurationError: The system is in local mode, without addresses.
        """
        if not self.jobs:
            raise ConfigurationError(
                "DTENSOR_JOBS is not set, so this client has no address; set it to HOST:PORT of every client"
            )
        return self.own_address or self.jobs[self.client_id]

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, *, backend: object = None) -> Settings:
        """Read and check all variables.

        Args:
            environ: The variables; None for the process's environment.
            backend: Overrides `DMESH_BACKEND`, if it is not None.

        Raises:
            ConfigurationError: A value is malformed. The message names the variable, the value, what was
                expected and what to do.
        """
        environ = os.environ if environ is None else environ
        jobs = read_jobs(environ)
        origins = {name: _origin(environ, variable) for name, variable in VARIABLES.items()}
        if backend is not None:
            origins["backend"] = "argument backend"
        settings = cls(
            jobs=jobs,
            client_id=read_client_id(environ, len(jobs)),
            job_name=read_job_name(environ, multi_client=bool(jobs)),
            heartbeat=read_heartbeat(environ),
            parallel_executor=values.text(environ, "DTENSOR_USE_PARALLEL_EXECUTOR") or cls.parallel_executor,
            coordinator=values.address(environ, "DMESH_COORDINATOR"),
            cluster=values.name(environ, "DMESH_CLUSTER") or cls.cluster,
            backend=read_backend(environ, backend),
            data_port=values.number(environ, "DMESH_DATA_PORT", 65_535, "unset it to use any free port"),
            bind_host=values.bind_host(environ),
            interfaces=values.interfaces(environ),
            token=values.token(environ),
            token_file=values.text(environ, "DMESH_TOKEN_FILE"),
            tls_ca=values.text(environ, "DMESH_TLS_CA"),
            tls_cert=values.text(environ, "DMESH_TLS_CERT"),
            tls_key=values.text(environ, "DMESH_TLS_KEY"),
            tls_server_name=values.text(environ, "DMESH_TLS_SERVER_NAME"),
            peer_tls=values.flag(environ, "DMESH_PEER_TLS"),
            insecure=values.flag(environ, "DMESH_INSECURE"),
            num_cpu_devices=read_num_cpu_devices(environ),
            native=read_native(environ),
            init_timeout=values.seconds(environ, "DMESH_INIT_TIMEOUT", cls.init_timeout),
            shutdown_timeout=values.seconds(environ, "DMESH_SHUTDOWN_TIMEOUT", cls.shutdown_timeout),
            collective_timeout=values.seconds(environ, "DMESH_COLLECTIVE_TIMEOUT", cls.collective_timeout),
            shared_memory=_shared_memory(environ),
            tuning=values.text(environ, "DMESH_TUNING"),
            folding=_folding(environ),
            restart_policy=_restart_policy(environ),
            heartbeat_interval=values.optional_seconds(
                environ, "DMESH_HEARTBEAT_INTERVAL", 0.01, _LONGEST_LEASE
            ),
            lease=values.optional_seconds(environ, "DMESH_LEASE", 0.1, _LONGEST_LEASE),
            stuck_after=values.optional_seconds(environ, "DMESH_STUCK_AFTER", 0.0, values.LONGEST_TIME),
            trace=values.text(environ, "DMESH_TRACE"),
            otel=values.flag(environ, "DMESH_OTEL"),
            origins=origins,
        )
        settings._check_heartbeat()
        settings._check_peer_tls()
        settings._check_backend()
        if settings.parallel_executor == "pw":
            announce(
                "DTENSOR_USE_PARALLEL_EXECUTOR=pw requests the Pathways backend, which dmesh does not "
                "have; continuing with NumPy. Unset the variable to silence this"
            )
        return settings

    def _check_heartbeat(self) -> None:
        if self.heartbeat_interval is None or self.lease is None or self.heartbeat_interval < self.lease:
            return
        raise ConfigurationError(
            f"DMESH_HEARTBEAT_INTERVAL is {self.heartbeat_interval:g} and DMESH_LEASE is {self.lease:g}; "
            "expected an interval shorter than the lease, because a client that is silent for a lease counts "
            "as blocked or lost. A fifth of the lease is a good interval"
        )

    def _check_peer_tls(self) -> None:
        files = {"DMESH_TLS_CA": self.tls_ca, "DMESH_TLS_CERT": self.tls_cert, "DMESH_TLS_KEY": self.tls_key}
        missing = [name for name, value in files.items() if value is None]
        if self.peer_tls and missing:
            raise ConfigurationError(
                f"DMESH_PEER_TLS is on, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
                "not set. Peers verify each other's certificates, so set DMESH_TLS_CA to the PEM file of the "
                "authority that signed them, and DMESH_TLS_CERT and DMESH_TLS_KEY to this client's own "
                "certificate and key"
            )

    def _check_backend(self) -> None:
        if self.backend != "mpi":
            return
        asked = (
            "DMESH_BACKEND is mpi" if self.origins["backend"] != "argument backend" else "backend is 'mpi'"
        )
        if not self.jobs:
            raise ConfigurationError(
                f"{asked}, but DTENSOR_JOBS is not set: every process of an MPI launch would compute alone. "
                "Set DTENSOR_JOBS to HOST:PORT of every client, as many as mpirun starts, and "
                "DTENSOR_CLIENT_ID to each client's own index"
            )
        if self.peer_tls:
            raise ConfigurationError(
                f"{asked} and DMESH_PEER_TLS is on, but MPI does not encrypt its traffic. Use "
                "DMESH_BACKEND=tcp, or unset DMESH_PEER_TLS if you trust the network"
            )


VARIABLES: Mapping[str, str] = {
    "jobs": "DTENSOR_JOBS",
    "client_id": "DTENSOR_CLIENT_ID",
    "job_name": "DTENSOR_JOB_NAME",
    "heartbeat": "DTENSOR_ENABLE_HEARTBEAT",
    "parallel_executor": "DTENSOR_USE_PARALLEL_EXECUTOR",
    "coordinator": "DMESH_COORDINATOR",
    "cluster": "DMESH_CLUSTER",
    "backend": "DMESH_BACKEND",
    "data_port": "DMESH_DATA_PORT",
    "bind_host": "DMESH_BIND_HOST",
    "interfaces": "DMESH_INTERFACES",
    "token": "DMESH_TOKEN",
    "token_file": "DMESH_TOKEN_FILE",
    "tls_ca": "DMESH_TLS_CA",
    "tls_cert": "DMESH_TLS_CERT",
    "tls_key": "DMESH_TLS_KEY",
    "tls_server_name": "DMESH_TLS_SERVER_NAME",
    "peer_tls": "DMESH_PEER_TLS",
    "insecure": "DMESH_INSECURE",
    "num_cpu_devices": "DMESH_NUM_CPU_DEVICES",
    "native": "DMESH_NATIVE",
    "init_timeout": "DMESH_INIT_TIMEOUT",
    "shutdown_timeout": "DMESH_SHUTDOWN_TIMEOUT",
    "collective_timeout": "DMESH_COLLECTIVE_TIMEOUT",
    "shared_memory": "DMESH_SHARED_MEMORY",
    "tuning": "DMESH_TUNING",
    "folding": "DMESH_FOLDING",
    "restart_policy": "DMESH_RESTART_POLICY",
    "heartbeat_interval": "DMESH_HEARTBEAT_INTERVAL",
    "lease": "DMESH_LEASE",
    "stuck_after": "DMESH_STUCK_AFTER",
    "trace": "DMESH_TRACE",
    "otel": "DMESH_OTEL",
}
"""The environment variable of each field of `Settings`."""

OTHER_VARIABLES = tuple(
    f"DMESH_{name}" for name in (
        "BUILD_NATIVE", "FAILPOINTS", "KUBERNETES_NAMESPACE", "KUBERNETES_POD", "KUBERNETES_PORT",
        "KUBERNETES_SELECTOR", "KUBERNETES_SERVICE", "KUBERNETES_SERVICE_ACCOUNT", "KUBERNETES_SIZE",
        "LAUNCHER", "NUM_CLIENTS", "PORT_BASE", "RESTART_COUNT", "RUN_ID", "SSH", "TRACEBACK",
    )
)  # fmt: skip
"""Variables that are read elsewhere."""
_FROM_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT(_\d+_[A-Z]+\w*)?$")
"""Ends of the variables that Kubernetes sets for a service, whose name may begin with "dmesh"."""


def misspelled(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that dmesh does not read, each with the similar one that is probably meant."""
    known = {*VARIABLES.values(), *OTHER_VARIABLES}
    found = {}
    for variable in environ:
        if variable.startswith(("DMESH_", "DTENSOR_")) and variable not in known:
            from difflib import get_close_matches  # rarely needed

            close = get_close_matches(variable, known, 1, 0.85)
            if close and not _FROM_KUBERNETES.search(variable):
                found[variable] = close[0]
    return found


# Single variables ------------------------------------------------------------------------------------------


def read_jobs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the clients' addresses from `DTENSOR_JOBS`, by client id; empty in local mode.

    Raises:
        ConfigurationError: An entry is empty, malformed or a duplicate, or BNS addresses are not sorted.
    """
    raw = values.text(environ, "DTENSOR_JOBS")
    if raw is None:
        return ()
    jobs = tuple(entry.strip() for entry in raw.split(","))
    seen: dict[tuple[str, int], int] = {}
    for index, entry in enumerate(jobs):
        what = f"entry {index} of DTENSOR_JOBS"
        if not entry:
            raise ConfigurationError(
                f"{what} is empty in {shown(raw)}; remove the extra comma. Expected HOST:PORT of each "
                "client, separated by single commas"
            )
        if entry.startswith(BNS_PREFIX):
            # Google's internal naming: a task number, and optionally the number or the name of a port.
            key = (entry, 0)
        else:
            host, port = split_address(entry, what)
            key = (host.lower(), port)
        first = seen.setdefault(key, index)
        if first != index:
            raise ConfigurationError(
                f"DTENSOR_JOBS lists {entry} more than once, as entries {first} and {index}. Each client "
                "needs its own address: give them different ports"
            )
    if any(entry.startswith(BNS_PREFIX) for entry in jobs):
        check_bns_order(jobs)
    return jobs


def read_client_id(environ: Mapping[str, str], num_jobs: int) -> int:
    """Return this client's id from `DTENSOR_CLIENT_ID`, default 0.

    Args:
        environ: The environment variables.
        num_jobs: Number of entries in `DTENSOR_JOBS`; 0 in local mode.

    Raises:
        ConfigurationError: The variable is not an integer from 0 to the number of clients - 1.
    """
    raw = values.text(environ, "DTENSOR_CLIENT_ID")
    if raw is None:
        return 0
    if values.INTEGER.fullmatch(raw) and 0 <= int(raw) < (num_jobs or 1):
        return int(raw)
    if num_jobs == 0:
        raise ConfigurationError(
            f"DTENSOR_CLIENT_ID is {shown(raw)}, but DTENSOR_JOBS is not set: without other clients the id "
            "can only be 0. Set DTENSOR_JOBS to HOST:PORT of every client, or unset DTENSOR_CLIENT_ID"
        )
    raise ConfigurationError(
        f"DTENSOR_CLIENT_ID is {shown(raw)}; expected an integer from 0 to {num_jobs - 1}, because "
        f"DTENSOR_JOBS has {num_jobs} {'entry' if num_jobs == 1 else 'entries'}. Give each client the index "
        "of its own entry"
    )


def read_num_clients(environ: Mapping[str, str]) -> int | None:
    """Return `DMESH_NUM_CLIENTS`, None if it is not set.

    Raises:
        ConfigurationError: The value is not a positive integer.
    """
    return values.number(environ, "DMESH_NUM_CLIENTS", MOST_CLIENTS, "unset it to run without other clients")


def read_job_name(environ: Mapping[str, str], *, multi_client: bool) -> str:
    """Return the job name from `DTENSOR_JOB_NAME`; default `worker`, or `localhost` in local mode.

    Raises:
        ConfigurationError: The name has characters that are not valid in a device name.
    """
    return values.name(environ, "DTENSOR_JOB_NAME") or ("worker" if multi_client else "localhost")


def read_heartbeat(environ: Mapping[str, str]) -> bool:
    """Return `DTENSOR_ENABLE_HEARTBEAT` as a truth value, default True.

    Raises:
        ConfigurationError: The value is not a truth value.
    """
    raw = values.text(environ, "DTENSOR_ENABLE_HEARTBEAT")
    if raw is None or raw.lower() in ("true", "1", "yes", "on"):
        return True
    if raw.lower() in ("false", "0", "no", "off"):
        return False
    raise ConfigurationError(
        f"DTENSOR_ENABLE_HEARTBEAT is {shown(raw)}; expected true or false. Unset it for the default, true"
    )


def read_num_cpu_devices(environ: Mapping[str, str]) -> int | None:
    """Return `DMESH_NUM_CPU_DEVICES`, None if it is not set.

    Raises:
        ConfigurationError: The value is not a positive integer.
    """
    return values.number(
        environ,
        "DMESH_NUM_CPU_DEVICES",
        MOST_CPU_DEVICES,
        "unset it to use as many as the program requests",
    )


def read_backend(environ: Mapping[str, str], argument: object = None) -> str:
    """Return the backend of the data plane, from an argument or `DMESH_BACKEND`; default `tcp`.

    Raises:
        ConfigurationError: The backend does not exist.
    """
    raw = values.text(environ, "DMESH_BACKEND") if argument is None else argument
    if raw is None:
        return Settings.backend
    if isinstance(raw, str) and raw.lower() in BACKENDS:
        return raw.lower()
    name = "DMESH_BACKEND" if argument is None else "backend"
    given = shown(raw) if isinstance(raw, str) else repr(raw)
    raise ConfigurationError(
        f"{name} is {given}; expected {' or '.join(BACKENDS)}, the transport of arrays between clients. "
        f"Leave it out for the default, {Settings.backend}"
    )


def read_native(environ: Mapping[str, str]) -> bool | None:
    """Return `DMESH_NATIVE` as a truth value, None if it is not set or `auto`.

    Raises:
        ConfigurationError: The value is not 0, 1 or auto.
    """
    raw = values.text(environ, "DMESH_NATIVE")
    if raw is None or raw.lower() == "auto":
        return None
    if raw.lower() in ("0", "false", "no", "off"):
        return False
    if raw.lower() in ("1", "true", "yes", "on"):
        return True
    raise ConfigurationError(
        f"DMESH_NATIVE is {shown(raw)}; expected 1 (require the native core), 0 (never use it) or auto "
        "(use it if it is installed). Unset it for the default, auto"
    )


# Values -----------------------------------------------------------------------------------------------------


def _origin(environ: Mapping[str, str], variable: str) -> str:
    return _DEFAULT if values.text(environ, variable) is None else f"environment variable {variable}"


def _choice(environ: Mapping[str, str], variable: str, choices: Collection[str], expected: str) -> str | None:
    raw = values.text(environ, variable)
    if raw is not None and raw.lower() not in choices:
        raise ConfigurationError(f"{variable} is {shown(raw)}; expected {expected}")
    return None if raw is None else raw.lower()


def _restart_policy(environ: Mapping[str, str]) -> str | None:
    expected = (
        f"{' or '.join(RESTART_POLICIES)}: whether a lost client fails the job, or another process "
        "may replace it. Unset it to use the cluster's"
    )
    return _choice(environ, "DMESH_RESTART_POLICY", RESTART_POLICIES, expected)


def _folding(environ: Mapping[str, str]) -> str | None:
    expected = (
        f"{', '.join(FOLDINGS)}: whether reductions are always in the order of ranks, "
        "host by host where that is faster, or in any order. Unset it for the tuning's, by default "
        "host"
    )
    return _choice(environ, "DMESH_FOLDING", FOLDINGS, expected)


def _shared_memory(environ: Mapping[str, str]) -> int:
    raw = values.text(environ, "DMESH_SHARED_MEMORY")
    if raw is None:
        return Settings.shared_memory
    if values.INTEGER.fullmatch(raw) is None or not 0 <= int(raw) <= _MOST_SHARED_MEMORY:
        raise ConfigurationError(
            f"DMESH_SHARED_MEMORY is {shown(raw)}; expected a whole number of MiB from 0 (share none) to "
            f"{_MOST_SHARED_MEMORY}, or unset it for the default, {Settings.shared_memory}"
        )
    return int(raw)
