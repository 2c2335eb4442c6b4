"""From a signal to the announcement that this process is about to be preempted.

A signal handler runs in the main thread, between any two steps of whatever that was doing, perhaps while it
holds a lock of ours. So the handler takes none: it starts a thread, which does the rest.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Collection
from types import FrameType

from dmesh._log import logger
from dmesh.coordination.agent_source import AgentSource, current_agent
from dmesh.errors import ConfigurationError, DMeshError, NotInitializedError
from dmesh.runtime import context

_Handler = Callable[[int, FrameType | None], object]


def announce_in_background(reason: str) -> None:
    """Announce the preemption of this process, on a thread for that. Usable in signal handlers.

    Raises:
        NotInitializedError: This process is no client, or there is no coordination service.
        ConfigurationError: The reason is not a string.
    """
    if not isinstance(reason, str):
        raise ConfigurationError(f"the reason for a preemption is a string, not {reason!r}")
    if context.current().find(AgentSource) is None:
        raise NotInitializedError(
            "without a coordination service (enable_coordination_service=False), a process cannot announce "
            "a preemption"
        )
    _thread.start_new_thread(_announce, (reason,))


def _announce(reason: str) -> None:
    try:
        current_agent().preemption.announce(reason)
    except DMeshError as error:  # shut down meanwhile, or fenced: the others know otherwise, or need not
        logger.warning("the preemption of this process could not be announced: %s", error)


class SignalHook:
    """The handler of one signal, and the former handler."""

    def __init__(self, number: int, previous: object) -> None:
        self._number = number
        self._previous = previous

    @classmethod
    def install(cls, signals: Collection[int]) -> None:
        """Install a hook for each of the signals. One that is there already stays.

        Raises:
            ConfigurationError: This is not the main thread, or there is no such signal.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("handle_preemption_signals() must be called in the main thread")
        numbers = []
        for number in (signals,) if isinstance(signals, int) else signals:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise ConfigurationError(f"{number!r} is not a signal that a process can handle")
            numbers.append(number)
        for number in numbers:
            previous = signal.getsignal(number)
            if not isinstance(previous, cls):
                signal.signal(number, cls(number, previous))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if context.current_or_none() is None:  # not a client any more, or a forked child
            previous = signal.SIG_DFL if self._previous is None else self._previous
            signal.signal(number, previous)  # type: ignore[arg-type]
            os.kill(os.getpid(), number)
            return
        announce_in_background(f"it received {signal.Signals(number).name}")
        if callable(self._previous):
            self._previous(number, frame)
