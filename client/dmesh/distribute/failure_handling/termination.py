"""Detection of a machine's preemption, and the program's reaction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["TerminationConfig"]


@dataclass(frozen=True)
class TerminationConfig:
    """Customization of `PreemptionCheckpointHandler` for a platform.

    Raises:
        StrategyTypeError: What should be a function is none.
        StrategyValueError: The grace period is negative.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    """Called every second on a thread of its own; returns True once this machine will be taken away. None:
    the signal SIGTERM says so."""
    exit_fn: Callable[[], object] | None = None
    """Called on every client once the last checkpoint is saved. None: the client leaves the cluster, and the
    process ends with exit code 75, which asks to be started again. What returns lets the program go on."""
    grace_period: float | None = None
    """Seconds from the notice to the end. If given, all clients save at once, go on training, and save again
    and end shortly before the time is over. None or 0: they save once, and end."""
    save_fn: Callable[..., Any] | None = None
    """Saves the checkpoint, in place of the manager; called on every client, with the arguments of
    `save_checkpoint_if_preempted`."""

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise StrategyTypeError(f"{name} must be a function or None, got {given!r:.80}")
        if self.grace_period is not None and not 0 <= self.grace_period < math.inf:
            raise StrategyValueError(
                f"grace_period must be a number of seconds from 0, or None; got {self.grace_period!r}"
            )
