"""Agent of `dmesh run` on a host: `python -m dmesh.launcher.agent`, started by ssh, by srun or as a child.

It speaks frames with the launcher over its standard input and output. It starts the host's clients, passes
their output and their ends on, and delivers the launcher's signals. It decides nothing, but one thing: when
the connection ends, or the launcher has been silent for too long, the clients are killed.

| from the launcher | | from the agent | |
|---|---|---|---|
| `setup` | program, directory, number of clients | `hello` | version |
| `files` | credentials, by their variables | `ready`, `refused` | ports and address; or why not |
| `start` | a rank, with its environment | `started` | its process id |
| `signal` | for a rank and all that it started | `out`, `err` | output of a rank |
| `input` | for a rank's standard input; empty: its end | `taken` | that has been passed on |
| `finish` | kill what an ended rank has left | `ended`, `gone` | a rank has ended; nothing is left of it |
| `ping` | it lives | `ping` | it lives |
| `pause`, `resume` | it is about to be stopped; it goes on | | |
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dmesh._version import __version__
from dmesh.config.addresses import join_address
from dmesh.distribute.cluster_resolver.launched import own_host
from dmesh.errors import ConfigurationError, DMeshError
from dmesh.launcher.binding import check_binding
from dmesh.launcher.diagnosis import ErrorTail
from dmesh.launcher.frames import MAGIC, Decoder, Frame, frame
from dmesh.launcher.input import InputWriter
from dmesh.launcher.orphans import Guard, Orphans
from dmesh.launcher.outbox import Outbox
from dmesh.launcher.plan import ClientPlan, LaunchOptions, check_command, command_of, own_settings
from dmesh.launcher.ports import EVERYWHERE, PortReservation, reserve_ports
from dmesh.launcher.process import ClientProcess, Sink
from dmesh.launcher.signals import ENDING, NOTIFYING, SignalInbox

_CHUNK = 1 << 16
_SIGNALS = (*ENDING - {signal.SIGKILL}, *NOTIFYING, signal.SIGCHLD)
_MOST_UNSENT = 1 << 18
"""Bytes that wait for the launcher before the clients' output is left in its pipes."""
PING_INTERVAL = 5.0
"""Seconds between signs of life, in both directions."""


class _Uplink:
    """Sink that passes one output stream of a client on to the launcher."""

    due: float | None = None

    def __init__(self, outbox: Outbox, kind: str, rank: int) -> None:
        self._outbox, self._kind, self._rank = outbox, kind, rank

    def feed(self, data: bytes) -> None:
        self._outbox.send(Frame(self._kind, self._rank, data))

    def release(self) -> None:
        """Hold nothing back."""

    def finish(self) -> None:
        """Leave the stream's end to the frame `gone`."""


