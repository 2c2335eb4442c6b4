"""Clock, disk and core together: what is released when, and what happens when the disk fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from tests.server.raw_client import PATIENCE, PATIENT

from dmesh_server.core import events
from dmesh_server.core.effects import (
    Attached,
    BarrierResult,
    HeartbeatAck,
    KvRevision,
    LivenessChange,
    MembershipChange,
    Message,
    Record,
    Registered,
    SessionEnd,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller, ClusterState, Job, KeyValue, Liveness, Process, Task
from dmesh_server.runtime import Runtime
from dmesh_server.sessions import Session
from dmesh_server.store.base import Store
from dmesh_server.store.memory import MemoryStore

JOBS = (Job("worker", tuple(f"h{i}:1" for i in range(100))),)


class GatedStore(MemoryStore):
    """Pretends to be a disk: commits wait at a gate, and fail while `failure` is set."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.failure: str | None = None
        self.commits: list[int] = []
        self.threads: set[int] = set()

    def commit(self, records: Sequence[Record]) -> None:
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        if self.failure is not None:
            raise OSError(self.failure)
        self.commits.append(len(records))
        super().commit(records)

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE)


class ManualClock:
    """Time that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def caller(index: int) -> Caller:
    return Caller("c", Task("worker", index), 100 + index)


class Driver:
    """Makes events for a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def register(self, index: int) -> Registered:
        number = self.runtime.next_number()
        event = events.Register(number, caller(index), f"r{number}", JOBS, Process(), (), (), 5, b"s" * 32)
        return await self.runtime.request(event, Registered)

    async def join(self, index: int) -> Session:
        await self.register(index)
        return (await self.runtime.open_session(caller(index)))[0]

    async def put(self, key: str, value: bytes = b"v", request_id: str = "") -> KvRevision:
        number = self.runtime.next_number()
        event = events.KvSet(number, caller(0), request_id or f"r{number}", key, value, True)
        return await self.runtime.request(event, KvRevision)

    async def get(self, key: str, timeout: float | None = 0) -> KeyValue:
        event = events.KvGet(self.runtime.next_number(), caller(0), key, timeout)
        return await self.runtime.request(event, KeyValue)


@pytest.fixture
async def store() -> Store:
    return GatedStore()


@pytest.fixture
async def driver(store: Store) -> AsyncIterator[Driver]:
    runtime = Runtime(store, PATIENT, session_queue=4)
    await runtime.start()
    yield Driver(runtime)
    if isinstance(store, GatedStore):
        store.gate.set()
    await runtime.close()


async def refused(call: asyncio.Future[object]) -> CoreError:
    with pytest.raises(CoreError) as caught:
        async with asyncio.timeout(PATIENCE):
            await call
    return caught.value


async def test_nobody_is_told_before_it_is_durable(driver: Driver, store: GatedStore) -> None:
    await driver.register(0)
    store.gate.clear()
    await store.until_entered()
    change = asyncio.create_task(driver.put("k"))
    await store.until_entered()
    read = asyncio.create_task(driver.get("k"))
    await asyncio.sleep(0.05)
    assert not change.done()
    assert not read.done(), "the reader would see what a crash could still undo"
    store.gate.set()
    assert (await change).revision == 1
    assert (await read).value == b"v"


async def test_what_gathers_during_a_commit_shares_the_next(driver: Driver, store: GatedStore) -> None:
    await driver.register(0)
    store.gate.clear()
    changes = [asyncio.create_task(driver.put("first"))]
    await store.until_entered()
    await store.until_entered()
    changes += [asyncio.create_task(driver.put(f"k{index}")) for index in range(50)]
    await asyncio.sleep(0)
    store.gate.set()
    revisions = [answer.revision for answer in await asyncio.gather(*changes)]
    assert revisions == list(range(1, 52))
    assert len(store.commits) == 3, "registration, the first, all the others"
    assert threading.get_ident() not in store.threads
    assert len(store.threads) == 1


async def test_heartbeats_and_reads_cost_no_commit(driver: Driver, store: GatedStore) -> None:
    session = await driver.join(0)
    before = len(store.commits)
    driver.runtime.send(events.Heartbeat(session.number, 3))
    outgoing = await session.send_queue.get()
    assert outgoing is not None
    assert isinstance(outgoing.message, HeartbeatAck)
    assert len(store.commits) == before


@pytest.mark.parametrize("store", [MemoryStore()])
async def test_memory_store_answers_without_a_thread_hop(driver: Driver) -> None:
    await driver.register(0)
    change = driver.put("k")
    with pytest.raises(StopIteration) as finished:
        change.send(None)
    assert finished.value.value == KvRevision(1)


