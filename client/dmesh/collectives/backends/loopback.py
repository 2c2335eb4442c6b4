"""Loopback: what a rank sends to itself, which is kept in its memory until it receives it."""

from __future__ import annotations

import numpy as np

from dmesh._locks import Lock
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


class Kept(Operation):
    """A synchronous send of a rank to itself, which waits until it is received."""

    def __init__(self, backend: LoopbackBackend, number: int) -> None:
        self._backend = backend
        self._number = number
        self._error: BaseException | None = None

    def progress(self, seconds: float) -> bool:
        """See `Operation.progress`."""
        return self._backend.bell.wait_for(self._is_over, seconds)

    def _is_over(self) -> bool:
        if self._error is not None:
            raise self._error
        return not self._backend.keeps(self._number)

    def missing(self) -> tuple[int, ...]:
        """Return no other ranks: this one must receive it."""
        return ()

    def fail(self, error: BaseException) -> None:
        """See `Operation.fail`."""
        self._error = self._error or error
        self._backend.bell.ring()

    def revoke(self) -> None:
        """Stop waiting: the sent data is a copy."""


class LoopbackBackend(Backend):
    """Transfers of a rank to itself. A send is always buffered; only a synchronous one waits.

    Args:
        bell: Rings when something has been sent, or received.
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
        self.bell = bell
        self._lock = Lock()
        self._sent: dict[int, tuple[str, Array]] = {}

    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether the call is a transfer of this rank to itself."""
        del sequence
        return request.device is None and stream.pair is not None and stream.pair[0] == stream.pair[1]

    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Keep a copy of the sent array, or deliver it; see `Backend.start`."""
        if request.contributes:
            assert buffers.source is not None
            with self._lock:
                self._sent[call.sequence] = request.text, buffers.source.copy()
            self.bell.ring()
            if request.synchronous:
                return Kept(self, call.sequence)
        else:
            with self._lock:
                _, data = self._sent.pop(call.sequence)
            self.bell.ring()
            buffers.result.view(np.uint8)[...] = data.view(np.uint8)  # with the padding of structures
        return Done()

    def keeps(self, number: int) -> bool:
        """Return whether something that was sent has not been received."""
        with self._lock:
            return number in self._sent

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and descriptor of the messages that were not received, in order."""
        with self._lock:
            return [(number, text) for number, (text, _) in sorted(self._sent.items())]
