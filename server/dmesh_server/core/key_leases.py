"""Leases of keys: granted on request, or a member's own. Attached keys are deleted when their lease ends.

A granted lease is named by a random number that its owner draws, so that granting it again changes nothing. A
member's own lease is named by its incarnation: it ends when the member leaves, fails or is lost. Granted
leases and attachments are durable; after a restart every lease has its full time again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dmesh_server.core import records, validation
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.lease import Lease
from dmesh_server.core.messages import quote
from dmesh_server.core.roster import Roster
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction

LONGEST = 30 * 24 * 3600.0
"""The longest time to live of a granted lease, seconds."""


@dataclass(slots=True, eq=False)
class _Attached:
    """The keys of one lease: an item of it."""

    number: int
    lease: Lease
    ended: Callable[[_Attached, Transaction], None]
    keys: set[str] = field(default_factory=set)
    granted: bool = True
    """True if it was granted for keys; False for the lease of a member."""

    def lease_ended(self, lease: Lease, transaction: Transaction) -> None:
        """Remove the keys."""
        self.ended(self, transaction)


class KeyLeases:
    """The leases of keys in one generation of a cluster.

    Args:
        cluster: Name of the cluster.
        shared: State of all clusters.
        roster: Its members.
        remove: Removes the keys of a lease that has ended.
    """

    def __init__(
        self,
        cluster: str,
        shared: Shared,
        roster: Roster,
        remove: Callable[[list[str], Transaction], None],
    ) -> None:
        self._cluster = cluster
        self._leases = shared.leases
        self._limits = shared.limits
        self._roster = roster
        self._remove = remove
        self._attached: dict[int, _Attached] = {}

    # Calls.

    def grant(self, number: int, ttl: float, transaction: Transaction) -> float:
        """Grant a lease, or return the time to live of one that was granted before.

        Raises:
            CoreError: The number or the time cannot be, or there are too many leases.
        """
        known = self._attached.get(number)
        if known is not None and known.granted:
            self._leases.renew(known.lease, transaction.now)
            return known.lease.ttl
        validation.duration(ttl, "the time to live of a lease", positive=True)
        if not 1 <= number < 1 << 64 or self._roster.held(number) is not None:
            raise validation.invalid(f"the lease number {number:#x} must be a random number of 64 bits")
        if not self._limits.min_lease <= ttl <= LONGEST:
            raise validation.invalid(
                f"a lease can last from {self._limits.min_lease:g} s to {LONGEST:g} s, not {ttl:g} s"
            )
        if len(self._attached) >= self._limits.max_key_leases + len(self._roster.slots):
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"cluster {quote(self._cluster)} has {self._limits.max_key_leases} leases of keys, which is "
                "the server's limit",
            )
        self._make(number, ttl, transaction.now)
        transaction.persist(self._cluster, records.LEASE, f"{number:016x}", records.encode_seconds(ttl))
        return ttl

    def renew(self, number: int, transaction: Transaction) -> float:
        """Restart the time of a granted lease; return its time to live.

        Raises:
            CoreError: LEASE_NOT_FOUND.
        """
        attached = self._find(number)
        if attached.granted:
            self._leases.renew(attached.lease, transaction.now)
        return attached.lease.ttl

    def revoke(self, number: int, transaction: Transaction) -> int:
        """End a granted lease; return how many keys ended with it. Nothing if there is no such lease."""
        attached = self._attached.get(number)
        if attached is None:
            return 0
        if not attached.granted:
            raise validation.invalid("the lease of a member ends with its membership: leave the cluster")
        count = len(attached.keys)
        self._leases.revoke(attached.lease, transaction)
        return count

    # Keys.

    def check(self, number: int) -> None:
        """Check that keys can be attached to a lease.

        Raises:
            CoreError: LEASE_NOT_FOUND.
        """
        self._find(number)

    def attach(self, key: str, number: int, transaction: Transaction) -> None:
        """Attach a key to a lease that was checked."""
        self.restore_key(key, number)
        transaction.persist(self._cluster, records.ATTACHMENT, key, records.encode_number(number))

    def detach(self, key: str, number: int, transaction: Transaction) -> None:
        """Detach a key from its lease."""
        attached = self._attached.get(number)
        if attached is not None:
            attached.keys.discard(key)
            if not attached.keys and not attached.granted:
                attached.lease.detach(attached)
                del self._attached[number]
        transaction.persist(self._cluster, records.ATTACHMENT, key, None)

    def remaining(self, number: int, now: float) -> float | None:
        """Return for how long a lease holds if it is not renewed, seconds; None for a member's own."""
        attached = self._attached.get(number)
        if attached is None or not attached.granted:
            return None
        return max(0.0, self._leases.remaining(attached.lease, now))

    # Beginning and end.

    def restore(self, number: int, ttl: float, now: float) -> None:
        """Grant a lease again after a restart."""
        self._make(number, ttl, now)

    def restore_key(self, key: str, number: int) -> None:
        """Attach a key again after a restart; its lease is there."""
        attached = self._find(number)
        if not attached.keys and not attached.granted:
            self._attached[number] = attached
            attached.lease.attach(attached)
        attached.keys.add(key)

    def end(self, transaction: Transaction) -> None:
        """Forget all leases: the cluster's generation is over."""
        for number, attached in self._attached.items():
            for key in attached.keys:
                transaction.persist(self._cluster, records.ATTACHMENT, key, None)
            if attached.granted:
                self._leases.drop(attached.lease)
                transaction.persist(self._cluster, records.LEASE, f"{number:016x}", None)
        self._attached.clear()

    def items(self) -> dict[int, set[str]]:
        """Return the keys of each lease."""
        return {number: set(attached.keys) for number, attached in self._attached.items()}

    def _make(self, number: int, ttl: float, now: float) -> None:
        owner = f"keys of cluster {self._cluster}"
        attached = _Attached(number, self._leases.grant(owner, ttl, now), self._ended)
        attached.lease.attach(attached)
        self._attached[number] = attached

    def _find(self, number: int) -> _Attached:
        attached = self._attached.get(number)
        if attached is not None:
            return attached
        task = self._roster.held(number)
        slot = None if task is None else self._roster.slots[task]
        if slot is not None and slot.incarnation == number and not slot.state.departed:
            return _Attached(number, slot.lease, self._ended, granted=False)
        raise CoreError(
            ErrorKind.LEASE_NOT_FOUND,
            f"there is no lease {number:#x} in cluster {quote(self._cluster)}: it expired, was revoked, "
            "or its member is gone. Its keys were deleted.",
        )

    def _ended(self, attached: _Attached, transaction: Transaction) -> None:
        if attached.granted:
            transaction.persist(self._cluster, records.LEASE, f"{attached.number:016x}", None)
        # The keys are detached one by one as they are removed.
        self._remove(sorted(attached.keys), transaction)
        self._attached.pop(attached.number, None)
