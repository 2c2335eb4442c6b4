"""The ranks of a cluster as threads of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.collectives.fake_mpi import launch
from tests.collectives.transport.harness import secure_pair

from dmesh import native
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry, Sizes, here
from dmesh.collectives.backends.tcp.local import LocalNetwork
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.tuning import SHIPPED, Tuning

LIMIT = 100.0
"""Seconds after which a test has failed; nothing comes near it unless something is broken."""


class Cluster:
    """Communicators that are connected by a local network.

    Args:
        size: How many.
        wait_policy: Of all of them.
        timeout: Of collectives, seconds.
        shm: For each rank, over and over, whether it shares memory: `native`, `no` for one that refuses,
            `without` for one that has no native core, `dedicated` for one that has connections instead, and
            `encrypted` for one whose connections are; with `@NAME` on a host of that name. Empty: no rank
            knows of shared memory.
        sizes: Of what they share.
        tuning: Of each rank, over and over.
        single_copy_from: Of all of them; see `SharedMemoryRegistry`.
        mpi: Whether all of them are in one MPI launch, a fake one.
        tls: Whether dedicated connections are encrypted, as they are if a rank is `encrypted`.
    """

    def __init__(
        self,
        size: int,
        wait_policy: WaitPolicy | None = None,
        timeout: float = LIMIT,
        shm: tuple[str, ...] = (),
        sizes: Sizes | None = None,
        tuning: tuple[Tuning, ...] = (SHIPPED,),
        single_copy_from: int | None = None,
        mpi: bool = False,
        tls: bool = False,
    ) -> None:
        self.size = size
        self.shm = shm
        self.sizes = sizes
        self.single_copy_from = single_copy_from
        self.tuning = tuning
        self.generation = 0
        quiet = WaitPolicy(announce=lambda message: None)
        self.options = {"timeout": timeout, "wait_policy": wait_policy or quiet}
        self.former: list[Communicator] = []
        self.network = LocalNetwork(
            self.size,
            dedicated=any(way.startswith(("dedicated", "encrypted")) or "@" in way for way in shm),
            make_pair=secure_pair if tls or "encrypted" in shm else socket.socketpair,
        )
        self.mpi, self.worlds = launch(size) if mpi else (None, [None] * size)
        self.communicators = [self._communicator(rank) for rank in range(self.size)]

    def _communicator(self, rank: int, **options: Any) -> Communicator:
        peers, transport = self.network.peers(rank), self.network.transport(rank)
        options = {"mpi": self.worlds[rank], "tuning": self.tuning[rank % len(self.tuning)], **options}
        if self.shm:
            way, _, host = self.shm[rank % len(self.shm)].partition("@")
            core = None if way == "without" else native.core()
            limit = 0 if way in ("no", "dedicated", "encrypted") else 1 << 30
            place = (host.encode().ljust(16), here()[1]) if host else None
            options["shared_memory"] = SharedMemoryRegistry(
                limit, core, sizes=self.sizes, host=place, single_copy_from=self.single_copy_from
            )
        return Communicator(rank, peers, transport, **{**self.options, **options})

    def replace(self, rank: int, reason: str = "killed by the test") -> Communicator:
        """Kills a rank, and lets another process take its task slot; it becomes a member by `renew`."""
        self.network.kill(rank, reason)
        self.former.append(self.communicators[rank])
        self.generation += 2  # as the epoch grows: one is lost, another one comes
        self.network.replace(rank)
        self.communicators[rank] = self._communicator(rank, joined=self.generation)
        return self.communicators[rank]

    def renew(self, *ranks: int) -> None:
        """What ranks (or all) do when they have passed a barrier together."""
        for rank in ranks or range(self.size):
            self.communicators[rank].renew(self.network.peers(rank), self.generation)

    def run(self, body: Callable[[Communicator], Any], ranks: tuple[int, ...] | None = None) -> list[Any]:
        """Runs `body` on all ranks (or some) at once; returns their results or their exceptions."""
        ranks = tuple(range(self.size)) if ranks is None else ranks
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = body(self.communicators[rank])
            except BaseException as error:  # noqa: BLE001
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"a rank hangs; done: {results}"
        return [results[rank] for rank in ranks]

    def all(self, body: Callable[[Communicator], Any]) -> list[Any]:
        """Runs `body` on all ranks; no exceptions are expected."""
        results = self.run(body)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Waits for what gives no signal of its own; returns whether it came."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def settle(self, *targets: int) -> None:
        """Waits until all ranks (or some) have heard everything that has been said to them."""
        pairs = [(source, target) for source in range(self.size) for target in targets or range(self.size)]
        assert self.wait_until(
            lambda: not any(self.network.held(*pair) for pair in pairs if pair not in self.network.holding)
        ), "messages are not delivered"

    def close(self) -> None:
        for communicator in (*self.communicators, *self.former):
            communicator.close(linger=0.0)


@contextmanager
def cluster(size: int, **options: Any) -> Iterator[Cluster]:
    """A cluster that is closed in the end."""
    made = Cluster(size, **options)
    try:
        yield made
    finally:
        made.close()
