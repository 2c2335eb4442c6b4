"""Coordination service for programs: barriers, keys and values, members of the cluster.

Everything acts on the cluster that `dmesh.initialize_accelerator_system` joined. In local mode, a coordinator
for this process alone is started at the first use.

```python
from dmesh import coordination

coordination.key_value_set("config/seed", "17")
seed = int(coordination.key_value_get("config/seed", timeout=30))
coordination.barrier("loaded", timeout=60)
```

Values are `str` or `bytes` when they are set, where a `str` stands for its UTF-8 encoding, and `bytes` when
they are read; `encoding="utf-8"` makes them `str`. Every call that waits reports every 10 seconds which
clients it waits for, can be ended by Ctrl-C, and survives a restart of the coordinator.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, overload

from dmesh._lazy_imports import lazy_getattr
from dmesh.coordination.activity import TRACKER, Activity
from dmesh.coordination.agent_source import current_agent as _agent

# Imported here although few programs use these names: the module has the name of a function below, which it
# would replace if it were imported later.
from dmesh.coordination.members import (
    BarrierProgress,
    BarrierStatus,
    DepartureCause,
    Device,
    Liveness,
    Member,
    MemberState,
    Participant,
    Process,
    Task,
)
from dmesh.errors import ConfigurationError

if TYPE_CHECKING:
    from dmesh.coordination.barrier_functions import (
        alive_barrier,
        arrive,
        barrier,
        barrier_progress,
        cancel_barrier,
        double_barrier,
    )
    from dmesh.coordination.barrier_methods import PendingBarrier
    from dmesh.coordination.key_value import CompareAndSetResult
    from dmesh.coordination.leases import Lease
    from dmesh.coordination.locks import Counter, Election, Leader, Lock, Semaphore
    from dmesh.coordination.preemption import PreemptionNotice
    from dmesh.coordination.transactions import (
        Condition,
        Delete,
        Get,
        Increment,
        Operation,
        Put,
        TransactionResult,
    )
    from dmesh.coordination.values import Snapshot
    from dmesh.coordination.watches import KeyEvent, Watch

_HOMES = {
    "barrier_functions": (
        "alive_barrier", "arrive", "barrier", "barrier_progress", "cancel_barrier", "double_barrier",
    ),
    "barrier_methods": ("PendingBarrier",),
    "key_value": ("CompareAndSetResult",),
    "leases": ("Lease",),
    "locks": ("Counter", "Election", "Leader", "Lock", "Semaphore"),
    "preemption": ("PreemptionNotice",),
    "transactions": ("Condition", "Delete", "Get", "Increment", "Operation", "Put", "TransactionResult"),
    "values": ("Snapshot",),
    "watches": ("KeyEvent", "Watch"),
}  # fmt: skip
"""Modules of the names that are imported when they are first used."""

__getattr__ = lazy_getattr(__name__, _HOMES)

__all__ = [
    "Activity",
    "add_preemption_listener",
    "alive_barrier",
    "announce_preemption",
    "arrive",
    "barrier",
    "barrier_progress",
    "BarrierProgress",
    "BarrierStatus",
    "cancel_barrier",
    "CompareAndSetResult",
    "Condition",
    "Counter",
    "Delete",
    "DepartureCause",
    "Device",
    "double_barrier",
    "Election",
    "epoch",
    "Get",
    "handle_preemption_signals",
    "Increment",
    "key_value_compare_and_set",
    "key_value_delete",
    "key_value_get",
    "key_value_get_many",
    "key_value_increment",
    "key_value_list",
    "key_value_set",
    "key_value_try_get",
    "KeyEvent",
    "Leader",
    "Lease",
    "lease",
    "Liveness",
    "Lock",
    "Member",
    "member",
    "members",
    "MemberState",
    "Operation",
    "Participant",
    "PendingBarrier",
    "PreemptionNotice",
    "Process",
    "progress",
    "Put",
    "reached_preemption_sync_point",
    "rejoined",
    "report_error",
    "Semaphore",
    "Snapshot",
    "Task",
    "transaction",
    "TransactionResult",
    "wait_for_epoch",
    "Watch",
    "watch",
]


def key_value_set(
    key: str,
    value: str | bytes,
    allow_overwrite: bool = False,
    *,
    owned: bool = False,
    ttl: float | None = None,
    lease: Lease | None = None,
    ephemeral: bool = False,
) -> int:
    """Set a key.

    ```python
    if dmesh.rank() == 0:
        dmesh.coordination.key_value_set("run/name", "blue-42")
    name = dmesh.coordination.key_value_get("run/name", encoding="utf-8")
    assert name == "blue-42"
    ```

    Args:
        key: 1-1024 bytes in UTF-8. "/" has no special meaning; keys that begin with `dmesh/` are reserved.
        value: At most 1 MiB, unless the coordinator has another limit. A `str` is stored as UTF-8.
        allow_overwrite: Replace an existing value.
        owned: This process owns the key: if the coordinator loses its store, the key is set again before any
            call of this process continues. No other process should set or delete it.
        ttl: Seconds after which the key is deleted, unless it is set again; None for never.
        lease: Delete the key when this lease ends: see `lease`.
        ephemeral: Delete the key when this process leaves, fails or is lost.

    Returns:
        The revision of the change.

    Raises:
        KeyExistsError: The key has a value, and overwriting was not allowed.
        LeaseExpiredError: The lease has ended.
        LimitExceededError: The value is too large, or the store is full.
        StoreLostError: The coordinator lost data that this process has seen. Every call here can raise it.
    """
    from dmesh.coordination.barriers import refuse_reserved

    refuse_reserved(key, "keys")
    if sum((ttl is not None, lease is not None, bool(ephemeral), bool(owned))) > 1:
        raise ConfigurationError(
            f"key {key!r} can have only one lifetime: pass at most one of owned, ttl, lease and ephemeral"
        )
    agent = _agent()
    if ttl is not None:
        lease = agent.lease(ttl, keep_alive=False)
    number = 0 if lease is None else lease.number
    return agent.key_value_set(
        key, value, allow_overwrite, owned=owned, lease=number, ephemeral=bool(ephemeral)
    )


def lease(ttl: float, *, keep_alive: bool = True) -> Lease:
    """Grant a lease: keys that are set with it are deleted when it ends.

    ```python
    from dmesh import coordination

    with coordination.lease(30) as lease:
        coordination.key_value_set("serving/node7", "ready", lease=lease)
    coordination.key_value_try_get("serving/node7")  # -> None
    ```

    It is renewed in the background for as long as this process runs; a process that is killed or frozen loses
    it after `ttl` seconds. A restart of the coordinator lets its time begin anew.

    Args:
        ttl: Seconds for which it lives unless it is renewed, at least the shortest lease that the coordinator
            allows (0.1 s).
        keep_alive: Renew it in the background; otherwise it ends after `ttl` seconds, or later by
            `Lease.renew`.

    Raises:
        ConfigurationError: `ttl` is too short or too long.
        CoordinatorUnavailableError: The coordinator has been silent for too long.
    """
    return _agent().lease(ttl, keep_alive=keep_alive)


@overload
def key_value_get(key: str, timeout: float | None = None) -> bytes: ...


@overload
def key_value_get(key: str, timeout: float | None = None, *, encoding: str) -> str: ...


def key_value_get(key: str, timeout: float | None = None, *, encoding: str | None = None) -> str | bytes:
    """Read a key; wait until it is set.

    Args:
        key: The key.
        timeout: Seconds to wait; 0 not to wait, None for no limit.
        encoding: Return text, decoded from this; bytes by default.

    Raises:
        KeyWaitTimeoutError: The key did not appear in time.
        KeyNotFoundError: There is no such key, and `timeout` is 0.
    """
    with TRACKER.during(f"waiting for key {key!r}"):
        return _agent().key_value_get(key, timeout, encoding=encoding)


@overload
def key_value_try_get(key: str) -> bytes | None: ...


@overload
def key_value_try_get(key: str, *, encoding: str) -> str | None: ...


def key_value_try_get(key: str, *, encoding: str | None = None) -> str | bytes | None:
    """Read a key without waiting; return None if there is no such key.

    Args:
        key: The key.
        encoding: Return text, decoded from this; bytes by default.
    """
    return _agent().key_value_try_get(key, encoding=encoding)


def key_value_get_many(keys: Iterable[str]) -> Snapshot:
    """Read many keys in one call, all at one revision; those that do not exist are left out.

    Returns:
        A dictionary in the order asked for, with the revision as an attribute.
    """
    return _agent().key_value_get_many(keys)


def key_value_list(prefix: str) -> Snapshot:
    """Read all keys that start with `prefix` in one call, all at one revision; empty for all keys.

    Returns:
        A dictionary sorted by key, with the revision as an attribute. `watch(prefix, listed.revision + 1)`
        goes on where it ends.
    """
    return _agent().key_value_list(prefix)


def key_value_delete(key: str, *, is_prefix: bool = False) -> int:
    """Delete a key, or with `is_prefix` every key that starts with it; return how many there were."""
    from dmesh.coordination.barriers import refuse_reserved

    refuse_reserved(key, "keys")
    return _agent().key_value_delete(key, is_prefix=is_prefix)


def key_value_increment(key: str, amount: int = 1) -> int:
    """Add to a key whose value is a decimal integer, atomically; a missing key counts as 0.

    Returns:
        The sum.

    Raises:
        KeyTypeError: The value is not a decimal integer of 64 bits.
    """
    from dmesh.coordination.barriers import refuse_reserved

    refuse_reserved(key, "keys")
    return _agent().key_value_increment(key, amount)


def key_value_compare_and_set(
    key: str, expected: str | bytes | None, value: str | bytes
) -> CompareAndSetResult:
    """Set a key if its value is `expected`, atomically.

    Args:
        key: The key.
        expected: The value that it must have; None: it must not exist.
        value: The value to set.

    Returns:
        An object that is true if the key was set, and has the value that the key has now.
    """
    from dmesh.coordination.barriers import refuse_reserved

    refuse_reserved(key, "keys")
    return _agent().key_value_compare_and_set(key, expected, value)


def transaction(
    compare: Iterable[Condition] = (),
    then: Iterable[Operation] = (),
    otherwise: Iterable[Operation] = (),
) -> TransactionResult:
    """Compare keys, then change and read several of them: all at one revision, or not at all.

    ```python
    from dmesh import coordination
    from dmesh.coordination import Condition, Delete, Get, Increment, Put

    moved = coordination.transaction(
        [Condition.exists("jobs/waiting/7"), Condition.absent("jobs/running/7")],
        then=[Delete("jobs/waiting/7"), Put("jobs/running/7", "node3"), Increment("jobs/started")],
        otherwise=[Get("jobs/", is_prefix=True)],
    )
    moved.succeeded  # -> False
    moved.results[0].text()  # -> {}
    ```

    Like every change, it is made once, however often its answer is lost and it is sent again.

    Args:
        compare: Conditions, at most 128.
        then: Operations that are carried out in order if all conditions hold, at most 128: each sees the
            changes of those before it, and no key may be changed twice.
        otherwise: Operations that are carried out if one of the conditions does not hold.

    Returns:
        An object that is true if all conditions held. Its `results` has one item for each operation, which is
        the revision for a `Put`, the number of keys for a `Delete`, the sum for an `Increment`, a `Snapshot`
        for a `Get`.

    Raises:
        KeyTypeError: A value is neither str nor bytes, or is to be incremented and no integer.
        LimitExceededError: Too many operations, a value is too large, the store is full, or more than 16 KiB
            are read beside changes.
    """
    from dmesh.coordination.barriers import refuse_reserved
    from dmesh.coordination.transactions import Delete, Increment, Put

    then, otherwise = tuple(then), tuple(otherwise)
    for operation in (*then, *otherwise):
        if isinstance(operation, Put | Delete | Increment):
            refuse_reserved(operation.key, "keys")
    return _agent().transaction(compare, then, otherwise)


def watch(prefix: str, from_revision: int | None = None) -> Watch:
    """Watch all keys that start with `prefix`: iterate over what this returns.

    Every change is delivered once, in order of revision, also across a lost connection and a restart of the
    coordinator. Close it (from any thread), or use it in a `with` statement.

    Args:
        prefix: The prefix; empty for all keys.
        from_revision: First revision of interest; None for the changes from now on.

    Raises:
        WatchCompactedError: The coordinator no longer has the changes since then.
    """
    return _agent().watch(prefix, from_revision)


def members() -> tuple[Member, ...]:
    """Return the clients of the cluster as the coordinator sees them now, by rank, departed ones too.

    `state` says whether each is there, `liveness` whether it gets anywhere, and of one that is stuck
    `activity` what it was doing.
    """
    return _agent().members()


def member(task: int | str) -> Member:
    """Return one client as the coordinator sees it now: cheap, however large the cluster is.

    ```python
    from dmesh import coordination

    coordination.member(0).state.name  # -> 'CONNECTED'
    ```

    Args:
        task: A rank (client id), or a task such as `/job:worker/task:2`.

    Returns:
        The client; its `incarnation` is 0 if no process has taken the task yet.

    Raises:
        ConfigurationError: There is no such task.
    """
    return _agent().member(task)


def epoch() -> int:
    """Return the latest epoch of the cluster that this process has seen.

    Epochs grow whenever a client registers, leaves, fails or is lost.
    """
    return _agent().epoch


def wait_for_epoch(after: int, timeout: float | None = None) -> int:
    """Wait until the cluster's epoch is larger than `after`, and return it: a member has come or gone.

    ```python
    from dmesh import coordination

    known = 0
    known = coordination.wait_for_epoch(known)
    present = [member for member in coordination.members() if not member.state.departed]
    ```

    Args:
        after: An epoch: from `epoch`, from an earlier call, or 0.
        timeout: Seconds to wait; 0 not to wait, None for no limit.

    Raises:
        WaitTimeoutError: The epoch did not grow in time.
        CoordinatorUnavailableError: The coordinator has been silent for too long.
    """
    with TRACKER.during(f"waiting for the epoch after {after}"):
        return _agent().wait_for_epoch(after, timeout).epoch


def rejoined() -> bool:
    """Return whether this process replaced a lost client while the others kept running.

    That is possible under the restart policy `rejoin` (`DMESH_RESTART_POLICY`). Such a process takes part in
    collectives from its first barrier of all clients on; the others, whose collectives have raised a
    `PeerLostError`, come to that barrier, too. From there on they have to agree on where to go on from:

    ```python
    recover = coordination.rejoined()
    while step < last:
        try:
            if recover:
                coordination.barrier("recover")
                step, state = restore()
                recover = False
            state = train(state)
            step += 1
        except dmesh.errors.PeerLostError:
            recover = True
    ```
    """
    return _agent().rejoined


def progress() -> None:
    """Report that this process makes progress, in long work without barriers or collectives.

    A process that others wait for, and that makes no progress meanwhile, is reported to all as stuck, with
    its stack. Costs less than a microsecond: nothing is sent until the next heartbeat.
    """
    TRACKER.mark()


def reached_preemption_sync_point(step: int) -> bool:
    """Return whether all clients save at this step, because one of them will be preempted.

    Every client calls it at each of its steps, with the same sequence of growing numbers. Once a preemption
    was announced (by `announce_preemption`, or a signal: see `handle_preemption_signals`), the clients agree
    on the first step that none of them has passed, and this function returns True for each when it comes
    there, whether or not they run at the same speed. It returns True once per preemption.

    ```python
    coordination.handle_preemption_signals()
    for step in range(first, last):
        train(step)
        if coordination.reached_preemption_sync_point(step):
            save(step)
            break
    ```

    It takes microseconds as long as no preemption is announced. After an announcement, it waits until all
    clients have reported their positions, which they do by themselves once they have called this function;
    lost clients are left out. A client that replaced a lost one after the step was chosen uses that step,
    too.

    Args:
        step: The number of this step.
    """
    return _agent().preemption.reached(step)


def announce_preemption(reason: str = "") -> None:
    """Announce that this client is about to be preempted, so that all clients save at the same step.

    Returns at once and may be used in a signal handler: a thread of its own tells the others. Announcing
    again before all are past the step agreed on changes nothing.

    Args:
        reason: Why, for the people who read the others' output.
    """
    from dmesh.coordination.preemption_signals import announce_in_background

    announce_in_background(reason)


def add_preemption_listener(listener: Callable[[PreemptionNotice], object]) -> None:
    """Add a function to call when a client announces its preemption; it runs on a thread of dmesh."""
    _agent().preemption.add_listener(listener)


def handle_preemption_signals(signals: Collection[int] = (signal.SIGTERM,)) -> None:
    """Announce this process's preemption when it receives a signal, instead of ending it at once.

    A handler that is there already is called, too. The process has to end by itself: see
    `reached_preemption_sync_point`. Shutting dmesh down restores the former handlers. Call it in the main
    thread, after `dmesh.initialize_accelerator_system`.

    Args:
        signals: Which signals; Kubernetes and batch systems send SIGTERM.
    """
    from dmesh.coordination.preemption_signals import SignalHook

    _agent().preemption.start()
    SignalHook.install(signals)


def report_error(message: str, code: int = 0) -> None:
    """Declare this process failed and report the reason to all others. It cannot use the cluster any more.

    Args:
        message: Description of the failure, for the people who read the others' errors.
        code: Code of the failure for programs, of 32 bits; 0 for none. The others find it in `Member.code`.
    """
    _agent().report_error(message, code)
