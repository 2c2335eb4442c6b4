"""Rules of registration: which task slot a client may take, with which job list and settings."""

from __future__ import annotations

from dataclasses import replace

from dmesh_server.core import cluster_settings, messages, validation
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.effects import Registered
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Register
from dmesh_server.core.log_events import MemberJoined
from dmesh_server.core.membership import check_proof, fenced, fenced_predecessor, grant_lease
from dmesh_server.core.model import Caller, Job, Limits, MemberState, Task
from dmesh_server.core.replies import Replies
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.transaction import Transaction

ANY_TASK = -1
"""Index of a caller that takes any task slot of its job."""

_MAX_DIFFERENCES = 5
_MAX_NAMED = 8


def choose_task(event: Register, cluster: Cluster | None, transaction: Transaction) -> Register:
    """Pick a task slot for a caller that takes any: its own, one never taken, then that of a lost member.

    Args:
        event: The registration; its caller's index may be `ANY_TASK`.
        cluster: The cluster, if there is one, whether or not it has ended.
        transaction: The present event.

    Returns:
        The registration with a task slot, which may still be refused.

    Raises:
        CoreError: SPEC_MISMATCH, or TASK_TAKEN: others hold all task slots.
    """
    wished = validation.caller_task(event.caller)
    if wished.index != ANY_TASK:
        return event
    found = None if cluster is None else cluster.roster.held(event.caller.incarnation)
    if found is None and cluster is not None and not cluster.ended:
        _check_agreement(event, wished, cluster)
        found = _best_task(cluster, wished.job, transaction)
    return replace(event, caller=replace(event.caller, task=found or Task(wished.job, 0)))


def _best_task(cluster: Cluster, job: str, transaction: Transaction) -> Task | None:
    """Return a task slot of the job that may be free; None if there is no such job.

    Raises:
        CoreError: TASK_TAKEN: others hold all of its task slots.
    """
    roster = cluster.roster
    vacant = next((task for task in roster.iterate_vacant() if task.job == job), None)
    if vacant is not None:
        return vacant
    gone = [slot for slot in roster.departed.values() if slot.task.job == job]
    if gone:
        # A member that left, or was replaced too often, cannot have a successor; the refusal explains that.
        usable = (
            slot
            for slot in gone
            if slot.state is not MemberState.LEFT and len(slot.former) < cluster.limits.max_rejoins
        )
        return next(usable, gone[0]).task
    holders = tuple(member for member in roster.active_members() if member.task.job == job)
    if not holders:
        return None
    raise CoreError(
        ErrorKind.TASK_TAKEN,
        f"all {len(holders)} task slots of job {messages.quote(job)} in cluster "
        f"{messages.quote(cluster.name)} are held: {messages.listing(holders, transaction.now)}. More "
        "clients were started than there are task slots, or an earlier run is still alive.",
        holders[:_MAX_NAMED],
        fields=("caller.task.job",),
    )


def check_registration(event: Register, cluster: Cluster | None, limits: Limits) -> None:
    """Check a registration, but for the state of the task slots.

    Args:
        event: The registration.
        cluster: The cluster that it must fit; None if it begins a new generation.
        limits: Bounds of the server.

    Raises:
        CoreError: INVALID_ARGUMENT, UNKNOWN_TASK or SPEC_MISMATCH.
    """
    task = validation.caller_task(event.caller)
    validation.request_id(event.request_id)
    validation.process(event.process)
    validation.devices(event.devices)
    validation.peer_addresses(event.peer_addresses)
    cluster_settings.check(event.settings, limits)
    jobs = event.jobs
    if cluster is not None:
        jobs = cluster.roster.jobs
        _check_agreement(event, task, cluster)
    sizes = {job.name: len(job.addresses) for job in jobs}
    if not 0 <= task.index < sizes.get(task.job, 0):
        listed = ", ".join(f"/job:{name}/task:0-{size - 1}" for name, size in sizes.items())
        raise CoreError(
            ErrorKind.UNKNOWN_TASK,
            f"{messages.label(task)} is not one of the tasks of the job list: {listed}.",
            fields=("caller.task.job", "caller.task.index"),
        )


