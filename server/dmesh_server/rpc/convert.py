"""Between protobuf messages and the core's values.

What a message must contain to make sense as an event is checked here (a caller, a kind, a time that is not
negative); what is allowed in a cluster is the core's to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from dmesh.v1 import common_pb2, coordination_pb2, key_value_pb2, progress_pb2
from dmesh_server.core import effects, events
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import (
    Activity,
    BarrierStatus,
    Caller,
    ClusterSettings,
    ClusterState,
    Device,
    KeyEvent,
    KeyValue,
    Member,
    PassedBarrier,
    Process,
    RestartPolicy,
    SeenState,
    Task,
)
from dmesh_server.core.views import Summary
from dmesh_server.progress import MemberProgress
from dmesh_server.sessions import OutgoingMessage

_MAX_PASSED = 1024
_MAX_FRAMES = 50
_LONGEST_FRAME = 300
_LONGEST_OPERATION = 200
_LARGEST_COUNT = 1 << 62
"""Of an epoch or revision that a client may present: the server goes on behind it."""
_CREDENTIAL_BYTES = range(16, 65)
_LONGEST_TIMEOUT_MS = 10 * 365 * 24 * 3600 * 1000


def invalid(message: str) -> CoreError:
    """Return the refusal of a malformed request."""
    return CoreError(ErrorKind.INVALID_ARGUMENT, message)


# From the wire.


def caller(message: common_pb2.Caller, present: bool) -> Caller:
    """Read the caller of a request.

    Args:
        message: The field.
        present: Whether the request has it.
    """
    if not present:
        raise invalid("the request does not say who is calling: set `caller`")
    slot = task(message.task) if message.HasField("task") else None
    return Caller(message.cluster, slot, message.incarnation, _proof(message.credential))


def _proof(credential: bytes) -> bytes:
    """Hash a credential: nothing behind this function knows it."""
    if not credential:
        return b""
    if len(credential) not in _CREDENTIAL_BYTES:
        raise invalid(f"the caller's credential has {len(credential)} bytes; it must be 16-64 random bytes")
    return hashlib.sha256(credential).digest()


def task(message: common_pb2.Task) -> Task:
    """Read a task slot."""
    return Task(message.job, message.index)


def process(message: common_pb2.Process) -> Process:
    """Read the facts about a process."""
    return Process(
        host=message.host,
        pid=message.pid,
        boot_id=message.boot_id,
        program=message.program,
        dmesh_version=message.dmesh_version,
        python_version=message.python_version,
        started_at_unix_ms=message.started_at_unix_ms,
        pid_namespace=message.pid_namespace,
        start_ticks=message.start_ticks,
    )


def devices(messages: Iterable[common_pb2.Device]) -> tuple[Device, ...]:
    """Read devices."""
    return tuple(Device(message.type, message.index, message.description) for message in messages)


def cluster_settings(message: coordination_pb2.ClusterSettings) -> ClusterSettings:
    """Read a client's wishes for its cluster's settings; the core checks the values."""
    if message.restart_policy not in _POLICIES:
        raise invalid(f"restart policy {message.restart_policy} is not one that this server knows")
    return ClusterSettings(
        restart_policy=RestartPolicy(message.restart_policy) if message.restart_policy else None,
        heartbeat_interval=_seconds(message.heartbeat_interval_ms),
        lease=_seconds(message.lease_ms),
        stuck_after=_seconds(message.stuck_after_ms),
    )


def passed_barriers(messages: Collection[coordination_pb2.PassedBarrier]) -> tuple[PassedBarrier, ...]:
    """Read the passed barriers that a client presents; the core checks names and tasks."""
    if len(messages) > _MAX_PASSED:
        raise invalid(
            f"{len(messages)} passed barriers are presented; at most {_MAX_PASSED} are allowed, the "
            "latest ones"
        )
    return tuple(
        PassedBarrier(
            message.name,
            message.instance,
            tuple(task(participant) for participant in message.participants),
            message.epoch,
        )
        for message in messages
    )


def seen_state(
    request: coordination_pb2.RegisterRequest | coordination_pb2.Attach | key_value_pb2.WatchRequest,
) -> SeenState | None:
    """Read the latest state that a client has seen; None if the request has none."""
    if not request.HasField("last_told"):
        return None
    seen = request.last_told
    if not 0 <= seen.epoch <= _LARGEST_COUNT or not 0 <= seen.revision <= _LARGEST_COUNT:
        raise invalid(f"last_told is out of range: epoch {seen.epoch}, revision {seen.revision}")
    return SeenState(
        seen.store_id, seen.cluster_incarnation, seen.server_incarnation, seen.epoch, seen.revision
    )


def activity(message: common_pb2.Activity) -> Activity:
    """Read the activity of a client's main thread, cut to a bounded length."""
    return Activity(
        message.operation[:_LONGEST_OPERATION],
        _age(message.age_ms),
        # The innermost frames are the last.
        tuple(frame[:_LONGEST_FRAME] for frame in message.stack[-_MAX_FRAMES:]),
    )


