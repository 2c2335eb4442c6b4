"""The launcher's side of its agents: one connection a host, and the clients behind it."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmesh._version import __version__
from dmesh.config.addresses import check_port
from dmesh.errors import HostError
from dmesh.launcher.error_output import ErrorOutput
from dmesh.launcher.frames import Decoder, Frame, frame
from dmesh.launcher.hosts import Host, Way
from dmesh.launcher.labels import Output
from dmesh.launcher.orphans import Guard
from dmesh.launcher.outbox import Outbox
from dmesh.launcher.plan import ClientPlan
from dmesh.launcher.process import Client, Stream, Terminal

_CHUNK = 1 << 18
_LONGEST_LINE = 500
_END_GRACE = 2.0
"""Seconds that ssh or srun have to end once the agent has closed the connection."""
SILENCE = 120.0
"""Seconds of silence after which the other side counts as gone."""
KILL_PATIENCE = 10.0
"""Seconds in which an agent must kill its clients when asked to."""
_LOST = 255
"""Exit code of clients of whose end nothing is known: ssh's own for a lost connection."""


class RemoteClient(Client):
    """A client on another host, as its agent tells of it.

    Args:
        plan: What to start.
        terminal: Where its output goes.
        connection: To the host's agent.
        now: Current time, seconds.
        restarts: How often this rank was started before.
    """

    def __init__(
        self, plan: ClientPlan, terminal: Terminal, connection: HostConnection, now: float, restarts: int
    ) -> None:
        super().__init__(plan, now, restarts)
        self._connection = connection
        self.gone = False
        """True once nothing is left of it."""
        self.streams: Sequence[Stream] = [Stream(sink) for sink in terminal.sinks(plan, self.errors)]

    def _deliver(self, number: signal.Signals) -> bool:
        if self.gone:
            return False
        self._connection.signal(self.rank, number)
        return True

    def group_is_left(self) -> bool:
        """Return whether the agent knows of something that is left of it."""
        return not self.gone

    def finish(self) -> bool:
        """Have its remaining processes killed; return False until that is done."""
        if not self.gone:
            self._connection.send(Frame("finish", self.rank))
        return self.gone

    def take(self, message: Frame) -> None:
        """Handle the agent's message about it."""
        if message.kind in ("out", "err"):
            self.streams[message.kind == "err"].feed(message.payload)
        elif message.kind == "started":
            self.pid = int(message.fields()["pid"])
        elif message.kind == "ended":
            found = message.fields()
            self.status = int(found["status"])
            if found["ended_by"] is None:  # it had ended before a signal of ours reached it
                self.ended_by = None
        elif message.kind == "gone":
            self._leave()

    def lose(self, reason: str) -> None:
        """Take note that nothing more will be heard of it."""
        if self.status is None:
            self.status, self.lost = _LOST, reason
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        for stream in self.streams:
            if stream.open:
                stream.close()


