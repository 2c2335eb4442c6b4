"""The rules of membership: who may take a seat, how it is kept, how it is lost, and who is told."""

from __future__ import annotations

from dmesh_server.core import validation, wording
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.deadlines import GraceDue, LeaseDue, NoticeDue
from dmesh_server.core.effects import MembershipChange, Registered, SessionEnd
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Attach, Register
from dmesh_server.core.model import Caller, Job, MemberState, Task
from dmesh_server.core.replies import Replies
from dmesh_server.core.roster import Seat
from dmesh_server.core.turn import Turn

_MAX_DIFFERENCES = 5
_MAX_NAMED = 8


def check_registration(event: Register, cluster: Cluster | None) -> None:
    """Checks everything in a registration that can be checked without looking at the seats.

    Args:
        event: The registration.
        cluster: The cluster that it must fit; None if it begins a new life.

    Raises:
        CoreError: INVALID_ARGUMENT, UNKNOWN_TASK or SPEC_MISMATCH.
    """
    task = validation.caller_task(event.caller)
    validation.request_id(event.request_id)
    validation.process(event.process)
    validation.devices(event.devices)
    validation.peer_addresses(event.peer_addresses)
    jobs = event.jobs if cluster is None else cluster.roster.jobs
    if cluster is not None and event.jobs != jobs and _sorted(event.jobs) != _sorted(jobs):
        first = next(iter(cluster.roster.seats.values())).snapshot()
        process = f"(host {event.process.host or 'unknown'}, pid {event.process.pid})"
        raise CoreError(
            ErrorKind.SPEC_MISMATCH,
            f"/job:{wording.quote(task.job)[1:-1]}/task:{task.index} {process} has another job list than "
            f"cluster {wording.quote(cluster.name)}, which was formed by {wording.name(first)}: "
            f"{_difference(event.jobs, jobs)}. Give all clients the same DTENSOR_JOBS and DTENSOR_JOB_NAME, "
            "and every program of its own a DMESH_CLUSTER of its own.",
            (first,),
        )
    sizes = {job.name: len(job.addresses) for job in jobs}
    if not 0 <= task.index < sizes.get(task.job, 0):
        listed = ", ".join(f"/job:{name}/task:0-{size - 1}" for name, size in sizes.items())
        raise CoreError(
            ErrorKind.UNKNOWN_TASK,
            f"/job:{wording.quote(task.job)[1:-1]}/task:{task.index} is not one of the tasks of the job "
            f"list: {listed}. Check DTENSOR_CLIENT_ID and DTENSOR_JOB_NAME.",
        )


def is_holder(cluster: Cluster, seat: Seat, event: Register, turn: Turn) -> bool:
    """Tells whether the caller holds the seat already, and renews its lease if so.

    Raises:
        CoreError: FENCED: the caller held the seat, but has departed. CLUSTER_ENDING: another's departure
        bars the seat until the others have departed, too.
    """
    if seat.incarnation == event.caller.incarnation:
        if not seat.state.departed:
            seat.last_seen_at = seat.lease_from = turn.now
        elif event.request_id != seat.request_id:
            raise fenced(cluster, seat)
        return True
    if not seat.state.departed or cluster.ended:
        return False
    last = seat.snapshot()
    active = cluster.roster.active_members()
    raise CoreError(
        ErrorKind.CLUSTER_ENDING,
        f"{seat.task} of cluster {wording.quote(cluster.name)} cannot be taken again before the cluster has "
        f"ended: its last holder {wording.name(last)} {wording.fate_of(last)}, but {len(active)} of its "
        "members are still there: "
        f"{wording.listing(active[:_MAX_NAMED], turn.now)}{', ...' if len(active) > _MAX_NAMED else ''}. End "
        "them, or wait until they have ended, and try again.",
        active,
    )


def check_not_taken(cluster: Cluster, seat: Seat | None, turn: Turn) -> None:
    """Refuses a seat that another process holds.

    Raises:
        CoreError: TASK_TAKEN.
    """
    if seat is None:
        return
    holder = seat.snapshot()
    raise CoreError(
        ErrorKind.TASK_TAKEN,
        f"{seat.task} of cluster {wording.quote(cluster.name)} is held by another process: "
        f"{wording.name_and_age(holder, turn.now)}, registered "
        f"{wording.seconds(turn.now - holder.registered_at)} ago. Two clients have the same client id, or an "
        "earlier run is still alive: give each client its own DTENSOR_CLIENT_ID, or end that process.",
        (holder,),
    )


