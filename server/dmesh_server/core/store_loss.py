"""Stores that lack data that clients have seen: empty ones, older copies, and those of other servers.

Every store has an identity, drawn when the first cluster begins in it. A client sends the latest state that
it has seen, and the store's identity. If that is another store, or if this server began with an older state,
the client has to register again; the answer has the store's identity, which reveals the loss. A store that
turns out to be an older copy gets a new identity, so that all clients learn of it, even if they have seen
nothing that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from dmesh_server.core import messages, records
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.effects import SessionEnd
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import SeenState
from dmesh_server.core.transaction import Transaction

STORE = "store"
"""Key of the store's identity, a record of no cluster."""

_TAKEN = frozenset(
    {
        ErrorKind.FENCED,
        ErrorKind.TASK_TAKEN,
        ErrorKind.SPEC_MISMATCH,
        ErrorKind.UNKNOWN_TASK,
        ErrorKind.CLUSTER_ENDING,
    }
)
"""Refusals of a registration that have another meaning for a client that comes from another store."""


class StoreIdentity:
    """Identity of a server's store.

    Args:
        server_incarnation: Incarnation of the server.
    """

    def __init__(self, server_incarnation: int) -> None:
        self.value = 0
        """The identity; 0 before the first cluster begins in the store."""
        self._server_incarnation = server_incarnation

    def named(self, fresh: int, transaction: Transaction) -> int:
        """Return the identity; a store that has none gets this one."""
        if not self.value:
            self._set(fresh, transaction)
        return self.value

    def renew(self, fresh: int, clusters: Iterable[Cluster], transaction: Transaction) -> None:
        """Give a store that turned out to be an older copy another identity, and let all clients see it."""
        self._set(fresh, transaction)
        error = CoreError(
            ErrorKind.NOT_REGISTERED, "this server's store turned out to be an older copy: register again"
        )
        for cluster in clusters:
            cluster.advance_epoch(
                transaction
            )  # the same epoch was another membership after the copy was made
            transaction.push(cluster.roster.sessions, SessionEnd(error))

    def is_older(self, cluster: Cluster, seen: SeenState) -> bool:
        """Return whether this server began with an older state of a cluster than a client has seen."""
        if seen.store != self.value or seen.server_incarnation == self._server_incarnation:
            return False
        same = seen.cluster_incarnation == cluster.generation.incarnation
        return seen.epoch > cluster.restored_epoch or (same and seen.revision > cluster.restored_revision)

    def check(self, cluster: Cluster, seen: SeenState | None) -> None:
        """Refuse a client that has seen another store, or a later state of this one.

        Raises:
            CoreError: NOT_REGISTERED.
        """
        if seen is not None and (seen.store != self.value or self.is_older(cluster, seen)):
            raise CoreError(
                ErrorKind.NOT_REGISTERED,
                f"this server does not have the store of cluster {messages.quote(cluster.name)} in which the "
                "caller registered: register again",
            )

    def _set(self, value: int, transaction: Transaction) -> None:
        self.value = value
        transaction.persist("", records.CLUSTER, STORE, records.encode_number(value))


def check_place(cluster: Cluster, seen: SeenState) -> None:
    """Refuse a client of another store in a cluster that came from this server's store.

    A cluster that has begun since this server's start is the successor of the client's.

    Raises:
        CoreError: STORE_LOST.
    """
    if cluster.restored and cluster.generation.incarnation != seen.cluster_incarnation:
        raise lost(
            f"its cluster {messages.quote(cluster.name)} is another cluster of the same name, whose members "
            "have not departed"
        )


def translated(error: CoreError) -> CoreError:
    """Return the refusal of a registration as a client from another store must understand it."""
    return lost(f"in it, {error.message}") if error.kind in _TAKEN else error


def lost(what: str) -> CoreError:
    """Return the error for a client that has no place in this store."""
    return CoreError(
        ErrorKind.STORE_LOST,
        f"this server was started with the store of another cluster, or with an older one: {what}. Start it "
        "with the right data directory, or start the job again.",
    )


def go_on(cluster: Cluster, seen: SeenState, transaction: Transaction) -> None:
    """Continue epochs and revisions after the highest ones that a client has seen, so that none is reused."""
    if seen.epoch >= cluster.epoch:
        cluster.roster.epoch = seen.epoch
        cluster.advance_epoch(transaction)
    cluster.store.advance(seen.revision, transaction)
