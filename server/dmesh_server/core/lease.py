"""Leases: the core's one primitive of liveness.

A lease has an owner, a time to live, and items attached to it: a member's task, ephemeral keys, locks.
Everything that comes from the owner renews it; when it ends, its items learn it in the same transaction.

    lease = leases.grant("keys of c", ttl=30.0, now=now)  # not renewed for 30 s: it ends
    lease.attach(item)                # item.lease_ended(lease, transaction) is called when it ends
    lease.detach(item)                # not any more; nothing happens if the item was not attached
    leases.renew(lease, now)          # the owner was heard
    leases.revoke(lease, transaction) # ends it now: its items are notified, in the order of their attachment
    leases.drop(lease)                # ends it without notifying its items: the owner's cluster is over

The lease of a member is `slot.lease`. Attach an ephemeral key or a lock to it, or grant a separate lease for
a key with a time to live. Leases are not durable: keep what is needed to grant them again after a restart
(owner, time to live, items) in the items' own records.

**Suspicion.** A closed connection is no verdict. It moves the deadline closer: to `Limits.suspicion` from
now, plus `Limits.suspicion_per_client` for every owner that is suspected at the same time, since the server
attaches them one by one; never beyond the whole lease after the last sign of life, and never so close that a
client could not reconnect. A sign of life restarts the suspicion, `clear` ends it. `vouch` notes that the
owner's process is known to exist: it then has its whole lease. An owner known to be gone is for `revoke`.

**Stalls.** Leases are measured in served time: the monotonic clock without the time for which the server
itself did not run (`note_stall`). A stall therefore extends every lease, and a moment more, so that what was
queued meanwhile is read before anybody is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from dmesh_server.core.deadlines import Deadlines, LeaseDue
from dmesh_server.core.model import Limits
from dmesh_server.core.transaction import Transaction

_RECONNECT = 1.0
"""Seconds that a client has for its next attempt to connect, however long it was silent before."""
_SETTLE = 1.0
"""Seconds, at most, by which a stall extends leases beyond its own length."""


class Item(Protocol):
    """Something that ends with a lease."""

    def lease_ended(self, lease: Lease, transaction: Transaction) -> None:
        """Draw the consequences; called once, when the lease is over."""


@dataclass(slots=True, eq=False)
class Lease:
    """A right that ends unless its owner is heard of. Made by `Leases.grant`."""

    number: int
    """Names it within this run of the server."""
    owner: str
    """Owner, for messages and logs."""
    ttl: float
    """Silence after which it ends, seconds."""
    renewed_at: float
    """Last sign of life, in served time."""
    expired: Callable[[Transaction], None] | None = None
    """Judges an owner whose time is over; None: the lease is revoked."""
    suspected_at: float | None = None
    """Beginning of the suspicion, in served time; None if the owner is not suspected."""
    vouched: bool = False
    """True if the suspected owner's process is known to exist."""
    ended: bool = False
    """True if the lease is over."""
    _items: dict[int, Item] = field(default_factory=dict)

    @property
    def suspected(self) -> bool:
        """True if the owner's connection closed and it has not been heard from since."""
        return self.suspected_at is not None

    @property
    def items(self) -> Iterator[Item]:
        """The attached items, in the order of their attachment."""
        return iter(tuple(self._items.values()))

    def attach(self, item: Item) -> None:
        """Attach an item; once, however often it is called.

        Raises:
            ValueError: The lease is over.
        """
        if self.ended:
            raise ValueError(f"the lease of {self.owner} is over: nothing can be attached to it")
        self._items[id(item)] = item

    def detach(self, item: Item) -> None:
        """Detach an item; idempotent."""
        self._items.pop(id(item), None)


OVER = Lease(0, "nobody", 0.0, 0.0, ended=True)
"""A lease that is over: nothing can be attached to it."""


