"""Escalation from a failure or a signal to SIGTERM and SIGKILL. A state machine: no clock, no processes."""

from __future__ import annotations

import enum
import signal

_SAME_REQUEST = 0.2
"""Seconds within which two signals are one request: `timeout` and some terminals also signal the group."""


class Phase(enum.Enum):
    """Stage of the escalation."""

    RUNNING = "running"
    FAILED = "a client failed; the others may notice by themselves"
    INTERRUPTED = "the user asked for the end; it may take its time"
    TERMINATING = "the clients were asked to end, and will be killed if they do not"
    KILLED = "the clients were killed"


class Escalation:
    """Decides on the signals that the clients get.

    Each method returns the signal to send to every client that still runs, or None.
    """

    def __init__(self, timeout_after_failure: float, terminate_grace: float) -> None:
        self.phase = Phase.RUNNING
        self.deadline: float | None = None
        """Time of the next call of `on_time`; None for none."""
        self.requested: signal.Signals | None = None
        """The first signal that the launcher itself received."""
        self._requested_at = 0.0
        self._timeout_after_failure = timeout_after_failure
        self._terminate_grace = terminate_grace

    def on_failure(self, now: float) -> signal.Signals | None:
        """Take note that a client failed."""
        if self.phase is Phase.RUNNING:
            self.phase = Phase.FAILED
            self.deadline = now + self._timeout_after_failure
            return self.on_time(now)
        return None

    def on_signal(self, received: signal.Signals, now: float) -> signal.Signals | None:
        """Take note of a signal to the launcher: the first is passed on, the second kills."""
        if self.requested is not None:
            if now - self._requested_at < _SAME_REQUEST or self.phase is Phase.KILLED:
                return None
            return self._kill()
        self.requested, self._requested_at = received, now
        if self.phase is Phase.KILLED:
            return None
        if received is not signal.SIGINT:
            self._terminate_by(now)
        elif self.phase is Phase.RUNNING:
            # The user can press Ctrl-C again, so there is no time limit for a script to end.
            self.phase = Phase.INTERRUPTED
        return received

    def on_output_closed(self, now: float) -> signal.Signals | None:
        """Take note that the output has no reader any more, as after `| head`."""
        if self.phase in (Phase.RUNNING, Phase.FAILED):
            self._terminate_by(now)
            return signal.SIGTERM
        return None

    def on_time(self, now: float) -> signal.Signals | None:
        """Take note of the time."""
        if self.deadline is None or now < self.deadline:
            return None
        if self.phase is Phase.FAILED:
            self._terminate_by(now)
            return signal.SIGTERM
        return self._kill()

    def postpone(self, seconds: float) -> None:
        """Take note that launcher and clients were stopped for some time, which does not count."""
        if self.deadline is not None:
            self.deadline += seconds

    def _terminate_by(self, now: float) -> None:
        self.phase = Phase.TERMINATING
        kill_at = now + self._terminate_grace
        self.deadline = kill_at

    def _kill(self) -> signal.Signals:
        self.phase, self.deadline = Phase.KILLED, None
        return signal.SIGKILL
