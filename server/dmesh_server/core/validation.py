"""Refuses malformed events before anything is changed or allocated for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.messages import quote
from dmesh_server.core.model import Caller, Device, Job, Limits, PassedBarrier, Process, Task

DEVICE_TYPES = ("CPU", "GPU", "TPU")
"""The kinds of device that a client may have."""

MAX_REASON = 4_096
"""Characters of a reason or an error message."""

INT32 = range(-(1 << 31), 1 << 31)
"""Range of signed 32-bit integers."""

INT64 = range(-(1 << 63), 1 << 63)
"""Range of a 64-bit integer."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_INT31 = range(1 << 31)
_UINT64 = range(1, 1 << 64)
_MAX_TEXT = 1_024
_MAX_DEVICES = 4_096
_MAX_ADDRESSES = 64


def invalid(message: str, *fields: str) -> CoreError:
    """Return the error for malformed fields."""
    return CoreError(ErrorKind.INVALID_ARGUMENT, message, fields=fields)


def encoded_size(text: str, what: str) -> int:
    """Return the bytes of a text in UTF-8; refuse one that cannot be encoded (it has lone surrogates)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise invalid(f"{what} {quote(text)} is not valid Unicode") from None


def short_text(text: str, what: str, *, least: int = 0) -> None:
    """Check a text that names something: its length, that it can be encoded, and that no NUL is in it.

    Args:
        text: The text.
        what: Name of the field, for the refusal.
        least: Fewest characters.
    """
    if not least <= len(text) <= _MAX_TEXT:
        raise invalid(f"{what} {quote(text)} must have {least}-{_MAX_TEXT} characters")
    encoded_size(text, what)
    if "\0" in text:
        raise invalid(f"{what} {quote(text)} contains a NUL character")


def operator(by: str) -> None:
    """Check who asks for an operation."""
    if not 1 <= len(by) <= 256 or not by.isprintable():
        raise invalid("an operation must name its operator, in 1-256 printable characters")


def cluster_name(name: str) -> None:
    """Check the name of a cluster."""
    if not _NAME.fullmatch(name):
        raise invalid(f"the cluster name {quote(name)} must be 1-128 characters of A-Z a-z 0-9 _ . -")


def caller_task(caller: Caller) -> Task:
    """Return the caller's task slot; observers are refused."""
    if caller.task is None:
        raise invalid(
            "an observer (a caller without a task) may only read state and change keys; name a task"
        )
    if caller.incarnation not in _UINT64:
        raise invalid(
            f"{caller.task} calls with incarnation {caller.incarnation}; it must be a random number from 1 "
            "to 2^64-1"
        )
    return caller.task


def request_id(text: str) -> None:
    """Check the id that makes a call idempotent."""
    if not 1 <= len(text) <= 64 or not text.isprintable():
        raise invalid(f"the request id {quote(text)} must be 1-64 printable characters, unique per call")


def reason(text: str, *, required: bool) -> None:
    """Check the reason of a leave or failure."""
    if required and not text:
        raise invalid("an error report needs a message that says what happened")
    if len(text) > MAX_REASON:
        raise invalid(f"the message has {len(text)} characters; at most {MAX_REASON} are allowed")
    encoded_size(text, "the message")


def job_sizes(sizes: Sequence[tuple[str, int]], limits: Limits) -> None:
    """Check the names of a cluster's jobs and their numbers of tasks."""
    if not sizes:
        raise invalid("the job list is empty; it must name every job of the cluster with its tasks")
    names = [name for name, _ in sizes]
    for name, tasks in sizes:
        if not _NAME.fullmatch(name):
            raise invalid(f"the job name {quote(name)} must be 1-128 characters of A-Z a-z 0-9 _ . -")
        if tasks < 1:
            raise invalid(f"job {quote(name)} has no tasks", "jobs")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(f"job {quote(twice)} is listed twice")
    count = sum(tasks for _, tasks in sizes)
    if count > limits.max_tasks:
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"the job list has {count} tasks; the server allows {limits.max_tasks} in one cluster",
        )