class Leases:
    """All leases of one server, with one deadline each."""

    def __init__(self, limits: Limits, deadlines: Deadlines) -> None:
        self._limits = limits
        self._deadlines = deadlines
        self._leases: dict[int, Lease] = {}
        self._suspects: dict[int, Lease] = {}
        self._last_number = 0
        self._stalled = 0.0
        self._storm = 0
        """Most owners that were suspected at a time, since the last moment without any."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def suspects(self) -> int:
        """Number of owners that are suspected."""
        return len(self._suspects)

    def find(self, number: int) -> Lease | None:
        """Return a lease that is not over."""
        return self._leases.get(number)

    def suspect_of(self, number: int) -> Lease | None:
        """Return a lease whose owner is suspected."""
        return self._suspects.get(number)

    def remaining(self, lease: Lease, now: float) -> float:
        """Return for how long the lease holds if nothing more is heard, seconds; negative: it is due."""
        return self._when(lease) - now

    # What happens to a lease.

    def grant(
        self, owner: str, ttl: float, now: float, expired: Callable[[Transaction], None] | None = None
    ) -> Lease:
        """Grant a lease.

        Args:
            owner: Owner, for messages and logs.
            ttl: Silence after which it ends, seconds.
            now: The time.
            expired: Called instead of `revoke` when the time is over. It must revoke or renew the lease, or
                leave it alone: then it stays, without a deadline, until it is renewed or suspected.
        """
        self._last_number += 1
        lease = Lease(self._last_number, owner, ttl, self._served(now), expired)
        self._leases[lease.number] = lease
        self._arm(lease)
        return lease

    def renew(self, lease: Lease, now: float) -> None:
        """Note a sign of life of the owner. Cheap: an armed deadline is not moved, but judged when due."""
        if lease.ended:
            return
        # Right after a stall, the time that counts is a little before that of the sign before it.
        lease.renewed_at = max(lease.renewed_at, self._served(now))
        if lease.suspected_at is not None:
            lease.suspected_at = max(lease.suspected_at, lease.renewed_at)
            self._arm(lease)
        elif LeaseDue(lease.number) not in self._deadlines.live:
            self._arm(lease)

    def suspect(self, lease: Lease, now: float) -> None:
        """Note that the owner's connection closed: its deadline moves closer."""
        lease.suspected_at, lease.vouched = self._served(now), False
        self._suspects[lease.number] = lease
        self._storm = max(self._storm, len(self._suspects))
        self._arm(lease)

    def vouch(self, lease: Lease) -> None:
        """Note that a suspected owner's process exists: it has its whole lease to come back."""
        if lease.suspected and not lease.vouched:
            lease.vouched = True
            self._arm(lease)

    def clear(self, lease: Lease, now: float) -> None:
        """Note that the owner is connected: the suspicion is over."""
        self._acquit(lease)
        self.renew(lease, now)

    def revoke(self, lease: Lease, transaction: Transaction) -> None:
        """End the lease and notify its items. Idempotent."""
        items = tuple(lease.items)
        self.drop(lease)
        for item in items:
            item.lease_ended(lease, transaction)

    def drop(self, lease: Lease) -> None:
        """End the lease without notifying its items. Idempotent."""
        lease.ended = True
        lease._items.clear()
        self._acquit(lease)
        self._leases.pop(lease.number, None)
        self._deadlines.cancel(LeaseDue(lease.number))

    # Time.

    def due(self, number: int, transaction: Transaction) -> None:
        """Judge a lease whose deadline has come: it may have been renewed, or the server have stalled."""
        lease = self._leases[number]
        if self._when(lease) > transaction.now:
            self._arm(lease)
        elif lease.expired is not None:
            lease.expired(transaction)
        else:
            self.revoke(lease, transaction)

    def note_stall(self, seconds: float) -> None:
        """Extend every lease by a time for which the server did not run, and a moment to catch up."""
        self._stalled += seconds + min(seconds, _SETTLE)

    def window(self, lease: Lease) -> float:
        """Return how long a suspected owner has to come back, seconds."""
        limits = self._limits
        return min(lease.ttl, limits.suspicion + limits.suspicion_per_client * self._storm)

    def _served(self, now: float) -> float:
        return now - self._stalled

    def _when(self, lease: Lease) -> float:
        """Return when the lease is over, by the clock."""
        end = lease.renewed_at + lease.ttl
        if lease.suspected_at is not None:
            window = self.window(lease)
            if not lease.vouched:
                end = min(end, lease.suspected_at + window)
            end = max(end, lease.suspected_at + min(window, _RECONNECT))
        return end + self._stalled

    def _arm(self, lease: Lease) -> None:
        self._deadlines.set(LeaseDue(lease.number), self._when(lease))

    def _acquit(self, lease: Lease) -> None:
        lease.suspected_at, lease.vouched = None, False
        if self._suspects.pop(lease.number, None) is not None and not self._suspects:
            self._storm = 0