async def test_failing_disk(driver: Driver, store: GatedStore) -> None:
    session = await driver.join(0)
    await driver.put("k", b"old")
    await driver.put("quiet", b"kept")
    changes: list[str | None] = []
    driver.runtime.add_readiness_listener(lambda: changes.append(driver.runtime.readiness()))
    store.failure = "no space left"
    error = await refused(asyncio.ensure_future(driver.put("k", b"new", request_id="retry")))
    assert error.kind is ErrorKind.STORE_UNAVAILABLE
    assert "no space left" in error.message
    assert "no space left" in (driver.runtime.readiness() or "")

    later = await refused(asyncio.ensure_future(driver.put("other")))
    assert (later.kind, "no space left" in later.message) == (ErrorKind.STORE_UNAVAILABLE, True)
    dirty = await refused(asyncio.ensure_future(driver.get("k")))
    assert dirty.kind is ErrorKind.STORE_UNAVAILABLE, "a crash could undo what this would show"
    async with asyncio.timeout(PATIENCE):
        assert (await driver.get("quiet")).value == b"kept", "reads go on"
        driver.runtime.send(events.Heartbeat(session.number, 1))
        assert await session.send_queue.get() is not None, "heartbeats, too"

        store.failure = None
        while driver.runtime.readiness() is not None:
            await asyncio.sleep(0.01)
        assert (await driver.put("k", b"new", request_id="retry")).revision == 3, "the change had one effect"
        assert (await driver.get("k")).value == b"new"
        assert (await driver.put("other")).revision == 4
    assert [reason is None for reason in changes] == [False, True]


async def test_watchers_hear_of_a_change_only_when_the_disk_has_it(driver: Driver, store: GatedStore) -> None:
    await driver.register(0)
    event = events.KvWatch(driver.runtime.next_number(), caller(0), "", 0)
    watch = await driver.runtime.open_watch(event)
    store.failure = "broken"
    await refused(asyncio.ensure_future(driver.put("k")))
    assert len(watch.send_queue) == 0
    store.failure = None
    async with asyncio.timeout(PATIENCE):
        push = await watch.send_queue.get()
    assert push is not None
    assert push.revision == 1
    driver.runtime.close_watch(watch)


async def test_nobody_hears_of_a_loss_that_a_crash_would_undo(driver: Driver, store: GatedStore) -> None:
    runtime = driver.runtime
    survivor, victim = await driver.join(0), await driver.join(1)
    epoch, store.failure = runtime.views.summary("c").epoch, "broken"
    runtime.send(events.EnterBarrier(survivor.number, "b", 0, (), None))
    runtime.close_session(victim)
    async with asyncio.timeout(PATIENCE):
        while runtime.views.summary("c").epoch == epoch or runtime.readiness() is None:
            await asyncio.sleep(0.01)
    runtime.send(events.EnterBarrier(survivor.number, "later", 0, (), None))
    assert survivor.send_queue.take_all() == []
    state = events.GetClusterState(runtime.next_number(), caller(0))
    undurable = await refused(asyncio.ensure_future(runtime.request(state, ClusterState)))
    assert undurable.kind is ErrorKind.STORE_UNAVAILABLE
    store.failure = None
    messages = [await told(survivor) for _ in range(3)]
    assert [type(message) for message in messages] == [BarrierResult, MembershipChange, BarrierResult]


async def test_a_loss_that_nobody_heard_of_may_be_forgotten(store: GatedStore) -> None:
    runtime = Runtime(store, PATIENT)
    await runtime.start()
    driver = Driver(runtime)
    survivor, victim = await driver.join(0), await driver.join(1)
    epoch, store.failure = runtime.views.summary("c").epoch, "broken"
    runtime.close_session(victim)
    async with asyncio.timeout(PATIENCE):
        while runtime.views.summary("c").epoch == epoch or runtime.readiness() is None:
            await asyncio.sleep(0.01)
    assert survivor.send_queue.take_all() == []
    await runtime.close()  # as if it were killed: the store cannot write
    store.failure = None
    successor = Runtime(store, PATIENT)
    await successor.start()
    await successor.open_session(caller(1))
    await successor.close()


async def told(session: Session) -> Message:
    async with asyncio.timeout(PATIENCE):
        outgoing = await session.send_queue.get()
    assert outgoing is not None
    return outgoing.message


async def test_closing_gives_up_on_a_disk_that_stays_broken(store: GatedStore) -> None:
    runtime = Runtime(store, PATIENT)
    await runtime.start()
    await Driver(runtime).register(0)
    store.failure = "broken"
    await refused(asyncio.ensure_future(Driver(runtime).put("k")))
    async with asyncio.timeout(PATIENCE):
        await runtime.close()


async def test_restart_takes_up_what_the_store_holds(store: GatedStore) -> None:
    runtime = Runtime(store, PATIENT)
    await runtime.start()
    await Driver(runtime).register(0)
    await Driver(runtime).put("k", b"kept")
    await runtime.close()
    successor = Runtime(store, PATIENT)
    await successor.start()
    assert successor.server_incarnation != runtime.server_incarnation
    assert (await Driver(successor).get("k")).value == b"kept"
    assert (await successor.open_session(caller(0)))[1] == Attached(1)
    await successor.close()


