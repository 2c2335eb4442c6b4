"""Quotas of tenants: bounds on what the clusters that one tenant has formed may hold together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dmesh_server.core.errors import CoreError, ErrorKind


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one tenant; None: only the server's own."""

    clusters: int | None = None
    """Clusters that it has formed and that have not ended."""
    tasks: int | None = None
    """Tasks of these clusters, registered or not."""
    keys: int | None = None
    """Keys in these clusters."""
    bytes: int | None = None
    """Bytes of these keys and their values."""
    calls_per_second: int | None = None
    """Calls, on average over a second. Kept where calls come in; the core does not count them."""


class Owned(Protocol):
    """A cluster, as far as quotas count it."""

    @property
    def owner(self) -> str:
        """Tenant that formed it; empty for none."""

    @property
    def ended(self) -> bool:
        """True if all its members have departed."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Number of tasks, number of keys, bytes of keys and values."""


def _unlimited(_: str) -> Quota | None:
    return None


class Quotas:
    """Compares what tenants hold with their quotas."""

    def __init__(self, quota_of: Callable[[str], Quota | None] = _unlimited) -> None:
        """Make quotas of tenants that hold nothing yet.

        Args:
            quota_of: Looks up the quota of a tenant; None for none.
        """
        self._quota_of = quota_of
        self._owned: dict[str, list[Owned]] = {}

    def check_cluster(self, owner: str, tasks: int) -> None:
        """Check that a tenant may form another cluster.

        Raises:
            CoreError: LIMIT_EXCEEDED, naming the quota.
        """
        quota = self._quota_of(owner) if owner else None
        if quota is None:
            return
        running = self._running(owner)
        _check(owner, "clusters", quota.clusters, len(running), 1)
        _check(owner, "tasks", quota.tasks, sum(cluster.size[0] for cluster in running), tasks)

    def check_write(self, owner: str, keys: int, growth: int) -> None:
        """Check that a tenant's cluster may grow by so many keys and bytes.

        Raises:
            CoreError: LIMIT_EXCEEDED, naming the quota.
        """
        quota = self._quota_of(owner) if owner else None
        if quota is None or (keys <= 0 and growth <= 0):
            return
        running = self._running(owner)
        _check(owner, "keys", quota.keys, sum(cluster.size[1] for cluster in running), keys)
        _check(owner, "bytes", quota.bytes, sum(cluster.size[2] for cluster in running), growth)

    def add(self, cluster: Owned) -> None:
        """Count a cluster that begins for its owner."""
        if cluster.owner:
            self._owned.setdefault(cluster.owner, []).append(cluster)

    def _running(self, owner: str) -> list[Owned]:
        found = [one for one in self._owned.get(owner, ()) if not one.ended and one.owner == owner]
        # A cluster that ended and begins again for the same owner was added twice.
        unique = list({id(one): one for one in found}.values())
        if unique:
            self._owned[owner] = unique
        else:
            self._owned.pop(owner, None)
        return unique


def _check(owner: str, name: str, most: int | None, held: int, more: int) -> None:
    if most is not None and more > 0 and held + more > most:
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"quota `{name}` of token {owner}: its clusters hold {held} of {most} {name}, and {more} "
            "more were requested. Free some, or ask the operator for a token with a larger quota.",
        )