def jobs(listed: tuple[Job, ...], limits: Limits) -> None:
    """Check the job list of a cluster."""
    job_sizes([(job.name, len(job.addresses)) for job in listed], limits)
    for job in listed:
        for index, address in enumerate(job.addresses):
            short_text(address, f"the address of task {index} of job {quote(job.name)}")


def process(facts: Process) -> None:
    """Check the facts about a process."""
    if facts.pid < 0 or facts.pid not in INT64:
        raise invalid(f"the process id {facts.pid} is not one")
    for field in ("host", "boot_id", "program", "dmesh_version", "python_version", "pid_namespace"):
        short_text(getattr(facts, field), f"the process's {field}")


def devices(listed: tuple[Device, ...]) -> None:
    """Check the devices of a client."""
    if len(listed) > _MAX_DEVICES:
        raise invalid(f"{len(listed)} devices were listed; a client may have {_MAX_DEVICES}")
    seen: set[tuple[str, int]] = set()
    for device in listed:
        if device.type not in DEVICE_TYPES:
            raise invalid(f"the device type {quote(device.type)} must be one of {', '.join(DEVICE_TYPES)}")
        if device.index not in _INT31:
            raise invalid(f"the index {device.index} of a {device.type} must be from 0 to 2^31-1")
        short_text(device.description, f"the description of {device.type}:{device.index}")
        if (device.type, device.index) in seen:
            raise invalid(f"the device {device.type}:{device.index} is listed twice")
        seen.add((device.type, device.index))


def peer_addresses(listed: tuple[str, ...]) -> None:
    """Check where peers reach a client."""
    if len(listed) > _MAX_ADDRESSES:
        raise invalid(f"{len(listed)} peer addresses were given; at most {_MAX_ADDRESSES} are allowed")
    for address in listed:
        short_text(address, "the peer address", least=1)


def passed(listed: tuple[PassedBarrier, ...], caller: Task, limits: Limits) -> None:
    """Check the barriers that a client presents as passed."""
    if len(listed) > limits.max_passed:
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"{caller} presents {len(listed)} barriers that it has passed; the server takes "
            f"{limits.max_passed}: the latest are enough",
        )
    if len({one.name for one in listed}) != len(listed):
        raise invalid(f"{caller} presents several barriers of the same name as passed; the latest is enough")
    for one in listed:
        if (
            one.instance < 0
            or one.epoch not in INT64
            or (one.participants and caller not in one.participants)
        ):
            raise invalid(
                f"{caller} presents barrier {quote(one.name)}, instance {one.instance}, as passed, which it "
                "cannot have been: instances count from 0, and the caller must be one of the participants"
            )


def duration(value: float | None, what: str, *, positive: bool) -> None:
    """Check a time to wait; None is no limit."""
    if value is not None and (not math.isfinite(value) or value < 0 or (positive and value == 0)):
        raise invalid(
            f"{what} ({value}) must be a {'positive' if positive else 'non-negative'} number of seconds"
        )


def key(text: str, limits: Limits, *, prefix: bool = False) -> None:
    """Check a key, or a prefix of keys, which may be empty."""
    what = "prefix" if prefix else "key"
    if not text and not prefix:
        raise invalid("the key is empty")
    if len(text) > limits.max_key_bytes or encoded_size(text, f"the {what}") > limits.max_key_bytes:
        raise invalid(f"the {what} {quote(text)} is longer than {limits.max_key_bytes} bytes of UTF-8")
    if "\0" in text:
        raise invalid(f"the {what} {quote(text)} contains a NUL character")


def value(content: bytes, of: str, limits: Limits) -> None:
    """Check the size of a value."""
    if len(content) > limits.max_value_bytes:
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"the value for key {quote(of)} has {len(content)} bytes; the server allows "
            f"{limits.max_value_bytes}. Keep large data in files or send it with a collective.",
        )


def keys(listed: Iterable[str], count: int, limits: Limits) -> None:
    """Check the keys of one read of many."""
    if count > limits.max_keys_per_read:
        raise CoreError(
            ErrorKind.LIMIT_EXCEEDED,
            f"{count} keys were requested at once; the server allows {limits.max_keys_per_read}. Split "
            "the request.",
        )
    for text in listed:
        key(text, limits)
