"""Settings of a whole cluster: the first client that registers chooses them for all."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dmesh.errors import ConfigurationError
from dmesh.v1 import coordination_pb2 as pb

_NEVER_MS = -1


class RestartPolicy(enum.Enum):
    """Consequence of a member's loss or failure."""

    FAIL_FAST = "fail-fast"
    """The job fails for all."""
    REJOIN = "rejoin"
    """Another process may take its task slot, while the others wait for it at their next barrier."""


_TO_WIRE = {
    RestartPolicy.FAIL_FAST: pb.RESTART_POLICY_FAIL_FAST,
    RestartPolicy.REJOIN: pb.RESTART_POLICY_REJOIN,
}
_FROM_WIRE = {value: policy for policy, value in _TO_WIRE.items()}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of a cluster, as a client wishes them or as the cluster has them.

    In a request, None stands for the cluster's value, or the server's default for a new cluster.
    """

    restart_policy: RestartPolicy | None = None
    """Consequence of a member's loss or failure."""
    heartbeat_interval: float | None = None
    """Interval of the clients' heartbeats, seconds."""
    lease: float | None = None
    """Silence after which a member is blocked, or, without a connection, lost; seconds."""
    stuck_after: float | None = None
    """Seconds that others wait for a member before the server asks for its status; 0: never."""

    def __post_init__(self) -> None:
        for name, least in (("heartbeat_interval", 0.001), ("lease", 0.001), ("stuck_after", 0.0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 1e9:
                raise ConfigurationError(f"{name} must be a number of seconds from {least:g}, not {value!r}")

    @property
    def rejoin(self) -> bool:
        """True if another process may take the task of a lost member."""
        return self.restart_policy is RestartPolicy.REJOIN

    def to_proto(self) -> pb.ClusterSettings:
        """Convert for the wire, where 0 is what None is here, and a negative time is never."""
        message = pb.ClusterSettings(
            heartbeat_interval_ms=_milliseconds(self.heartbeat_interval),
            lease_ms=_milliseconds(self.lease),
            stuck_after_ms=_NEVER_MS if self.stuck_after == 0 else _milliseconds(self.stuck_after),
        )
        if self.restart_policy is not None:
            message.restart_policy = _TO_WIRE[self.restart_policy]
        return message

    @classmethod
    def from_proto(cls, message: pb.ClusterSettings) -> ClusterSettings:
        """Convert from the wire. A policy that this version does not know becomes None."""
        return cls(
            restart_policy=_FROM_WIRE.get(message.restart_policy),
            heartbeat_interval=_seconds(message.heartbeat_interval_ms),
            lease=_seconds(message.lease_ms),
            stuck_after=0.0 if message.stuck_after_ms < 0 else _seconds(message.stuck_after_ms),
        )


NO_WISHES = ClusterSettings()
"""Settings that accept whatever the cluster has."""


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * 1000))


def _seconds(milliseconds: int) -> float | None:
    return milliseconds / 1000 if milliseconds > 0 else None
