"""Encoding of `Record` values.

Clusters, members and barriers are JSON; keys, changes and replies, which every change writes, are packed
binary. The store names the format's version; a change of anything here is a new version.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from dmesh_server.core.effects import (
    Done,
    KvDeleted,
    KvIncremented,
    KvRead,
    KvResult,
    KvRevision,
    KvTransacted,
    Record,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.messages import ranges
from dmesh_server.core.model import (
    Activity,
    ClusterSettings,
    DepartureCause,
    Device,
    Job,
    KeyEvent,
    KeyValue,
    Liveness,
    Member,
    MemberState,
    Participant,
    Process,
    RestartPolicy,
    Task,
)
from dmesh_server.core.replies import Remembered, RememberedAnswer

T = TypeVar("T")

FORMAT = 5
"""Version of the encoding."""

CLUSTER = "cluster"
"""Kind: a cluster's life (key "") and epoch ("epoch"); of no cluster, the floor of epochs ("floor")."""
MEMBER = "member"
"""Kind: the holder of a task slot, by JOB/INDEX."""
KEY = "key"
"""Kind: a key of the key-value store."""
CHANGE = "change"
"""Kind: the changes of one revision of the key-value store, by revision."""
BARRIER = "barrier"
"""Kind: the latest finished instance of a barrier, by name."""
REPLY = "reply"
"""Kind: a remembered answer, by JOB/INDEX/PLACE; without a job, of a caller without a task."""
LEASE = "lease"
"""Kind: a lease granted for keys, by its number in hexadecimal digits."""
ATTACHMENT = "attachment"
"""Kind: the number of the lease that a key is attached to, by key."""

_KEY_HEAD = struct.Struct("<QQ")
_EVENT_HEAD = struct.Struct("<BIIQQ")
NO_EVENTS = b"\0"
"""Changes of a revision that changed nothing: the store went on behind an earlier one's revisions."""
_REPLY_HEAD = struct.Struct("<QQHH")
"""Incarnation, sequence, lengths of the call and the request id."""
_ANSWER_HEAD = struct.Struct("<BqqI")
"""Head of an answer: kind, number, revision, bytes of the rest."""
_ANSWERS = (Done, KvRevision, KvDeleted, KvIncremented, KvTransacted, KvRead)


class RecordError(ValueError):
    """A durable record cannot be understood."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Facts fixed for one generation of a cluster."""

    incarnation: int
    secret: bytes
    jobs: tuple[Job, ...]
    settings: ClusterSettings
    """With nothing left open."""
    owner: str = ""
    """Tenant that formed it; empty for none."""

    def __repr__(self) -> str:
        return f"Life(incarnation={self.incarnation}, jobs={self.jobs!r}, settings={self.settings!r})"


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """Durable facts about the holder of a task slot."""

    member: Member
    """The times in it are not durable: a monotonic clock means nothing to the next process."""
    request_id: str
    """Of its registration."""
    epoch: int
    """The cluster's, with which it came in."""
    former: tuple[int, ...]
    """Incarnations of the earlier holders."""
    proof: bytes = field(default=b"", repr=False)
    """SHA-256 of the holder's credential; empty if it registered without one."""


@dataclass(frozen=True, slots=True)
class FinishedBarrier:
    """The result of an instance of a barrier."""

    number: int
    participants: frozenset[Task] | None
    """None for every task of the cluster."""
    error: CoreError | None
    epoch: int
    """The cluster's, when it was over."""
    present: tuple[Participant, ...] | None = None
    """Participants that came to a barrier of those alive that succeeded."""

    def encode(self) -> bytes:
        """Return the value of its record."""
        data: dict[str, Any] = {"number": self.number, "epoch": self.epoch}
        if self.participants is not None:
            data["participants"] = ranges(self.participants)
        if self.present is not None:
            data["present"] = [[one.task.job, one.task.index, one.incarnation] for one in self.present]
        if self.error is not None:
            data["error"] = {
                "kind": self.error.kind.value,
                "message": self.error.message,
                "members": [_member(member) for member in self.error.members],
            }
        return _dump(data)


