"""Locks, semaphores, elections and counters, made of ephemeral keys, transactions and watches.

All but the counter are queues: to wait is to set an ephemeral key, and the keys with the lowest creation
revisions hold. When a holder leaves, fails or is lost, or its lease ends, the server deletes its key and the
next one holds. The creation revision of the holder's key is its *fencing token*: tokens only grow.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from dmesh.coordination.activity import TRACKER
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.barriers import RESERVED_PREFIX
from dmesh.coordination.calls import Announcer
from dmesh.coordination.leases import Lease
from dmesh.coordination.transactions import Condition
from dmesh.coordination.values import Snapshot, Value, check_timeout, decode_value, encode_value
from dmesh.coordination.waiting import Worker
from dmesh.coordination.watches import Watch
from dmesh.errors import (
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    LockLostError,
    LockTimeoutError,
    WatchCompactedError,
)

if TYPE_CHECKING:
    from dmesh.coordination.agent import Agent

__all__ = ["Counter", "Election", "Leader", "Lock", "Semaphore"]

_Self = TypeVar("_Self", bound="_Held")
_MAX_NAME = 256
_AGAIN = 1.0
"""Seconds before the coordinator is asked again to delete a key that others wait for."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key in a queue."""

    key: str
    """The key."""
    token: int
    """Its creation revision."""
    value: bytes
    """Description by the process that has set it."""


class Queue:
    """Processes that wait for one of a number of places. For one thread at a time.

    Args:
        prefix: Begins the keys of those who hold or wait.
        places: How many may hold at a time.
        title: Names it in messages: "lock 'checkpoint'".
        lease: The lease of its keys; None for this process's membership.
        agent: This process's agent; None for the one of `dmesh.coordination`.
    """

    def __init__(
        self, prefix: str, places: int, title: str, lease: Lease | None, agent: Agent | None
    ) -> None:
        self._prefix = prefix
        self._places = places
        self._title = title
        self._lease = lease
        self._agent = agent
        self.entry: Entry | None = None
        """This process's key while it holds a place."""

    @property
    def agent(self) -> Agent:
        """This process's agent."""
        return self._agent or current_agent()

    def enter(self, value: bytes, timeout: float | None) -> Entry:
        """Wait for a place.

        Args:
            value: What is said of this process.
            timeout: Seconds; 0 not to wait, None for no limit.

        Raises:
            LockTimeoutError: Time ran out.
            LockLostError: The lease ended while this process waited.
        """
        if self.entry is not None:
            raise ConfigurationError(f"this process holds {self._title} already: release it first")
        check_timeout(timeout)
        key = f"{self._prefix}{secrets.token_hex(8)}"
        try:
            with TRACKER.during(f"waiting for {self._title}"):
                self.entry = self._wait(key, value, timeout)
        except BaseException:
            self._withdraw(key)
            raise
        return self.entry

    def leave(self) -> None:
        """Give the place up.

        Raises:
            LockLostError: This process had lost it.
        """
        entry, self.entry = self.entry, None
        if entry is None:
            raise ConfigurationError(f"this process does not hold {self._title}")
        try:
            deleted = self.agent.key_value_delete(entry.key)
        except CoordinationError:
            self._withdraw(entry.key)
            raise
        if not deleted:
            raise self._lost(entry.key)

    def entries(self) -> list[Entry]:
        """Return the keys of all who hold or wait, those of the holders first."""
        return self._sorted(self.agent.key_value_list(self._prefix))

    def _withdraw(self, key: str) -> None:
        """Delete a key that may have been set; in the background if the coordinator is away.

        As long as this process is a member, the others would wait for a key that it has forgotten.
        """
        agent = self.agent

        def delete() -> bool:
            try:
                agent.key_value_delete(key)
            except CoordinatorUnavailableError:
                return False
            except CoordinationError:  # not a member any more: the key ends with the membership
                return True
            return True

        def delete_later() -> None:
            while not delete():
                time.sleep(_AGAIN)

        if not delete():
            Worker(delete_later, "dmesh-lock").start()

    def leaders(self) -> Iterator[Leader | None]:
        """Yield the first in the queue now and after every change; None while there is none."""
        last: Leader | None = None
        started = False
        while True:
            listed = self.agent.key_value_list(self._prefix)
            with (
                contextlib.suppress(WatchCompactedError),
                self.agent.watch(self._prefix, listed.revision + 1) as watch,
            ):
                entries = {entry.key: entry for entry in self._sorted(listed)}
                while True:
                    first = min(entries.values(), key=lambda entry: entry.token, default=None)
                    leader = None if first is None else Leader(first.value, first.token)
                    if leader != last or not started:
                        last, started = leader, True
                        yield leader
                    event = next(watch, None)
                    if event is None:
                        return
                    if event.value is None:
                        entries.pop(event.key, None)
                    else:
                        entries[event.key] = Entry(event.key, event.create_revision, event.value)

    def _sorted(self, listed: Snapshot) -> list[Entry]:
        created = listed.create_revisions
        return sorted(
            (Entry(key, created[key], value) for key, value in listed.items()), key=lambda entry: entry.token
        )

    def _wait(self, key: str, value: bytes, timeout: float | None) -> Entry:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        agent = self.agent
        lease = self._lease.number if self._lease else 0
        agent.key_value_set(key, value, lease=lease, ephemeral=not lease)
        announcer = agent.announcer()
        while True:
            listed = agent.key_value_list(self._prefix)
            entries = self._sorted(listed)
            place = next((place for place, entry in enumerate(entries) if entry.key == key), None)
            if place is None:
                raise self._lost(key)
            before = {entry.key: entry for entry in entries[:place]}
            if place >= self._places and timeout != 0:
                with (
                    contextlib.suppress(WatchCompactedError),
                    agent.watch(self._prefix, listed.revision + 1) as watch,
                ):
                    self._follow(watch, key, before, deadline, announcer)
            if len(before) < self._places:
                return entries[place]
            if time.monotonic() >= deadline:
                raise LockTimeoutError(
                    f"{self._title} did not become free within {timeout:g} s; {self._holders(before)}"
                )

    def _follow(
        self, watch: Watch, key: str, before: dict[str, Entry], deadline: float, announcer: Announcer
    ) -> None:
        """Follows the queue until this process has a place, or time is up."""
        while len(before) >= self._places:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            event = watch.poll(min(left, announcer.left))
            if event is not None and event.deleted:
                if event.key == key:
                    raise self._lost(key)
                before.pop(event.key, None)
            if announcer.due:
                announcer.say(f"still waiting for {self._title}; {self._holders(before)}")

    def _holders(self, before: Mapping[str, Entry]) -> str:
        holders = list(before.values())[: self._places]
        ahead = len(before) - len(holders)
        text = f"held by {', '.join(describe(holder.value) for holder in holders)}"
        return f"{text}, and {ahead} wait before this process" if ahead else text

    def _lost(self, key: str) -> LockLostError:
        return LockLostError(
            f"this process has lost its place at {self._title}: the lease of its key {key!r} has ended, or "
            "the key was deleted. Others may hold it since: do not go on with what it protects."
        )


