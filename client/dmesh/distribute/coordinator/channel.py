"""Messages between the coordinator and the workers, over keys of the coordination service.

The package's docstring lists the keys. One thread sends messages, so that `schedule` waits for none, and
another one receives them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from dmesh.coordination.agent import Agent
from dmesh.coordination.waiting import Bell, Worker
from dmesh.distribute.coordinator.dispatch import WorkerId
from dmesh.errors import (
    CoordinatorUnavailableError,
    DMeshError,
    KeyExistsError,
    StrategyError,
    StrategyValueError,
)

__all__ = ["PREFIX", "Channel"]

PREFIX = "dmesh/coordinator/"
_AGAIN = 1.0
"""Seconds until the coordination service is asked again after it was away."""
_LONGEST_WAIT = 3600.0


class Channel:
    """Messages between the coordinator and the workers of a cluster.

    Args:
        agent: Session with the coordination service.
        on_ready: Called when a worker can run functions, on the channel's threads like the others.
        on_gone: Called when a worker has left, or is lost.
        on_result: Called with the outcome of a function.
        on_failure: Called when no message can be sent or received any more.

    Raises:
        StrategyValueError: There is a coordinator in this cluster already.
    """

    def __init__(
        self,
        agent: Agent,
        on_ready: Callable[[WorkerId], None],
        on_gone: Callable[[WorkerId], None],
        on_result: Callable[[WorkerId, bytes], None],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._agent = agent
        self._on_ready, self._on_gone, self._on_result = on_ready, on_gone, on_result
        self._on_failure = on_failure
        self._client = agent.identity.task.index
        self._closed = False
        self._bell = Bell()
        self._outgoing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        try:
            agent.key_value_set(f"{PREFIX}state/host", str(self._client), ephemeral=True)
        except KeyExistsError:
            host = agent.key_value_try_get(f"{PREFIX}state/host", encoding="utf-8")
            raise StrategyValueError(
                f"client {host} is the coordinator of this cluster already; close() that one first"
            ) from None
        self._number = agent.key_value_increment(f"{PREFIX}state/made")
        agent.key_value_set(f"{PREFIX}state/client", str(self._client), allow_overwrite=True)
        present = agent.key_value_list(f"{PREFIX}from/")
        self._watch = agent.watch(f"{PREFIX}from/", present.revision + 1)
        self._receiving = Worker(lambda: self._receive(dict(present)), "dmesh-coordinator-receive")
        self._sending = Worker(self._send, "dmesh-coordinator-send")

    def start(self) -> None:
        """Start the threads."""
        self._receiving.start()
        self._sending.start()

    def later(self, send: Callable[[], None]) -> None:
        """Run a function that sends messages on the sending thread."""
        self._outgoing.put(send)

    def send(self, worker: WorkerId, name: str, value: bytes) -> None:
        """Send a worker a message, which replaces an earlier one with the same name."""
        key = f"{PREFIX}to/{worker.client}/{worker.incarnation}/{name}"
        self._agent.key_value_set(key, value, allow_overwrite=True, ephemeral=True)

    def close(self, *, in_order: bool) -> None:
        """End the threads; with `in_order`, also notify the workers that there are no more functions."""
        self._closed = True
        self._bell.ring()
        self._outgoing.put(None)
        self._sending.join(_LONGEST_WAIT)
        self._watch.close()
        if not in_order:
            return
        # Before the workers are listed: one that comes later finds that it is closed.
        self._agent.key_value_set(f"{PREFIX}state/closed", str(self._number), allow_overwrite=True)
        self._agent.key_value_delete(f"{PREFIX}state/host")
        for key in self._agent.key_value_list(f"{PREFIX}from/"):
            worker, name = _sender_of(key)
            if name == "ready":
                self.send(worker, "end", str(self._number).encode())

    def _send(self) -> None:
        while (send := self._outgoing.get()) is not None:
            try:
                send()
            except DMeshError as error:
                self._on_failure(error)

    def _receive(self, present: dict[str, bytes]) -> None:
        try:
            for key, value in present.items():
                self._deliver(key, value)
            while not self._watch.closed:
                try:
                    for event in self._watch:
                        self._deliver(event.key, event.value)
                except CoordinatorUnavailableError:
                    if self._bell.wait_for(lambda: self._closed, _AGAIN):
                        return
        except DMeshError as error:
            self._on_failure(error)
        except (KeyError, TypeError, ValueError) as error:
            self._on_failure(
                StrategyError(f"a message under {PREFIX}from/ is from no worker: {error!r:.200}")
            )

    def _deliver(self, key: str, value: bytes | None) -> None:
        worker, name = _sender_of(key)
        if name == "ready" and value is not None:
            greeting = f"{self._client} {self._number}".encode()
            self.later(lambda: self.send(worker, "host", greeting))
            self._on_ready(worker)
        elif name == "ready":
            self._on_gone(worker)
        elif value is not None:
            self._on_result(worker, value)


def _sender_of(key: str) -> tuple[WorkerId, str]:
    """Return the worker that sent a message, and the message's name."""
    client, incarnation, name = key.removeprefix(f"{PREFIX}from/").split("/")
    return WorkerId(int(client), incarnation), name