def slot_key(task: Task) -> str:
    """Return the key of a member's record."""
    return f"{task.job}/{task.index}"


def reply_key(task: Task | None, place: int) -> str:
    """Return the key of a reply's record; those to callers without a task have none."""
    return f"/0/{place}" if task is None else f"{task.job}/{task.index}/{place}"


def encode_number(number: int) -> bytes:
    """Encode an epoch."""
    return str(number).encode()


def encode_seconds(seconds: float) -> bytes:
    """Encode a duration."""
    return repr(float(seconds)).encode()


def encode_declaration(tasks: tuple[tuple[str, int], ...], settings: ClusterSettings) -> bytes:
    """Encode the declared jobs and settings of a cluster."""
    policy = settings.restart_policy
    wishes = [settings.heartbeat_interval, settings.lease, settings.stuck_after]
    return _dump({"tasks": tasks, "settings": [policy.value if policy else 0, *wishes]})


def encode_generation(generation: Generation) -> bytes:
    """Encode the fixed facts of a cluster's generation."""
    settings = generation.settings
    return _dump(
        {
            "incarnation": generation.incarnation,
            "secret": base64.b64encode(generation.secret).decode(),
            "jobs": [[job.name, list(job.addresses)] for job in generation.jobs],
            "settings": [
                (settings.restart_policy or RestartPolicy.FAIL_FAST).value,
                settings.heartbeat_interval,
                settings.lease,
                settings.stuck_after,
            ],
            **({"owner": generation.owner} if generation.owner else {}),
        }
    )


def encode_member(holder: MemberRecord) -> bytes:
    """Encode the holder of a task slot."""
    return _dump(
        {
            **_member(holder.member),
            "request_id": holder.request_id,
            "epoch": holder.epoch,
            "former": list(holder.former),
            **({"proof": holder.proof.hex()} if holder.proof else {}),
        }
    )


def encode_reply(incarnation: int, remembered: Remembered) -> bytes:
    """Encode a remembered answer to a process. Packed, because one is written with every change."""
    call, request_id = remembered.call.encode(), remembered.request_id.encode()
    head = _REPLY_HEAD.pack(incarnation, remembered.sequence, len(call), len(request_id))
    return head + call + request_id + _encode_answer(remembered.answer)


def _encode_answer(answer: RememberedAnswer | KvRead) -> bytes:
    number, revision, rest = 0, 0, b""
    match answer:
        case Done():
            pass
        case KvRevision(revision):
            pass
        case KvDeleted(number, revision) | KvIncremented(number, revision):
            pass
        case KvTransacted(succeeded, results, revision):
            number, rest = int(succeeded), b"".join(map(_encode_answer, results))
        case KvRead(kvs, revision):
            rest = encode_change(tuple(map(KeyEvent, kvs)))
    return _ANSWER_HEAD.pack(_ANSWERS.index(type(answer)), number, revision, len(rest)) + rest


def encode_key(kv: KeyValue) -> bytes:
    """Encode the value and revisions of a key."""
    return _KEY_HEAD.pack(kv.create_revision, kv.mod_revision) + kv.value


def encode_change(events: tuple[KeyEvent, ...]) -> bytes:
    """Encode the changes of one revision."""
    parts = []
    for event in events:
        kv, key = event.kv, event.kv.key.encode()
        parts += [
            _EVENT_HEAD.pack(event.deleted, len(key), len(kv.value), kv.create_revision, kv.mod_revision),
            key,
            kv.value,
        ]
    return b"".join(parts)


def decode_number(record: Record) -> int:
    """Decode an epoch."""
    return _decoded(record, lambda value: int(value.decode("ascii")))


def decode_lease(record: Record) -> tuple[int, float]:
    """Decode the number and the time to live of a lease, seconds."""
    return _decoded(record, lambda value: (int(record.key, 16), float(value.decode("ascii"))))


