"""Set-up of gRPC and of a channel to a coordinator, and the time of its last sign of life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeAlias

import grpc

from dmesh._locks import Lock
from dmesh.coordination.retry import DEFAULT_PATIENCE, Patience

ChannelOptions: TypeAlias = list[tuple[str, int]]

_MIB = 1 << 20
_FAILING_FOR = 1.0
_POLL_INTERVAL_MS = 100
"""Milliseconds between polls of channels by gRPC's own thread; they cost 0.1 % of a processor."""


def prepare_grpc() -> None:
    """Set the variables that gRPC reads when this process uses it first, unless they are set."""
    for name, value in grpc_variables(grpc.__version__).items():
        os.environ.setdefault(name, value)


def grpc_variables(version: str) -> dict[str, str]:
    """Return the environment variables that a version of grpcio needs, with their values.

    Before 1.73, the threads that read a client's connections need the interpreter between two reads. While it
    is held, pings stay unanswered, and the server takes the client for dead. gRPC's timer thread can read the
    connections, too: by default every 5 s, and in most releases from 1.68 on not at all. It does if two
    experiments, which those releases switch on although Python cannot use them, are off
    (grpc/grpc#38290, grpc/grpc#39894).
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    # gRPC's own remarks (a server that says goodbye is one) would stand between the program's lines.
    variables = {"GRPC_VERBOSITY": "ERROR"}
    if release < (1, 73):
        variables["GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"] = str(_POLL_INTERVAL_MS)
        experiments = ["-event_engine_dns"]
        if release >= (1, 69):  # 1.68 complains that it does not know this one
            experiments.append("-event_engine_callback_cq")
        variables["GRPC_EXPERIMENTS"] = ",".join(experiments)
    return variables


def channel_options(patience: Patience = DEFAULT_PATIENCE, *, use_proxy: bool = False) -> ChannelOptions:
    """Return the options of a channel to a coordinator.

    Args:
        patience: How often to ping, and how long to wait for the answer.
        use_proxy: Honor `http_proxy` and its relatives. Off by default: coordinators live in the same
            network, and a proxy that somebody set for the web breaks long-lived streams, on loopback above
            all.
    """
    interval, timeout = (max(50, round(1000 * seconds)) for seconds in patience.pings)
    return [
        ("grpc.enable_http_proxy", int(use_proxy)),
        # They find connections that died without a word, and servers that were stopped. A server answers them
        # on threads of gRPC, also while its interpreter is blocked: then it is worth waiting for. It is the
        # ping timeout that closes a connection; the keepalive timeout alone does not.
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.http2.min_time_between_pings_ms", interval // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # How long an attempt to connect may take, whatever the option's name says. After one that failed
        # there is another channel, see `credentials`: gRPC's own waits between attempts do not matter.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Calls are made again here, with their request id, not by gRPC.
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # Every agent has a connection of its own, so that the server sees each one break.
        ("grpc.use_local_subchannel_pool", 1),
        # Reads of many keys and large tables of members are long; the server limits their size.
        ("grpc.max_receive_message_length", 64 * _MIB),
        ("grpc.max_send_message_length", 64 * _MIB),
    ]


class Contact:
    """Time of a peer's last sign of life, and since when attempts to reach it fail. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._heard_at = clock()
        self._ever = False
        self._failing_since: float | None = None
        self._connected = False

    def heard(self) -> None:
        """Note an answer, just now."""
        with self._lock:
            self._heard_at = self._clock()
            self._ever = True
            self._failing_since = None

    def failed(self) -> None:
        """Note an attempt that was not answered."""
        with self._lock:
            if self._failing_since is None:
                self._failing_since = self._clock()

    def connected(self) -> None:
        """Note that there is a connection which notices by itself when it breaks."""
        with self._lock:
            self._connected = True

    def disconnected(self, unsure: float) -> None:
        """Note that it broke; up to `unsure` seconds ago it was answered."""
        with self._lock:
            if self._connected:
                self._connected = False
                self._heard_at = max(self._heard_at, self._clock() - unsure)

    @property
    def blocked(self) -> bool:
        """True if there is a connection, so that the other side is there even if it is silent."""
        with self._lock:
            return self._connected

    @property
    def ever(self) -> bool:
        """True if there ever was an answer."""
        with self._lock:
            return self._ever

    @property
    def silence(self) -> float:
        """Seconds since the last answer, or since the beginning."""
        with self._lock:
            return self._clock() - self._heard_at

    def silent_for(self, limit: float) -> bool:
        """Return whether the last answer is `limit` seconds old."""
        return self.silence >= limit

    def lost_for(self, limit: float) -> bool:
        """Return whether the other side has been silent for `limit` seconds although it was tried.

        A process that was stopped itself finds a long silence when it goes on; that alone says nothing about
        the other side, so an attempt must have failed, and not only this moment.
        """
        with self._lock:
            now = self._clock()
            return (
                not self._connected
                and now - self._heard_at > limit
                and self._failing_since is not None
                and now - self._failing_since > min(_FAILING_FOR, limit / 2)
            )
