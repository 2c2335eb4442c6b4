"""Checks of `dmesh doctor`. Each check looks at one thing, changes nothing, and says what to do."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dmesh import native
from dmesh._version import __version__
from dmesh.cli.observing import Observer, find_target, named_coordinator
from dmesh.config.host import listener_on, numa_nodes, own_nodes
from dmesh.config.interfaces import check_exists, look_at, usable
from dmesh.config.settings import Settings, split_address
from dmesh.coordination.credentials import ClientTls
from dmesh.coordination.members import ClusterState
from dmesh.errors import ConfigurationError, DMeshError
from dmesh.security import tokens
from dmesh.security.certificates import check_identity, read_pem
from dmesh.v1 import coordination_pb2

_SOON = 14.0
"""Days before a certificate's or token's end from which on it is a worry."""
_FEW_FILES = 1024
_CONNECT = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    """Subject of the check."""
    verdict: Verdict
    """Verdict; `skip` if there was nothing to look at."""
    message: str
    """Findings, and advice if it is not well."""


def examine(environ: Mapping[str, str], coordinator: str | None = None) -> Iterator[Check]:
    """Looks at everything, one thing after the other.

    Args:
        environ: The environment of the program.
        coordinator: The server's address, in place of the environment's.
    """
    yield _versions()
    yield _native_core()
    settings: Settings | None = None
    try:
        settings = Settings.load(environ)
    except ConfigurationError as error:
        yield Check("settings", "fail", str(error))
    else:
        kind = f"client {settings.client_id} of {settings.num_clients}" if settings.jobs else "local mode"
        yield Check("settings", "ok", kind)
    yield _proxies(environ)
    yield _token(environ)
    yield from _certificates(environ)
    yield _own_name()
    if settings is not None:
        yield from _names_and_port(settings)
        yield _interfaces(settings)
    yield _numa()
    yield _files(1 if settings is None else settings.num_clients)
    yield _shared_memory(settings)
    yield _tracing()
    yield _clock()
    yield from _server(environ, coordinator)


def _versions() -> Check:
    import google.protobuf
    import grpc
    import numpy as np

    packages = f"numpy {np.__version__}, grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}"
    return Check("versions", "ok", f"dmesh {__version__}, Python {platform.python_version()}, {packages}")


def _native_core() -> Check:
    try:
        core, reason = native.core(), native.reason()
    except DMeshError as error:
        return Check("native core", "fail", str(error))
    if core is None:
        return Check("native core", "warn", f"not used, small collectives are slower: {reason}")
    return Check("native core", "ok", "in use")


def _proxies(environ: Mapping[str, str]) -> Check:
    names = [name for name in environ if name.lower() in _PROXIES and environ[name].strip()]
    if not names:
        return Check("proxies", "ok", "none in the environment")
    return Check(
        "proxies",
        "warn",
        f"{', '.join(sorted(names))} set. dmesh reaches its server without a proxy, but browsers, curl and "
        "Prometheus may not: add the server's host to no_proxy",
    )


def _token(environ: Mapping[str, str]) -> Check:
    value, path = (environ.get(f"DMESH_{name}", "").strip() or None for name in ("TOKEN", "TOKEN_FILE"))
    try:
        source = tokens.find(value, path)
        if source is None:
            return Check("token", "warn", "none: a server that asks for one will refuse this process")
        token = source.read()[0]
    except ConfigurationError as error:
        return Check("token", "fail", str(error))
    found = f"from {source.origin}, fingerprint {token.fingerprint}, role {token.role.name.lower()}"
    now = time.time()
    if token.expired(now):
        return Check("token", "fail", f"{found}: it has expired; ask the server's owner for another")
    if token.expired(now + _SOON * 86_400):
        return Check("token", "warn", f"{found}: it expires within {_SOON:.0f} days")
    return Check("token", "ok", found)


def _certificates(environ: Mapping[str, str]) -> Iterator[Check]:
    names = ("CA", "CERT", "KEY", "SERVER_NAME")
    try:
        tls = ClientTls.of(*(environ.get(f"DMESH_TLS_{name}", "").strip() or None for name in names))
        if tls is None:
            yield Check("certificates", "skip", "no TLS: DMESH_TLS_CA is not set")
            return
        read_pem(tls.ca, "DMESH_TLS_CA")
        yield Check("authority", "ok", str(tls.ca))
        if tls.identity is not None:
            validity = check_identity(tls.identity, "DMESH_TLS_CERT/DMESH_TLS_KEY", tls.ca)
            left = validity.days_left(time.time())
            verdict: Verdict = "ok" if left > _SOON else "warn"
            yield Check("certificate", verdict, f"{validity.describe()}; {left:.0f} days left")
    except ConfigurationError as error:
        yield Check("certificates", "fail", str(error))


def _own_name() -> Check:
    name = socket.gethostname()
    try:
        found = _resolve(name)
    except OSError as error:
        return Check(
            "own name", "warn", f"this host calls itself {name!r}, which nothing resolves ({error.strerror})"
        )
    return Check("own name", "ok", f"{name} is {', '.join(found)}")


def _names_and_port(settings: Settings) -> Iterator[Check]:
    if not settings.jobs:
        yield Check("names", "skip", "local mode: DTENSOR_JOBS is not set")
        return
    hosts = sorted({split_address(entry, "DTENSOR_JOBS")[0] for entry in settings.jobs})
    unknown = []
    for host in hosts:
        try:
            _resolve(host)
        except OSError as error:
            unknown.append(f"{host} ({error.strerror})")
    if unknown:
        yield Check("names", "fail", f"these hosts of DTENSOR_JOBS are not known here: {', '.join(unknown)}")
    else:
        yield Check("names", "ok", f"all {len(hosts)} hosts of DTENSOR_JOBS are known here")
    yield _own_port(settings)


def _own_port(settings: Settings) -> Check:
    host, port = split_address(settings.address, "DTENSOR_JOBS")
    host = settings.bind_host or host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        other = listener_on(port)
        return Check(
            "own port",
            "fail",
            f"{host}:{port} cannot be listened on: {error.strerror}"
            + (f", by {other.describe()}" if other else "")
            + ". If this client runs already, that is "
            "why; else free the port, correct DTENSOR_CLIENT_ID, or set DMESH_BIND_HOST",
        )
    return Check("own port", "ok", f"{host}:{port} can be listened on")


def _interfaces(settings: Settings) -> Check:
    names = settings.interfaces or ()
    try:
        check_exists(names)
    except ConfigurationError as error:
        return Check("interfaces", "fail", str(error))
    bad = [f"{name}: {seen}" for name in names if isinstance(seen := look_at(name), str)]
    if bad:
        return Check("interfaces", "warn", f"clients do without these of DMESH_INTERFACES: {'; '.join(bad)}")
    there = [interface.describe() for interface in usable()]
    if not there:
        return Check("interfaces", "skip", "/sys shows none that leads to other hosts")
    advice = "" if len(there) == 1 or names else "; DMESH_INTERFACES makes arrays use several"
    return Check("interfaces", "ok", ", ".join(there) + advice)


def _numa() -> Check:
    nodes, own = numa_nodes(), own_nodes()
    if not own:
        return Check("numa", "skip", "/sys shows no nodes")
    allowed = [f"node {node} ({len(cpus)} CPUs)" for node, cpus in own.items()]
    many = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return Check("numa", "ok", f"{many}; this process may run on {', '.join(allowed)}")


def _files(clients: int) -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_FEW_FILES, 256 + 4 * clients)
    if soft != resource.RLIM_INFINITY and soft < needed:
        return Check(
            "open files",
            "warn",
            f"this process may open {soft} files, and {clients} clients may need {needed}: ulimit -n {needed}"
            + (f" (the hard limit is {hard})" if hard != resource.RLIM_INFINITY and hard < needed else ""),
        )
    return Check("open files", "ok", f"{soft} may be open")


def _shared_memory(settings: Settings | None) -> Check:
    limit = Settings.shared_memory if settings is None else settings.shared_memory
    if limit == 0:
        return Check("shared memory", "skip", "DMESH_SHARED_MEMORY is 0: clients on this host share none")
    if not hasattr(os, "memfd_create"):
        return Check("shared memory", "warn", f"not on {sys.platform}: clients on this host use connections")
    try:
        descriptor = os.memfd_create("dmesh-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, limit << 20)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Check("shared memory", "fail", f"a segment of {limit} MiB cannot be made: {error.strerror}")
    free = _meminfo("MemAvailable")
    if free is not None and free < limit << 20:
        return Check(
            "shared memory",
            "warn",
            f"a client may share {limit} MiB, and {free >> 20} MiB of memory are free: lower "
            "DMESH_SHARED_MEMORY if large arrays are shared",
        )
    return Check("shared memory", "ok", f"up to {limit} MiB for each client")


def _tracing() -> Check:
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None or scope == "0":
        return Check("memory of peers", "ok", "clients of one user may read each other's memory")
    return Check(
        "memory of peers",
        "warn",
        f"kernel.yama.ptrace_scope is {scope}: clients on this host may not map or read each other's memory, "
        "and may use connections in its place, which is slower",
    )


def _clock() -> Check:
    stamp = Path(__file__).stat().st_mtime
    if time.time() < stamp - 86_400:
        return Check(
            "clock", "fail", "this host's clock is before dmesh was installed: certificates will not be valid"
        )
    try:
        synchronized = _synchronized()
    except OSError:
        return Check("clock", "skip", "whether it is synchronized cannot be found out here")
    if synchronized:
        return Check("clock", "ok", "synchronized")
    return Check(
        "clock",
        "warn",
        "the kernel does not know of a synchronization (NTP): certificates and tokens that expire depend on "
        "the clock; leases and timeouts do not",
    )


def _synchronized() -> bool:
    """Asks the kernel, which time daemons tell.

    Raises:
        OSError: The server does not answer.
    """
    if not sys.platform.startswith("linux"):
        raise OSError("not on Linux")
    import ctypes

    answer = (ctypes.c_char * 512)()  # struct timex, all zero: asks, sets nothing
    state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(answer))
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return state != 5  # TIME_ERROR


def _server(environ: Mapping[str, str], given: str | None) -> Iterator[Check]:
    try:
        target, named = find_target(given, environ), named_coordinator(given, environ)
        address = target.address
        host, port = split_address(address, "the server's address")
    except ConfigurationError as error:
        yield Check("server", "fail", str(error))
        return
    try:
        socket.create_connection((host, port), timeout=_CONNECT).close()
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        if named is None:
            yield Check(
                "server", "skip", f"none is named, and none answers at {address}, {target.origin}: {why}"
            )
            return
        hosted = not (given or environ.get("DMESH_COORDINATOR", "").strip())
        advice = "client 0 hosts it, once it runs" if hosted else "start it with `dmesh serve`"
        verdict: Verdict = "warn" if hosted else "fail"
        yield Check("server", verdict, f"{address} cannot be connected to: {why}; {advice}")
        return
    origin = "" if named is not None else f", {target.origin},"
    yield Check("server", "ok", f"{address}{origin} takes connections")
    try:
        with Observer(address, token=target.token, tls=target.tls) as observer:
            clusters = observer.clusters()
            yield Check("server's answer", "ok", f"it has {_clusters(len(clusters))}, and accepts the token")
            for cluster in clusters[:16]:
                yield _skew(cluster.name, _state(observer, cluster.name))
    except DMeshError as error:
        yield Check("server's answer", "fail", str(error))


def _state(observer: Observer, cluster: str) -> ClusterState:
    request = coordination_pb2.GetClusterStateRequest()
    request.caller.cluster = cluster
    return ClusterState.from_proto(observer.ask(observer.link.coordination.GetClusterState, request))


def _skew(cluster: str, state: ClusterState) -> Check:
    versions: dict[str, int] = {}
    for member in state.members:
        if not member.state.departed:
            versions[member.process.dmesh_version] = versions.get(member.process.dmesh_version, 0) + 1
    others = {version: count for version, count in versions.items() if version != __version__}
    if not others:
        return Check(f"versions in {cluster!r}", "ok", f"all members have {__version__}")
    listed = ", ".join(f"{count} with {version or 'none'}" for version, count in sorted(others.items()))
    return Check(
        f"versions in {cluster!r}", "warn", f"here is {__version__}, and there are members: {listed}"
    )


def _resolve(host: str) -> list[str]:
    found: Callable[..., list[tuple[object, ...]]] = socket.getaddrinfo  # type: ignore[assignment]
    return sorted({str(entry[4][0]) for entry in found(host, None)})  # type: ignore[index]


def _meminfo(name: str) -> int | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) << 10
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _clusters(count: int) -> str:
    return f"{count} cluster{'' if count == 1 else 's'}"