def admit(cluster: Cluster, event: Register, task: Task, turn: Turn) -> None:
    """Gives a vacant seat to the caller."""
    seat = Seat(
        task,
        event.caller.incarnation,
        MemberState.REGISTERED,
        event.process,
        event.devices,
        event.peer_addresses,
        event.request_id,
        registered_at=turn.now,
        last_seen_at=turn.now,
        lease_from=turn.now,
        replies=Replies(cluster.limits.replies_per_member),
    )
    cluster.roster.add(seat)
    cluster.persist_seat(seat, turn)
    cluster.advance_epoch(turn)
    cluster.deadlines.set(LeaseDue(cluster.name, task), turn.now + cluster.limits.lease)


def registered(cluster: Cluster) -> Registered:
    """Returns the answer to a registration."""
    return Registered(cluster.life.incarnation, cluster.epoch, cluster.life.secret)


def find(cluster: Cluster, caller: Caller) -> Seat:
    """Returns the caller's seat, even if the caller has departed.

    Raises:
        CoreError: The caller does not hold the seat.
    """
    task = validation.caller_task(caller)
    seat = cluster.roster.seats.get(task)
    if seat is not None and seat.incarnation == caller.incarnation:
        return seat
    label = f"/job:{wording.quote(task.job)[1:-1]}/task:{task.index}"
    if not cluster.roster.knows(task):
        raise CoreError(
            ErrorKind.UNKNOWN_TASK,
            f"{label} is not a task of cluster {wording.quote(cluster.name)}, which consists of "
            f"{wording.tasks(cluster.roster.everyone)}",
        )
    if seat is None or seat.state.departed:
        raise CoreError(
            ErrorKind.NOT_REGISTERED,
            f"{label} (incarnation {caller.incarnation:#x}) is not registered in cluster "
            f"{wording.quote(cluster.name)}: register first",
        )
    holder = seat.snapshot()
    raise CoreError(
        ErrorKind.FENCED,
        f"{label} is held by another process, {wording.name(holder)}; the caller (incarnation "
        f"{caller.incarnation:#x}) may not act for it. It belongs to an earlier life of the cluster, or has "
        "the same client id as another process: end it.",
        (holder,),
    )


def authorize(cluster: Cluster, caller: Caller, turn: Turn) -> Seat:
    """Returns the seat of a caller that may act for it, and notes that it was seen.

    Raises:
        CoreError: The caller does not hold the seat, or has departed.
    """
    seat = find(cluster, caller)
    if seat.state.departed:
        raise fenced(cluster, seat)
    seen(seat, turn)
    return seat


def seen(seat: Seat, turn: Turn) -> None:
    """Notes a sign of life; without a session it does not prolong the lease, within which to attach."""
    seat.last_seen_at = turn.now
    if seat.session is not None:
        seat.lease_from = turn.now


def fenced(cluster: Cluster, seat: Seat) -> CoreError:
    """Returns the error for a process that has departed."""
    member = seat.snapshot()
    return CoreError(
        ErrorKind.FENCED,
        f"{wording.name(member)} {wording.fate_of(member)}; it is not a member of cluster "
        f"{wording.quote(cluster.name)} any more and may not act for its task. End the process, and start "
        "the job again.",
        (member,),
    )


def attach(cluster: Cluster, seat: Seat, event: Attach, turn: Turn) -> None:
    """Binds a session to a seat; an older session of it ends."""
    replaced = cluster.bind(seat, event.session)
    if replaced is not None:
        turn.push(
            (replaced,),
            SessionEnd(
                CoreError(
                    ErrorKind.NOT_REGISTERED,
                    f"this session of {wording.name(seat.snapshot())} was replaced by a newer one of the "
                    "same process",
                    epoch=cluster.epoch,
                )
            ),
        )
    seat.state = MemberState.CONNECTED
    seat.closed_at = None
    seat.restored = False
    seen(seat, turn)
    cluster.deadlines.cancel(GraceDue(cluster.name, seat.task))


def session_closed(cluster: Cluster, seat: Seat, turn: Turn) -> None:
    """Notes that a seat's session broke; its holder has a moment to come back."""
    cluster.unbind(seat)
    seat.state = MemberState.REGISTERED
    seat.closed_at = turn.now
    cluster.deadlines.set(GraceDue(cluster.name, seat.task), turn.now + cluster.limits.session_grace)


