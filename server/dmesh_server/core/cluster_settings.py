"""Settings of a cluster: decided by the first client to register, and the same for all others."""

from __future__ import annotations

import math

from dmesh_server.core import messages
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import ClusterSettings, Limits, Member, RestartPolicy
from dmesh_server.core.validation import invalid

NEVER = -1.0
"""`stuck_after` of a cluster whose members are never asked for their activity."""


def decide(wish: ClusterSettings, limits: Limits, tasks: int) -> ClusterSettings:
    """Return the settings of a cluster whose first client has this wish.

    If the wish names only one of lease and heartbeat interval, the other keeps the server's proportion to it.
    In large clusters, both are longer than the server's defaults: reading ten thousand heartbeats every three
    seconds would leave the server no time for other work.

    Args:
        wish: The client's wish.
        limits: The server's bounds and defaults.
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
            f"the cluster's heartbeat interval ({interval:g} s) must be shorter than its lease ({lease:g} s)",
            "settings.heartbeat_interval_ms",
            "settings.lease_ms",
        )
    stuck_after = wish.stuck_after or limits.stuck_after
    return ClusterSettings(
        wish.restart_policy or RestartPolicy.FAIL_FAST,
        interval,
        lease,
        stuck_after if stuck_after > 0 else NEVER,
    )


def check(wish: ClusterSettings, limits: Limits) -> None:
    """Check a wish by itself.

    Raises:
        CoreError: INVALID_ARGUMENT: it could not be fulfilled by any cluster.
    """
    for what, field, value, least in (
        (
            "heartbeat interval",
            "settings.heartbeat_interval_ms",
            wish.heartbeat_interval,
            limits.min_heartbeat_interval,
        ),
        ("lease", "settings.lease_ms", wish.lease, limits.min_lease),
    ):
        if not math.isfinite(value) or (value != 0 and not least <= value <= limits.max_lease):
            raise invalid(
                f"the {what} of a cluster must be from {least:g} to {limits.max_lease:g} s, not {value:g} s",
                field,
            )
    if math.isnan(wish.stuck_after) or wish.stuck_after > limits.max_lease * 24:
        raise invalid(
            f"stuck_after must be at most {limits.max_lease * 24:g} s, or "
            f"negative for never; not {wish.stuck_after:g} s",
            "settings.stuck_after_ms",
        )


def compare(
    wish: ClusterSettings, settings: ClusterSettings, who: str, cluster: str, founder: Member
) -> None:
    """Compare a later client's requested settings with the cluster's.

    Args:
        wish: The client's wish.
        settings: What the cluster has.
        who: The client, in words.
        cluster: The cluster's name.
        founder: The member that decided the settings.

    Raises:
        CoreError: SPEC_MISMATCH: the client wants something else.
    """
    for what, field, wished, has in (
        ("restart policy", "restart_policy", _policy(wish.restart_policy), _policy(settings.restart_policy)),
        (
            "heartbeat interval",
            "heartbeat_interval_ms",
            _seconds(wish.heartbeat_interval),
            _seconds(settings.heartbeat_interval),
        ),
        ("lease", "lease_ms", _seconds(wish.lease), _seconds(settings.lease)),
        (
            "time after which a member counts as stuck",
            "stuck_after_ms",
            _seconds(wish.stuck_after),
            _seconds(settings.stuck_after),
        ),
    ):
        if wished not in ("", has):
            raise CoreError(
                ErrorKind.SPEC_MISMATCH,
                f"{who} requests another {what} ({wished}) than cluster {messages.quote(cluster)} has "
                f"({has}), which was formed by {messages.name(founder)}.",
                (founder,),
                fields=(f"settings.{field}",),
            )


def _policy(policy: RestartPolicy | None) -> str:
    return "" if policy is None else policy.name.lower().replace("_", "-")


def _seconds(value: float) -> str:
    """Return a time as it is compared and shown: whole milliseconds, as on the wire."""
    if value == 0:
        return ""
    return "never" if value < 0 else f"{round(value, 3):g} s"
