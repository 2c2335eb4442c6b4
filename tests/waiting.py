"""Waits for what gives no signal of its own, and ports that nobody listens on, for all tests."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test has failed; nothing waits this long unless something is broken."""
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
_FIRST, _COUNT = (10_000 + int(_WORKER) % 20 * 1_000, 1_000) if _WORKER else (10_000, 20_000)
_ports = itertools.count(random.randrange(_COUNT))


def eventually(
    condition: Callable[[], T], what: str = "the condition", timeout: float = PATIENCE, pause: float = 0.005
) -> T:
    """Wait until a condition holds that no event reports; return the first true answer.

    Args:
        condition: Called again and again.
        what: Name of what is waited for, for the message of a failure.
        timeout: Seconds until the test fails.
        pause: Seconds between two calls.
    """
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout:g} s"
        time.sleep(pause)
    return answer


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, from outside the range that is handed out for connections.

    Tests that run at the same time get different ones, also for servers that are down for a while.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = _FIRST + next(_ports) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    return ports
