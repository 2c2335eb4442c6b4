"""Start-up without a coordination service: waits until there is a connection with every peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dmesh.coordination.waiting import Bell
from dmesh.errors import InitializationTimeoutError


def wait_for_peers(
    rank: int,
    clients: int,
    missing: Callable[[], Sequence[int]],
    describe: Callable[[int], str],
    check: Callable[[], None],
    changed: Bell,
    *,
    timeout: float,
    report: Callable[[str], None],
    report_every: float,
) -> None:
    """Wait until no peer is missing; see `TcpTransport.connect_all`.

    Args:
        rank: This client's id.
        clients: Number of clients, with this one.
        missing: Returns the ranks without a connection.
        describe: Returns the name of one of them, and why there is no connection.
        check: Raises if a peer is gone or the transport is closed.
        changed: Rings when `missing` or `check` may have another result.
        timeout: Seconds.
        report: Called from time to time with a line that names the missing ranks.
        report_every: Seconds between the reports.
    """
    began = reported = time.monotonic()

    def over() -> bool:
        check()
        return not missing()

    while not over():
        names = ", ".join(map(describe, absent := missing()))
        now = time.monotonic()
        if now >= began + timeout:
            raise InitializationTimeoutError(
                f"{len(absent)} of {clients} clients did not come within {timeout:g} s: {names}. Start them, "
                "or check that DTENSOR_JOBS is the same everywhere and that their addresses can be reached "
                "from here."
            )
        if now >= reported + report_every:
            reported = now
            report(
                f"rank {rank} has waited {now - began:.0f} s (of {timeout:g} s) for "
                f"{len(absent)} of {clients} clients: {names}"
            )
        changed.wait_for(over, max(0.0, min(began + timeout, reported + report_every) - now))
