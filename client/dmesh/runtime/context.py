"""Process-wide state of the SDK: the parts of the initialized system that the public functions act on.

`system` and `exits` write it (and tests); everything that a script calls without naming a cluster reads it.
This module knows none of the parts: each room asks for its own by class, so any room may import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from dmesh.errors import NotInitializedError

Part = TypeVar("Part")


class Context:
    """The parts of one initialized system, each found by its class.

    ```python
    state = context.current()
    state.get(Communicator).world.barrier()
    ```

    The parts are `config.settings.Settings`, `config.client.FoundVariables`, `devices.device.LogicalDevices`,
    `coordination.members.Members`, `coordination.agent_source.AgentSource`, `tpu.topology.Topology`,
    `collectives.communicator.Communicator`, `runtime.membership.Client` and
    `distribute.cluster_resolver.joined.FoundResolver`.

    Args:
        client_id: This process's client id; 0 in local mode.
        *parts: The parts that there are; None is ignored.
    """

    def __init__(self, client_id: int, *parts: object) -> None:
        self.client_id = client_id
        """This process's client id; 0 in local mode."""
        self.parts: dict[type, object] = {type(part): part for part in parts if part is not None}
        """The parts by class."""

    def find(self, kind: type[Part]) -> Part | None:
        """Return the part of this class, or None."""
        return self.parts.get(kind)  # type: ignore[return-value]

    def get(self, kind: type[Part]) -> Part:
        """Return the part of this class.

        Raises:
            NotInitializedError: The system was initialized without it.
        """
        part = self.find(kind)
        if part is None:
            raise NotInitializedError(f"dmesh was initialized without a {kind.__name__} in this process")
        return part

    def put(self, part: object, kind: type | None = None) -> None:
        """Add a part, in place of the one of its class.

        Args:
            part: The part.
            kind: The class to find it by; its own if None.
        """
        self.parts[kind or type(part)] = part

    def discard(self, kind: type) -> None:
        """Remove the part of this class, if there is one."""
        self.parts.pop(kind, None)


@dataclass
class Process:
    """State of this process, or of a thread that stands for one; see `dmesh.testing.FakeCluster`."""

    context: Context | None
    """The state of the initialized system; None if it is not."""
    environ: Mapping[str, str]
    """Its environment variables, as far as dmesh reads any."""


_real = Process(None, os.environ)
process: ContextVar[Process] = ContextVar("dmesh_process", default=_real)
"""The process that this thread belongs to; collectives that are given no group look up the world here."""
_inherited: Context | None = None
"""The parent's state in a forked child: never used, but kept so that its connections are not torn down."""
_devices_in_use = False


def current() -> Context:
    """Return the state of the initialized system.

    Raises:
        NotInitializedError: There is none.
    """
    state = current_or_none()
    if state is None:
        refuse_forked_child()
        raise NotInitializedError(
            "dmesh is not initialized in this process: put the call into a `with dmesh.session():` block, or "
            "call dmesh.initialize_accelerator_system() first"
        )
    return state


def refuse_forked_child() -> None:
    """Raise NotInitializedError in a child that was forked from an initialized process.

    Threads do not survive a fork and connections cannot be shared: a child's call would wait forever, or
    disturb the parent.
    """
    if _inherited is not None:
        raise NotInitializedError(
            f"this process was forked from client {_inherited.client_id} and cannot use dmesh: the "
            "connections belong to its parent. Do not call dmesh in it, or start it with "
            'multiprocessing.get_context("spawn")'
        )


def disown_after_fork() -> None:
    """Make the state of a forked child unusable. Called in every forked child."""
    global _inherited
    if _real.context is not None:
        _real.context, _inherited = None, _real.context


def current_or_none() -> Context | None:
    """Return the state of the initialized system, or None."""
    return process.get().context


def find(kind: type[Part]) -> Part | None:
    """Return the part of this class; None if there is none, or the system is not initialized."""
    state = current_or_none()
    return None if state is None else state.find(kind)


def fake_process() -> Process | None:
    """Return the fake process that this thread is, or None in the thread of a real one."""
    found = process.get()
    return None if found is _real else found


def environment() -> Mapping[str, str]:
    """Return the environment variables of this process, or of the fake process that this thread is."""
    return process.get().environ


def install(context: Context) -> None:
    """Make `context` the state that the public functions act on."""
    _real.context = context


def clear() -> None:
    """Return to the state before `initialize_accelerator_system`."""
    global _devices_in_use
    _real.context = None
    _devices_in_use = False


def mark_devices_in_use() -> None:
    """Note that a mesh over local devices was made, after which their number must not change."""
    global _devices_in_use
    _devices_in_use = True


def devices_in_use() -> bool:
    """Return whether a mesh was made before the system was initialized."""
    return _devices_in_use
