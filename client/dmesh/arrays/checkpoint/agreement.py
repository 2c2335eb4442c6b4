"""Agreement of clients on the outcome of each step of a save or a load: if one fails, all raise an error."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.grid import Grid
from dmesh.arrays.transfer.execute import gather_counts
from dmesh.collectives.group import Group
from dmesh.devices.device import this_client
from dmesh.errors import CheckpointError, CollectiveError, DMeshError, MeshMismatchError
from dmesh.runtime import context

_RECORD = 512
"""Size of a client's report of a step's outcome, bytes."""


class Participants:
    """Clients that save or load together.

    Args:
        grids: Meshes of the arrays; if there are none, all clients of the program participate.
        what: Name of the operation, for errors.

    Raises:
        MeshMismatchError: The meshes have different clients.
        NotInitializedError: There are several clients, and the system is not initialized.
    """

    def __init__(self, grids: Iterable[Grid], what: str) -> None:
        self.what = what
        """Name of the operation, for errors."""
        self.ranks = _clients(grids)
        """Their ranks in the world, in ascending order."""
        self._group: Group | None = None
        if len(self.ranks) > 1:
            from dmesh.collectives.communicator import Communicator  # a large module

            communicator = context.current().get(Communicator)
            self._group = communicator.mesh_group("", "checkpoint", self.ranks)

    @property
    def index(self) -> int:
        """Position of this client among them."""
        return 0 if self._group is None else self._group.rank

    def check(self, grids: Iterable[Grid]) -> None:
        """Raise MeshMismatchError if a mesh has other clients than the participants."""
        for grid in grids:
            if grid.clients != self.ranks:
                raise MeshMismatchError(
                    f"{self.what} is called by clients {list(self.ranks)}, but mesh {grid.mesh.name!r} has "
                    f"clients {list(grid.clients)}. Pass a mesh of all of them as mesh="
                )

    def step(self, work: Callable[[], str]) -> list[str]:
        """Run a step on all clients; return the results of all clients' `work` if none failed.

        Raises:
            CheckpointError: The step failed on some clients; the message lists them.
            DMeshError: The step raised this error on this client.
        """
        failure: Exception | None = None
        try:
            text = work()
        except CollectiveError:
            raise  # the other clients get it, too
        except Exception as error:  # noqa: BLE001 -- raised below, after the exchange
            failure, text = error, f"{socket.gethostname()}: {type(error).__name__}: {error}"
        record = np.zeros(_RECORD, np.uint8)
        encoded = text.encode(errors="replace")[: _RECORD - 1]
        record[0] = failure is not None
        record[1 : 1 + len(encoded)] = np.frombuffer(encoded, np.uint8)
        rows = record[None]
        if self._group is not None:
            with ledger.operation(self.what):
                rows = gather_counts(self._group, record).reshape(-1, _RECORD)
        texts = [bytes(row[1:]).rstrip(b"\0").decode(errors="replace") for row in rows]
        if isinstance(failure, DMeshError):
            raise failure
        failed = [at for at, row in enumerate(rows) if row[0]]
        if failed:
            details = "".join(f"\n  rank {self.ranks[at]} on {texts[at]}" for at in failed)
            named = ", ".join(str(self.ranks[at]) for at in failed)
            raise CheckpointError(f"{self.what} failed on rank {named}:{details}") from failure
        return texts

    def same(self, texts: list[str], kind: str) -> None:
        """Raise CheckpointError if the clients' results of a step differ.

        Args:
            texts: Result of `step`.
            kind: What the texts describe, for the message.
        """
        if len(set(texts)) > 1:
            others = [rank for rank, text in zip(self.ranks, texts, strict=True) if text != texts[0]]
            raise CheckpointError(
                f"{self.what} needs the same {kind} on all clients, but those of rank "
                f"{', '.join(map(str, others))} differ from those of rank {self.ranks[0]}. Nothing was done"
            )


def _clients(grids: Iterable[Grid]) -> tuple[int, ...]:
    found = dict.fromkeys(grid.clients for grid in grids)
    if len(found) > 1:
        raise MeshMismatchError(
            "the arrays of a checkpoint must be on meshes with the same clients, but these have clients "
            f"{' and '.join(str(list(clients)) for clients in found)}"
        )
    if found:
        return next(iter(found))
    return tuple(range(this_client().num_clients))
