"""Between the core's decisions and the world: effects are released in order, never before they are durable.

Records that gather while one commit runs go into the next one together (group commit): a thousand clients
that register at once cost a handful of disk writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dmesh_server.core.effects import Effect, Persist, Record
from dmesh_server.store.base import Store
from dmesh_server.telemetry import logs

_FIRST_RETRY = 0.1
_LONGEST_RETRY = 5.0


@dataclass
class _Batch:
    """What goes into one commit, and what may be done after it."""

    records: list[Record] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


class CommitPipeline:
    """Writes records in a thread of its own and hands effects on, all on the event loop's thread.

    If a commit fails, its records are kept and tried again together with later ones until the store accepts
    them, for the core has already gone on: what it holds and what is durable must not part ways for good.
    Meanwhile `failure` says why, and effects that need no new records pass at once.
    """

    def __init__(
        self,
        store: Store,
        release: Callable[[Sequence[Effect]], None],
        refuse: Callable[[Sequence[Effect], str], list[Effect]],
        on_change: Callable[[], None],
    ) -> None:
        """Makes a pipeline.

        Args:
            store: Where records go.
            release: Does what effects say.
            refuse: Told of the effects of a commit that failed, and why; does what can be done at once, and
                returns those effects that have to wait until the records are durable after all.
            on_change: Called when `failure` has changed.
        """
        self._store = store
        self._release = release
        self._refuse = refuse
        self._on_change = on_change
        self._gathering = _Batch()
        self._committing = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        # One thread: stores are not asked to be thread-safe, and commits must not overtake each other.
        self._thread = ThreadPoolExecutor(1, "dmesh-store") if store.blocking else None
        self.failure: str | None = None

    async def load(self) -> Sequence[Record]:
        """Reads all records from the store."""
        if self._thread is None:
            return self._store.load()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.load)

    def submit(self, effects: Sequence[Effect]) -> None:
        """Takes the effects of one event: commits what they contain and then releases the rest."""
        records = [r for effect in effects if isinstance(effect, Persist) for r in effect.records]
        others = [effect for effect in effects if not isinstance(effect, Persist)] if records else effects
        if self._thread is None:
            if records:
                self._store.commit(records)
            self._release(others)
            return
        if not records and (self.failure is not None or not (self._committing or self._gathering.effects)):
            self._release(others)
            return
        self._gathering.records += records
        self._gathering.effects += others
        if not self._committing:
            self._committing = True
            self._task = asyncio.get_running_loop().create_task(self._commit_all(), name="dmesh-commit")

    async def drain(self) -> None:
        """Waits until everything submitted is durable and released, or cannot be made so."""
        self._closing = True
        self._hurry.set()
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Drains, and closes the store."""
        await self.drain()
        if self._thread is None:
            self._store.close()
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _commit_all(self) -> None:
        delay = _FIRST_RETRY
        try:
            # Not before the events that are already waiting for the loop had their say: they share this
            # commit.
            await asyncio.sleep(0)
            while self._gathering.records or self._gathering.effects:
                batch, self._gathering = self._gathering, _Batch()
                try:
                    if batch.records:
                        await asyncio.get_running_loop().run_in_executor(
                            self._thread, self._store.commit, batch.records
                        )
                except Exception as error:  # noqa: BLE001 -- whatever it is, nothing of it is durable
                    self._fail(batch, error)
                    if self._closing:
                        return
                    await self._pause(delay)
                    delay = min(delay * 2, _LONGEST_RETRY)
                else:
                    delay = _FIRST_RETRY
                    self._recover()
                    self._release(batch.effects)
        finally:
            self._committing = False

    def _fail(self, batch: _Batch, error: Exception) -> None:
        reason = f"the store cannot write: {error}"
        if self.failure != reason:
            logs.error("store_failed", reason=reason, records=len(batch.records))
            self.failure = reason
            self._on_change()
        self._gathering.records[:0] = batch.records
        self._gathering.effects[:] = self._refuse(batch.effects + self._gathering.effects, reason)

    def _recover(self) -> None:
        if self.failure is not None:
            logs.info("store_recovered", after=self.failure)
            self.failure = None
            self._on_change()

    async def _pause(self, delay: float) -> None:
        try:
            await asyncio.wait_for(self._hurry.wait(), delay)
        except TimeoutError:
            return