class Agent:
    """The clients of one host, on behalf of a launcher elsewhere.

    Args:
        reader: Descriptor with what the launcher sends.
        writer: Descriptor to it.
        clock: Monotonic time in seconds.
    """

    def __init__(self, reader: int, writer: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._outbox = Outbox(writer)
        self._decoder = Decoder()
        self._clients: dict[int, ClientProcess] = {}
        self._inputs: dict[int, InputWriter] = {}
        self._command: tuple[str, ...] = ()
        self._bind = ""
        self._base: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._ports: PortReservation | None = None
        self._ended: set[int] = set()
        self._silence = math.inf
        self._silent_at = math.inf
        """Time at which the launcher counts as gone."""
        self._ping_at = math.inf
        self._paused = False
        """True while the launcher is stopped."""
        self._over = False

    def sinks(self, plan: ClientPlan, errors: ErrorTail) -> tuple[Sink, Sink]:
        """Return the destinations of a client's standard output and standard error."""
        return _Uplink(self._outbox, "out", plan.rank), _Uplink(self._outbox, "err", plan.rank)

    def run(self) -> None:
        """Serve the launcher until it is gone, or has no clients here any more."""
        with (
            SignalInbox(self._on_signal, _SIGNALS) as inbox,
            contextlib.closing(self._selector),
            contextlib.closing(Guard()) as self._guard,
            (orphans := Orphans(self._guard)).adopted(),
        ):
            self._selector.register(inbox, selectors.EVENT_READ)
            self._selector.register(self._reader, selectors.EVENT_READ, self)
            self._outbox.send_raw(MAGIC)
            self._outbox.send(frame("hello", {"version": __version__}))
            try:
                while not self._over:
                    self._wait(inbox)
                    orphans.reap()
            finally:
                for client in self._clients.values():
                    client.signal_group(signal.SIGKILL)
                if self._ports is not None:
                    self._ports.close()

    def read(self) -> None:
        """Handle messages of the launcher."""
        data = os.read(self._reader, _CHUNK)
        if not data:
            self._over = True
            return
        if not self._paused:
            self._silent_at = self._clock() + self._silence
        for message in self._decoder.feed(data):
            self._take(message)

    def _on_signal(self, received: signal.Signals) -> None:
        if received in ENDING:  # of whoever cleans up here: the clients are not left behind
            self._over = True
            return
        for client in [*self._clients.values()]:  # of Slurm, which knows the agent alone
            client.signal_group(received)

    def _wait(self, inbox: SignalInbox) -> None:
        self._outbox.watch(self._selector)
        crowded = self._outbox.unsent > _MOST_UNSENT
        for client in self._clients.values():
            client.watch_output(not crowded)
        deadline = min(self._silent_at, self._ping_at)
        timeout = None if deadline == math.inf else max(0.0, deadline - self._clock())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is inbox:
                inbox.clear()
            else:
                key.data.read()
        self._settle()
        now = self._clock()
        if now >= self._silent_at or self._outbox.closed:
            self._over = True
        if now >= self._ping_at:
            self._ping_at = now + PING_INTERVAL
            if self._outbox.idle:
                self._outbox.send(Frame("ping", 0))

    def _settle(self) -> None:
        """Report clients that have ended, and those whose processes are all gone, to the launcher."""
        for rank, client in [*self._clients.items()]:
            if rank not in self._ended and client.poll():
                client.catch_up()
                self._ended.add(rank)
                self._outbox.send(
                    frame("ended", {"status": client.status, "ended_by": client.ended_by}, rank)
                )
            if rank in self._ended and not client.streams_open and not client.group_is_left():
                self._close(rank)

    def _close(self, rank: int) -> None:
        self._clients.pop(rank).finish()
        self._ended.discard(rank)
        if rank in self._inputs:
            self._inputs.pop(rank).close()
        self._outbox.send(Frame("gone", rank))

    # Messages ----------------------------------------------------------------------

    def _take(self, message: Frame) -> None:
        rank, client = message.number, self._clients.get(message.number)
        if message.kind == "setup":
            self._set_up(message.fields())
        elif message.kind == "files":
            self._write_files(message.fields())
        elif message.kind == "start":
            self._start(rank, message.fields())
        elif message.kind == "signal" and client is not None:
            client.signal_group(signal.Signals(message.fields()["number"]))
        elif message.kind == "finish" and client is not None and rank in self._ended:
            self._close(rank)
        elif message.kind == "input" and rank in self._inputs:
            self._inputs[rank].write(message.payload)
        elif message.kind in ("pause", "resume"):
            self._paused = message.kind == "pause"
            self._silent_at = math.inf if self._paused else self._clock() + self._silence

    def _set_up(self, wanted: Mapping[str, Any]) -> None:
        try:
            self._enter(wanted["directory"])
            options = LaunchOptions(1, tuple(wanted["command"]), module=wanted["module"])
            check_command(options)
            self._bind = wanted.get("bind", "")
            if self._bind:
                check_binding()
            self._command = command_of(options)
            self._ports = reserve_ports(wanted["clients"], host=EVERYWHERE)
            address = _own_address(wanted["way"])
        except (DMeshError, OSError) as error:
            self._outbox.send(Frame("refused", 0, str(error).encode()))
            return
        # The clients' settings come from the launcher's machine, not from this user's profile here.
        self._base = {name: value for name, value in os.environ.items() if not own_settings(name)}
        self._silence = wanted["silence"]
        self._ping_at = self._clock() + PING_INTERVAL
        cores = os.cpu_count() or 1
        self._base.setdefault("OMP_NUM_THREADS", str(max(1, cores // wanted["clients"])))
        self._outbox.send(frame("ready", {"ports": self._ports.ports, "address": address}))

    def _enter(self, directory: str) -> None:
        try:
            os.chdir(directory)
        except OSError as error:
            raise ConfigurationError(
                f"it has no working directory {directory} ({error.strerror}); name another one with --chdir"
            ) from error

    def _write_files(self, contents: Mapping[str, Any]) -> None:
        """Write credentials where only this user can read them, until the guard removes them."""
        directory = Path(tempfile.mkdtemp(prefix="dmesh-run-"))
        self._guard.remove(directory)
        for variable, content in contents.items():
            path = directory / variable.rpartition("_")[2].lower()
            path.touch(mode=0o600)
            path.write_text(content)
            self._files[variable] = str(path)

    def _start(self, rank: int, wanted: Mapping[str, Any]) -> None:
        environment = {**self._base, **wanted["environment"], **self._files}
        plan = ClientPlan(rank, self._command, environment, bind=self._bind)
        stdin = subprocess.PIPE if wanted["input"] else subprocess.DEVNULL
        client = ClientProcess(
            plan, self, self._selector, self._guard, self._clock(), wanted["restarts"], stdin
        )
        self._clients[rank] = client
        if client.stdin is not None:
            self._inputs[rank] = InputWriter(client.stdin, self._selector, self._outbox, rank)
        self._outbox.send(frame("started", {"pid": client.pid}, rank))


def _own_address(way: str) -> str:
    """Return the address at which the launcher's network reaches this host; empty if unknown.

    Args:
        way: How the agent was started: `ssh`, `srun` or `here`.
    """
    if way == "srun":
        return own_host(join_address(os.environ["SLURM_LAUNCH_NODE_IPADDR"], 1))
    words = os.environ.get("SSH_CONNECTION", "").split() if way == "ssh" else []
    with contextlib.suppress(ValueError, IndexError):
        if not ipaddress.ip_address(words[2]).is_link_local:
            return words[2]
    return ""


def main() -> int:
    """Serve the launcher that started this process; return the exit code."""
    writer = os.dup(1)
    os.dup2(2, 1)  # what is printed by mistake must not get between the frames
    os.set_blocking(writer, False)
    Agent(0, writer).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
