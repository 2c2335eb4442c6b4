"""Rules of membership: authorization of callers, leases, departures, and the notices of them."""

from __future__ import annotations

import hmac
from functools import partial
from itertools import islice

from dmesh_server.core import messages, validation
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.deadlines import NoticeDue
from dmesh_server.core.effects import MembershipChange, Probe, ProcessQuery, SessionEnd
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Attach, Evidence, ReportProcess, SessionClosed
from dmesh_server.core.log_events import MemberDeparted
from dmesh_server.core.model import Caller, DepartureCause, Liveness, MemberState
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.transaction import Transaction

ENDED = "it ended its session without a goodbye"
_CLOSED = "its connection closed without a goodbye"
_ASKED = 2
"""Most members of a suspected member's host that are asked whether its process exists."""
_LOOKED_AT = 16
"""Most members of its host that are considered for that."""


def find(cluster: Cluster, caller: Caller, transaction: Transaction) -> TaskSlot:
    """Return the caller's task slot, even if the caller has departed.

    Raises:
        CoreError: The caller does not hold the task slot, or does not prove it.
    """
    task = validation.caller_task(caller)
    slot = cluster.roster.slots.get(task)
    if slot is not None and slot.incarnation == caller.incarnation:
        check_proof(cluster, slot, caller)
        return slot
    label = messages.label(task)
    cluster.check_task(task)
    if slot is not None and caller.incarnation in slot.former:
        raise fenced_predecessor(cluster, slot, caller, transaction.now)
    if slot is None or slot.state.departed:
        raise CoreError(
            ErrorKind.NOT_REGISTERED,
            f"{label} (incarnation {caller.incarnation:#x}) is not registered in cluster "
            f"{messages.quote(cluster.name)}: register first",
        )
    holder = slot.snapshot()
    raise CoreError(
        ErrorKind.FENCED,
        f"{label} is held by another process, {messages.name(holder)}; the caller (incarnation "
        f"{caller.incarnation:#x}) may not use it. The caller belongs to an earlier generation of the "
        "cluster, or two processes have the same client id. End the caller.",
        (holder,),
    )


def check_proof(cluster: Cluster, slot: TaskSlot, caller: Caller) -> None:
    """Refuse a caller that names a holder's incarnation without its credential, in constant time.

    Raises:
        CoreError: PERMISSION_DENIED.
    """
    if slot.proof and not hmac.compare_digest(slot.proof, caller.proof):
        raise CoreError(
            ErrorKind.PERMISSION_DENIED,
            f"the caller names the incarnation of {slot.task} of cluster {messages.quote(cluster.name)}, but "
            f"its credential is {'wrong' if caller.proof else 'missing'}: only the process that "
            "registered may call for the task. Let other processes call without a task, or register "
            "with an incarnation and a credential of their own.",
        )


def authorize(cluster: Cluster, caller: Caller, transaction: Transaction) -> TaskSlot:
    """Return the task slot of a caller that may act for it.

    Raises:
        CoreError: The caller does not hold the task slot, or has departed.
    """
    slot = find(cluster, caller, transaction)
    if slot.state.departed:
        raise fenced(cluster, slot)
    return slot


def fenced(cluster: Cluster, slot: TaskSlot) -> CoreError:
    """Return the refusal of a process that has departed."""
    member = slot.snapshot()
    return CoreError(
        ErrorKind.FENCED,
        f"{messages.name(member)} {messages.fate_of(member)}; it is not a member of cluster "
        f"{messages.quote(cluster.name)} any more and may not act for its task. End the process, and start "
        "the job again.",
        (member,),
    )


