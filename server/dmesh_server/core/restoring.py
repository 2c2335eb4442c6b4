"""Rebuilds clusters from their durable records after a restart of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dmesh_server.core import membership, records
from dmesh_server.core.cluster import Cluster, ServerState
from dmesh_server.core.declarations import RECORD
from dmesh_server.core.effects import Record
from dmesh_server.core.errors import CoreError
from dmesh_server.core.model import MemberState
from dmesh_server.core.records import RecordError
from dmesh_server.core.replies import Remembered, Replies
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.store_loss import STORE

FLOOR = "floor"
"""Key of the server's floor of epochs."""


def restore_all(
    durable: Iterable[Record], now: float, shared: ServerState
) -> tuple[int, int, dict[str, Cluster], list[Record]]:
    """Rebuild all clusters.

    Members that had not departed come back as REGISTERED, and have a full lease to attach again. Records
    must come in the order in which they were last written.

    Returns:
        The store's identity, 0 if it has none yet; the floor of epochs; the clusters by name; and the records
        of declared clusters.

    Raises:
        RecordError: A record cannot be understood, or one is missing.
    """
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in durable:
        grouped.setdefault(record.cluster, {}).setdefault(record.kind, []).append(record)
    of_server = {FLOOR: 0, STORE: 0}
    clusters, declared = {}, list[Record]()
    for name, kinds in grouped.items():
        if unknown := kinds.keys() - _KINDS:
            raise RecordError(f"the store has records of unknown kinds ({', '.join(sorted(unknown))})")
        if name:
            of_cluster = kinds.get(records.CLUSTER, [])
            declared += [record for record in of_cluster if record.key == RECORD]
            kinds[records.CLUSTER] = [record for record in of_cluster if record.key != RECORD]
            if any(kinds.values()):
                clusters[name] = _restore(name, kinds, now, shared)
        else:
            of_server |= {record.key: records.decode_number(record) for record in kinds[records.CLUSTER]}
    if clusters and not of_server[STORE]:
        raise RecordError("the record of the store's identity is missing from the store; it is damaged")
    return of_server[STORE], of_server[FLOOR], clusters, declared


_KINDS = {
    records.CLUSTER,
    records.MEMBER,
    records.KEY,
    records.CHANGE,
    records.BARRIER,
    records.REPLY,
    records.LEASE,
    records.ATTACHMENT,
}


def _restore(name: str, kinds: dict[str, list[Record]], now: float, shared: ServerState) -> Cluster:
    fixed = {record.key: record for record in kinds.get(records.CLUSTER, ())}
    if fixed.keys() != {"", "epoch"} or not kinds.get(records.MEMBER):
        raise RecordError(f"records of cluster {name!r} are missing from the store; it is damaged")
    generation, epoch = records.decode_generation(fixed[""]), records.decode_number(fixed["epoch"])
    cluster = Cluster(name, generation, epoch, shared)
    _restore_slots(cluster, kinds, now)
    for record in kinds.get(records.KEY, ()):
        cluster.store.keys.put(records.decode_key(record))
    _restore_leases(cluster, kinds, now)
    for revision, events in sorted(map(records.decode_change, kinds.get(records.CHANGE, ()))):
        cluster.store.history.append(revision, events, sum(event.size for event in events))
        cluster.store.revision = revision
    for record in kinds.get(records.BARRIER, ()):
        cluster.table.finished[record.key] = records.decode_barrier(record)
    cluster.restored, cluster.restored_revision = True, cluster.store.revision
    cluster.table.restored_at, cluster.table.restored_epoch = now, epoch
    shared.quotas.add(cluster)
    return cluster


def _restore_leases(cluster: Cluster, kinds: dict[str, list[Record]], now: float) -> None:
    """Grant the leases of keys again, and attach their keys."""
    store = cluster.store
    for number, ttl in map(records.decode_lease, kinds.get(records.LEASE, ())):
        store.leases.restore(number, ttl, now)
    for record in kinds.get(records.ATTACHMENT, ()):
        kv, number = store.keys.get(record.key), records.decode_number(record)
        try:
            if kv is None:
                raise RecordError(f"cluster {cluster.name!r} has a lease of a key that is missing")
            store.leases.restore_key(record.key, number)
        except CoreError as error:
            raise RecordError(f"a lease of keys is missing from the store: {error.message}") from error
        store.keys.put(replace(kv, lease=number))


def _restore_slots(cluster: Cluster, kinds: dict[str, list[Record]], now: float) -> None:
    for record in kinds[records.MEMBER]:
        holder = records.decode_member(record)
        member = holder.member
        if not cluster.roster.knows(member.task) or member.task in cluster.roster.slots:
            raise RecordError(
                f"the store has a member of cluster {cluster.name!r} that cannot be: {member.task}"
            )
        slot = TaskSlot(
            member.task,
            member.incarnation,
            member.state if member.state.departed else MemberState.REGISTERED,
            member.process,
            member.devices,
            member.peer_addresses,
            holder.request_id,
            registered_at=now,
            last_seen_at=now,
            replies=Replies(cluster.limits.replies_per_member),
            epoch=holder.epoch,
            proof=holder.proof,
            former=holder.former,
            reason=member.reason,
            cause=member.cause,
            code=member.code,
            restored=True,
        )
        cluster.roster.add(slot)
        if not slot.state.departed:
            membership.grant_lease(cluster, slot, now)
    kept: dict[Replies, list[Remembered]] = {}
    for task, incarnation, remembered in map(records.decode_reply, kinds.get(records.REPLY, ())):
        holding = None if task is None else cluster.roster.slots.get(task)
        if task is None:
            kept.setdefault(cluster.replies, []).append(remembered)
        elif holding is not None and holding.incarnation == incarnation:
            kept.setdefault(holding.replies, []).append(remembered)
    for replies, answers in kept.items():
        replies.restore(answers)
