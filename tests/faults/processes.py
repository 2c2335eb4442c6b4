"""Server and client processes that a test starts, kills, freezes and talks to.

A `ServerProcess` is `dmesh serve` on a fixed port, so that it can be killed and started again at the same
address. A `ClientProcess` runs `worker.py`: it is told by lines of JSON what to do, and answers in the same
way; see `ClientProcess.do`. What either writes to stderr goes to a file in the test's artefact directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.e2e import forkserver
from tests.waiting import eventually

from dmesh_server.core.model import Limits

PATIENCE = float(os.environ.get("DMESH_FAULTS_PATIENCE") or 90.0)
"""Seconds after which a test has failed; nothing waits this long unless something is broken."""

LEASE, INTERVAL = Limits().lease, Limits().heartbeat_interval
"""Default lease and heartbeat interval of a server, seconds."""
LONG_LEASE = ("--lease", "600")
"""For tests with raw clients, which send no heartbeats, about other things than who is lost."""

WORKER = Path(__file__).with_name("worker.py")


class Spawned:
    """A process of the test.

    Args:
        name: For messages and for the names of its artefacts.
        arguments: What to run.
        log: File that its stderr is added to.
        environ: Variables on top of the test's own.
        pipe: Whether its standard input is a pipe.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environ: Mapping[str, str], pipe: bool = False
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            errors.write(f"--- {name}: {' '.join(arguments)}\n".encode())
            errors.flush()
            self._process = forkserver.start(
                arguments,
                {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environ},
                stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                stderr=errors,
            )
        self.pid = self._process.pid
        self.statistics = psutil.Process(self.pid)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def err(self) -> str:
        """All that it (and its predecessors with the same file) wrote to stderr."""
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.running:
            self._process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.send(signal.SIGSTOP)
        eventually(lambda: self.statistics.status() == psutil.STATUS_STOPPED, f"{self.name} to be stopped")

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Waits for the end; returns the exit code, negative for a signal."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGABRT)  # faulthandler writes the stacks of all threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise AssertionError(f"{self.name} still runs after {timeout:g} s\n{self.err[-4000:]}") from None

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait(PATIENCE)
        self.close_stdin()

    def close_stdin(self) -> None:
        """Closes its standard input, if it has one."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def size(self) -> dict[str, int]:
        """What it holds: resident bytes, file descriptors, threads."""
        with self.statistics.oneshot():
            return {
                "rss": self.statistics.memory_info().rss,
                "fds": self.statistics.num_fds(),
                "threads": self.statistics.num_threads(),
            }


class ServerProcess:
    """`dmesh serve` on a fixed port.

    Args:
        artefacts: Directory for its stderr (`server-NAME.log`), which all its lives share.
        options: More flags of `dmesh serve`.
        data_dir: Where its state is; None for `--memory`.
        host: Address to listen on.
        port: Port to listen on; None for a free one, which stays the same for all generations.
        environ: Variables on top of the test's own (failpoints, LD_PRELOAD ...).
        prefix: Put in front of the command line, e.g. `ip netns exec NAME`; must `exec` what follows.
        http: Whether the REST side listens, too (`http_address`).
        name: For messages and artefacts.
    """

    def __init__(
        self,
        artefacts: Path,
        *options: str,
        data_dir: Path | None,
        host: str = "127.0.0.1",
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        http: bool = False,
        name: str = "server",
    ) -> None:
        from tests.e2e.clients import free_ports

        self.data_dir = data_dir
        self.options = list(options)
        self.environ = dict(environ or {})
        self.prefix = list(prefix)
        self.name = name
        first, second = free_ports(2)
        self.port = port or first
        self.address = f"{host}:{self.port}"
        self.http_address = f"{host}:{second}" if http else None
        self.lives = 0
        """How many times it was started."""
        self.ready_at = 0.0
        """When it last said that it is ready (`time.monotonic`)."""
        self._log = artefacts / f"{name}.log"
        self._process: Spawned | None = None
        self._ready = threading.Event()

    @property
    def process(self) -> Spawned:
        """The running process (or the last one)."""
        assert self._process is not None, "the server was never started"
        return self._process

    @property
    def err(self) -> str:
        """What all its lives wrote to stderr."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def launch(self) -> None:
        """Starts it without waiting for anything."""
        assert self._process is None or not self._process.running, "the server runs already"
        kept = ("--memory",) if self.data_dir is None else ("--data-dir", str(self.data_dir))
        web = ("--no-http",) if self.http_address is None else ("--http", self.http_address)
        self._ready = threading.Event()
        self._process = Spawned(
            self.name,
            [
                *self.prefix, sys.executable, "-m", "dmesh", "serve",
                "--listen", self.address, *web, *kept, *self.options,
            ],
            self._log,
            self.environ,
        )  # fmt: skip
        self.lives += 1
        threading.Thread(target=self._read, args=(self._process, self._ready), daemon=True).start()

    def _read(self, process: Spawned, ready: threading.Event) -> None:
        stream = process._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                if line.startswith(b"dmesh-server ready"):
                    self.ready_at = time.monotonic()
                    ready.set()
        ready.set()

    def start(self) -> ServerProcess:
        """Starts it; returns when it is ready."""
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Waits until it has said that it is ready."""
        deadline = time.monotonic() + PATIENCE
        while not self._ready.wait(0.05):
            assert time.monotonic() < deadline, f"the server is not ready\n{self.err[-4000:]}"
        assert self.process.running, f"the server ended ({self.process.wait()})\n{self.err[-4000:]}"

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        if self._process is not None:
            self._process.kill()

    def restart(self, down: float = 0.0) -> None:
        """kill -9, an absence of `down` seconds, and a restart at the same address with the same data."""
        self.kill()
        if down:
            time.sleep(down)  # the time that the server is away is what is injected
        self.start()

    def terminate(self, number: int = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Asks it to stop; returns its exit code."""
        self.process.send(number)
        return self.process.wait(timeout)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.thaw()

    @property
    def size(self) -> dict[str, int]:
        """Resident bytes, file descriptors and threads of the running process."""
        return self.process.size


