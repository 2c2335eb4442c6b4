"""Waiting until there is a connection with every peer, where nobody else can tell who is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dmesh.collectives.transport.handshake import Refused
from dmesh.coordination.waiting import Bell
from dmesh.errors import (
    CollectiveError,
    InitializationTimeoutError,
    PeerAuthenticationError,
    PeerLostError,
)


class Gathering:
    """What has become of the peers, and who waits to hear that all have come.

    `wait` is for users' threads, everything else for the transport's.

    Args:
        rank: This client's id.
        describe: Names a peer to a person.
    """

    def __init__(self, rank: int, describe: Callable[[int], str]) -> None:
        self._rank = rank
        self._describe = describe
        self._news = Bell()
        self._fates: dict[int, str] = {}
        self._refused: dict[int, Refused] = {}
        self._ended = False

    def look(self) -> None:
        """A connection has come about."""
        self._news.ring()

    def refused(self, peer: int, refusal: Refused) -> None:
        """A peer did not trust this client, or cannot be trusted."""
        self._refused[peer] = refusal

    def gone(self, peer: int, fate: str) -> None:
        """A peer is lost or has left."""
        self._fates[peer] = fate
        self._news.ring()

    def forget(self, peer: int) -> None:
        """A peer is another process now."""
        self._fates.pop(peer, None)
        self._refused.pop(peer, None)

    def end(self) -> None:
        """The transport is closed."""
        self._ended = True
        self._news.ring()

    def wait(
        self,
        clients: int,
        absent: Callable[[], Sequence[int]],
        problem: Callable[[int], str],
        timeout: float,
        report: Callable[[str], None],
        report_every: float,
    ) -> None:
        """Waits until nobody is absent; see `TcpTransport.connect_all`.

        Args:
            clients: How many there are, with this one.
            absent: Returns the ranks with which there is no connection.
            problem: Says of one of them why.
            timeout: Seconds.
            report: Told from time to time who is missing.
            report_every: Seconds between the reports.
        """
        began = reported = time.monotonic()
        while True:
            self._check()
            missing = absent()
            if not missing:
                return
            names = ", ".join(f"{self._describe(rank)} [{problem(rank)}]" for rank in missing)
            now = time.monotonic()
            if now >= began + timeout:
                raise InitializationTimeoutError(
                    f"{len(missing)} of {clients} clients did not come within {timeout:g} s: {names}. Start "
                    "them, or check that DTENSOR_JOBS is the same everywhere and that their addresses can be "
                    "reached from here."
                )
            if now >= reported + report_every:
                reported = now
                report(
                    f"rank {self._rank} has waited {now - began:.0f} s (of {timeout:g} s) for "
                    f"{len(missing)} of {clients} clients: {names}"
                )
            self._news.wait_for(
                lambda: not absent() or bool(self._fates) or self._ended,
                max(0.0, min(began + timeout, reported + report_every) - now),
            )

    def _check(self) -> None:
        for peer, fate in tuple(self._fates.items()):
            refused = self._refused.get(peer)
            if refused is not None:
                raise PeerAuthenticationError(f"rank {self._rank} cannot join: {refused}") from refused
            raise PeerLostError(f"{self._describe(peer)} is gone: {fate}", peer)
        if self._ended:
            raise CollectiveError(f"the transport of rank {self._rank} is closed")