def _check_agreement(event: Register, task: Task, cluster: Cluster) -> None:
    """Refuse a job list or settings that differ from the cluster's."""
    jobs = cluster.roster.jobs
    first = next(iter(cluster.roster.slots.values())).snapshot()
    label = messages.label(task) if task.index != ANY_TASK else f"a client of job {messages.quote(task.job)}"
    who = f"{label} (host {event.process.host or 'unknown'}, pid {event.process.pid})"
    if event.jobs != jobs and _sorted(event.jobs) != _sorted(jobs):
        raise CoreError(
            ErrorKind.SPEC_MISMATCH,
            f"{who} has a different job list than cluster {messages.quote(cluster.name)}, which was "
            f"formed by {messages.name(first)}: "
            f"{_difference(event.jobs, jobs)}.",
            (first,),
            fields=("jobs",),
        )
    cluster_settings.compare(event.settings, cluster.settings, who, cluster.name, first)


def check_incarnation(caller: Caller, cluster: Cluster) -> None:
    """Refuse a caller that registers with the incarnation of a holder, but without its credential.

    Raises:
        CoreError: PERMISSION_DENIED.
    """
    held = cluster.roster.held(caller.incarnation)
    slot = None if held is None else cluster.roster.slots[held]
    if slot is not None and slot.incarnation == caller.incarnation:
        check_proof(cluster, slot, caller)


def is_member(cluster: Cluster, slot: TaskSlot, event: Register, transaction: Transaction) -> bool:
    """Return whether the caller holds the task slot already.

    Raises:
        CoreError: FENCED: the caller held the task slot, but has departed.
    """
    if event.caller.incarnation in slot.former:
        raise fenced_predecessor(cluster, slot, event.caller, transaction.now)
    if slot.incarnation != event.caller.incarnation:
        return False
    if slot.state.departed and event.request_id != slot.request_id:
        raise fenced(cluster, slot)
    return True


def check_free(cluster: Cluster, task: Task, transaction: Transaction) -> None:
    """Refuse a slot that is held by another process, or that a departure bars until the cluster has ended.

    Raises:
        CoreError: TASK_TAKEN, CLUSTER_ENDING or LIMIT_EXCEEDED.
    """
    slot = cluster.roster.slots.get(task)
    if slot is None:
        if not cluster.rejoin and cluster.roster.fallen:
            raise _ending(
                cluster, f"{task} of cluster {messages.quote(cluster.name)} cannot be taken", transaction
            )
    elif not slot.state.departed:
        holder = slot.snapshot()
        raise CoreError(
            ErrorKind.TASK_TAKEN,
            f"{task} of cluster {messages.quote(cluster.name)} is held by another process: "
            f"{messages.name_and_age(holder, transaction.now)}, registered "
            f"{messages.seconds(transaction.now - holder.registered_at)} ago. Two clients have the same "
            "client id, or an earlier run is still alive.",
            (holder,),
            fields=("caller.task.index",),
        )
    elif not cluster.rejoin or slot.state is MemberState.LEFT:
        raise _barred(cluster, slot, transaction)
    elif len(slot.former) >= cluster.limits.max_rejoins:
        last = slot.snapshot()
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"{task} of cluster {messages.quote(cluster.name)} was taken by {len(slot.former) + 1} processes "
            f"one after another, which is the server's limit. The last, {messages.name(last)}, "
            f"{messages.fate_of(last)}. Find the cause in their logs, and start the job again.",
            (last,),
        )


