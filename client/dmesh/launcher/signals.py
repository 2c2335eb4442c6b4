"""Signals as events of a selector."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Catches, while entered, the signals that end a job and those of a child's end, or others.

    `on_signal` is called inside Python's signal handler, so also while the launcher is stuck writing to a
    terminal that was stopped with Ctrl-S. It must not write to a buffered stream. `fileno` becomes readable
    at every signal.
    """

    def __init__(
        self,
        on_signal: Callable[[signal.Signals], None],
        signals: Sequence[signal.Signals] = (*FORWARDED, signal.SIGCHLD),
    ) -> None:
        self._on_signal = on_signal
        self._signals = signals
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
