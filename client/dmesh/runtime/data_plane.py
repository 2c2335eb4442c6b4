"""Data plane of a client before it knows its peers: a TCP listener, and the MPI launch if there is to be one.

Everything that can be wrong with it is found here, before the first byte goes to a peer.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from pathlib import Path

from dmesh._log import announce
from dmesh.collectives.backends import mpi_world
from dmesh.collectives.backends.tcp.routes import LocalAddress
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.config.addresses import join_address
from dmesh.config.host import listener_on
from dmesh.config.interfaces import Interface, check_exists, look_at, usable
from dmesh.config.settings import Settings, split_address
from dmesh.errors import AddressInUseError, ConfigurationError
from dmesh.security.certificates import IdentityFiles


class DataPlane:
    """A client's end of the data plane.

    Args:
        settings: Multi-client settings.
        port: Port to listen on; 0 for any free one.
        deadline: Time on the monotonic clock by which all processes of an MPI launch must have come.

    Raises:
        AddressInUseError: The port is taken.
        ConfigurationError: The settings do not fit this machine, or the MPI launch.
        MissingExtraError: mpi4py or an MPI library is missing.
        InitializationTimeoutError: Not all processes of the MPI launch came.
        CollectiveError: MPI failed.
    """

    def __init__(self, settings: Settings, port: int, deadline: float) -> None:
        host, _ = split_address(
            settings.address, f"entry {settings.client_id} of DTENSOR_JOBS", any_port=True
        )
        check_exists(settings.interfaces or ())
        self._tls = _peer_tls(settings)
        self.mpi: mpi_world.MpiWorld | None = None
        """The MPI launch that carries the arrays; None if TCP does."""
        if settings.backend == "mpi":  # first, because it also finds clients that have the same id, and port
            left = max(deadline - time.monotonic(), 0.001)
            self.mpi = mpi_world.join(mpi_world.load(), settings.client_id, settings.jobs, left)
        with contextlib.ExitStack() as opened:
            if self.mpi is not None:
                opened.callback(self.mpi.close)
            self._listener = opened.enter_context(_listen(settings, host, port))
            self.address = join_address(host, self._listener.getsockname()[1])
            """HOST:PORT at which the peers reach it."""
            self._addresses = _listen_on_interfaces(settings, host, self._listener, opened)
            self._opened = opened.pop_all()

    def transport(
        self, rank: int, incarnation: int, secret: Callable[[], bytes], cluster_id: bytes
    ) -> TcpTransport:
        """Return the transport, not started; once.

        Args:
            rank: This client's id.
            incarnation: Random number of this process; 0 if there is none.
            secret: Returns the secret that all clients of the cluster share.
            cluster_id: Identifies this run of the cluster.
        """
        return TcpTransport(
            rank,
            self._listener,
            secret=secret,
            cluster_id=cluster_id,
            incarnation=incarnation,
            tls=self._tls,
            addresses=self._addresses,
        )

    def close(self) -> None:
        """Close the opened sockets, if no transport was created."""
        self._opened.close()


def address_in_use(where: str, settings: Settings) -> AddressInUseError:
    """Return the error that says that this client's port is taken."""
    source = settings.origins.get("jobs", "default")
    advice = ""
    if source != "default" and not source.startswith("environment variable"):
        advice = f" The port is from {source}; DMESH_PORT_BASE sets others for all clients of a launch"
    other = listener_on(split_address(where, "the address")[1])
    return AddressInUseError(
        f"cannot listen on {where}{_whose(settings)}: the port is taken by "
        f"{other.describe() if other else 'another process'}. Is another client with the same "
        f"DTENSOR_CLIENT_ID, or a leftover of an earlier run, still there?{advice}"
    )


def _peer_tls(settings: Settings) -> PeerTls | None:
    """Read the certificates for the connections with peers; None if those are not encrypted."""
    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_ca
    if (
        not settings.peer_tls or cert is None or key is None or ca is None
    ):  # settings are checked: all or none
        return None
    return PeerTls(IdentityFiles(Path(cert), Path(key)), Path(ca))


def _listen(settings: Settings, host: str, port: int) -> socket.socket:
    """Open the listener for this client's peers; port 0 takes any free one."""
    bind_host = settings.bind_host or host
    where = join_address(bind_host, port)
    try:
        return _open(bind_host, port)
    except socket.gaierror as error:
        raise ConfigurationError(f"cannot listen on {where}{_whose(settings)}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise address_in_use(where, settings) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(
                f"cannot listen on {where}{_whose(settings)}: this machine does not have that address. "
                "Check DTENSOR_CLIENT_ID, or set DMESH_BIND_HOST to the local address to listen on."
            ) from error
        raise


def _open(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted client must not wait for the kernel to forget its old connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_on_interfaces(
    settings: Settings, host: str, listener: socket.socket, opened: contextlib.ExitStack
) -> tuple[LocalAddress, ...]:
    """Listen at the addresses of the network interfaces that carry arrays, where `listener` does not.

    An interface that the user has not named gets a listener only if that is there anyway.
    """
    bound, port = ipaddress.ip_address(listener.getsockname()[0]), listener.getsockname()[1]
    everywhere = bound.is_unspecified
    found = []
    for interface in _interfaces(settings, host, everywhere=everywhere):
        address, more = interface.address, None
        covered = everywhere and (bound.version == 6 or address.version == 4)
        if not covered and address.ip != bound:
            more = _open_at(interface, port)
            if more is None:
                continue
            opened.enter_context(more)
        found.append(LocalAddress(address, port if more is None else more.getsockname()[1], more))
    return tuple(found)


def _open_at(interface: Interface, port: int) -> socket.socket | None:
    problem = ""
    for wanted in (port, 0):
        try:
            return _open(str(interface.address.ip), wanted)
        except OSError as error:
            problem = error.strerror or str(error)
    announce(f"arrays do not use {interface.describe()}: cannot listen there: {problem}")
    return None


def _interfaces(settings: Settings, host: str, *, everywhere: bool) -> list[Interface]:
    """Return the interfaces that carry arrays; without a setting, that of `host`, and those as fast."""
    if settings.interfaces is not None:
        seen = [(name, look_at(name)) for name in settings.interfaces]
        for name, problem in seen:
            if isinstance(problem, str):
                announce(f"client {settings.client_id} does not use {name}: {problem}")
        return [interface for _, interface in seen if isinstance(interface, Interface)]
    if not everywhere or len(there := usable()) < 2:
        return []
    try:
        known = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return []  # a name for others alone, such as that of a gateway
    mine = [interface for interface in there if str(interface.address.ip) in known][:1]
    return mine + [
        other
        for other in there
        for own in mine
        if other is not own and (other.speed or own.speed) >= own.speed
    ]


def _whose(settings: Settings) -> str:
    return (
        f" for client {settings.client_id} (DTENSOR_JOBS entry {settings.address})" if settings.jobs else ""
    )
