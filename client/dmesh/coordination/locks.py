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
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from dmesh.coordination.activity import TRACKER
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.leases import Lease
from dmesh.coordination.transactions import Condition, Put
from dmesh.coordination.values import Snapshot, Value, check_timeout, decode_value, encode_value
from dmesh.coordination.waiting import Worker
from dmesh.coordination.watches import Watch
from dmesh.errors import (
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    LockLostError,
    LockTimeoutError,
    StoreLostError,
    StoreUnavailableError,
    WatchCompactedError,
)
from dmesh.protocol import RESERVED_PREFIX

if TYPE_CHECKING:
    from dmesh.coordination.agent import Agent

__all__ = ["Counter", "Election", "Leader", "Lock", "Semaphore"]

_Self = TypeVar("_Self", bound="Semaphore")
_MAX_NAME = 256
_AGAIN = 1.0
"""Seconds before the coordinator is asked again to delete a key that others wait for."""
_LOOK = 0.5
"""Seconds between two looks at whether a lease is over."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key in a queue."""

    key: str
    """The key."""
    token: int
    """Its creation revision."""
    value: bytes
    """Description by the process that has set it."""


class _Held:
    """Place in a queue of processes, for a lock, a semaphore or an election. For one thread at a time.

    Each process that waits watches one key: that of its predecessor, so that a release wakes one process
    however many wait. With several places, a process that has got one sets its key again, which wakes its
    successor; the first one without a place watches all who hold.

    Args:
        kind: What it is: "lock".
        name: Its name, 1-256 characters, the same in all processes.
        places: How many may hold it at a time.
        lease: The lease of this process's key; None for its membership of the cluster.
        agent: This process's agent; None for the one of `dmesh.coordination`.
    """

    def __init__(self, kind: str, name: str, places: int, lease: Lease | None, agent: Agent | None) -> None:
        self._prefix = queue_prefix(kind, name)
        self._name = name
        self._title = f"{kind} {name!r}"
        self._places = places
        self._lease = lease
        self._given_agent = agent
        self._held: Entry | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def held(self) -> bool:
        """True while this process holds it."""
        return self._held is not None

    @property
    def token(self) -> int:
        """Fencing token: positive, and larger than the tokens of all earlier holders.

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
        return _still_there(self._entry())

    def release(self) -> None:
        """Give it up, so that the next one holds it.

        Raises:
            LockLostError: This process had lost it: its lease had ended.
            ConfigurationError: This process does not hold it.
        """
        key = self._entry().key
        self._held = None
        try:
            deleted = self._agent.key_value_delete(key)
        except CoordinationError:
            self._withdraw(key)
            raise
        if not deleted:
            raise self._lost(key)

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

    @property
    def _agent(self) -> Agent:
        return self._given_agent or current_agent()

    def _entry(self) -> Entry:
        if self._held is None:
            raise ConfigurationError(f"this process does not hold {self._title}")
        return self._held

    def _enter(self, value: bytes, timeout: float | None) -> int:
        """Wait for a place; return its fencing token."""
        if self._held is not None:
            raise ConfigurationError(f"this process holds {self._title} already: release it first")
        check_timeout(timeout)
        key = f"{self._prefix}{secrets.token_hex(8)}"
        try:
            with TRACKER.during(f"waiting for {self._title}"):
                self._held = self._wait(Put(key, value, self._lease, self._lease is None), timeout)
        except BaseException:
            self._withdraw(key)
            raise
        return self._held.token

    def _wait(self, put: Put, timeout: float | None) -> Entry:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        agent, announcer = self._agent, self._agent.announcer()
        agent.transaction(then=[put])
        while True:
            listed = agent.key_value_list(self._prefix)
            entries = _sorted(listed)
            place = next((place for place, entry in enumerate(entries) if entry.key == put.key), None)
            if place is None:
                raise self._lost(put.key)
            if place < self._places:
                mine, after = entries[place], entries[place + 1 :]
                # The next one, if any, watches this process's key until that has a place.
                if after and self._places > 1 and not agent.transaction([_still_there(mine)], [put]):
                    raise self._lost(put.key)
                return mine
            holders = self._holders(entries[:place])
            if time.monotonic() >= deadline:
                raise LockTimeoutError(f"{self._title} did not become free within {timeout:g} s; {holders}")
            if announcer.due:
                announcer.say(f"still waiting for {self._title}; {holders}")
            before = entries[place - 1].key
            watched = self._prefix if place == self._places > 1 else before
            with (
                contextlib.suppress(WatchCompactedError),  # too much has changed since: list the keys again
                agent.watch(watched, listed.revision + 1) as watch,
            ):
                self._follow(watch, before, min(deadline, time.monotonic() + announcer.left))

    def _follow(self, watch: Watch, before: str, deadline: float) -> None:
        """Wait until the queue has moved, the process before has its place, the lease is over or time is."""
        while (left := deadline - time.monotonic()) > 0 and not watch.closed:
            event = watch.poll(min(left, _LOOK) if self._lease else left)
            moved = event is not None and (event.deleted or event.key == before)
            if moved or (self._lease is not None and self._lease.over):
                return

    def _withdraw(self, key: str) -> None:
        """Delete a key that may have been set; in the background if that cannot be done now.

        As long as this process is a member, the others would wait for a key that it has forgotten.
        """
        agent = self._agent

        def delete(again: bool = True) -> bool:
            try:
                agent.key_value_delete(key)
            except StoreLostError:  # it may have come back as an older copy, which has the key
                return not again or delete(again=False)
            except CoordinationError as error:  # any other: no member any more, and the key ends with that
                return not isinstance(error, CoordinatorUnavailableError | StoreUnavailableError)
            return True

        def delete_later() -> None:
            while not delete():
                time.sleep(_AGAIN)

        if not delete():
            Worker(delete_later, "dmesh-lock").start()

    def _holders(self, before: list[Entry]) -> str:
        held = ", ".join(entry.value.decode(errors="replace")[:200] for entry in before[: self._places])
        ahead = len(before) - self._places
        return f"held by {held}" + (f", and {ahead} wait before this process" if ahead else "")

    def _lost(self, key: str) -> LockLostError:
        return LockLostError(
            f"this process has lost its place at {self._title}: the lease of its key {key!r} has ended, or "
            "the key was deleted. Others may hold it since: do not go on with what it protects."
        )


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
        process = self._agent.identity.process
        return self._enter(
            f"{self._agent.identity.task} (host {process.host}, pid {process.pid})".encode(), timeout
        )

    def __enter__(self: _Self) -> _Self:
        self.acquire()
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
            value: Published value of the leader, for example its address; a str is stored as UTF-8.
            timeout: Seconds to wait; 0 not to wait, None for no limit.

        Raises:
            LockTimeoutError: Another process led all the time.
            LockLostError: The lease ended while this process waited.
            CoordinatorUnavailableError: The coordinator has been silent for too long.
        """
        return self._enter(encode_value(value, self._name), timeout)

    def resign(self) -> None:
        """Give leadership up, so that the next candidate leads.

        Raises:
            LockLostError: This process had lost it: its lease had ended.
            ConfigurationError: This process does not lead.
        """
        self.release()

    def leader(self) -> Leader | None:
        """Return the leader; None if there is none."""
        return _leader(_sorted(self._agent.key_value_list(self._prefix)))

    def observe(self) -> Iterator[Leader | None]:
        """Yield the leader, None if there is none, now and after every change. Ends with the process.

        Of changes that follow each other at once, only the last may be seen.
        """
        seen: list[Leader | None] = []
        while True:
            listed = self._agent.key_value_list(self._prefix)
            entries = _sorted(listed)
            if seen != [_leader(entries)]:
                seen = [_leader(entries)]
                yield seen[0]
            watched = entries[0].key if entries else self._prefix
            with (
                contextlib.suppress(WatchCompactedError),
                self._agent.watch(watched, listed.revision + 1) as watch,
            ):
                if next(watch, None) is None:
                    return


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
    """Return the unique prefix of the keys of a lock, semaphore or election.

    Raises:
        ConfigurationError: The name is none.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ConfigurationError(
            f"the name of a {kind} is a string of 1 to {_MAX_NAME} characters, not {name!r}"
        )
    return f"{RESERVED_PREFIX}{kind}/{quote(name, safe='')}/"


def _sorted(listed: Snapshot) -> list[Entry]:
    created = listed.create_revisions
    return sorted(
        (Entry(key, created[key], value) for key, value in listed.items()), key=lambda entry: entry.token
    )


def _leader(entries: list[Entry]) -> Leader | None:
    return Leader(entries[0].value, entries[0].token) if entries else None


def _still_there(entry: Entry) -> Condition:
    return Condition.create_revision(entry.key, "==", entry.token)
