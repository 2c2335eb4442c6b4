"""Placement of replicas on clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dmesh.errors import StrategyValueError

__all__ = ["Placement", "Replica", "ids_text"]


@dataclass(frozen=True)
class Replica:
    """One of the copies of the program that run in step."""

    id: int
    """Its number among all replicas."""
    client: int
    """The client that computes it."""
    devices: tuple[str, ...]
    """Its logical devices, by name."""


@dataclass(frozen=True)
class Placement:
    """All replicas; equal on all clients.

    Raises:
        StrategyValueError: There is no replica, or the clients have different numbers of them.
    """

    replicas: tuple[Replica, ...]
    """By id."""
    client: int
    """This client."""
    num_clients: int = 1
    """Number of clients with replicas."""

    def __post_init__(self) -> None:
        counts = [
            sum(replica.client == client for replica in self.replicas)
            for client in ([self.client] if self.num_clients == 1 else range(self.num_clients))
        ]
        if not self.replicas or len(set(counts)) != 1:
            raise StrategyValueError(
                "every client must have the same number of replicas, at least one, but "
                + ", ".join(f"client {client} has {count}" for client, count in enumerate(counts))
            )

    @cached_property
    def local(self) -> tuple[Replica, ...]:
        """This client's replicas, by id."""
        return self.of_client(self.client)

    @cached_property
    def consecutive(self) -> bool:
        """True if the replicas of each client have consecutive numbers, in the order of the clients."""
        clients = [replica.client for replica in self.replicas]
        return clients == sorted(clients)

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    def of_client(self, client: int) -> tuple[Replica, ...]:
        """Return the replicas that a client computes, by id."""
        return tuple(replica for replica in self.replicas if replica.client == client)

    def describe(self, ids: Sequence[int]) -> str:
        """Return names and clients of replicas, such as `replicas 4-7 (client 1)`."""
        clients = sorted({self.replicas[number].client for number in ids})
        word = "replica" if len(ids) == 1 else "replicas"
        where = "client" if len(clients) == 1 else "clients"
        return f"{word} {ids_text(ids)} ({where} {ids_text(clients)})"


def ids_text(ids: Sequence[int]) -> str:
    """Write numbers with ranges, such as `0, 2-4`."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