def waiting(session: int, message: coordination_pb2.Waiting) -> events.ReportWaiting:
    """Read the tasks that a client waits for outside of the server's sight."""
    return events.ReportWaiting(
        session,
        message.operation[:_LONGEST_OPERATION],
        tuple(task(waited_for) for waited_for in message.tasks),
        _age(message.age_ms),
    )


def _age(milliseconds: int) -> float:
    return _seconds(max(0, milliseconds))


def barrier_timeout(milliseconds: int) -> float | None:
    """Read the time limit of a barrier: 0 for none; the core refuses negative ones."""
    return _seconds(milliseconds) if milliseconds else None


def wait_timeout(milliseconds: int) -> float | None:
    """Read how long to wait for something: 0 is not at all, -1 as long as the call lives."""
    if milliseconds < -1:
        raise invalid(
            f"the time to wait is {milliseconds} ms; it must be 0 (none), -1 (no limit) or positive"
        )
    return None if milliseconds == -1 else _seconds(milliseconds)


def _seconds(milliseconds: int) -> float:
    # A limit of more than ten years is none; beyond it, clock arithmetic would lose its precision.
    return min(milliseconds, _LONGEST_TIMEOUT_MS) / 1000


_POLICIES = frozenset(policy.value for policy in RestartPolicy) | {0}


# To the wire.


def error_kind(kind: ErrorKind) -> common_pb2.ErrorKind.ValueType:
    """Write the kind of an error; the core's values are the wire's."""
    return common_pb2.ErrorKind.ValueType(kind.value)


def error_to_proto(error: CoreError, now: float) -> common_pb2.Error:
    """Write an error and the members that it concerns."""
    return common_pb2.Error(
        kind=error_kind(error.kind),
        message=error.message,
        members=(member_to_proto(member, now) for member in error.members),
        epoch=error.epoch,
        fields=error.fields,
        oldest_revision=error.oldest_revision,
        revision=error.revision,
    )


def task_to_proto(value: Task) -> common_pb2.Task:
    """Write a task slot."""
    return common_pb2.Task(job=value.job, index=value.index)


def member_to_proto(value: Member, now: float) -> common_pb2.Member:
    """Write a member, its times as ages at `now`. A vacant task has no ages."""
    message = common_pb2.Member(
        task=task_to_proto(value.task),
        incarnation=value.incarnation,
        reason=value.reason,
        peer_addresses=value.peer_addresses,
        devices=(
            common_pb2.Device(type=device.type, index=device.index, description=device.description)
            for device in value.devices
        ),
    )
    if value.incarnation:
        message.state = common_pb2.MemberState.ValueType(value.state.value)
        if not value.state.departed:
            message.liveness = common_pb2.Liveness.ValueType(value.liveness.value)
        if value.activity is not None:
            message.activity.CopyFrom(activity_to_proto(value.activity))
        message.cause = common_pb2.DepartureCause.ValueType(value.cause.value)
        message.code = value.code
        message.last_seen_age_ms = _milliseconds(now - value.last_seen_at)
        message.registered_age_ms = _milliseconds(now - value.registered_at)
        facts = value.process
        message.process.CopyFrom(
            common_pb2.Process(
                host=facts.host,
                pid=facts.pid,
                boot_id=facts.boot_id,
                program=facts.program,
                dmesh_version=facts.dmesh_version,
                python_version=facts.python_version,
                started_at_unix_ms=facts.started_at_unix_ms,
                pid_namespace=facts.pid_namespace,
                start_ticks=facts.start_ticks,
            )
        )
    return message


def activity_to_proto(value: Activity) -> common_pb2.Activity:
    """Write the activity of a member's main thread."""
    return common_pb2.Activity(
        operation=value.operation, age_ms=_milliseconds(value.age), stack=value.stack
    )  # fmt: skip


