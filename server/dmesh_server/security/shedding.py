"""Load shedding: requests without an accepted token have a small budget, in all and for each host.

Requests with an accepted token do not count against it. New connections of a host far beyond its budget are
not accepted, unless a request with a token came from that host lately; then each request is judged.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dmesh_server.security.pace import Pace

V = TypeVar("V")

_MOST_HOSTS = 4096
_OVERDRAWN = 2.0
"""Debt from which on new connections of a host are not accepted, seconds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on requests without a token, per second."""

    per_second: float = 100.0
    """From all hosts, on average."""
    per_second_and_host: float = 25.0
    """From one host, on average."""
    burst_seconds: float = 4.0
    """Size of a burst in seconds' worth of requests: a browser loads all files of a page together."""
    trust_seconds: float = 60.0
    """Seconds for which a host is trusted after a request with a token came from it."""


class LoadShedder:
    """Admission of requests and connections whose callers have shown no token."""

    def __init__(self, clock: Callable[[], float], budget: Budget | None = None) -> None:
        """Begin with a full budget.

        Args:
            clock: Monotonic seconds.
            budget: The bounds; the defaults if None.
        """
        self._clock = clock
        self._budget = budget if budget is not None else Budget()
        self._all = self._pace(self._budget.per_second)
        self._hosts: OrderedDict[str, Pace] = OrderedDict()
        self._trusted: OrderedDict[str, float] = OrderedDict()
        self.shed = 0
        """Requests and connections turned away so far."""

    def authenticated(self, host: str) -> None:
        """Note that a request with an accepted token came from a host."""
        _keep(self._trusted, host, self._clock())

    def serves(self, host: str) -> bool:
        """Count a request without a token from a host; return whether it is within the budget."""
        name, now = _network(host), self._clock()
        pace = self._hosts.get(name)
        if pace is None:
            pace = self._pace(self._budget.per_second_and_host)
        _keep(self._hosts, name, pace)
        # A host beyond its own budget takes nothing of that of all.
        if pace.spend(now) > 0 or self._all.spend(now) > 0:
            self.shed += 1
            return False
        return True

    def listens(self, host: str) -> bool:
        """Return whether a new connection from a host is worth accepting."""
        pace, now = self._hosts.get(_network(host)), self._clock()
        if pace is None or pace.debt(now) < _OVERDRAWN:
            return True
        if now - self._trusted.get(host, float("-inf")) < self._budget.trust_seconds:
            return True
        self.shed += 1
        return False

    def _pace(self, rate: float) -> Pace:
        return Pace(rate, self._clock(), burst=self._budget.burst_seconds, most_debt=2 * _OVERDRAWN)


def _keep(table: OrderedDict[str, V], key: str, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MOST_HOSTS:
        table.popitem(last=False)


def _network(host: str) -> str:
    """Return the network that counts as one host: of IPv6 the /64, of which one machine has all addresses."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