class RemoteError(Exception):
    """What a client raised, as its process told it.

    Attributes:
        kind: Name of the class.
        kinds: Names of all its base classes, itself included: `"BarrierError" in error.kinds`.
        message: `str` of it.
        members: What its `members` says: dictionaries with rank, host, pid, state, last_seen_age, reason ...
        fields: Its other attributes that are numbers or texts, e.g. `rank`.
        at: When it was raised, `time.monotonic` (one clock for all processes of a machine).
    """

    def __init__(self, client: str, told: dict[str, Any]) -> None:
        super().__init__(f"{client}: {told['kind']}: {told['message']}")
        self.kind: str = told["kind"]
        self.kinds: list[str] = told["kinds"]
        self.message: str = told["message"]
        self.members: list[dict[str, Any]] = told["members"]
        self.fields: dict[str, Any] = told["fields"]
        self.at: float = told["at"]


@dataclass(frozen=True)
class Answer:
    """What a client answered, and when."""

    value: Any
    """The expression's value: JSON's types; bytes come back as `str`, other objects as their repr."""
    started: float
    """When it began, `time.monotonic` of the client."""
    ended: float
    """When it ended."""


class ClientProcess:
    """A process with a `dmesh.coordination.agent.Agent`, or a whole SDK, that does what it is told.

    Args:
        artefacts: Directory for its stderr (`NAME.log`).
        index: Client id.
        size: How many clients there are.
        address: HOST:PORT of the server.
        sdk: Call `dmesh.initialize_accelerator_system()` instead of making an `Agent` alone.
        ports: With `sdk`, the ports of all clients (`free_ports(size)`).
        host: With `sdk`, the address at which peers reach this client.
        cluster: Name of the cluster.
        environ: Variables on top of the test's own.
        prefix: Put in front of the command line; must `exec` what follows.
        options: Keyword arguments of `Agent`, as Python source, e.g. "patience=Patience(give_up=5)".
        settings: Keyword arguments of `ClusterSettings`, as Python source; not with `sdk`: set DMESH_*.
        name: For messages and artefacts.
    """

    def __init__(
        self,
        artefacts: Path,
        index: int,
        size: int,
        address: str,
        *,
        sdk: bool = False,
        ports: Sequence[int] = (),
        hosts: Sequence[str] = (),
        cluster: str = "default",
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        options: str = "",
        settings: str = "",
        name: str | None = None,
    ) -> None:
        self.index = index
        self.name = name or f"client-{index}"
        variables = {"FAULTS_OPTIONS": options, "FAULTS_SETTINGS": settings, **(environ or {})}
        if sdk:
            hosts = hosts or ["127.0.0.1"] * size
            variables = {
                "DTENSOR_JOBS": ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)),
                "DTENSOR_CLIENT_ID": str(index),
                "DMESH_COORDINATOR": address,
                "DMESH_CLUSTER": cluster,
                **variables,
            }
        self.events: list[dict[str, Any]] = []
        """What it was told by the way: {"event": "departed" | "failure" | "line", "at": ..., ...}."""
        self._changed = threading.Condition()
        self._ordering = threading.Lock()
        self._answers: dict[int, Future[Answer]] = {}
        self._next = 1
        self._ended = False
        self.process = Spawned(
            self.name,
            [*prefix, sys.executable, str(WORKER), "sdk" if sdk else "agent", address, str(index), str(size),
             cluster],
            artefacts / f"{self.name}.log",
            variables,
            pipe=True,
        )  # fmt: skip
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # What it does -------------------------------------------------------------------------------------------

    def submit(self, source: str, *, thread: bool = False) -> Future[Answer]:
        """Has it run Python source; returns at once.

        The source is an expression, whose value is the answer, or statements, which may set `result`. Its
        names: `agent`, `dmesh`, `np`, `os`, `signal`, `sys`, `threading`, `time`, `say(**event)` and
        everything that earlier sources defined. It runs in the client's main thread, one after the other.

        Args:
            source: Python.
            thread: Run it in a new thread instead.
        """
        with self._changed:
            number, self._next = self._next, self._next + 1
            future: Future[Answer] = Future()
            if self._ended:
                future.set_exception(AssertionError(f"{self.name} has ended\n{self.process.err[-3000:]}"))
                return future
            self._answers[number] = future
        stdin = self.process._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reader fails the future
            order = json.dumps({"id": number, "source": source, "thread": thread}).encode() + b"\n"
            with self._ordering:
                while order:  # a pipe may take less than all of it
                    order = order[os.write(stdin.fileno(), order) :]
        return future

    def do(self, source: str, *, thread: bool = False, timeout: float = PATIENCE) -> Any:
        """Has it run Python source and returns the value; see `submit`.

        Raises:
            RemoteError: The source raised.
        """
        try:
            return self.submit(source, thread=thread).result(timeout).value
        except TimeoutError:
            raise AssertionError(
                f"{self.name} does not answer {source!r}\n{self.process.err[-4000:]}"
            ) from None

    def join(self, timeout: float = PATIENCE) -> ClientProcess:
        """Joins the cluster (with `sdk`: waits for all its clients)."""
        self.do("join()", timeout=timeout)
        return self

    def wait_event(self, kind: str, /, timeout: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """Waits for an event of this kind with these fields; returns it. Earlier ones count."""

        def find() -> dict[str, Any] | None:
            wanted = {"event": kind, **fields}
            return next((event for event in self.events if wanted.items() <= event.items()), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._ended, timeout)
            event = find()
        assert event is not None, (
            f"{self.name}: no event {kind} {fields} within {timeout:g} s; it was told {self.events}\n"
            f"{self.process.err[-4000:]}"
        )
        return event

    def told(self, kind: str, /, **fields: Any) -> list[dict[str, Any]]:
        """The events of this kind with these fields so far."""
        with self._changed:
            return [event for event in self.events if {"event": kind, **fields}.items() <= event.items()]

    # What becomes of it -------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.thaw()

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self.process.kill()
        self._reader.join(PATIENCE)

    def end(self, timeout: float = PATIENCE) -> int:
        """Closes its standard input, so that it ends after what it does now; returns the exit code."""
        self.process.close_stdin()
        return self.process.wait(timeout)

    @property
    def size(self) -> dict[str, int]:
        """Resident bytes, file descriptors and threads."""
        return self.process.size

    def _read(self) -> None:
        stream = self.process._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                try:
                    told = json.loads(line)
                    assert isinstance(told, dict)
                except (ValueError, AssertionError):
                    told = {"event": "line", "text": line.decode(errors="replace").rstrip("\n")}
                self._take(told)
        with self._changed:
            self._ended = True
            left, self._answers = list(self._answers.values()), {}
            self._changed.notify_all()
        for future in left:
            future.set_exception(AssertionError(f"{self.name} ended\n{self.process.err[-3000:]}"))

    def _take(self, told: dict[str, Any]) -> None:
        with self._changed:
            if "event" in told:
                self.events.append(told)
                self._changed.notify_all()
                return
            future = self._answers.pop(told["id"])
        if "error" in told:
            future.set_exception(RemoteError(self.name, told["error"]))
        else:
            future.set_result(Answer(told["value"], told["started"], told["ended"]))


def results(futures: Sequence[Future[Answer]], timeout: float = PATIENCE) -> list[Answer]:
    """Waits for all; raises the first error."""
    deadline = time.monotonic() + timeout
    return [future.result(max(0.1, deadline - time.monotonic())) for future in futures]


def errors(futures: Sequence[Future[Answer]], timeout: float = PATIENCE) -> list[RemoteError]:
    """Waits for all; every one must raise."""
    deadline = time.monotonic() + timeout
    raised = []
    for future in futures:
        error = future.exception(max(0.1, deadline - time.monotonic()))
        assert isinstance(error, RemoteError), f"expected an error, got {error!r} / {future}"
        raised.append(error)
    return raised
