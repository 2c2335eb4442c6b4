"""The settings of a cluster: decided by the first client to register, and the same for all others."""

from __future__ import annotations

import math

from dmesh_server.core import messages
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import ClusterSettings, Limits, Member, RestartPolicy
from dmesh_server.core.validation import invalid

NEVER = -1.0
"""`stuck_after` of a cluster in which nobody is asked."""

_ADVICE = "Leave it unset, or set it alike for all clients"
_VARIABLES = {
    "restart policy": "DMESH_RESTART_POLICY",
    "heartbeat interval": "DMESH_HEARTBEAT_INTERVAL",
    "lease": "DMESH_LEASE",
    "time after which a member counts as stuck": "DMESH_STUCK_AFTER",
}


def decide(wish: ClusterSettings, limits: Limits, tasks: int) -> ClusterSettings:
    """Returns the settings of a cluster whose first client has this wish.

    Of lease and heartbeat interval, one that was not wished for keeps the server's proportion to the other.
    In large clusters, both are longer than the server's: reading ten thousand heartbeats every three seconds
    would leave it time for nothing else.

    Args:
        wish: What the client wishes.
        limits: What the server allows, and has for those who wish for nothing.
        tasks: Task slots of the cluster.

    Raises:
        CoreError: INVALID_ARGUMENT: the wish cannot be fulfilled.
    """
    check(wish, limits)
    beats = limits.lease / limits.heartbeat_interval
    standard = max(limits.heartbeat_interval, tasks / limits.heartbeats_per_second)
    interval, lease = wish.heartbeat_interval, wish.lease
    if not lease:
        lease = min(max(limits.lease, (interval or standard) * beats), limits.max_lease)
    if not interval:
        interval = min(standard, lease / beats)
    if interval >= lease:
        raise invalid(
            f"the cluster's heartbeat interval ({interval:g} s) must be shorter than its lease ({lease:g} s)"
            ": see DMESH_HEARTBEAT_INTERVAL and DMESH_LEASE"
        )
    stuck_after = wish.stuck_after or limits.stuck_after
    return ClusterSettings(
        wish.restart_policy or RestartPolicy.FAIL_FAST,
        interval,
        lease,
        stuck_after if stuck_after > 0 else NEVER,
    )


def check(wish: ClusterSettings, limits: Limits) -> None:
    """Checks a wish by itself.

    Raises:
        CoreError: INVALID_ARGUMENT: it could not be fulfilled by any cluster.
    """
    for what, value, least, most in (
        ("heartbeat interval", wish.heartbeat_interval, limits.min_heartbeat_interval, limits.max_lease),
        ("lease", wish.lease, limits.min_lease, limits.max_lease),
    ):
        if not math.isfinite(value) or (value != 0 and not least <= value <= most):
            raise invalid(
                f"the {what} of a cluster must be from {least:g} to {most:g} s, not {value:g} s: see "
                f"{_VARIABLES[what]}"
            )
    if math.isnan(wish.stuck_after) or wish.stuck_after > limits.max_lease * 24:
        raise invalid(
            f"the time after which a member counts as stuck must be at most {limits.max_lease * 24:g} s, or "
            f"negative for never; not {wish.stuck_after:g} s: see DMESH_STUCK_AFTER"
        )


def compare(
    wish: ClusterSettings, settings: ClusterSettings, who: str, cluster: str, founder: Member
) -> None:
    """Compares a later client's wish with what the cluster has.

    Args:
        wish: The client's wish.
        settings: What the cluster has.
        who: The client, in words.
        cluster: The cluster's name.
        founder: Who decided.

    Raises:
        CoreError: SPEC_MISMATCH: the client wants something else.
    """
    for what, wished, has in (
        ("restart policy", _policy(wish.restart_policy), _policy(settings.restart_policy)),
        ("heartbeat interval", _seconds(wish.heartbeat_interval), _seconds(settings.heartbeat_interval)),
        ("lease", _seconds(wish.lease), _seconds(settings.lease)),
        (
            "time after which a member counts as stuck",
            _seconds(wish.stuck_after),
            _seconds(settings.stuck_after),
        ),
    ):
        if wished not in ("", has):
            raise CoreError(
                ErrorKind.SPEC_MISMATCH,
                f"{who} wants another {what} ({wished}) than cluster {messages.quote(cluster)} has ({has}), "
                f"which was formed by {messages.name(founder)}. {_ADVICE} ({_VARIABLES[what]}).",
                (founder,),
            )


def _policy(policy: RestartPolicy | None) -> str:
    return "" if policy is None else policy.name.lower().replace("_", "-")


def _seconds(value: float) -> str:
    """Returns a time as it is compared and shown: whole milliseconds, as on the wire."""
    if value == 0:
        return ""
    return "never" if value < 0 else f"{round(value, 3):g} s"