def describe(value: bytes) -> str:
    """Name the process that has set a key of a queue, for people."""
    return value.decode(errors="replace")[:200]


class _Held:
    """Something that this process may hold. For one thread at a time.

    Args:
        kind: What it is: "lock".
        name: Its name, 1-256 characters, the same in all processes.
        places: How many may hold it at a time.
        lease: The lease of this process's key; None for its membership of the cluster.
        agent: This process's agent; None for the one of `dmesh.coordination`.
    """

    def __init__(self, kind: str, name: str, places: int, lease: Lease | None, agent: Agent | None) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise ConfigurationError(
                f"the name of a {kind} is a string of 1 to {_MAX_NAME} characters, not {name!r}"
            )
        self._name = name
        self._title = f"{kind} {name!r}"
        self._queue = Queue(queue_prefix(kind, name), places, self._title, lease, agent)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def held(self) -> bool:
        """True while this process holds it."""
        return self._queue.entry is not None

    @property
    def token(self) -> int:
        """Fencing token: positive, and larger than those of all earlier holders.

        Raises:
            ConfigurationError: This process does not hold it.
        """
        return self._entry().token

    @property
    def condition(self) -> Condition:
        """Condition that this process still holds it, for `coordination.transaction`.

        Raises:
            ConfigurationError: This process does not hold it.
        """
        entry = self._entry()
        return Condition.create_revision(entry.key, "==", entry.token)

    def release(self) -> None:
        """Give it up, so that the next one holds it.

        Raises:
            LockLostError: This process had lost it: its lease had ended.
            ConfigurationError: This process does not hold it.
        """
        self._queue.leave()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.release()
            return
        with contextlib.suppress(CoordinationError):  # the error of the body says more
            self.release()

    def _entry(self) -> Entry:
        entry = self._queue.entry
        if entry is None:
            raise ConfigurationError(f"this process does not hold {self._title}")
        return entry


class Semaphore(_Held):
    """Places that a limited number of processes may hold at a time, in the order in which they asked.

    ```python
    from dmesh import coordination

    with coordination.Semaphore("downloads", places=4):
        ...  # at most four processes of the cluster are here
    ```

    Its place is an ephemeral key: when the process leaves, fails or is lost, the next one gets it. For one
    thread at a time; give each thread an object of its own.

    Args:
        name: Its name, 1-256 characters.
        places: How many may hold it at a time, the same in all processes.
        lease: Lease at whose end the place is given up; None for the process's membership of the cluster.
        agent: This process's agent; None for that of `dmesh.coordination`.
    """

    def __init__(
        self, name: str, places: int, *, lease: Lease | None = None, agent: Agent | None = None
    ) -> None:
        if isinstance(places, bool) or not isinstance(places, int) or places < 1:
            raise ConfigurationError(f"a semaphore has a positive number of places, not {places!r}")
        super().__init__("semaphore", name, places, lease, agent)

    def acquire(self, timeout: float | None = None) -> int:
        """Wait for a place, first come, first served; return its fencing token.

        Args:
            timeout: Seconds to wait; 0 not to wait, None for no limit.

        Raises:
            LockTimeoutError: No place became free in time; the message names the holders.
            LockLostError: The lease ended while this process waited.
            CoordinatorUnavailableError: The coordinator has been silent for too long.
        """
        return self._queue.enter(_who(self._queue.agent), timeout).token

    def __enter__(self: _Self) -> _Self:
        self._queue.enter(_who(self._queue.agent), None)
        return self


