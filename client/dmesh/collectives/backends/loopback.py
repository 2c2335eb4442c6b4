"""Loopback: what a rank sends to itself, which is kept in its memory until it receives it."""

from __future__ import annotations

import threading

import numpy as np

from dmesh.collectives.backends.base import Backend, Call, Capabilities, Operation, Stream
from dmesh.collectives.request import Array, Buffers, Request
from dmesh.coordination.waiting import Bell


class Done(Operation):
    """A call that was complete when it began."""

    def progress(self, seconds: float) -> bool:
        """Return True."""
        del seconds
        return True

    def missing(self) -> tuple[int, ...]:
        """Return no ranks."""
        return ()

    def fail(self, error: BaseException) -> None:
        """Do nothing: it is over."""

    def revoke(self) -> None:
        """Do nothing: it is over."""


class LoopbackBackend(Backend):
    """Transfers of a rank to itself. A send is always buffered, and so never waits.

    Args:
        bell: Rings when something has been sent.
    """

    name = "loopback"
    capabilities = Capabilities(
        media="memory of the rank",
        arrays="NumPy",
        operations="sends of a rank to itself",
        dtypes="all of fixed size",
        condition="always",
    )

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[str, Array]] = {}

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the call is a transfer of this rank to itself."""
        del sequence
        return request.device is None and stream.pair is not None and stream.pair[0] == stream.pair[1]

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Keep a copy of what is sent, or hand it over; see `Backend.start`."""
        if request.contributes:
            assert buffers.source is not None
            with self._lock:
                self._sent[call.sequence] = request.text, buffers.source.copy()
            self._bell.ring()
        else:
            with self._lock:
                _, data = self._sent.pop(call.sequence)
            buffers.result.view(np.uint8)[...] = data.view(np.uint8)  # with the padding of structures
        return Done()

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and descriptor of what has not been received, in order."""
        with self._lock:
            return [(number, text) for number, (text, _) in sorted(self._sent.items())]
