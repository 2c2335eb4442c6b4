"""Source of this process's session with the coordination server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dmesh._locks import Lock
from dmesh.errors import NotInitializedError
from dmesh.runtime import context

if TYPE_CHECKING:
    from dmesh.coordination.agent import Agent


class AgentSource:
    """Session with the coordination server: open already, or opened at its first use.

    In local mode, the first use starts a coordination server for this process alone.

    Args:
        agent: The session, if it is open.
        start: Opens it otherwise; returns it, and a function that ends what was started.
    """

    def __init__(
        self,
        agent: Agent | None = None,
        start: Callable[[], tuple[Agent, Callable[[], None]]] | None = None,
    ) -> None:
        self.opened = agent
        """The session; None until its first use."""
        self._start = start
        self._stop: Callable[[], None] | None = None
        self._lock = Lock()

    def open(self) -> Agent:
        """Return the session, opened if it is not yet."""
        with self._lock:
            if self.opened is None:
                assert self._start is not None
                self.opened, self._stop = self._start()
            return self.opened

    def close(self) -> None:
        """End a session that the first use opened; one that was open before stays."""
        if self._stop is not None:
            self._stop()


def source() -> AgentSource:
    """Return the source of this process's session.

    Raises:
        NotInitializedError: dmesh is not initialized, or there is no coordination service.
    """
    found = context.current().find(AgentSource)
    if found is None:
        raise NotInitializedError(
            "there is no coordination service: initialize_accelerator_system was called with "
            "enable_coordination_service=False. Call it with True to use dmesh.coordination."
        )
    return found


def current_agent() -> Agent:
    """Return this process's session with the coordination server.

    Raises:
        NotInitializedError: dmesh is not initialized, or there is no coordination service.
    """
    state = context.process.get().context
    known: AgentSource | None = None if state is None else state.parts.get(AgentSource)  # type: ignore[assignment]
    return known.opened if known is not None and known.opened is not None else source().open()


def opened_agent() -> Agent | None:
    """Return this process's session if it is open, without opening it."""
    found = context.find(AgentSource)
    return None if found is None else found.opened