class Lock(Semaphore):
    """Lock that one process of the cluster holds at a time, in the order in which they asked.

    ```python
    from dmesh import coordination

    with coordination.Lock("checkpoint") as lock:
        coordination.transaction([lock.condition], [coordination.Put("checkpoint/owner", str(lock.token))])
    ```

    A holder that leaves, fails or is lost gives it up: another one may hold it before the old one knows. So
    what the lock protects should be guarded by its fencing token: in the key-value store by `condition`,
    elsewhere by refusing any `token` lower than the highest seen.

    Args:
        name: Its name, 1-256 characters.
        lease: Lease at whose end the lock is given up; None for the process's membership of the cluster.
        agent: This process's agent; None for that of `dmesh.coordination`.
    """

    def __init__(self, name: str, *, lease: Lease | None = None, agent: Agent | None = None) -> None:
        _Held.__init__(self, "lock", name, 1, lease, agent)


@dataclass(frozen=True, slots=True)
class Leader:
    """Leader of an election."""

    value: bytes
    """The value with which it was elected."""
    token: int
    """Its fencing token: larger than those of all earlier leaders."""

    def text(self, encoding: str = "utf-8") -> str:
        """Return the value as text."""
        return decode_value(self.value, "leader", encoding)


class Election(_Held):
    """Election of one process of the cluster: the first candidate leads until it resigns or is gone.

    ```python
    from dmesh import coordination

    election = coordination.Election("chief")
    election.campaign("node7:4000")
    election.leader().text()  # -> 'node7:4000'
    election.resign()
    ```

    Args:
        name: Its name, 1-256 characters.
        lease: Lease at whose end leadership is given up; None for the process's membership of the cluster.
        agent: This process's agent; None for that of `dmesh.coordination`.
    """

    def __init__(self, name: str, *, lease: Lease | None = None, agent: Agent | None = None) -> None:
        super().__init__("election", name, 1, lease, agent)

    def campaign(self, value: Value = b"", timeout: float | None = None) -> int:
        """Wait until this process leads; return its fencing token.

        Args:
            value: What the others are told of the leader, for example its address; str stands for UTF-8.
            timeout: Seconds to wait; 0 not to wait, None for no limit.

        Raises:
            LockTimeoutError: Another process led all the time.
            LockLostError: The lease ended while this process waited.
            CoordinatorUnavailableError: The coordinator has been silent for too long.
        """
        return self._queue.enter(encode_value(value, self._name), timeout).token

    def resign(self) -> None:
        """Give leadership up, so that the next candidate leads.

        Raises:
            LockLostError: This process had lost it: its lease had ended.
            ConfigurationError: This process does not lead.
        """
        self.release()

    def leader(self) -> Leader | None:
        """Return the leader; None if there is none."""
        entries = self._queue.entries()
        return Leader(entries[0].value, entries[0].token) if entries else None

    def observe(self) -> Iterator[Leader | None]:
        """Yield the leader, None if there is none, now and after every change. Ends with the process."""
        return self._queue.leaders()


class Counter:
    """Integer of 64 bits that all processes of the cluster count up and down.

    ```python
    from dmesh import coordination

    examples = coordination.Counter("examples")
    examples.add(32)  # -> 32
    examples.value()  # -> 32
    ```

    Args:
        name: Its name, 1-256 characters, the same in all processes.
        agent: This process's agent; None for that of `dmesh.coordination`.
    """

    def __init__(self, name: str, *, agent: Agent | None = None) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise ConfigurationError(
                f"a counter's name is a string of 1 to {_MAX_NAME} characters, not {name!r}"
            )
        self._key = queue_prefix("counter", name)[:-1]
        self._agent = agent

    def add(self, amount: int = 1) -> int:
        """Add to it, exactly once; return the sum. The first sum counts from 0.

        Raises:
            KeyTypeError: The sum does not fit 64 bits.
        """
        return (self._agent or current_agent()).key_value_increment(self._key, amount)

    def value(self) -> int:
        """Return its value; 0 if nothing was added yet."""
        return int((self._agent or current_agent()).key_value_try_get(self._key) or b"0")


def queue_prefix(kind: str, name: str) -> str:
    """Return what the keys of a lock, semaphore or election begin with; none of another name does."""
    return f"{RESERVED_PREFIX}{kind}/{quote(name, safe='')}/"


def _who(agent: Agent) -> bytes:
    process = agent.identity.process
    return f"{agent.identity.task} (host {process.host}, pid {process.pid})".encode()