def cluster_settings_to_proto(value: ClusterSettings) -> coordination_pb2.ClusterSettings:
    """Write the settings of a cluster, which leave nothing open."""
    policy = value.restart_policy.value if value.restart_policy is not None else 0
    return coordination_pb2.ClusterSettings(
        restart_policy=coordination_pb2.RestartPolicy.ValueType(policy),
        heartbeat_interval_ms=round(value.heartbeat_interval * 1000),
        lease_ms=round(value.lease * 1000),
        stuck_after_ms=round(value.stuck_after * 1000),
    )


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def barrier_to_proto(value: BarrierStatus, now: float) -> coordination_pb2.Barrier:
    """Write a barrier under way, its times relative to `now`."""
    return coordination_pb2.Barrier(
        name=value.name,
        instance=value.instance,
        arrived=map(task_to_proto, value.arrived),
        missing=map(task_to_proto, value.missing),
        age_ms=_milliseconds(now - value.started_at),
        remaining_ms=-1 if value.deadline is None else _milliseconds(value.deadline - now),
    )


def cluster_header_to_proto(
    state: ClusterState, server_incarnation: int, now: float
) -> coordination_pb2.GetClusterStateResponse:
    """Write a cluster without its members."""
    return coordination_pb2.GetClusterStateResponse(
        server_incarnation=server_incarnation,
        cluster_incarnation=state.incarnation,
        epoch=state.epoch,
        jobs=(common_pb2.Job(name=job.name, addresses=job.addresses) for job in state.jobs),
        vacant=map(task_to_proto, state.vacant),
        barriers=(barrier_to_proto(barrier, now) for barrier in state.barriers),
    )


def progress_to_proto(members: Iterable[MemberProgress], now: float) -> progress_pb2.GetProgressResponse:
    """Write members' latest progress reports, as they were received."""
    response = progress_pb2.GetProgressResponse()
    for member in members:
        message = response.members.add(
            task=task_to_proto(member.task),
            incarnation=member.incarnation,
            age_ms=_milliseconds(now - member.received_at),
        )
        message.report.ParseFromString(member.encoded)
    return response


def cluster_summary_to_proto(summary: Summary) -> progress_pb2.ClusterSummary:
    """Write a cluster's entry in a list."""
    return progress_pb2.ClusterSummary(
        name=summary.name,
        incarnation=summary.incarnation,
        epoch=summary.epoch,
        present=summary.present,
        tasks=sum(len(job.addresses) for job in summary.jobs),
    )


def encode_outgoing(item: OutgoingMessage | bytes, now: float) -> bytes:
    """Encode a session's message, once for all the sessions that it goes to."""
    if isinstance(item, bytes):
        return item
    if item.encoded is None:
        item.encoded = session_message_to_proto(item.message, now).SerializeToString()
    return item.encoded


def session_message_to_proto(message: effects.Message, now: float) -> coordination_pb2.SessionResponse:
    """Write a message to a session."""
    response = coordination_pb2.SessionResponse()
    match message:
        case effects.HeartbeatAck():
            response.heartbeat_ack.sequence = message.sequence
            response.heartbeat_ack.epoch = message.epoch
        case effects.MembershipChange():
            response.membership_change.epoch = message.epoch
            response.membership_change.departed.extend(member_to_proto(m, now) for m in message.departed)
            response.membership_change.rejoined.extend(member_to_proto(m, now) for m in message.rejoined)
        case effects.LivenessChange():
            response.liveness_change.members.extend(member_to_proto(m, now) for m in message.members)
        case effects.ProcessQuery():
            response.process_query.CopyFrom(
                coordination_pb2.ProcessQuery(
                    task=task_to_proto(message.task),
                    lease=message.lease,
                    pid=message.pid,
                    start_ticks=message.start_ticks,
                )
            )
        case effects.StatusRequest():
            response.status_request.id = message.id
        case effects.BarrierResult():
            response.barrier_result.name = message.name
            response.barrier_result.instance = message.instance
            response.barrier_result.epoch = message.epoch
            for one in message.present or ():
                response.barrier_result.present.add(task=task_to_proto(one.task), incarnation=one.incarnation)
            if message.error is not None:
                response.barrier_result.error.CopyFrom(error_to_proto(message.error, now))
        case effects.SessionEnd():
            response.session_end.error.CopyFrom(error_to_proto(message.error, now))
    return response


def key_value_to_proto(value: KeyValue) -> key_value_pb2.KeyValue:
    """Write a key with its value and revisions."""
    return key_value_pb2.KeyValue(
        key=value.key,
        value=value.value,
        create_revision=value.create_revision,
        mod_revision=value.mod_revision,
        lease=value.lease,
    )


def key_event_to_proto(value: KeyEvent) -> key_value_pb2.KeyEvent:
    """Write a change of a key."""
    event = key_value_pb2.KeyEvent(kv=key_value_to_proto(value.kv), deleted=value.deleted)
    event.kv.ClearField("lease")  # of which what was kept through a restart knows nothing
    return event
