"""A cluster inside one process, for the tests of programs that use dmesh."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dmesh.collectives.api import World
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.local import LocalNetwork
from dmesh.collectives.communicator import Communicator
from dmesh.config.settings import Settings
from dmesh.coordination.agent import Agent
from dmesh.coordination.agent_source import AgentSource
from dmesh.coordination.identity import Identity
from dmesh.coordination.members import Device, Member, Members, MemberState
from dmesh.coordination.process import new_incarnation, this_process
from dmesh.coordination.server import HostedServer
from dmesh.devices.device import LogicalDevices
from dmesh.errors import (
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    DMeshError,
    MissingExtraError,
)
from dmesh.runtime import context
from dmesh.runtime.context import Context, Process
from dmesh.testing.keys import FakeKeys
from dmesh.tpu.accelerator import TpuSystem
from dmesh.tpu.table import devices_of, topology_of

_GOODBYE = 2.0
_AFTER_FAILURE = 10.0
"""Seconds that the other ranks have to end after one of them has raised."""


class RankHangsError(DMeshError, TimeoutError):
    """A rank's program did not end in time; the message has its stack."""


class RankKilledError(DMeshError, RuntimeError):
    """Placeholder in a list of results for a rank that the test killed."""


@dataclass
class _Rank:
    """One fake process."""

    process: Process
    communicator: Communicator
    identity: Identity
    agent: Agent | None = None
    dead: bool = False
    killed: bool = False


@dataclass
class _Call:
    """One rank's run of a program."""

    rank: int
    thread: threading.Thread | None = None
    value: Any = None
    error: BaseException | None = None
    order: int = -1


