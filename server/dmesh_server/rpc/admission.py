"""Lets clients that start all at once take their task slots a few hundred at a time."""

from __future__ import annotations

import asyncio

from dmesh_server.core.model import Caller

_ROOM = 256
_PATIENCE = 1.0


class Admission:
    """Bounds the number of clients that have registered but not attached their sessions.

    Calls are served in the order in which they come. When ten thousand clients register at once, the first
    one's session would wait behind the registrations of all others, for longer than its lease: the server
    would declare it dead for being slow itself. So registrations wait for their turn, and sessions overtake
    them.
    """

    def __init__(self, room: int = _ROOM, patience: float = _PATIENCE) -> None:
        """Make an empty lobby.

        Args:
            room: How many may be in it.
            patience: Seconds after which a client that does not attach no longer counts.
        """
        self._room = asyncio.Semaphore(room)
        self._patience = patience
        self._inside: dict[Caller, asyncio.TimerHandle] = {}

    async def enter(self, caller: Caller) -> None:
        """Wait until it is the caller's turn to register."""
        await self._room.acquire()
        self.leave(caller)  # a retry, of a call whose answer was lost
        loop = asyncio.get_running_loop()
        self._inside[caller] = loop.call_later(self._patience, self.leave, caller)

    def leave(self, caller: Caller) -> None:
        """Note that the caller has attached, or was refused: it is the next one's turn."""
        timer = self._inside.pop(caller, None)
        if timer is not None:
            timer.cancel()
            self._room.release()
