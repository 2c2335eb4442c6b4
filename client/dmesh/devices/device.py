"""Devices: their names, and which of them this client and the others have.

A device is a place that holds one part of an array: CPU device 0 to K-1 of a client are logical, they share
its processor and memory. GPUs are reported where there are any; dmesh computes with NumPy on the host.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from dmesh.config import client as config
from dmesh.config.settings import JOB_NAME_PATTERN, Settings, read_num_cpu_devices
from dmesh.devices.detection import detect_gpus
from dmesh.errors import DeviceError
from dmesh.runtime import context
from dmesh.tpu.accelerator import TpuSystem

if TYPE_CHECKING:
    from dmesh.coordination.members import Member

__all__ = [
    "DEVICE_TYPES",
    "detect_gpus",
    "device_name",
    "DeviceSpec",
    "known_members",
    "local_devices",
    "LogicalDevices",
    "num_devices_of_client",
    "num_global_devices",
    "num_local_devices",
    "preferred_device_type",
    "this_client",
    "ThisClient",
]

DEVICE_TYPES = ("CPU", "GPU", "TPU")
"""The types of device that there are, in upper case."""

_SHORT_FORMS = {*DEVICE_TYPES, "CUSTOM", "EPU"}
"""Types that may stand without `device:` in front, as in `CPU:0`."""
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
_INDEX = re.compile(r"[0-9]{1,9}", re.ASCII)
_FULL_JOB_NAME = re.compile(r"([^/]+)/replica:([0-9]{1,9})/task:([0-9]{1,9})", re.ASCII)


class _Fields(TypedDict, total=False):
    job: str | None
    replica: int | None
    task: int | None
    device_type: str | None
    device_index: int | None


@dataclass(frozen=True, slots=True, repr=False)
class DeviceSpec:
    """A device's name in its parts, as in `/job:worker/replica:0/task:1/device:CPU:0`; each may be left out.

    Specs are values: immutable, equal if all parts are, and usable as keys.

    Raises:
        DeviceError: A part cannot be in a device name.
    """

    job: str | None = None
    """Name of the job. One such as `worker/replica:0/task:1`, what `full_job_name()` returns, is taken
    apart; a number becomes text."""
    replica: int | None = None
    """Replica within the job; always 0 in practice."""
    task: int | None = None
    """The client's id."""
    device_type: str | None = None
    """CPU, GPU, TPU or another type, kept in upper case."""
    device_index: int | None = None
    """Index among the client's devices of this type; None stands for any of them and is written `*`."""

    def __post_init__(self) -> None:
        job: object = self.job
        if isinstance(job, int) and not isinstance(job, bool):
            object.__setattr__(self, "job", str(job))
        elif isinstance(job, str) and "/" in job and (match := _FULL_JOB_NAME.fullmatch(job)):
            self._split_job(*match.groups())
        if self.job is not None and not (isinstance(self.job, str) and JOB_NAME_PATTERN.fullmatch(self.job)):
            raise DeviceError(
                f"{self.job!r:.200} is not a job name: expected 1 to 128 letters, digits, dots, dashes or "
                "underscores"
            )
        for name in ("replica", "task", "device_index"):
            object.__setattr__(self, name, _index_or_none(name, getattr(self, name)))
        if self.device_type is not None:
            if not (isinstance(self.device_type, str) and _TYPE.fullmatch(self.device_type)):
                raise DeviceError(f"{self.device_type!r:.200} is not a device type: expected CPU, GPU or TPU")
            object.__setattr__(self, "device_type", self.device_type.upper())

    def _split_job(self, job: str, replica: str, task: str) -> None:
        """Distributes the parts of `worker/replica:0/task:1`."""
        for name, said in (("replica", int(replica)), ("task", int(task))):
            given = getattr(self, name)
            if given not in (None, said):
                raise DeviceError(
                    f"job is {self.job!r:.200}, but {name} is {given!r:.200}; pass only one of them"
                )
            object.__setattr__(self, name, said)
        object.__setattr__(self, "job", job)

    @classmethod
    def from_string(cls, spec: str) -> DeviceSpec:
        """Reads a name such as `/job:worker/replica:0/task:1/device:CPU:0`, or a part of it, such as `CPU:0`.

        Raises:
            DeviceError: It is not such a name.
        """
        if not isinstance(spec, str):
            raise DeviceError(f"a device name must be a str, got {type(spec).__name__}")
        fields: _Fields = {}
        for part in spec.split("/"):
            if not part:
                continue
            found = _parse_part(part, spec)
            if fields.keys() & found.keys():
                raise DeviceError(
                    f"the device name {spec!r:.200} has more than one {next(iter(found))}; keep one"
                )
            fields.update(found)
        return cls(**fields)

    def parse_from_string(self, spec: str) -> DeviceSpec:
        """Returns the spec that `spec` names; this one has no part in it."""
        return DeviceSpec.from_string(spec)

    def to_string(self) -> str:
        """Returns the name, with the parts that are known."""
        text = "" if self.job is None else f"/job:{self.job}"
        if self.replica is not None:
            text += f"/replica:{self.replica}"
        if self.task is not None:
            text += f"/task:{self.task}"
        if self.device_type is not None:
            text += f"/device:{self.device_type}:{'*' if self.device_index is None else self.device_index}"
        return text

    def make_merged_spec(self, dev: DeviceSpec) -> DeviceSpec:
        """Returns this spec with the parts that `dev` has in place of its own."""
        return DeviceSpec(
            job=self.job if dev.job is None else dev.job,
            replica=self.replica if dev.replica is None else dev.replica,
            task=self.task if dev.task is None else dev.task,
            device_type=self.device_type if dev.device_type is None else dev.device_type,
            device_index=self.device_index if dev.device_index is None else dev.device_index,
        )

    def replace(self, **parts: Unpack[_Fields]) -> DeviceSpec:
        """Returns this spec with some parts replaced, by the names of the fields; None takes a part away.

        Raises:
            DeviceError: There is no such part, or it cannot have such a value.
        """
        unknown = parts.keys() - {field.name for field in dataclasses.fields(self)}
        if unknown:
            raise DeviceError(
                f"a device name has no part {', '.join(sorted(unknown))}; its parts are job, replica, task, "
                "device_type and device_index"
            )
        return dataclasses.replace(self, **parts)

    def __str__(self) -> str:
        return self.to_string()

    def __repr__(self) -> str:
        return f"DeviceSpec.from_string({self.to_string()!r})"


