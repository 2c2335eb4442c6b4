"""Changes that operators, who hold no task slot, may make to a cluster.

Each names exactly what it is about (an incarnation, an instance, a revision), and asks for a state, not for a
change: if it is so already, nothing happens and the answer is the same. So a call may be repeated, also after
a restart of the server, and never hits what came after.
"""

from __future__ import annotations

from dmesh_server.core import membership, messages, validation
from dmesh_server.core.barriers import check_barrier
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.effects import Answer, KeySnapshot, Operated
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import DropKey, Evict, RestoreKeys, SnapshotKeys, StopBarrier
from dmesh_server.core.key_restore import KeyRestore
from dmesh_server.core.model import DepartureCause, MemberState
from dmesh_server.core.transaction import Transaction

OperatorEvent = StopBarrier | Evict | DropKey | SnapshotKeys | RestoreKeys

RESERVED = "dmesh/"
"""Prefix of the keys that belong to the processes of the cluster."""


def operate(cluster: Cluster, event: OperatorEvent, transaction: Transaction) -> Answer | None:
    """Do what an operator asks for; None: the answer comes later.

    Raises:
        CoreError: It was refused.
    """
    match event:
        case StopBarrier():
            return stop_barrier(cluster, event, transaction)
        case Evict():
            return evict(cluster, event, transaction)
        case DropKey():
            return drop_key(cluster, event, transaction)
        case SnapshotKeys():
            return snapshot_keys(cluster)
        case RestoreKeys():
            restore_keys(cluster, event, transaction)
            return None


def stop_barrier(cluster: Cluster, event: StopBarrier, transaction: Transaction) -> Operated:
    """Fail a barrier for all its participants.

    Raises:
        CoreError: That instance is neither under way nor cancelled.
    """
    check_barrier(event.name, event.instance, None)
    if event.instance < 0:
        raise validation.invalid(f"barrier {messages.quote(event.name)}: name the instance to cancel")
    return Operated(
        cluster.barriers.stop(event.name, event.instance, f"an operator ({event.by})", transaction)
    )


def evict(cluster: Cluster, event: Evict, transaction: Transaction) -> Operated:
    """Declare a member failed. Its process is asked to exit, and cannot use its task slot any more.

    Raises:
        CoreError: That process never held the task slot.
    """
    validation.reason(event.reason, required=False)
    label = messages.label(event.task)
    cluster.check_task(event.task)
    slot = cluster.roster.slots.get(event.task)
    if slot is None or (slot.incarnation != event.incarnation and event.incarnation not in slot.former):
        holder = "no process holds it" if slot is None else f"it is held by {messages.name(slot.snapshot())}"
        raise CoreError(
            ErrorKind.NOT_REGISTERED,
            f"{label} was never held by a process of incarnation {event.incarnation:016x}: {holder}. "
            "Read the member again.",
        )
    if slot.incarnation != event.incarnation or slot.state.departed:
        return Operated(changed=False)
    why = f": {event.reason}" if event.reason else ""
    reason = f"evicted by an operator ({event.by}){why}"[: validation.MAX_REASON]
    membership.depart(cluster, slot, MemberState.FAILED, DepartureCause.EVICTED, reason, transaction)
    return Operated(changed=True)


def drop_key(cluster: Cluster, event: DropKey, transaction: Transaction) -> Operated:
    """Delete a key, unless it was changed since the operator looked at it.

    Raises:
        CoreError: It was.
    """
    validation.key(event.key, cluster.limits)
    if event.revision not in validation.INT64 or event.revision < 1:
        raise validation.invalid(f"a key is not of revision {event.revision}: revisions count from 1")
    found = cluster.store.keys.get(event.key)
    if found is None:
        return Operated(changed=False)
    if found.mod_revision != event.revision:
        raise CoreError(
            ErrorKind.KEY_EXISTS,
            f"key {messages.quote(event.key)} was changed: it is of revision {found.mod_revision}, not "
            f"{event.revision}. Read it again before you delete it.",
        )
    cluster.store.remove(event.key, transaction)
    return Operated(changed=True)


def snapshot_keys(cluster: Cluster) -> KeySnapshot:
    """Return all keys of the cluster but dmesh's own."""
    kvs = tuple(kv for kv in cluster.store.keys.with_prefix("") if not kv.key.startswith(RESERVED))
    return KeySnapshot(cluster.generation.incarnation, kvs, cluster.store.revision)


def restore_keys(cluster: Cluster, event: RestoreKeys, transaction: Transaction) -> None:
    """Begin to give the cluster the keys of a backup: all of them, or none if one is refused.

    Raises:
        CoreError: The cluster has ended.
    """
    if cluster.ended:
        raise CoreError(
            ErrorKind.CLUSTER_ENDING,
            f"all members of cluster {messages.quote(cluster.name)} are gone: keys restored now would "
            "not be those of the next members. Restore them after one of these has registered.",
        )

    def check(key: str, value: bytes) -> None:
        validation.key(key, cluster.limits)
        validation.value(value, key, cluster.limits)
        if key.startswith(RESERVED):
            raise validation.invalid(
                f"key {messages.quote(key)} is reserved for dmesh and cannot be restored"
            )

    def spared(key: str) -> bool:
        return event.merge or key.startswith(RESERVED)

    restore = KeyRestore(event.token, cluster.name, event.keys, check, spared)
    cluster.store.begin_restore(restore, transaction)