def fenced_predecessor(cluster: Cluster, slot: TaskSlot, caller: Caller, now: float) -> CoreError:
    """Return the refusal of a process that was declared gone and whose slot was taken again."""
    holder = slot.snapshot()
    return CoreError(
        ErrorKind.FENCED,
        f"the caller (incarnation {caller.incarnation:#x}) was declared lost or failed as {slot.task} of "
        f"cluster {messages.quote(cluster.name)}, and another process has taken the task since: "
        f"{messages.name(holder)}, registered {messages.seconds(now - holder.registered_at)} ago"
        f"{f', which {messages.fate_of(holder)}' if holder.state.departed else ''}. End the caller: it may "
        "not act for the task any more.",
        (holder,),
    )


def attach(cluster: Cluster, slot: TaskSlot, event: Attach, transaction: Transaction) -> None:
    """Bind a session to a task slot; an older session of it ends."""
    replaced = cluster.bind(slot, event.session)
    if replaced is not None:
        transaction.push(
            (replaced,),
            SessionEnd(
                CoreError(
                    ErrorKind.NOT_REGISTERED,
                    f"this session of {messages.name(slot.snapshot())} was replaced by a newer one of the "
                    "same process",
                    epoch=cluster.epoch,
                )
            ),
        )
    slot.state = MemberState.CONNECTED
    slot.restored = False
    cluster.leases.clear(slot.lease, transaction.now)
    cluster.watchdog.attached(event.session, transaction)


def grant_lease(cluster: Cluster, slot: TaskSlot, now: float) -> None:
    """Grant the holder of a task slot its lease."""
    owner = f"{slot.task} of cluster {messages.quote(cluster.name)}"
    expired = partial(lease_expired, cluster, slot)
    slot.lease = cluster.leases.grant(owner, cluster.settings.lease, now, expired)


def session_closed(cluster: Cluster, slot: TaskSlot, event: SessionClosed, transaction: Transaction) -> None:
    """Suspect a member whose session broke, and start a search for its process."""
    cluster.unbind(slot)
    slot.state = MemberState.REGISTERED
    cluster.watchdog.detached(slot, transaction)
    lease, process = slot.lease, slot.process
    if slot.liveness is Liveness.BLOCKED:
        # Its transport has answered until now, or the session would have broken before.
        cluster.leases.renew(lease, transaction.now)
    cluster.leases.suspect(lease, transaction.now)
    transaction.probe(
        Probe(cluster.name, slot.task, lease.number, process, slot.peer_addresses, event.remote)
    )
    if process.pid > 0:
        nearby = islice(cluster.roster.neighbors(slot), _LOOKED_AT)
        sessions = [other.session for other in nearby if other.session is not None][:_ASKED]
        query = ProcessQuery(slot.task, lease.number, process.pid, process.start_ticks)
        transaction.push(sessions, query)


def take_evidence(cluster: Cluster, event: Evidence, transaction: Transaction) -> None:
    """End the lease of a suspected member whose process is gone; restore it if the process exists."""
    slot = cluster.roster.slots.get(event.task)
    if slot is None or slot.lease.number != event.lease or not slot.lease.suspected:
        return
    if event.gone:
        lose(cluster, slot, DepartureCause.PROCESS_GONE, f"{_CLOSED}, and {event.source}", transaction)
    else:
        cluster.leases.vouch(slot.lease)


def take_report(cluster: Cluster, reporter: TaskSlot, event: ReportProcess, transaction: Transaction) -> None:
    """Act on a member's report about a process of its own host."""
    slot = cluster.roster.slots.get(event.task)
    if slot is not None and reporter in cluster.roster.neighbors(slot):
        source = f"its process is gone, says {messages.name(reporter.snapshot())}"
        evidence = Evidence(cluster.name, event.task, event.lease, event.gone, source)
        take_evidence(cluster, evidence, transaction)