async def test_not_ready_before_it_has_started(store: GatedStore) -> None:
    runtime = Runtime(store, PATIENT)
    assert runtime.readiness() == "starting"
    asked = events.GetClusterState(1, caller(0))
    error = await refused(asyncio.ensure_future(runtime.request(asked, ClusterState)))
    assert error.kind is ErrorKind.INTERNAL
    await runtime.start()
    assert runtime.readiness() is None
    await runtime.close()
    assert runtime.readiness() == "shutting down"


async def test_session_that_does_not_read_is_dropped(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    lazy, diligent = await driver.join(0), await driver.join(1)
    for sequence in range(5):
        driver.runtime.send(events.Heartbeat(lazy.number, sequence))
    assert lazy.send_queue.overflowed
    assert await lazy.send_queue.get() is None
    assert "session_dropped" in caplog.text
    driver.runtime.send(events.Heartbeat(diligent.number, 1))
    assert await diligent.send_queue.get() is not None


@pytest.mark.parametrize("bounds", [{"watch_history": 3}, {"watch_history_bytes": 10}])
async def test_watch_that_does_not_read_is_dropped(store: GatedStore, bounds: dict[str, int]) -> None:
    runtime = Runtime(store, replace(PATIENT, **bounds))
    await runtime.start()
    driver = Driver(runtime)
    await driver.register(0)
    watch = await runtime.open_watch(events.KvWatch(runtime.next_number(), caller(0), "", 0))
    for index in range(4):
        assert not watch.send_queue.overflowed
        await driver.put(f"k{index}")
    assert watch.send_queue.overflowed
    await runtime.close()


async def test_cancelled_request_is_abandoned(store: GatedStore) -> None:
    runtime = Runtime(store, replace(PATIENT, max_waiters=1))
    await runtime.start()
    driver = Driver(runtime)
    await driver.register(0)
    for _ in range(3):  # the second would pass the limit if the first were still there
        waiting = asyncio.create_task(driver.get("k", None))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await runtime.close()


async def test_shutdown_answers_everybody(driver: Driver) -> None:
    session = await driver.join(0)
    waiting = asyncio.create_task(driver.get("k", None))
    await asyncio.sleep(0)
    await driver.runtime.shutdown()
    assert (await refused(waiting)).kind is ErrorKind.SHUTTING_DOWN
    outgoing = await session.send_queue.get()
    assert outgoing is not None
    assert isinstance(outgoing.message, SessionEnd)
    assert outgoing.message.error.kind is ErrorKind.SHUTTING_DOWN
    assert await session.send_queue.get() is None
    assert (await refused(asyncio.ensure_future(driver.put("k")))).kind is ErrorKind.SHUTTING_DOWN


async def test_shutdown_takes_nobody_for_dead(store: GatedStore) -> None:
    runtime = Runtime(store, replace(PATIENT, suspicion=0.0))
    await runtime.start()
    session = await Driver(runtime).join(0)
    await runtime.shutdown()
    runtime.close_session(session)
    await runtime.close()
    successor = Runtime(store, PATIENT)
    await successor.start()
    [name] = successor.views.names()
    assert not successor.views.holders(name, 0, 1)[0].state.departed
    await successor.close()


async def test_time_is_the_injected_clocks(store: GatedStore) -> None:
    clock = ManualClock()
    runtime = Runtime(store, replace(PATIENT, lease=15.0), clock=clock)
    await runtime.start()
    driver = Driver(runtime)
    _, alive = await driver.join(0), await driver.join(1)
    for _ in range(15):
        clock.now += 1.0
        runtime.send(events.Heartbeat(alive.number, 1))
        runtime.tick()
    clock.now += 0.5
    runtime.tick()
    async with asyncio.timeout(PATIENCE):
        while (outgoing := await alive.send_queue.get()) is not None:
            if isinstance(outgoing.message, LivenessChange):
                break
        assert outgoing is not None
        assert isinstance(outgoing.message, LivenessChange)
        # Its session is open, so its process is there.
        [blocked] = outgoing.message.members
        assert (blocked.task.index, blocked.liveness) == (0, Liveness.BLOCKED)
    await runtime.close()


async def test_timer_wakes_the_core_by_itself(store: GatedStore) -> None:
    runtime = Runtime(store, replace(PATIENT, suspicion=0.05))
    await runtime.start()
    driver = Driver(runtime)
    survivor, victim = await driver.join(0), await driver.join(1)
    runtime.close_session(victim)
    async with asyncio.timeout(PATIENCE):
        outgoing = await survivor.send_queue.get()
    assert outgoing is not None
    assert isinstance(outgoing.message, MembershipChange)
    await runtime.close()


async def test_timer_survives_a_fault(store: GatedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(store, replace(PATIENT, suspicion=0.01))
    await runtime.start()
    driver = Driver(runtime)
    survivor, victim = await driver.join(0), await driver.join(1)
    tick, faults = runtime.tick, [ZeroDivisionError("once")]

    def faulty() -> None:
        if faults:
            raise faults.pop()
        tick()

    monkeypatch.setattr(runtime, "tick", faulty)
    runtime.close_session(victim)
    async with asyncio.timeout(PATIENCE):
        assert await survivor.send_queue.get() is not None
    await runtime.close()
