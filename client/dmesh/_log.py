"""Output of the SDK: the `dmesh` logger, and lines that a waiting user must see."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("dmesh")
logger.addHandler(logging.NullHandler())


def announce(message: str, *, warning: bool = True) -> None:
    """Prints a line for the user that must not be missed, such as the ranks that a call waits for.

    Goes to the `dmesh` logger as a warning, or as information that was asked for; where no logging is
    configured, to standard error, because a program that seems to hang without a word is worse than a line
    too many.
    """
    logger.log(logging.WARNING if warning else logging.INFO, "%s", message)
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in current.handlers):
            return
        current = current.parent if current.propagate else None
    print(f"dmesh: {message}", file=sys.stderr, flush=True)  # noqa: T201