def decode_declaration(record: Record) -> tuple[tuple[tuple[str, int], ...], ClusterSettings]:
    """Decode the declared jobs and settings of a cluster."""

    def decode(value: bytes) -> tuple[tuple[tuple[str, int], ...], ClusterSettings]:
        data = json.loads(value)
        policy, interval, lease, stuck_after = data["settings"]
        settings = ClusterSettings(
            RestartPolicy(policy) if policy else None, float(interval), float(lease), float(stuck_after)
        )
        return tuple((str(job), int(count)) for job, count in data["tasks"]), settings

    return _decoded(record, decode)


def decode_generation(record: Record) -> Generation:
    """Decode the fixed facts of a cluster's generation."""

    def decode(value: bytes) -> Generation:
        data = json.loads(value)
        policy, interval, lease, stuck_after = data["settings"]
        return Generation(
            int(data["incarnation"]),
            base64.b64decode(data["secret"], validate=True),
            tuple(Job(str(name), tuple(map(str, addresses))) for name, addresses in data["jobs"]),
            ClusterSettings(RestartPolicy(policy), float(interval), float(lease), float(stuck_after)),
            str(data.get("owner", "")),
        )

    return _decoded(record, decode)


def decode_member(record: Record) -> MemberRecord:
    """Decode the holder of a task slot; its times are 0."""

    def decode(value: bytes) -> MemberRecord:
        data = json.loads(value)
        return MemberRecord(
            _read_member(data),
            str(data["request_id"]),
            int(data["epoch"]),
            tuple(map(int, data["former"])),
            bytes.fromhex(data.get("proof", "")),
        )

    return _decoded(record, decode)


def decode_barrier(record: Record) -> FinishedBarrier:
    """Decode the result of an instance of a barrier."""

    def decode(value: bytes) -> FinishedBarrier:
        data = json.loads(value)
        participants, error, present = data.get("participants"), data.get("error"), data.get("present")
        return FinishedBarrier(
            int(data["number"]),
            None
            if participants is None
            else frozenset(
                Task(job, index)
                for job, spans in participants.items()
                for low, high in spans
                for index in range(low, high + 1)
            ),
            None
            if error is None
            else CoreError(
                ErrorKind(error["kind"]),
                str(error["message"]),
                tuple(_read_member(member) for member in error["members"]),
                int(data["epoch"]),
            ),
            int(data["epoch"]),
            None
            if present is None
            else tuple(Participant(Task(job, index), incarnation) for job, index, incarnation in present),
        )

    return _decoded(record, decode)


def decode_reply(record: Record) -> tuple[Task | None, int, Remembered]:
    """Decode a remembered answer: whose task, if any, which incarnation's, and the answer."""

    def decode(value: bytes) -> tuple[Task | None, int, Remembered]:
        job, index, place = record.key.split("/")
        incarnation, sequence, call_size, id_size = _REPLY_HEAD.unpack_from(value)
        words = value[_REPLY_HEAD.size :]
        call, rest = words[:call_size].decode(), words[call_size:]
        request_id, rest = rest[:id_size].decode(), rest[id_size:]
        (answer,) = _decode_answers(rest)
        if isinstance(answer, KvRead):
            raise ValueError("it is no answer to a change")
        task = Task(job, int(index)) if job else None
        return task, incarnation, Remembered(max(0, int(place)), sequence, request_id, call, answer)

    return _decoded(record, decode)


