"""Ranks in the worker processes of a Dask cluster."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dmesh._log import logger
from dmesh.engines import rank as ranks
from dmesh.engines.gang import Ending, distinct
from dmesh.engines.rank import Call, Place
from dmesh.errors import ArgumentTypeError, EngineError

if TYPE_CHECKING:
    from distributed import Client, Future

_WORKER_POLL = 5.0
"""Seconds between checks for workers that disappeared without an event."""
_REPLACEMENT_POLL = 0.2
"""Seconds between checks for a replacement of a lost worker; Dask checks as often itself."""


class DaskGang:
    """Worker processes of a Dask cluster, one for each rank.

    Args:
        client: A connected client of the cluster, not an asynchronous one.
        size: Number of ranks.

    Raises:
        ArgumentTypeError: The client is asynchronous.
        EngineError: The cluster has fewer worker processes, or its workers cannot import dmesh.
    """

    def __init__(self, client: Client, size: int) -> None:
        if client.asynchronous:
            raise ArgumentTypeError(
                "dmesh.launch blocks until its ranks end, so it cannot use an asynchronous Dask client. "
                "Create the client without asynchronous=True"
            )
        self._client = client
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._futures: dict[int, Future] = {}
        self._run = secrets.token_hex(4)
        self._started = 0
        self._watched: set[str] = set()
        found = self._usable(exclude=())
        if len(found) < size:
            raise EngineError(
                f"dmesh.launch(n={size}) needs {size} Dask workers that are separate processes, but the "
                f"cluster has {len(found)}{self._describe_unusable(found)}. "
                "Start more workers, or launch fewer ranks"
            )
        chosen = sorted(found[:size], key=lambda worker: worker[1].host)
        self._addresses = [address for address, _ in chosen]
        self.places = [place for _, place in chosen]
        for address in self._addresses:
            self._watch(address)

    def start(self, rank: int, variables: Mapping[str, str], call: Call) -> None:
        """Start a rank as a task that is pinned to its worker."""
        self._started += 1
        future = self._client.submit(
            ranks.run_rank,
            _Variables(variables),
            call.function,
            call.args,
            dict(call.kwargs),
            call.initialize,
            call.file,
            key=f"dmesh-rank-{rank}-{self._run}-{self._started}",
            workers=[self._addresses[rank]],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        self._futures[rank] = future
        future.add_done_callback(lambda done: self._events.put(("done", done)))

    def wait(self, timeout: float | None) -> Ending | None:
        """Return the next rank that ended; None after the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WORKER_POLL if deadline is None else min(_WORKER_POLL, deadline - time.monotonic())
            if left <= 0:
                return None
            try:
                kind, what = self._events.get(timeout=left)
            except queue.Empty:
                for address in set(self._addresses) - self._workers().keys():
                    self._events.put(("gone", address))
                continue
            ending = self._worker_gone(what) if kind == "gone" else self._task_done(what)
            if ending is not None:
                return ending

    def replace(self, rank: int, timeout: float) -> None:
        """Wait for a worker that runs no rank, perhaps one that Dask has not started yet."""
        deadline = time.monotonic() + timeout
        taken = {self._addresses[other] for other in self._futures}
        while not (found := self._usable(exclude=taken)):
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"rank {rank} cannot be restarted: the Dask cluster had no free worker within "
                    f"{timeout:g} s (DMESH_INIT_TIMEOUT). Start one more worker than there are ranks, or "
                    "start the workers with a nanny, which restarts them"
                )
            time.sleep(_REPLACEMENT_POLL)
        self._addresses[rank], self.places[rank] = found[0]
        self._watch(found[0][0])

    def abandon(self, cluster: str) -> None:
        """Make the running ranks leave their cluster: Dask cannot stop a running task."""
        addresses = [self._addresses[rank] for rank in self._futures]

        def end_ranks() -> None:
            # If the workers or the whole Dask cluster are gone, so are the ranks.
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                self._client.run(ranks.abandon, cluster, workers=addresses, on_error="ignore")

        # A frozen worker would never answer.
        thread = threading.Thread(target=end_ranks, name="dmesh-abandon", daemon=True)
        thread.start()
        thread.join(_WORKER_POLL)

    def close(self) -> None:
        """Cancel the tasks and unsubscribe from worker events."""
        for address in self._watched:
            with contextlib.suppress(ValueError):  # no longer subscribed
                self._client.unsubscribe_topic(address)
        if self._futures:
            self._client.cancel(list(self._futures.values()), force=True)
        self._futures.clear()

    def _task_done(self, future: Future) -> Ending | None:
        rank = next((rank for rank, known in self._futures.items() if known is future), None)
        if rank is None:
            return None  # `_worker_gone` has reported the rank
        del self._futures[rank]
        if future.cancelled():
            return Ending(rank, how="did not finish: Dask cancelled its task")
        try:
            return Ending(rank, report=future.result())
        except Exception as error:  # noqa: BLE001 - whatever Dask or unpickling raises ends this rank
            logger.debug("rank %d has no report", rank, exc_info=True)
            return Ending(rank, how=f"could not be run by Dask: {type(error).__name__}: {error}")

    def _worker_gone(self, address: str) -> Ending | None:
        rank = next((rank for rank in self._futures if self._addresses[rank] == address), None)
        if rank is None:
            return None  # the worker's rank had ended before
        future = self._futures.pop(rank)
        if future.status == "finished":  # the report is in transit, or was lost with the worker
            with contextlib.suppress(Exception):
                return Ending(rank, report=future.result(timeout=1))
        future.cancel(force=True)
        return Ending(rank, how=f"was lost: its process, the Dask worker {address}, is gone")

    def _watch(self, address: str) -> None:
        def on_event(event: tuple[float, Any]) -> None:
            if isinstance(event[1], dict) and event[1].get("action") == "remove-worker":
                self._events.put(("gone", address))

        self._client.subscribe_topic(address, on_event)
        self._watched.add(address)

    def _workers(self) -> dict[str, Any]:
        return dict(self._client.scheduler_info(n_workers=-1)["workers"])

    def _usable(self, exclude: Collection[str]) -> list[tuple[str, Place]]:
        """Return the workers that are separate processes, idle ones first."""
        workers = {address: info for address, info in self._workers().items() if address not in exclude}
        if not workers:
            return []
        try:
            asked = self._client.run(ranks.own_place, workers=list(workers), on_error="ignore")
        except ImportError as error:
            raise EngineError(
                f"the Dask workers cannot import dmesh: {error}. Install the version that is installed here"
            ) from error
        order = sorted(asked, key=lambda address: bool(workers[address].get("metrics", {}).get("executing")))
        places = [replace(asked[address], address=_host_of(address)) for address in order]
        own = ranks.own_place()
        return [(order[index], places[index]) for index in distinct(places, own)]

    def _describe_unusable(self, found: list[tuple[str, Place]]) -> str:
        others = len(self._workers()) - len(found)
        return f" (and {others} in the process of another worker or of this program)" if others else ""


class _Variables(dict[str, str]):
    """Environment variables of a rank. The repr hides the token: Dask logs the arguments of tasks."""

    def __repr__(self) -> str:
        return f"<{len(self)} variables>"


def _host_of(address: str) -> str:
    return urlsplit(address).hostname or ""
