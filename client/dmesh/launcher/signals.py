"""Signals to the launcher: how they reach the clients, and signals as events of a selector."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType

FORWARDED: Mapping[signal.Signals, signal.Signals] = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    # The kernel drops SIGTSTP in sessions without a terminal, such as those of the clients.
    signal.SIGTSTP: signal.SIGSTOP,
    signal.SIGCONT: signal.SIGCONT,
}
"""Signals that the launcher passes on, and what the clients get in their place."""
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL})
"""Signals that ask for the end of a job, or make it end."""
NOTIFYING = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals for the client alone: they would end the processes that it has started and that expect none."""


class SignalInbox:
    """Catches signals while entered: by default those forwarded to clients, and SIGCHLD.

    Signals that do not end a job are left to the handlers that the program has for them, if it has any.
    `on_signal` is called inside Python's signal handler, so also while the launcher is stuck writing to a
    terminal that was stopped with Ctrl-S. It must not write to a buffered stream. `fileno` becomes readable
    at every signal.
    """

    def __init__(
        self,
        on_signal: Callable[[signal.Signals], None],
        signals: Iterable[signal.Signals] = (*FORWARDED, signal.SIGCHLD),
    ) -> None:
        self._on_signal = on_signal
        self._signals = tuple(signals)
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous: dict[signal.Signals, object] = {}
        self._previous_wakeup = -1

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._receiver.fileno()

    def clear(self) -> None:
        """Make `fileno` unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def __enter__(self) -> SignalInbox:
        self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup, which is meant to last
            others = number in FORWARDED and number not in ENDING
            if others and signal.getsignal(number) is not signal.SIG_DFL:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        self._receiver.close()
        self._sender.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:  # for that one, the wake-up is all
            self._on_signal(signal.Signals(number))