def grace_due(cluster: Cluster, seat: Seat, floor: float, turn: Turn) -> None:
    """Declares a member lost whose session was not attached again in time.

    The time counts from `floor` at the earliest.
    """
    assert seat.closed_at is not None
    end = max(seat.closed_at, floor) + cluster.limits.session_grace
    if end > turn.now:
        cluster.deadlines.set(GraceDue(cluster.name, seat.task), end)
        return
    depart(cluster, seat, MemberState.LOST, "its connection closed without a goodbye", turn)


def lease_due(cluster: Cluster, seat: Seat, floor: float, turn: Turn) -> None:
    """Declares a member lost whose lease has run out; it counts from `floor` at the earliest.

    Leases are renewed without touching their deadline; whether one has really run out is judged only here.
    """
    end = max(seat.lease_from, floor) + cluster.limits.lease
    if end > turn.now:
        cluster.deadlines.set(LeaseDue(cluster.name, seat.task), end)
        return
    if seat.session is not None or seat.closed_at is not None:
        reason = f"no heartbeat for {wording.seconds(turn.now - seat.lease_from)}"
    elif seat.restored:
        reason = (
            f"it did not come back within {wording.seconds(cluster.limits.lease)} of the server's restart"
        )
    else:
        reason = (
            f"it did not open a session within {wording.seconds(cluster.limits.lease)} of its registration"
        )
    depart(cluster, seat, MemberState.LOST, reason, turn)


def depart(cluster: Cluster, seat: Seat, state: MemberState, reason: str, turn: Turn) -> None:
    """Ends a membership: fails the member's barriers, ends what it waits for, and lets everybody be told."""
    seat.state = state
    seat.reason = reason
    seat.closed_at = None
    cluster.roster.departed[seat.task] = seat
    cluster.deadlines.cancel(LeaseDue(cluster.name, seat.task))
    cluster.deadlines.cancel(GraceDue(cluster.name, seat.task))
    cluster.persist_seat(seat, turn)
    cluster.advance_epoch(turn)
    session = cluster.unbind(seat)
    cluster.barriers.member_departed(seat, turn)
    error = fenced(cluster, seat)
    error.epoch = cluster.epoch
    for token in sorted(seat.tokens):
        cluster.store.dismiss(token, error, turn)
    if session is not None and state is not MemberState.LEFT:
        turn.push((session,), SessionEnd(error))
    cluster.untold.append(seat)
    turn.departures.add(cluster.name)


def tell_departures(cluster: Cluster, turn: Turn) -> None:
    """Tells the sessions who departed: the first at once, those soon after it together."""
    if not cluster.untold:
        return
    if turn.now < cluster.quiet_until:
        cluster.deadlines.set(NoticeDue(cluster.name), cluster.quiet_until)
        return
    # Telling everybody costs time for each session: a cluster that ends must not tell all of those who stay
    # of each that goes.
    limits, sessions = cluster.limits, cluster.roster.sessions
    quiet = max(limits.departure_batch, limits.departure_quiet_per_session * len(sessions))
    cluster.quiet_until = turn.now + quiet
    departed = tuple(seat.snapshot() for seat in cluster.untold)
    cluster.untold.clear()
    turn.push(sessions, MembershipChange(cluster.epoch, departed))


def _sorted(jobs: tuple[Job, ...]) -> list[Job]:
    return sorted(jobs, key=lambda job: job.name)


def _difference(theirs: tuple[Job, ...], ours: tuple[Job, ...]) -> str:
    """Says in what a client's job list differs from the cluster's."""
    mine, known = {job.name: job.addresses for job in theirs}, {job.name: job.addresses for job in ours}
    found = []
    for name in sorted(mine.keys() | known.keys()):
        here, there = mine.get(name), known.get(name)
        label = f"job {wording.quote(name)}"
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
                f"task {index} of {label} is {wording.quote(a)} in the client's list and {wording.quote(b)} "
                "in the cluster's"
                for index, (a, b) in enumerate(zip(here, there, strict=False))
                if a != b
            )
    shown = "; ".join(found[:_MAX_DIFFERENCES])
    rest = len(found) - _MAX_DIFFERENCES
    return f"{shown}; and {rest} more differences" if rest > 0 else shown