def _decode_answers(value: bytes) -> Iterator[RememberedAnswer | KvRead]:
    while value:
        kind, number, revision, size = _ANSWER_HEAD.unpack_from(value)
        body, value = value[_ANSWER_HEAD.size :][:size], value[_ANSWER_HEAD.size + size :]
        if kind >= len(_ANSWERS) or len(body) < size:
            raise ValueError("it is cut short, or an unknown answer")
        match _ANSWERS[kind].__name__:
            case "KvRevision":
                yield KvRevision(revision)
            case "KvDeleted":
                yield KvDeleted(number, revision)
            case "KvIncremented":
                yield KvIncremented(number, revision)
            case "KvTransacted":
                results = tuple(_decode_answers(body))
                if any(isinstance(result, Done | KvTransacted) for result in results):
                    raise ValueError("it has results that no operation has")
                yield KvTransacted(bool(number), cast("tuple[KvResult, ...]", results), revision)
            case "KvRead":
                yield KvRead(tuple(event.kv for event in _decode_events(body)), revision)
            case _:
                yield Done()


def decode_key(record: Record) -> KeyValue:
    """Decode a key with its value and revisions."""

    def decode(value: bytes) -> KeyValue:
        created, modified = _KEY_HEAD.unpack_from(value)
        return KeyValue(record.key, value[_KEY_HEAD.size :], created, modified)

    return _decoded(record, decode)


def decode_change(record: Record) -> tuple[int, tuple[KeyEvent, ...]]:
    """Decode a revision and its changes."""

    def decode(value: bytes) -> tuple[int, tuple[KeyEvent, ...]]:
        if value == NO_EVENTS:
            return int(record.key), ()
        events = tuple(_decode_events(value))
        if not events:
            raise ValueError("it is empty")
        return int(record.key), events

    return _decoded(record, decode)


def _decode_events(value: bytes) -> Iterator[KeyEvent]:
    at = 0
    while at < len(value):
        deleted, key_size, value_size, created, modified = _EVENT_HEAD.unpack_from(value, at)
        at += _EVENT_HEAD.size
        if at + key_size + value_size > len(value):
            raise ValueError("it is cut short")
        key = value[at : at + key_size].decode()
        content = value[at + key_size : at + key_size + value_size]
        at += key_size + value_size
        yield KeyEvent(KeyValue(key, content, created, modified), bool(deleted))


def _decoded(record: Record, decode: Callable[[bytes], T]) -> T:
    try:
        assert record.value is not None, "it has no value"
        return decode(record.value)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, AssertionError) as error:
        raise RecordError(
            f"the {record.kind} record {record.key!r} of cluster {record.cluster!r} cannot be read "
            f"({type(error).__name__}: {error}); the store is damaged, or written by another version of dmesh"
        ) from error


def _dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _member(member: Member) -> dict[str, Any]:
    process = member.process
    data: dict[str, Any] = {
        "job": member.task.job,
        "index": member.task.index,
        "incarnation": member.incarnation,
        "state": member.state.value,
        "process": [
            process.host,
            process.pid,
            process.boot_id,
            process.program,
            process.dmesh_version,
            process.python_version,
            process.started_at_unix_ms,
        ],
        "devices": [[device.type, device.index, device.description] for device in member.devices],
        "peer_addresses": list(member.peer_addresses),
        "reason": member.reason,
    }
    if member.liveness is not Liveness.LIVE:
        data["liveness"] = member.liveness.value
    if member.activity is not None:
        data["activity"] = [member.activity.operation, member.activity.age, list(member.activity.stack)]
    if member.cause is not DepartureCause.NONE:
        data["cause"] = [member.cause.value, member.code]
    return data


def _read_member(data: Any) -> Member:
    activity, (cause, code) = data.get("activity"), data.get("cause", (0, 0))
    return Member(
        Task(str(data["job"]), int(data["index"])),
        int(data["incarnation"]),
        MemberState(data["state"]),
        Process(*data["process"]),
        tuple(Device(*device) for device in data["devices"]),
        tuple(map(str, data["peer_addresses"])),
        0.0,
        0.0,
        str(data["reason"]),
        Liveness(data.get("liveness", Liveness.LIVE.value)),
        None if activity is None else Activity(str(activity[0]), float(activity[1]), tuple(activity[2])),
        DepartureCause(cause),
        int(code),
    )
