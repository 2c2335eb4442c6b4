"""Leases of keys: what is attached to one is deleted when it ends."""

from __future__ import annotations

import contextlib
import secrets
import threading
from types import TracebackType

from dmesh.coordination.calls import Calls
from dmesh.coordination.link import Link
from dmesh.coordination.waiting import Worker
from dmesh.errors import ConfigurationError, CoordinationError, LeaseExpiredError
from dmesh.v1 import common_pb2
from dmesh.v1 import key_value_pb2 as pb

_RENEWALS = 3
"""Renewals within one time to live: two may fail."""


class Lease:
    """Lease of keys, renewed in the background until it is revoked. Made by `coordination.lease`.

    Keys that are set with it (`key_value_set(..., lease=lease)`, `Put(..., lease=lease)`) are deleted when it
    ends: when it is revoked, or when it was not renewed for its time to live, because the process is gone or
    does not run. Usable in a `with` statement, which revokes it.
    """

    def __init__(
        self, link: Link, calls: Calls, caller: common_pb2.Caller, ttl: float, *, keep_alive: bool
    ) -> None:
        if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 1e9:
            raise ConfigurationError(f"ttl must be a positive number of seconds, not {ttl!r}")
        self._link = link
        self._calls = calls
        self._caller = caller
        self._ttl = ttl
        self._number = secrets.randbits(63) | 1
        self._over = threading.Event()
        self._lost = False
        request = pb.GrantLeaseRequest(
            caller=caller,
            request_id=secrets.token_hex(16),
            lease=self._number,
            ttl_ms=max(1, round(ttl * 1000)),
        )
        calls.call(link.key_value.GrantLease, request, doing="granting a lease", repeatable=True)
        if keep_alive:
            Worker(self._keep_alive, "dmesh-lease").start()

    @property
    def number(self) -> int:
        """Random number that names it."""
        return self._number

    @property
    def ttl(self) -> float:
        """Seconds for which it lives unless it is renewed."""
        return self._ttl

    @property
    def lost(self) -> bool:
        """True if it is known to have ended against this process's will: its keys are deleted."""
        return self._lost

    @property
    def over(self) -> bool:
        """True once it was revoked, closed or lost: its keys are deleted, or about to be."""
        return self._over.is_set()

    def renew(self) -> None:
        """Let its time begin anew.

        Raises:
            LeaseExpiredError: It has ended.
        """
        request = pb.RenewLeaseRequest(caller=self._caller, lease=self._number)
        try:
            self._calls.call(
                self._link.key_value.RenewLease, request, doing="renewing a lease", mutates=False
            )
        except LeaseExpiredError:
            self._lost = True
            self._over.set()
            raise

    def revoke(self) -> int:
        """End it, and return how many keys ended with it. Nothing if it is over."""
        self._over.set()
        request = pb.RevokeLeaseRequest(
            caller=self._caller, request_id=secrets.token_hex(16), lease=self._number
        )
        return self._calls.call(
            self._link.key_value.RevokeLease, request, doing="revoking a lease", repeatable=True
        ).deleted

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.revoke()
            return
        with contextlib.suppress(CoordinationError):  # the error of the body says more
            self.revoke()

    def close(self) -> None:
        """Stop renewing it. Idempotent."""
        self._over.set()

    def _keep_alive(self) -> None:
        while not self._over.wait(self._ttl / _RENEWALS):
            try:
                self.renew()
            except LeaseExpiredError:
                return
            except CoordinationError:  # the coordinator is away: it has the lease in its store
                continue