@dataclass(frozen=True)
class Ready:
    """An agent's description of its host."""

    ports: tuple[int, ...]
    """A free port for each client."""
    address: str
    """Address at which the host was reached; empty if unknown."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], clients: int) -> Ready:
        """Return what an agent has sent.

        Raises:
            ValueError: It does not fit the number of clients.
        """
        ports = tuple(check_port("a port", port) for port in fields["ports"])
        if len(ports) != clients:
            raise ValueError(f"{len(ports)} ports for {clients} clients")
        return cls(ports, str(fields["address"]))


class HostConnection:
    """One host: the process that connects to it, the agent's messages, and its clients.

    Args:
        host: The host.
        way: What leads there.
        selector: Watches it.
        guard: Kills it should this process end before it.
        clock: Monotonic time in seconds.

    Raises:
        HostError: The command cannot be started.
    """

    def __init__(
        self,
        host: Host,
        way: Way,
        selector: selectors.BaseSelector,
        guard: Guard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.way = host, way
        self.ready: Ready | None = None
        """Ports and address of the host, once its agent has them."""
        self.clients: dict[int, RemoteClient] = {}
        """The clients there, by rank."""
        self.lost = ""
        """Reason why it is gone; empty while it is there."""
        self.on_taken: Callable[[], None] | None = None
        """Called when a chunk of standard input has reached its rank."""
        self._setup: Frame | None = None
        self._selector, self._guard, self._clock = selector, guard, clock
        self._decoder = Decoder(expects_magic=True)
        self._heard_at = clock()
        self._killed_by: float | None = None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own ssh, or srun
                way.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, bufsize=0,  # Ctrl-C reaches the clients through us
            )  # fmt: skip
        except OSError as error:
            raise HostError(
                f"host {host.name}: {way.command[0]} cannot be started: {error.strerror}"
            ) from error
        guard.watch(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._outbox = Outbox(self._stdin.fileno())
        selector.register(self._stdout, selectors.EVENT_READ, self)
        self._words = ErrorOutput(self._process.stderr, selector)

    @property
    def outbox(self) -> Outbox:
        """Data to be sent to the agent."""
        return self._outbox

    def begin(self, setup: Frame) -> None:
        """Have the agent set up, as soon as it is known to be of this version."""
        self._setup = setup

    def show_words(self, output: Output) -> None:
        """Show the standard error of the agent and of the connecting process from now on."""
        self._words.show(f"[{self.host.name}] ", output)

    def send(self, message: Frame) -> None:
        """Send a frame to the agent, or queue it."""
        self._outbox.send(message)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Have a client, and all that it started, get a signal."""
        if number is signal.SIGKILL and self._killed_by is None and self.clients[rank].status is None:
            self._killed_by = self._clock() + KILL_PATIENCE
        self.send(frame("signal", {"number": int(number)}, rank))

    @property
    def last_words(self) -> str:
        """Last standard error output of the agent and of the command that reaches it (ssh), in one line."""
        return " ".join(self._words.last)

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `on_time`; None for none."""
        if self.lost:
            return None
        silent = self._heard_at + SILENCE
        return silent if self._killed_by is None else min(silent, self._killed_by)

    def on_time(self, now: float) -> None:
        """Send what waits, and give an agent up that is silent, or that has not killed its clients."""
        if self.lost:
            return
        self._outbox.watch(self._selector)
        if now >= self._heard_at + SILENCE and not self._has_unread():
            self.lose(f"nothing was heard of it for {SILENCE:g} s")
        elif self._killed_by is not None and now >= self._killed_by:
            self._killed_by = None
            if any(client.status is None for client in self.clients.values()):
                self.lose(f"it has not killed its clients within {KILL_PATIENCE:g} s")

    def _has_unread(self) -> bool:
        """Return whether the agent has spoken while this process was stopped, or held up by its terminal."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return bool(poll.poll(0))

    def read(self) -> None:
        """Handle messages of the agent.

        Raises:
            HostError: The agent refuses, is of another version, or is none. Only before it is ready.
        """
        data = os.read(self._stdout.fileno(), _CHUNK)
        self._heard_at = self._clock()
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except HostError as error:
            self._fail(str(error))
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"its agent has sent what no agent of this version sends ({error!r:.100})")
        else:
            if not data:
                self._end()

    def _fail(self, reason: str) -> None:
        if self.ready is None:
            raise HostError(f"host {self.host.name}: {reason}")
        self.lose(reason)

    def _take(self, message: Frame) -> None:
        client = self.clients.get(message.number)
        if message.kind == "hello":
            version = message.fields().get("version")
            if version != __version__:
                raise HostError(
                    f"it has dmesh {version!s:.40}, this machine has {__version__}. Install the same version "
                    "on both, or name another Python there with --python"
                )
            assert self._setup is not None
            self.send(self._setup)
        elif message.kind == "ready":
            self.ready = Ready.of(message.fields(), self.host.slots)
        elif message.kind == "refused":
            raise HostError(message.text())
        elif message.kind == "taken" and self.on_taken is not None:
            self.on_taken()
        elif client is not None:
            client.take(message)

    def _end(self) -> None:
        """Find out why the agent has closed the connection."""
        try:
            status = self._process.wait(_END_GRACE)
        except subprocess.TimeoutExpired:
            self._fail("its agent has ended")
            return
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        reason = f"{self.way.name} ended with {how}"
        while self._words.read():
            pass
        if self.ready is None:
            self._fail(self._diagnose(status, reason))
        self.lose(reason + (f": {self._words.last[-1]}" if self._words.last else ""))

    def _diagnose(self, status: int, reason: str) -> str:
        """Say why no agent has started: for people, with what to do."""
        said = " ".join(self._words.last) or self._decoder.noise[-_LONGEST_LINE:].decode("utf-8", "replace")
        if "No module named" in said:
            advice = (
                f"dmesh is not installed for {self.way.python} there. Install it, or name another Python "
                "with --python"
            )
        elif status in (126, 127):
            advice = f"there is no {self.way.python}. Name the Python there with --python"
        elif self.way.attempt and status == _LOST:
            advice = f"it cannot be reached. Try: {self.way.attempt}"
        else:
            advice = "its agent has not started"
        said = " ".join(said.split())  # one line
        return f"{advice} ({reason}{f': {said}' if said else ''})"

    def lose(self, reason: str) -> None:
        """Give the connection up; nothing more will be known of the clients that still run."""
        if self.lost:
            return
        self.lost = reason
        for client in self.clients.values():
            client.lose(f"the connection to host {self.host.name} is gone: {reason}")
        self.close(0.0)

    def hang_up(self) -> None:
        """Tell the agent, by the end of its input, that it is not needed any more."""
        self._outbox.close(self._selector)
        if not self._stdin.closed:
            self._stdin.close()

    def close(self, grace: float = _END_GRACE) -> None:
        """End the connection; the agent ends its clients.

        Args:
            grace: Seconds that ssh or srun have to end by themselves.
        """
        self.lost = self.lost or "the run is over"
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.forget(self._process.pid)
        if not self._stdout.closed:
            self._selector.unregister(self._stdout)
            self._stdout.close()
        self._words.close()
