"""Loss of the coordinator's store: how threads learn of it, and which keys are set again.

A coordinator may come back with a store that lacks data that this process has seen: it is empty, an older
copy, or another cluster's. The session notices that when it registers again. No thread goes on as if nothing
had happened: every call under way and every watch fails with a `StoreLostError`, and so does the next call of
every thread. Keys that this process owns are set again before any thread gets the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination.registration import Registration
from dmesh.coordination.waiting import Bell, Worker
from dmesh.errors import CoordinatorUnavailableError, DMeshError, StoreLostError
from dmesh.v1 import coordination_pb2 as pb

_LOOK = 0.5
"""Seconds between two looks at the session while keys are set again."""


def loss_between(before: Registration, now: Registration, address: str) -> str:
    """Describe the loss between two registrations of this process; empty if nothing was lost.

    Args:
        before: The earlier one.
        now: The later one.
        address: HOST:PORT of the coordinator.
    """
    same_cluster = now.cluster_incarnation == before.cluster_incarnation
    same_store = now.store_id == before.store_id
    if same_cluster and same_store:
        return ""
    if same_cluster:
        what, gone = "its store is an older copy", "The latest changes of keys and counters are gone"
    elif same_store:
        what = "all members of this cluster had departed, this process included, so that it began anew"
        gone = "All its keys and counters are gone"
    else:
        what = "its store does not have this cluster: it is empty, or another one"
        gone = "All its keys and counters are gone"
    return (
        f"the coordination server at {address} came back, but {what}. {gone}, and watches cannot go on. "
        "Later calls use the keys that there are: go on from a checkpoint, or set again what the program "
        "needs. A server with --data-dir keeps its store."
    )


def refused_by(address: str, message: str) -> str:
    """Describe that the coordinator's store has no place for this process."""
    return f"the coordination server at {address} came back, but {message}"


def revision_of(reply: pb.KeyValueReply) -> int:
    """Return the revision of the store that an answer tells; 0 if it tells none."""
    kind = reply.WhichOneof("response")
    if kind is None or kind == "error":
        return 0
    response = getattr(reply, kind)
    revision: int = response.kv.mod_revision if kind == "get" else response.revision
    return revision


class LossSource(Protocol):
    """Session that notices losses."""

    @property
    def store_losses(self) -> int:
        """Number of losses so far."""

    @property
    def store_loss(self) -> str:
        """Description of the latest loss."""

    def check(self) -> None:
        """Raise the session's error."""


class OwnedKeys:
    """Keys that this process owns: set again whenever the coordinator has lost its store. Thread-safe.

    Args:
        session: Notices losses.
        put: Sets a key, whatever it had before; called on a thread of its own.
    """

    def __init__(self, session: LossSource, put: Callable[[str, bytes], object]) -> None:
        self._session = session
        self._put = put
        self._lock = Lock()
        self._values: dict[str, bytes] = {}
        self._bell = Bell()
        self._settled = 0
        self._running = False
        self._outcome = ""

    def keep(self, key: str, value: bytes) -> None:
        """Note a key that this process owns, with its value."""
        with self._lock:
            self._values[key] = value

    def forget(self, key: str, *, is_prefix: bool = False) -> None:
        """Note that this process does not own a key, or any with a prefix."""
        with self._lock:
            gone = [name for name in self._values if name.startswith(key)] if is_prefix else [key]
            for name in gone:
                self._values.pop(name, None)

    def store_lost(self) -> None:
        """Begin to set all keys again, on a thread of its own."""
        with self._lock:
            if self._running:  # it looks once more when it is done
                return
            if not self._values:
                self._settled, self._outcome = self._session.store_losses, ""
                self._bell.ring()
                return
            self._running = True
        Worker(self._run, "dmesh-owned-keys").start()

    def wait(self, losses: int) -> str:
        """Wait until the keys were set again after that many losses; return what came of it, in words."""
        while not self._bell.wait_for(lambda: self._settled >= losses, _LOOK):
            self._session.check()
        with self._lock:
            return self._outcome

    def _run(self) -> None:
        while True:
            losses = self._session.store_losses
            with self._lock:
                values = dict(self._values)
            outcome = self._put_all(values)
            with self._lock:
                if losses == self._session.store_losses:
                    self._settled, self._outcome, self._running = losses, outcome, False
                    break
        self._bell.ring()

    def _put_all(self, values: dict[str, bytes]) -> str:
        done, trouble = 0, ""
        for key, value in values.items():
            try:
                self._put(key, value)
            except StoreLostError:
                return ""  # the caller begins anew
            except DMeshError as error:
                logger.warning("key %r, which this process owns, was not set again: %s", key, error)
                trouble = f": {error}"
                if isinstance(error, CoordinatorUnavailableError):
                    break
            else:
                done += 1
        if trouble:
            return f" Of {len(values)} keys that this process owns {done} were set again{trouble}."
        if not done:
            return ""
        keys = "key that this process owns was" if done == 1 else "keys that this process owns were"
        return f" {done} {keys} set again."


class LossWitness:
    """Tells every thread once that the store was lost. Thread-safe.

    Args:
        session: Notices losses.
        settle: Waits until what follows from that many losses is done; returns words about it.
    """

    def __init__(self, session: LossSource, settle: Callable[[int], str] = lambda losses: "") -> None:
        self._session = session
        self._settle = settle
        self._reported = 0
        self._thread = threading.local()

    def begin(self) -> int:
        """Begin a call; return the number of losses so far.

        Raises:
            StoreLostError: This thread has not raised the latest loss yet; or it is new, and no thread has.
        """
        losses = self._session.store_losses
        if getattr(self._thread, "reported", self._reported) < losses:
            self._raise_loss(losses)
        self._thread.reported = losses
        return losses

    def check(self, begun: int) -> None:
        """Raise a `StoreLostError` if the store was lost since a call began with `begun` losses."""
        losses = self._session.store_losses
        if losses != begun:
            self._raise_loss(losses)

    def accept(self) -> None:
        """Note that this thread knows of all losses so far."""
        self._thread.reported = self._session.store_losses

    def error(self, losses: int) -> StoreLostError:
        """Make the error for the latest of that many losses, when what follows from it is done."""
        return StoreLostError(f"{self._session.store_loss}{self._settle(losses)}")

    def _raise_loss(self, losses: int) -> None:
        error = self.error(losses)
        self._thread.reported = losses
        self._reported = max(self._reported, losses)
        raise error