def _barred(cluster: Cluster, slot: TaskSlot, transaction: Transaction) -> CoreError:
    """Return the refusal of a task slot whose holder has departed while other members are present."""
    last = slot.snapshot()
    active = cluster.roster.active_members()
    return CoreError(
        ErrorKind.CLUSTER_ENDING,
        f"{slot.task} of cluster {messages.quote(cluster.name)} cannot be taken again before the cluster has "
        f"ended: its last holder {messages.name(last)} {messages.fate_of(last)}, but {len(active)} of its "
        "members are still there: "
        f"{messages.listing(active[:_MAX_NAMED], transaction.now)}"
        f"{', ...' if len(active) > _MAX_NAMED else ''}. End them, or wait until they have "
        "ended, and try again.",
        active,
    )


def _ending(cluster: Cluster, what: str, transaction: Transaction) -> CoreError:
    """Return the refusal of a vacant task slot in a cluster that cannot go on."""
    fallen = [slot.snapshot() for slot in list(cluster.roster.fallen.values())[:_MAX_NAMED]]
    more = len(cluster.roster.fallen) - len(fallen)
    fates = "; ".join(f"{messages.name(member)} {messages.fate_of(member)}" for member in fallen)
    return CoreError(
        ErrorKind.CLUSTER_ENDING,
        f"{what} any more, for the cluster cannot go on (its restart policy is fail-fast): {fates}"
        f"{f'; and {more} more' if more else ''}. Find out why, end the {cluster.roster.active} members that "
        "are still there, or wait until they have ended, and try again.",
        tuple(fallen),
    )


def admit(cluster: Cluster, event: Register, task: Task, transaction: Transaction) -> TaskSlot:
    """Give a free task slot to the caller; return it."""
    before = cluster.roster.slots.get(task)
    former: tuple[int, ...] = ()
    if before is not None:
        former = (*before.former, before.incarnation)
        cluster.forget_replies(before, transaction)
    slot = TaskSlot(
        task,
        event.caller.incarnation,
        MemberState.REGISTERED,
        event.process,
        event.devices,
        event.peer_addresses,
        event.request_id,
        registered_at=transaction.now,
        last_seen_at=transaction.now,
        replies=Replies(cluster.limits.replies_per_member),
        epoch=cluster.epoch + 1,
        proof=event.caller.proof,
        former=former,
    )
    cluster.roster.add(slot)
    cluster.persist_slot(slot, transaction)
    cluster.advance_epoch(transaction)
    cluster.barriers.member_joined(slot)
    transaction.note(MemberJoined(cluster.name, slot.outline(), cluster.epoch, bool(former)))
    grant_lease(cluster, slot, transaction.now)
    if former:
        cluster.unreported_rejoined[task] = slot
        transaction.unsettled.add(cluster.name)
    return slot


def registered(cluster: Cluster, slot: TaskSlot) -> Registered:
    """Return the answer to a registration."""
    return Registered(
        slot.task,
        cluster.generation.incarnation,
        cluster.epoch,
        cluster.generation.secret,
        cluster.settings,
        bool(slot.former),
    )


def _sorted(jobs: tuple[Job, ...]) -> list[Job]:
    return sorted(jobs, key=lambda job: job.name)


def _difference(theirs: tuple[Job, ...], ours: tuple[Job, ...]) -> str:
    """Describe the differences of a client's job list from the cluster's."""
    mine, known = {job.name: job.addresses for job in theirs}, {job.name: job.addresses for job in ours}
    found = []
    for name in sorted(mine.keys() | known.keys()):
        here, there = mine.get(name), known.get(name)
        label = f"job {messages.quote(name)}"
        if here is None:
            found.append(f"{label} is missing from the client's list")
        elif there is None:
            found.append(f"{label} is not in the cluster's list")
        else:
            if len(here) != len(there):
                found.append(
                    f"{label} has {len(here)} tasks in the client's list and {len(there)} in the cluster's"
                )
            found.extend(
                f"task {index} of {label} is {messages.quote(a)} in the client's list and "
                f"{messages.quote(b)} in the cluster's"
                for index, (a, b) in enumerate(zip(here, there, strict=False))
                if a != b
            )
    shown = "; ".join(found[:_MAX_DIFFERENCES])
    rest = len(found) - _MAX_DIFFERENCES
    return f"{shown}; and {rest} more differences" if rest > 0 else shown