def _index_or_none(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        index = operator.index(value)  # type: ignore[arg-type]  # whether it is an index is the question
    except TypeError:
        index = -1
    if isinstance(value, bool) or index < 0:
        raise DeviceError(f"{name} is {value!r:.200}; expected an integer from 0 up")
    return index


def _parse_part(part: str, spec: str) -> _Fields:
    pieces = part.split(":")
    match pieces:
        case ["job", job]:
            return {"job": job}
        case ["replica", number]:
            return {"replica": _parse_index(number, spec)}
        case ["task", number]:
            return {"task": _parse_index(number, spec)}
        case ["device", kind, number]:
            pass
        case [kind, number] if kind.upper() in _SHORT_FORMS:
            pass
        case [kind] if kind.upper() in _SHORT_FORMS:
            number = "*"
        case _:
            raise DeviceError(
                f"cannot read {part!r:.200} in the device name {spec!r:.200}; expected "
                "/job:NAME/replica:0/task:N/device:CPU:N or a part of it, such as CPU:0"
            )
    return {"device_type": kind, "device_index": None if number == "*" else _parse_index(number, spec)}


def _parse_index(text: str, spec: str) -> int:
    if not _INDEX.fullmatch(text):
        raise DeviceError(
            f"{text!r:.200} in the device name {spec!r:.200} is not a number from 0 to 999999999"
        )
    return int(text)


@dataclass(frozen=True)
class LogicalDevices:
    """Logical devices of this client."""

    type: str
    """Type of device that the program asked for: CPU, GPU or TPU."""
    counts: Mapping[str, int]
    """Number of devices of each type."""


class ThisClient(NamedTuple):
    """This process among the clients."""

    job: str
    """The job name that all clients share."""
    client_id: int
    """Its id."""
    num_clients: int
    """Number of clients."""


def this_client() -> ThisClient:
    """Return this process's place: as initialized, or else as the environment says now."""
    state = context.current_or_none()
    if state is not None:
        settings = state.get(Settings)
        return ThisClient(settings.job_name, settings.client_id, settings.num_clients)
    return ThisClient(config.job_name(), config.client_id(), config.num_clients())


# Who has which devices --------------------------------------------------------------------------------------


def local_devices(device_type: str, for_client_id: int | None = None) -> list[DeviceSpec]:
    """Returns the devices of one client, by index.

    Args:
        device_type: CPU, GPU or TPU, in any case.
        for_client_id: Whose devices; this client's if None. Another client's number of devices is known after
            `initialize_accelerator_system` with the coordination service; otherwise it is taken to be this
            one's.

    Raises:
        DeviceError: There is no such device type.
        ConfigurationError: There is no such client.
    """
    kind = _checked_type(device_type)
    job, client, num_clients = this_client()
    if for_client_id is not None:
        config.check_client_id(for_client_id, num_clients)
        client = for_client_id
    return [DeviceSpec(job, 0, client, kind, index) for index in range(num_devices_of_client(kind, client))]


def num_local_devices(device_type: str) -> int:
    """Returns how many devices of a type this client has.

    Before `initialize_accelerator_system`, its TPU devices are its share of the system that
    `TPU_ACCELERATOR_TYPE` and its like describe.

    Args:
        device_type: CPU, GPU or TPU, in any case.

    Raises:
        DeviceError: There is no such device type.
        ConfigurationError: The TPU system is not well described.
        TopologyError: The clients cannot share it.
    """
    kind = _checked_type(device_type)
    logical = context.find(LogicalDevices)
    if logical is not None:
        return logical.counts.get(kind, 0)
    if kind == "CPU":
        return read_num_cpu_devices(os.environ) or 1
    if kind == "GPU":
        return len(detect_gpus())
    system = TpuSystem.from_environment(context.environment())
    return 0 if system is None else len(system.share(config.client_id(), config.num_clients()))


def num_global_devices(device_type: str) -> int:
    """Returns how many devices of a type all clients have together.

    Without the coordination service, or before `initialize_accelerator_system`, all clients are taken to have
    as many as this one.

    Args:
        device_type: CPU, GPU or TPU, in any case.

    Raises:
        DeviceError: There is no such device type.
    """
    kind = _checked_type(device_type)
    return sum(num_devices_of_client(kind, client) for client in range(this_client().num_clients))


def known_members() -> tuple[Member, ...]:
    """Return all clients with their devices, by rank; empty before initialization and in local mode."""
    if context.current_or_none() is None:
        return ()
    from dmesh.coordination.members import Members  # loaded by now; by itself it would load gRPC

    return context.find(Members) or ()


def num_devices_of_client(device_type: str, client: int) -> int:
    """Returns how many devices of a type a client registered with; if unknown, as many as this client has."""
    for member in known_members():
        if member.rank == client:
            return sum(device.type == device_type for device in member.devices)
    return num_local_devices(device_type)


def preferred_device_type() -> str:
    """Returns the type of accelerator to use if the program does not say: TPU, else GPU, else CPU."""
    return next((kind for kind in ("TPU", "GPU") if num_local_devices(kind) > 0), "CPU")


def device_name() -> str:
    """Returns the name of the `CUSTOM` device that stands for all devices together on this client."""
    job, client, _ = this_client()
    return DeviceSpec(job, 0, client, "CUSTOM", 0).to_string()


def _checked_type(device_type: str) -> str:
    kind = device_type.upper() if isinstance(device_type, str) else ""
    if kind not in DEVICE_TYPES:
        raise DeviceError(
            f"device type {device_type!r:.200} is not known; expected one of {', '.join(DEVICE_TYPES)}"
        )
    return kind
