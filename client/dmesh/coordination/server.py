"""Coordination server in this process, as its clients see it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["HostedServer"]


class HostedServer(Protocol):
    """Running coordination server of this process: a `dmesh_server.embedded.EmbeddedServer`."""

    @property
    def address(self) -> str:
        """HOST:PORT at which it listens."""

    def stop(self, grace: float = 1.0) -> None:
        """Stop it; calls under way get `grace` seconds."""
