"""Agents of one cluster, a coordinator here or in a process of its own, children that can be killed."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from tests.e2e.clients import Process
from tests.waiting import eventually, free_ports

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.retry import Patience
from dmesh_server.core.model import Limits
from dmesh_server.embedded import EmbeddedServer
from dmesh_server.embedded import start as start_server

PATIENCE = 60.0
"""Seconds after which a test has failed; nothing waits this long unless something is broken."""


def identity(index: int, size: int, cluster: str = "default", **facts: object) -> Identity:
    jobs = {"worker": tuple(f"host:{port}" for port in range(1, size + 1))}
    return Identity.of_this_process("worker", index, jobs, cluster=cluster, **facts)


class Standalone:
    """`dmesh serve` in a process of its own, which can be killed and started again at the same address."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.address = f"127.0.0.1:{free_ports(1)[0]}"  # nobody else gets it while the server is down
        self.child: Process | None = None

    def start(self) -> None:
        serve = ["-m", "dmesh", "serve", "--listen", self.address, "--no-http"]
        self.child = Process([sys.executable, *serve, *self.options], {})
        ready = self.child.wait_for("dmesh-server ready")
        self.address = next(word[5:] for word in ready.split() if word.startswith("grpc="))

    def kill(self) -> None:
        if self.child is not None:
            self.child.end()


@pytest.fixture
def limits() -> Limits:
    """Parametrize to change what the server allows. No test lasts for this lease: only connections count."""
    return Limits(lease=120.0)


@pytest.fixture
def server(limits: Limits) -> Iterator[EmbeddedServer]:
    server = start_server("127.0.0.1:0", limits)
    yield server
    server.stop(0.1)


@pytest.fixture
def standalone() -> Iterator[Callable[..., Standalone]]:
    made: list[Standalone] = []

    def make(*options: str) -> Standalone:
        made.append(Standalone(*options))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def join() -> Iterator[Callable[..., Agent]]:
    """Makes and starts agents; whatever a test leaves of them is closed."""
    made: list[Agent] = []

    def make(
        address: str,
        index: int = 0,
        size: int = 2,
        *,
        cluster: str = "default",
        start: bool = True,
        **options,
    ) -> Agent:
        options.setdefault("connect_timeout", PATIENCE)
        agent = Agent(address, identity(index, size, cluster), **options)
        made.append(agent)
        if start:
            agent.start()
        return agent

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def background() -> Iterator[Callable[..., Future]]:
    """Runs a function in a thread; returns the future of its result."""
    threads: list[threading.Thread] = []

    def run(function: Callable[..., object], *args: object, **kwargs: object) -> Future:
        future: Future = Future()

        def work() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 -- handed to whoever asks for the result
                future.set_exception(error)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return future

    yield run
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a call did not end"


SCRIPT_HEAD = """
import os, signal, sys, time
from dmesh.coordination.agent import Agent, Identity
address, index, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jobs = {"worker": tuple(f"host:{port}" for port in range(1, size + 1))}
agent = Agent(address, Identity.of_this_process("worker", index, jobs), connect_timeout=60)
def say(text):
    os.write(1, (text + "\\n").encode())
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    """Runs a script as a member of the cluster: `agent` is there, not started yet."""
    made: list[Process] = []

    def make(script: str, address: str, index: int = 1, size: int = 2) -> Process:
        program = SCRIPT_HEAD + textwrap.dedent(script)
        made.append(Process([sys.executable, "-c", program, address, str(index), str(size)], {}))
        return made[-1]

    yield make
    for child in made:
        child.end()


def arrived(agent: Agent, name: str, count: int) -> Callable[[], bool]:
    """Returns a condition: `count` tasks have arrived at the barrier."""
    return lambda: any(
        barrier.name == name and len(barrier.arrived) == count for barrier in agent.cluster_state().barriers
    )


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., None]:
    return eventually


@pytest.fixture(name="arrived")
def _arrived() -> Callable[..., Callable[[], bool]]:
    return arrived


@pytest.fixture
def quick() -> Patience:
    """Gives up soon and announces often, for tests of just that."""
    return Patience(give_up=2.0, attempt=2.0, announce_interval=0.1)
