"""Commit pipeline: effects are released in order, and never before they are durable.

Records that gather while one commit runs go into the next one together (group commit): a thousand clients
that register at once cost a handful of disk writes. Lazy records, which clients could present again after a
crash, delay nothing: they go with the next commit, or by themselves a moment later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dmesh_server import failpoints
from dmesh_server.core.effects import Effect, LazyRecord, Persist, Record
from dmesh_server.core.records import CHANGE, KEY, REPLY
from dmesh_server.store.base import Store
from dmesh_server.telemetry import logs
from dmesh_server.telemetry.measures import Measures

_FIRST_RETRY = 0.1
_LONGEST_RETRY = 2.0
_LAZY = 0.5
"""Seconds that lazy records wait for a commit to join; half of the documented bound."""

_UNORDERED = frozenset({KEY, CHANGE, REPLY})
"""Kinds of records whose effects lazy ones may overtake, since nothing else builds on them."""

Address = tuple[str, str, str]


@dataclass
class _Batch:
    """Records of one commit, and the effects to release after it."""

    records: list[Record | LazyRecord] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    eager: bool = False
    """True if it has an effect that must stay unseen until it is durable."""
    ordered: bool = False
    """True if it has an effect that no other effect may overtake."""


class CommitPipeline:
    """Writes records in a thread of its own and releases effects on the event loop's thread.

    If a commit fails, its records are kept and retried together with later ones until the store accepts them:
    the core has already moved on, and its state must not diverge from the durable one. Meanwhile `failure`
    has the reason, `is_undurable` the records that a crash would undo, and effects that need no new records
    pass at once.
    """

    def __init__(
        self,
        store: Store,
        release: Callable[[Sequence[Effect]], None],
        refuse: Callable[[Sequence[Effect], str], list[Effect]],
        on_change: Callable[[], None],
        measures: Measures,
    ) -> None:
        """Make a pipeline.

        Args:
            store: Keeps the records.
            release: Carries effects out.
            refuse: Called with the effects of a failed commit and the reason; carries out those that need no
                durability, and returns the others, which wait for the store.
            on_change: Called when `failure` has changed.
            measures: Counts commits.
        """
        self._store = store
        self._release = release
        self._refuse = refuse
        self._on_change = on_change
        self._measures = measures
        self._gathering = _Batch()
        self._under_way: _Batch | None = None
        self._undurable: dict[Address, Record | LazyRecord] = {}
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._lazy_timer: asyncio.TimerHandle | None = None
        self._hurry = asyncio.Event()
        # One thread: stores are not asked to be thread-safe, and commits must not overtake each other.
        self._thread = ThreadPoolExecutor(1, "dmesh-store") if store.blocking else None
        self.failure: str | None = None

    async def load(self) -> Sequence[Record]:
        """Read all records from the store."""
        if self._thread is None:
            return self._store.load()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.load)

    def submit(self, effects: Sequence[Effect]) -> None:
        """Take the effects of one event: commits its records and then releases the rest."""
        persists = [effect for effect in effects if isinstance(effect, Persist)]
        if not persists:
            if self._thread is None:
                self._release(effects)
            else:
                self._release_in_turn(effects)
            return
        records = [record for persist in persists for record in persist.records]
        others = [effect for effect in effects if not isinstance(effect, Persist)]
        if self._thread is None and all(persist.lazy for persist in persists):
            self._release(others)
            self._store.commit(_encoded(records))
        elif self._thread is None:
            self._store.commit(_encoded(records))
            self._release(others)
        elif all(persist.lazy for persist in persists):
            self._gathering.records += records
            self._release_in_turn(others, may_overtake=True)
            self._commit_soon()
        elif self.failure is not None:
            # A request that comes while the store fails is refused at once: it need not wait for the retry.
            self._gathering.records += records
            self._gathering.effects += self._refuse(others, self.failure)
        else:
            self._gathering.records += records
            self._gathering.effects += others
            self._gathering.eager = True
            self._gathering.ordered |= any(record.kind not in _UNORDERED for record in records)
            self._commit_now()

    def hold(self, effect: Effect) -> None:
        """Keep an effect until everything that was submitted is durable."""
        self._gathering.effects.append(effect)

    def is_undurable(self, cluster: str, kind: str, key: str | None = None) -> bool:
        """Return whether the store has refused this record so far, or any of its kind if `key` is None."""
        if key is not None:
            return (cluster, kind, key) in self._undurable
        return any((owner, what) == (cluster, kind) for owner, what, _ in self._undurable)

    async def drain(self) -> None:
        """Wait until everything submitted is durable and released, or cannot be made so."""
        self._closing = True
        self._hurry.set()
        if self._thread is not None and self._gathering.records:
            self._commit_now()
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Drain, and close the store."""
        await self.drain()
        if self._lazy_timer is not None:
            self._lazy_timer.cancel()
        if self._thread is None:
            self._store.close()
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        finally:
            self._thread.shutdown(wait=False)

    def _release_in_turn(self, effects: Sequence[Effect], *, may_overtake: bool = False) -> None:
        """Release effects that need no commit: at once, or after the effects on which they may depend."""
        pending = [self._gathering] if self._under_way is None else [self._gathering, self._under_way]
        wait = any(batch.ordered if may_overtake else batch.eager for batch in pending)
        if wait and self.failure is None:
            self._gathering.effects += effects
            # Later effects wait, too, so that the order stays.
            self._gathering.eager = True
        else:
            self._release(effects)

    def _commit_soon(self) -> None:
        if self._lazy_timer is None and (self._task is None or self._task.done()):
            self._lazy_timer = asyncio.get_running_loop().call_later(_LAZY, self._commit_now)

    def _commit_now(self) -> None:
        if self._lazy_timer is not None:
            self._lazy_timer.cancel()
            self._lazy_timer = None
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._commit_all(), name="dmesh-commit")

    async def _commit_all(self) -> None:
        delay = _FIRST_RETRY
        # Not before the events that are already waiting for the loop had their say: they share this commit.
        await asyncio.sleep(0)
        while self._gathering.records or self._gathering.effects:
            batch, self._gathering = self._gathering, _Batch()
            self._under_way = batch
            try:
                if batch.records:
                    failpoints.hit("commits.before_commit")
                    await self._commit(batch.records)
                    failpoints.hit("commits.after_commit")
                failpoints.hit("commits.before_release")
            except Exception as error:  # noqa: BLE001 -- whatever it is, nothing of it is sure to be durable
                self._under_way = None
                self._fail(batch, error)
                if self._closing:
                    return
                await self._pause(delay)
                delay = min(delay * 2, _LONGEST_RETRY)
            else:
                self._under_way = None
                delay = _FIRST_RETRY
                self._recover()
                self._release(batch.effects)
                if self._store.untidy:
                    await self._maintain()

    async def _commit(self, records: Sequence[Record | LazyRecord]) -> None:
        taken = 0.0

        def commit() -> None:
            nonlocal taken
            begin = time.perf_counter()
            try:
                self._store.commit(_encoded(records))
            finally:
                taken = time.perf_counter() - begin

        try:
            await self._in_thread(commit)
        finally:
            self._measures.commits.observe(taken)
        self._measures.records += len(records)

    async def _maintain(self) -> None:
        try:
            await self._in_thread(self._store.maintain)
        except Exception:  # noqa: BLE001 -- a bug: what is committed is committed, and more can be
            logs.error("store_maintenance_failed", exc_info=True)

    async def _in_thread(self, call: Callable[..., None], *args: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        reason = f"the store cannot write: {error}"
        if self.failure != reason:
            logs.error("store_failed", reason=reason, records=len(batch.records))
            self.failure = reason
            self._on_change()
        # Only the last word on each address need be kept, however long the outage.
        waiting = _latest([*batch.records, *self._gathering.records])
        held = self._refuse([*batch.effects, *self._gathering.effects], reason)
        self._gathering = _Batch(list(waiting.values()), held)
        self._undurable = waiting

    def _recover(self) -> None:
        if self.failure is not None:
            logs.info("store_recovered", after=self.failure)
            self._undurable = {}
            self.failure = None
            self._on_change()

    async def _pause(self, delay: float) -> None:
        try:
            await asyncio.wait_for(self._hurry.wait(), delay)
        except TimeoutError:
            return


def _encoded(records: Iterable[Record | LazyRecord]) -> list[Record]:
    return [record.encoded() for record in records]


def _latest(records: Iterable[Record | LazyRecord]) -> dict[Address, Record | LazyRecord]:
    latest: dict[Address, Record | LazyRecord] = {}
    for record in records:
        address = (record.cluster, record.kind, record.key)
        latest.pop(address, None)
        latest[address] = record
    return latest
