"""Worker: runs the functions that a `ClusterCoordinator` schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from dmesh.collectives.object_encoding import decode, encode
from dmesh.collectives.objects import Serializer
from dmesh.coordination.activity import TRACKER
from dmesh.coordination.agent import Agent
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.members import MemberState
from dmesh.coordination.watches import KeyEvent, Watch
from dmesh.distribute.coordinator.channel import PREFIX
from dmesh.distribute.coordinator.messages import Encoding, encode_error
from dmesh.errors import CoordinationError, LimitExceededError, PeerLostError, StrategyError

__all__ = ["experimental_get_current_worker_index", "run_worker"]

_index: ContextVar[int | None] = ContextVar("dmesh_worker_index", default=None)


def experimental_get_current_worker_index() -> int:
    """Return the index of this worker among all workers, within a scheduled function or a `dataset_fn`.

    Raises:
        StrategyError: The caller is in no such function.
    """
    index = _index.get()
    if index is None:
        raise StrategyError(
            "there is no current worker: experimental_get_current_worker_index() is for functions that a "
            "ClusterCoordinator runs on a worker"
        )
    return index


def run_worker(*, modules: Iterable[str] = (), serializer: Serializer | None = None) -> None:
    """Run the functions that the coordinator schedules, until it is closed or its client leaves.

    It runs functions of this program (`__main__`), by name, and of the modules that are named here: a
    coordinator can have nothing else run, such as `os.system`. With a serializer, that decides.

    Args:
        modules: Names of modules, and of packages with all of their modules, whose functions may be run.
        serializer: Encoding of functions, arguments and results; the coordinator's.

    Raises:
        NotInitializedError: `dmesh.initialize_accelerator_system` has not been called.
        PeerLostError: The coordinator's client is lost. Under the restart policy `rejoin`, the worker waits
            for the process that replaces it, and goes on.
    """
    agent = current_agent()
    own = f"{agent.identity.task.index}/{agent.identity.incarnation:016x}/"
    functions = _Functions(Encoding(serializer, modules))
    with agent.watch(f"{PREFIX}to/{own}") as watch:
        agent.key_value_set(f"{PREFIX}from/{own}ready", b"1", allow_overwrite=True, ephemeral=True)
        try:
            if not _has_come_and_gone(agent):
                _serve(agent, watch, f"{PREFIX}from/{own}result", functions)
        finally:
            with contextlib.suppress(CoordinationError):  # it is gone with this process in any case
                agent.key_value_delete(f"{PREFIX}from/{own}", is_prefix=True)
                agent.key_value_delete(f"{PREFIX}to/{own}", is_prefix=True)


_served: WeakKeyDictionary[Agent, int] = WeakKeyDictionary()
"""Number of the latest coordinator that ended while this process was a worker."""


def _has_come_and_gone(agent: Agent) -> bool:
    """Return whether this process's coordinator has already ended.

    Raises:
        PeerLostError: It is lost, and no process replaces it.
    """
    state = agent.key_value_list(f"{PREFIX}state/")
    made = int(state.get(f"{PREFIX}state/made", b"0"))
    if f"{PREFIX}state/host" in state or made <= _served.get(agent, 0):
        return False
    closed = int(state.get(f"{PREFIX}state/closed", b"0")) == made
    if closed or _has_left(agent, int(state.get(f"{PREFIX}state/client", b"0"))):
        _served[agent] = made
        return True
    return False


def _serve(agent: Agent, watch: Watch, result_key: str, functions: _Functions) -> None:
    """Run functions until the coordinator ends."""
    host: int | None = None
    announcer = agent.announcer()
    while True:
        with TRACKER.during("waiting for a function to run"):
            event = watch.poll(announcer.left)
        if event is None:
            # One that is lost may not have greeted this worker, and says nothing any more.
            if watch.closed or (host is None and (_has_come_and_gone(agent) or _alone(agent))):
                return
            if host is not None:
                announcer = agent.announcer()
            elif announcer.due:
                announcer.say("still waiting for a client that makes a ClusterCoordinator")
            continue
        what = event.key.rpartition("/")[2]
        if what == "end":
            if event.value is not None:  # its first message, if it was closed when the worker came
                _served[agent] = int(event.value)
            return
        if what == "host" and event.value is not None:
            host, _served[agent] = map(int, event.value.split())
        elif what == "host" and host is not None:
            if _has_left(agent, host):
                return
            host = None
            functions.forget()
        elif what == "call" and event.value is not None:
            _answer(agent, result_key, functions.run(event))


def _alone(agent: Agent) -> bool:
    """Return whether no other client is left to become the coordinator."""
    state = agent.cluster_state()
    mine = agent.identity.task.index
    return not (
        agent.cluster_settings.rejoin
        or state.vacant
        or any(member.index != mine and not member.state.departed for member in state.members)
    )


def _has_left(agent: Agent, host: int) -> bool:
    """Return whether the coordinator's client has left; False to wait for a replacement.

    Raises:
        PeerLostError: It is lost, and no process replaces it.
    """
    member = agent.member(host)
    if member.state is MemberState.LEFT:
        return True
    if agent.cluster_settings.rejoin:
        return False
    if not member.state.departed:  # it has closed the coordinator
        return True
    raise PeerLostError(f"lost the coordinator, client {host}: {member.reason}", host)


def _answer(agent: Agent, key: str, reply: Mapping[str, Any]) -> None:
    try:
        agent.key_value_set(key, encode(reply), allow_overwrite=True, ephemeral=True)
    except LimitExceededError as error:
        reply = {"number": reply["number"], "error": encode_error(error)}
        agent.key_value_set(key, encode(reply), allow_overwrite=True, ephemeral=True)


class _Functions:
    """Functions of the coordinator, and the iterators that they use.

    Args:
        encoding: Makes functions and values of bytes.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._iterators: dict[str, Iterator[Any]] = {}

    def forget(self) -> None:
        """Drop the functions and iterators of a departed coordinator."""
        self._iterators.clear()

    def run(self, event: KeyEvent) -> dict[str, Any]:
        """Run a function; return the reply: its result, or a description of its error."""
        assert event.value is not None
        call = decode(event.value)
        token = _index.set(call["index"])
        try:
            with TRACKER.during(f"running {call['what']} for the coordinator"):
                fn, args, kwargs = self._encoding.decode_call(call["payload"])
                for where, name, payload in call["resources"]:
                    if isinstance(where, int):
                        args[where] = self._iterator(name, payload)
                    else:
                        kwargs[where] = self._iterator(name, payload)
                value = self._encoding.encode_value(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- raised again by the coordinator
            return {"number": call["number"], "error": encode_error(error)}
        finally:
            _index.reset(token)
        return {"number": call["number"], "value": value}

    def _iterator(self, name: str, payload: bytes) -> Iterator[Any]:
        if name not in self._iterators:
            fn, args, kwargs = self._encoding.decode_call(payload)
            self._iterators[name] = iter(fn(*args, **kwargs))
        return self._iterators[name]
