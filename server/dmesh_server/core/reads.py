"""Calls that read a cluster, at once or when what they wait for has happened."""

from __future__ import annotations

from dmesh_server.core import messages, validation
from dmesh_server.core.barriers import check_barrier
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.effects import Answer, BarrierProgress
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import GetBarrier, GetClusterState, GetMember, KvGet, KvGetMany, KvList, KvWatch
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.transaction import Transaction

Read = KvGet | KvGetMany | KvList | KvWatch | GetClusterState | GetMember | GetBarrier
"""Events that read a cluster."""


def answer(cluster: Cluster, slot: TaskSlot | None, event: Read, transaction: Transaction) -> Answer | None:
    """Answer a reader.

    Args:
        cluster: The cluster.
        slot: The reader's task slot; None for an observer.
        event: The call.
        transaction: The present event.

    Returns:
        The answer; None if it comes later, or was given already.

    Raises:
        CoreError: There is no answer.
    """
    match event:
        case KvGet():
            if event.timeout != 0:
                _check_waiter(cluster, event.token)
            return cluster.store.get(event, slot, transaction)
        case KvGetMany():
            return cluster.store.get_many(event)
        case KvList():
            return cluster.store.list(event)
        case KvWatch():
            _check_waiter(cluster, event.token)
            cluster.store.watch(event, slot, transaction)
            return None
        case GetClusterState():
            return _get_cluster_state(cluster, slot, event, transaction)
        case GetMember():
            cluster.check_task(event.task)
            return cluster.roster.describe(event.task)
        case GetBarrier():
            check_barrier(event.name, -1, None)
            last = cluster.table.finished.get(event.name)
            under_way = event.name in cluster.table.under_way
            return BarrierProgress(
                0 if last is None else last.number + 1,
                cluster.table.status_of(event.name) if under_way else None,
            )


def _get_cluster_state(
    cluster: Cluster, slot: TaskSlot | None, event: GetClusterState, transaction: Transaction
) -> Answer | None:
    validation.duration(event.timeout, "the time to wait for the next epoch", positive=False)
    if event.timeout == 0 or event.known_epoch != cluster.epoch:
        return cluster.state(event.known_epoch)
    _check_waiter(cluster, event.token)
    cluster.epoch_waits.wait(event, slot, transaction)
    return None


def _check_waiter(cluster: Cluster, token: int) -> None:
    if cluster.ended:
        raise CoreError(
            ErrorKind.CLUSTER_ENDING,
            f"cluster {messages.quote(cluster.name)} has ended: all its members have departed, so there is "
            "nothing to wait for",
        )
    if cluster.waits(token):
        raise validation.invalid(f"token {token} waits already")
