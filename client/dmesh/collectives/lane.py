"""The calls of a group that are counted together, and when each of them may be carried out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dmesh.collectives.arena.port import Port
from dmesh.collectives.arena.titles import Title, text_of
from dmesh.coordination.waiting import Bell

if TYPE_CHECKING:
    from dmesh.collectives.call import Call
    from dmesh.collectives.gpu.circuit import Circuit


class Lane:
    """The calls of a group that are counted together: its collectives, or the transfers of one pair of ranks.

    In a group that has an arena or wires, calls from a certain number on go through a port (`by_port`), and
    are carried out one after the other (`ready`): what stands there is of one call at a time.

    Guarded by the term's lock.

    Args:
        number: How the transport knows it.
        pair: Positions of sender and receiver; None for the collectives.
    """

    def __init__(self, number: int, pair: tuple[int, int] | None) -> None:
        self.number = number
        self.pair = pair
        self.calls: dict[int, Call] = {}
        self.port: Port | None = None
        """Through what calls go, once the first of those has been made."""
        self.circuit: Circuit | None = None
        """Through what calls of GPU arrays go, once the first of those has been made."""
        self._issued = 0
        self._finished = 0
        self._last = ""
        self._first = 0  # 0: none goes through shared memory
        self._open: Callable[[], Port] | None = None
        self._most = 1 if pair is None else sys.maxsize  # calls that need not wait for `settle`
        self._bell = Bell()
        self._waiting = 0
        self._idle: Callable[[], object] | None = None

    @property
    def issued(self) -> int:
        """Number of the last call that was made."""
        return self._issued if self.port is None else self.port.issued

    @property
    def finished(self) -> int:
        """Number of the last call that is over."""
        return self._finished if self.port is None else self.port.finished

    def last(self) -> tuple[int, str]:
        """Returns the number of the last call that is over, and its signature; empty if that is not known."""
        number = self.finished
        return number, self._last if number == self._finished else self.signature(number)

    def signature(self, number: int) -> str:
        """Returns the signature of a call that the port has taken; empty if it is forgotten."""
        return self.taken(number)[0]

    def taken(self, number: int) -> tuple[str, int]:
        """Returns signature and bytes of a call that the port has taken; none if it is forgotten."""
        recent = () if self.port is None else self.port.recent()
        return next(
            ((text_of(Title(*title)), nbytes) for found, title, nbytes, *_ in recent if found == number),
            ("", 0),
        )

    def by_port(self, number: int) -> bool:
        """Whether a call can go through a port."""
        return 0 < self._first <= number

    def issue(self) -> int:
        """Counts a call, and returns its number."""
        if self.port is None and self._first == self._issued + 1:
            self._open_port()
        if self.port is not None:
            return self.port.issue()
        self._issued += 1
        return self._issued

    def finish(self, number: int, signature: str) -> None:
        """A call is over, and well. To be followed by `ring`, without the lock."""
        if number > self._finished:
            self._last, self._finished = signature, number
            if self.port is not None and number > self.port.finished:
                self.port.finished = number

    def freeze(self) -> int:
        """Lets no later call begin before `settle`; returns the number of the last one that may."""
        self._most = self._issued
        return self._issued

    def settle(self, first: int, open_: Callable[[], Port] | None) -> None:
        """It is known now how calls are carried out.

        Args:
            first: Number of the first call that can go through a port; 0 if none does.
            open_: Opens the port for them.
        """
        self._first, self._open = first, open_
        if first and self._issued >= first - 1:
            self._open_port()
        self._most = sys.maxsize
        self._bell.ring()

    def _open_port(self) -> None:
        assert self._open is not None
        port = self._open()
        port.issued, port.finished = self._issued, self._first - 1
        port.on_free = self._idle
        self.port, self._open = port, None

    def ring(self) -> None:
        """Makes those who wait for their turn look again."""
        self._bell.ring()

    def ready(self, number: int, *, alone: bool = False) -> bool:
        """Whether a call may be carried out now.

        Args:
            number: Of the call.
            alone: Whether all earlier calls must be over, in any case.
        """
        if alone and min(tuple(self.calls), default=number) < number:
            return False
        if not self.by_port(number):
            return number <= self._most
        return self.finished >= number - 1

    def wait(self, number: int, failed: Callable[[], bool], seconds: float, *, alone: bool = False) -> bool:
        """Waits until a call may be carried out; False if that takes longer, or the group has failed."""
        if self.ready(number, alone=alone):
            return True
        self._waiting += 1
        try:
            if self.port is not None:
                self.port.on_free = self._ring_and_idle if self._idle else self._bell.ring
            self._bell.wait_for(lambda: failed() or self.ready(number, alone=alone), seconds)
        finally:
            self._waiting -= 1
            if self.port is not None and not self._waiting:
                self.port.on_free = self._idle
        return self.ready(number, alone=alone)

    def add_idle(self, told: Callable[[], object]) -> None:
        """Has `told` called, too, whenever a call is over that the port has taken whole."""
        self._idle = told if self._idle is None else partial(_both, self._idle, told)
        if self.port is not None and not self._waiting:
            self.port.on_free = self._idle

    def _ring_and_idle(self) -> None:
        self._bell.ring()
        assert self._idle is not None
        self._idle()

    def disconnect(self, *, orderly: bool) -> None:
        """No call of GPU arrays will be made any more. Does not wait.

        Args:
            orderly: Whether all of them are over, on the other members, too.
        """
        if self.circuit is not None:
            (self.circuit.end if orderly else self.circuit.cut)()


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()