class FakeCluster:
    """Runs a dmesh program as all clients of a cluster: one thread each, no ports, no processes, no set-up.

    In these threads the public functions act as in the process of a client: `dmesh.client_id()`,
    `dmesh.create_distributed_mesh`, `dmesh.collectives`, `dmesh.coordination`;
    `dmesh.initialize_accelerator_system()` and its counterpart find that all is done. Collectives go through
    memory, with the semantics of the real transport; coordination goes to a real coordination server in this
    process, started at the first use. Debuggers, coverage and monkeypatching see everything.

    ```python
    from dmesh.testing import FakeCluster

    def test_everybody_gets_the_mean():
        with FakeCluster(4) as cluster:
            means = cluster.run(my_package.mean_of_ranks, 1.5)
        assert means == [3.0] * 4

    def test_a_lost_worker_is_reported():
        with FakeCluster(3) as cluster:
            cluster.kill(2)
            outcomes = cluster.run(my_package.train, ranks=[0, 1], check=False)
        assert all(isinstance(outcome, dmesh.errors.PeerLostError) for outcome in outcomes)
    ```

    What threads cannot have of their own is shared: module globals, the random state of NumPy, signals. For
    real processes, use `dmesh run -n 4 script.py`. Threads that the program itself starts belong to no rank,
    unless it starts them in `contextvars.copy_context().run`.

    Args:
        size: How many clients.
        num_cpu_devices: Logical CPU devices of each.
        job_name: Name of their job.
        timeout: Seconds that a collective may take if the program says nothing else.
        environ: More variables that the programs find in `DMESH_*`, `DTENSOR_*` and `TPU_*`. With
            `TPU_ACCELERATOR_TYPE`, the clients share that TPU system.

    Raises:
        ConfigurationError: An argument has an impossible value.
    """

    def __init__(
        self,
        size: int,
        *,
        num_cpu_devices: int = 1,
        job_name: str = "worker",
        timeout: float = 60.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        for name, value in (("size", size), ("num_cpu_devices", num_cpu_devices)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
                raise ConfigurationError(
                    f"{name} of a FakeCluster is an integer from 1 to 1024, not {value!r}"
                )
        self.size = size
        self._network = LocalNetwork(size)
        self._lock = threading.Lock()
        self._server: HostedServer | None = None
        self._failures = 0
        self._closed = False
        jobs = ",".join(f"fake-host:{port}" for port in range(1, size + 1))
        shared = {
            "DTENSOR_JOBS": jobs,
            "DTENSOR_JOB_NAME": job_name,
            "DMESH_NUM_CPU_DEVICES": str(num_cpu_devices),
            "DMESH_COLLECTIVE_TIMEOUT": str(timeout),
            **(environ or {}),
        }
        system = TpuSystem.from_environment(shared)
        tpus = [() if system is None else devices_of(system, rank, size) for rank in range(size)]
        num_cpu_devices = max(num_cpu_devices, len(tpus[0]))
        devices = [(*(Device("CPU", i) for i in range(num_cpu_devices)), *tpus[rank]) for rank in range(size)]
        settings = [Settings.load({**shared, "DTENSOR_CLIENT_ID": str(rank)}) for rank in range(size)]
        identities = [
            Identity(
                cluster=settings[rank].cluster,
                job=job_name,
                index=rank,
                incarnation=new_incarnation(),
                jobs={job_name: settings[rank].jobs},
                process=this_process(),
                devices=devices[rank],
                peer_addresses=(settings[rank].jobs[rank],),
            )
            for rank in range(size)
        ]
        members = tuple(
            Member(
                job_name, rank, own.incarnation, MemberState.CONNECTED, own.process, devices[rank],
                own.peer_addresses,
            )
            for rank, own in enumerate(identities)
        )  # fmt: skip
        topology = None if system is None else topology_of(members)
        network = self._network
        peers = [
            Peer(
                member.rank, member.peer_addresses, network.transport(member.rank).incarnation,
                member.describe(),
            )
            for member in members
        ]  # fmt: skip
        self._ranks: list[_Rank] = []
        keys = FakeKeys()
        for rank in range(size):
            transport, timeout = self._network.transport(rank), settings[rank].collective_timeout
            communicator = Communicator(rank, peers, transport, timeout, store=lambda: keys)
            state = Context(
                rank,
                settings[rank],
                LogicalDevices(
                    "CPU" if system is None else "TPU",
                    {"CPU": num_cpu_devices, "GPU": 0, "TPU": len(tpus[rank])},
                ),
                Members(members),
                topology,
                communicator,
                World(communicator.world),
                AgentSource(start=self._opener(rank)),
            )
            environment = {**shared, "DTENSOR_CLIENT_ID": str(rank)}
            self._ranks.append(_Rank(Process(state, environment), communicator, identities[rank]))

    # Programs -----------------------------------------------------------------------------------------------

    def run(
        self,
        program: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        check: bool = True,
        limit: float = 120.0,
    ) -> list[Any]:
        """Runs `program(*args)` as every client at once and returns what each returned, by rank.

        A rank whose program raises has died, as its process would have: the others are notified, and it
        cannot run again. A rank that returned may run the next program.

        Args:
            program: A function; what it calls of dmesh acts for its rank.
            *args: Its arguments, the same for all.
            ranks: Which clients run it; by default all that are alive.
            check: Raise what the first rank to fail raised, with a note that says which; if False, exceptions
                stand in the list in place of results.
            limit: Seconds until a program that has not ended is taken to hang.

        Raises:
            RankHangsError: A program did not end; the message has the stacks.
            ConfigurationError: A rank is named that does not exist, or is dead.
        """
        calls = [_Call(rank) for rank in self._choose(ranks)]
        for call in calls:
            # Each in a context of its own, where it is a process of its own.
            own = contextvars.copy_context()
            call.thread = threading.Thread(
                target=own.run,
                args=(self._work, call, program, args),
                name=f"dmesh-fake-{call.rank}",
                daemon=True,
            )
        for call in calls:
            assert call.thread is not None
            call.thread.start()
        self._join(calls, limit)
        failed = sorted((call for call in calls if call.error is not None), key=lambda call: call.order)
        if check:
            for call in failed:
                if not isinstance(call.error, RankKilledError) and call.error is not None:
                    call.error.add_note(
                        f"raised by rank {call.rank} of a FakeCluster of {self.size}"
                        + "".join(f"; then rank {c.rank}: {c.error!r}" for c in failed if c is not call)
                    )
                    raise call.error
        return [call.error if call.error is not None else call.value for call in calls]

    # Faults -------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """Ends a rank as kill -9 would: the others lose it, and its program's calls of dmesh fail."""
        [rank] = self._choose([rank])
        victim = self._ranks[rank]
        victim.killed = victim.dead = True
        self._network.kill(rank)
        with self._lock:
            agent = victim.agent
        if agent is not None:
            agent.close()

    def hold(self, source: int, destination: int) -> None:
        """Keeps what `source` says to `destination` in collectives from arriving, until `release`."""
        self._check_ranks((source, destination))
        self._network.hold(source, destination)

    def release(self, source: int, destination: int) -> None:
        """Lets arrive, in order, what was held and what comes from now on."""
        self._check_ranks((source, destination))
        self._network.release(source, destination)

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all ranks and the coordination server, if one was started. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            server = self._server
        for rank in self._ranks:
            if rank.agent is not None and not rank.dead:
                with contextlib.suppress(CoordinationError):
                    rank.agent.leave(timeout=_GOODBYE)
            rank.communicator.close(linger=0.0)
        if server is not None:
            server.stop(grace=0.1)

    def __enter__(self) -> FakeCluster:
        """Returns the cluster, which is ready."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    # Inside -------------------------------------------------------------------------------------------------

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
                raise ConfigurationError(f"there is no rank {rank!r}: the cluster has 0 to {self.size - 1}")

    def _choose(self, ranks: Iterable[int] | None) -> list[int]:
        if self._closed:
            raise ConfigurationError("the FakeCluster is closed")
        if ranks is None:
            return [rank for rank in range(self.size) if not self._ranks[rank].dead]
        chosen = list(ranks)
        self._check_ranks(chosen)
        for rank in chosen:
            if self._ranks[rank].dead:
                raise ConfigurationError(f"rank {rank} is dead: it was killed, or its program raised")
        if len(set(chosen)) != len(chosen):
            raise ConfigurationError(f"a rank is named twice: {chosen}")
        return chosen

    def _work(self, call: _Call, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        rank = self._ranks[call.rank]
        context.process.set(rank.process)
        try:
            call.value = program(*args)
        except BaseException as error:  # noqa: BLE001 -- handed to whoever called `run`
            with self._lock:  # before the others are notified, and fail for this reason
                call.error, call.order, self._failures = error, self._failures, self._failures + 1
            self._die(rank, error)
        if rank.killed:
            call.error = RankKilledError(f"rank {call.rank} was killed by the test")

    def _die(self, rank: _Rank, error: BaseException) -> None:
        """Does what a process does that ends with an exception: it tells the others why."""
        if rank.dead:
            return
        rank.dead = True
        reason = f"{type(error).__name__}: {error}".rstrip(": ")[:1000]
        if rank.agent is not None:
            with contextlib.suppress(CoordinationError):
                rank.agent.leave(reason, timeout=_GOODBYE)
        rank.communicator.close(0.0, reason)

    def _join(self, calls: list[_Call], limit: float) -> None:
        deadline = time.monotonic() + limit
        for call in calls:
            assert call.thread is not None
            call.thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [call for call in calls if call.thread is not None and call.thread.is_alive()]
        if not hanging:
            return
        frames = sys._current_frames()
        stacks = [
            f"rank {call.rank}:\n{''.join(traceback.format_stack(frames[call.thread.ident]))}"
            for call in hanging
            if call.thread is not None and call.thread.ident in frames
        ]
        # Nobody may go on in the background of the tests that follow.
        for call in hanging:
            self._die(self._ranks[call.rank], TimeoutError(f"did not end within {limit:g} s"))
        for call in hanging:
            if call.thread is not None:
                call.thread.join(_AFTER_FAILURE)
        raise RankHangsError(
            f"{', '.join(f'rank {call.rank}' for call in hanging)} of {self.size} did not end within "
            f"{limit:g} s; they were here:\n" + "\n".join(stacks)
        )

    # Coordination -------------------------------------------------------------------------------------------

    def _opener(self, rank: int) -> Callable[[], tuple[Agent, Callable[[], None]]]:
        return lambda: (self._agent(rank), lambda: None)

    def _agent(self, rank: int) -> Agent:
        with self._lock:
            if self._closed:
                raise CoordinatorUnavailableError("the FakeCluster is closed")
            if self._server is None:
                self._server = _start_server()
                for other in self._ranks:
                    # All at once: whoever waits for another one finds it there, or dead.
                    other.agent = _join(self._server.address, other)
                    if other.dead:
                        other.agent.close()
            agent = self._ranks[rank].agent
        assert agent is not None
        return agent


def _start_server() -> HostedServer:
    try:
        from dmesh_server.embedded import start
    except ImportError as error:
        raise MissingExtraError(f"the coordination server cannot be imported: {error}") from error
    return start("127.0.0.1:0")


def _join(address: str, rank: _Rank) -> Agent:
    agent = Agent(address, rank.identity)
    agent.start()
    communicator = rank.communicator

    def on_departure(member: Member) -> None:
        communicator.lose(member.rank, member.reason or "it has left the cluster", hearsay=True)

    def on_failure(error: CoordinationError) -> None:
        if not isinstance(error, CoordinatorUnavailableError):
            communicator.shut_off(str(error))

    agent.add_departure_listener(on_departure)
    agent.add_failure_listener(on_failure)
    return agent
