"""Names of the errors that follow from the failure of another client: they tell consequence from cause."""

from __future__ import annotations

import re

WAITED_IN_VAIN = frozenset(
    {"BarrierTimeoutError", "CollectiveTimeoutError", "InitializationTimeoutError", "ReplicaTimeoutError"}
)
"""Errors of clients whose patience ended."""
LOST_SOMEBODY = frozenset(
    {
        "BarrierCancelledError",
        "BarrierError",
        "CoordinatorUnavailableError",
        "FencedError",
        "PeerLostError",
        "RemoteInputError",
        "ReplicaError",
    }
)
"""Errors of clients that have lost another one, or heard of its failure."""

_EXIT_CODE = re.compile(r"exited with code 7[56]\b")
"""Exit codes of clients that have lost another one, or were fenced: `dmesh.runtime.exits`."""


def follows(reason: str) -> bool:
    """Tell whether a client ended because of another one, by the reason that it gave."""
    name = error_name(reason)
    return name in WAITED_IN_VAIN or name in LOST_SOMEBODY or _EXIT_CODE.match(reason) is not None


def error_name(reason: str) -> str:
    """Return the class of the exception that a reason begins with, without its module; empty for none."""
    match = re.match(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?::|$)", reason)
    return match[1] if match else ""