def lease_expired(cluster: Cluster, slot: TaskSlot, transaction: Transaction) -> None:
    """Judge a member whose lease has run out.

    A member with an attached session exists, since its transport answers pings, but its interpreter does not
    run: it is BLOCKED. A member without a session that waits for the answer of a call exists as well. Any
    other member is lost.
    """
    lease, now = slot.lease, transaction.now
    silence = messages.seconds(now - slot.last_seen_at)
    if slot.session is not None:
        cluster.watchdog.block(
            slot,
            f"no heartbeat for {silence} although its connection answers: its interpreter does not run "
            "(something holds the GIL, or the process is starved)",
            transaction,
        )
        return
    if slot.tokens:
        cluster.leases.renew(lease, now)
        return
    if lease.suspected_at is not None:
        silent_before = lease.suspected_at - lease.renewed_at > 2 * cluster.settings.heartbeat_interval
        cause = DepartureCause.SILENT
        reason = f"no sign of life for {silence}: it was stopped, or its network is cut"
        if not silent_before:
            cause, reason = DepartureCause.DISCONNECTED, f"{_CLOSED} and was not built up again"
    elif slot.restored:
        cause = DepartureCause.NOT_BACK
        reason = f"it did not come back within {messages.seconds(lease.ttl)} of the server's restart"
    else:
        cause = DepartureCause.SILENT
        reason = f"no sign of life for {silence}, and no session"
    lose(cluster, slot, cause, reason, transaction)


def lose(
    cluster: Cluster, slot: TaskSlot, cause: DepartureCause, reason: str, transaction: Transaction
) -> None:
    """Declare a member lost."""
    depart(cluster, slot, MemberState.LOST, cause, reason, transaction)


def depart(
    cluster: Cluster,
    slot: TaskSlot,
    state: MemberState,
    cause: DepartureCause,
    reason: str,
    transaction: Transaction,
    code: int = 0,
) -> None:
    """End a membership: settle the member's barriers, end its waits, and queue the notice."""
    cluster.watchdog.departed(slot)
    slot.state, slot.cause, slot.code = state, cause, code
    slot.reason = reason
    cluster.roster.depart(slot)
    cluster.leases.revoke(slot.lease, transaction)
    cluster.persist_slot(slot, transaction)
    cluster.advance_epoch(transaction)
    transaction.note(MemberDeparted(cluster.name, slot.outline(), cluster.epoch))
    session = cluster.unbind(slot)
    cluster.barriers.member_departed(slot, transaction)
    error = fenced(cluster, slot)
    error.epoch = cluster.epoch
    cluster.dismiss_waiters_of(slot, error, transaction)
    if session is not None and state is not MemberState.LEFT:
        transaction.push((session,), SessionEnd(error))
    if not cluster.unreported:
        cluster.leave_due = transaction.now + cluster.limits.leave_quiet(len(cluster.roster.sessions))
    cluster.unreported.append(slot)
    cluster.unreported_loss |= state is not MemberState.LEFT
    cluster.unreported_rejoined.pop(slot.task, None)
    transaction.unsettled.add(cluster.name)


def report_changes(cluster: Cluster, transaction: Transaction) -> None:
    """Notify the sessions of departed and rejoined members: the first at once, those soon after it together.

    Members that left in good order are not urgent: their notice waits for another one, or for a while.
    """
    if not cluster.unreported and not cluster.unreported_rejoined:
        return
    # A notice costs time for each session: a cluster that ends must not send one for each member that leaves.
    sessions = cluster.roster.sessions
    due = cluster.quiet_until
    if not cluster.unreported_loss and not cluster.unreported_rejoined:
        due = max(due, cluster.leave_due)
    if transaction.now < due:
        cluster.deadlines.set(NoticeDue(cluster.name), due)
        return
    cluster.quiet_until = transaction.now + cluster.limits.quiet(len(sessions))
    departed = tuple(slot.snapshot() for slot in cluster.unreported)
    rejoined = tuple(slot.snapshot() for slot in cluster.unreported_rejoined.values())
    cluster.unreported.clear()
    cluster.unreported_loss = False
    cluster.unreported_rejoined.clear()
    transaction.push(sessions, MembershipChange(cluster.epoch, departed, rejoined))
