"""The notebook's side of its clients: processes that run one cell after the other."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dmesh.errors import ArgumentTypeError, CellError, CollectiveError, KeptClientsError
from dmesh.launcher import LaunchOptions, plan_launch
from dmesh.launcher.labels import Output
from dmesh.launcher.orphans import Guard
from dmesh.launcher.plan import ClientPlan, check_options
from dmesh.launcher.ports import reserve_ports
from dmesh.launcher.process import ClientProcess, PipeStream, Terminal
from dmesh.launcher.registry import registered
from dmesh.launcher.report import name_ranks
from dmesh.launcher.signals import SignalInbox
from dmesh.notebook.failures import CellOutcome, describe, outcome_of
from dmesh.notebook.messages import Channel, encoded

_LEFTOVER_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for clients that did not end by themselves."""
_PLAIN = "only None, bool, numbers, str, bytes, list, tuple, dict, set, dates and NumPy arrays can"


@dataclass(frozen=True)
class Result:
    """Value of a cell's last expression on one rank."""

    rank: int
    """The client."""
    text: str | None
    """Its repr; None if the cell ended with a statement, or with None."""
    html: str | None = None
    """Its HTML representation, if it has one and the cell ran on a single rank."""


@dataclass
class _Kept:
    """A client and the notebook's end of its channel."""

    process: ClientProcess
    channel: Channel

    @property
    def rank(self) -> int:
        return self.process.rank


@dataclass
class _Round:
    """A request to some clients, and their replies so far."""

    waiting: dict[int, _Kept]
    began: float
    replies: dict[int, dict[str, Any]]
    outcomes: list[CellOutcome]
    deadline: float | None = None
    """Time at which the running ranks are interrupted, or reported as not reacting."""
    interrupts: int = 0
    """Interrupts by the user."""
    begun: set[int] = field(default_factory=set)
    """Ranks that have begun the cell. An interrupt before that would be lost."""
    postponed: set[int] = field(default_factory=set)
    """Ranks to interrupt as soon as they begin."""
    shown: bool = False
    """True if the running ranks were interrupted because others had failed."""

    def interrupt(self, client: _Kept) -> None:
        """Interrupt a rank's cell, now or as soon as it begins."""
        if client.rank in self.begun:
            client.process.interrupt()
        else:
            self.postponed.add(client.rank)


class KeptClients:
    """Clients on this machine that run cells, started by the launcher of `dmesh run`.

    They receive code only over socket pairs that they inherit. They end with this process, however it ends;
    on Linux also with the thread that started them.

    Args:
        count: Number of clients.
        out: Destination of their standard output, with labels.
        err: Destination of their standard error, with labels, and of notices.
        cpu_devices: Logical CPU devices of each client; None for the default.
        environment: Environment variables of the clients; None for this process's.
        timeout_after_failure: Seconds for the other ranks to finish a cell after one failed.
        terminate_grace: Seconds for clients to end by themselves.
        clock: Monotonic time in seconds.

    Raises:
        ConfigurationError: The number of clients or a variable is invalid; nothing was started.
        KeptClientsError: The clients could not be started; none is running.
    """

    def __init__(
        self,
        count: int,
        out: Output,
        err: Output,
        *,
        cpu_devices: int | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_after_failure: float = 3.0,
        terminate_grace: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = count
        self.cpu_devices = cpu_devices
        self.ended = ""
        """Why the clients ended; empty while they run."""
        self._out, self._err, self._clock = out, err, clock
        self._timeout_after_failure, self._terminate_grace = timeout_after_failure, terminate_grace
        self._clients: list[_Kept] = []
        environment = os.environ if environment is None else environment
        options = LaunchOptions(count, ("dmesh.notebook.client",), module=True, cpu_devices=cpu_devices)
        check_options(options, environment)
        self._resources = contextlib.ExitStack()
        try:
            ports = self._resources.enter_context(reserve_ports(count)).ports
            plan = plan_launch(options, ports, environment)
            self._resources.enter_context(registered(plan.clients[0].environment, environment))
            self._guard = self._resources.enter_context(contextlib.closing(Guard()))
            self._selector = self._resources.enter_context(selectors.DefaultSelector())
            for client in plan.clients:
                self._clients.append(self._start(client))
            ready = self._collect(self._clients, self._clock())
        except BaseException as error:
            self._end("they could not be started", at_once=True)
            if isinstance(error, OSError):
                raise KeptClientsError(f"the clients could not be started: {error}") from error
            raise
        if not self._all_alive():
            text, _ = describe(ready.outcomes, "the start")
            self._end("they could not be started", at_once=True)
            raise KeptClientsError(f"the clients could not be started: {text}")
        if ready.interrupts:
            self._end("their start was interrupted", at_once=True)
            raise KeyboardInterrupt

    # Requests -----------------------------------------------------------------------------------------------

    def run(self, source: str, ranks: Sequence[int] | None = None, name: str = "<cell>") -> list[Result]:
        """Run a cell, and show its output meanwhile.

        Args:
            source: Python code.
            ranks: Ranks that run it; None for all.
            name: The cell's name in tracebacks.

        Returns:
            The last expression's value on each rank.

        Raises:
            SyntaxError: The code is not valid Python; nothing was sent.
            KeptClientsError: The clients do not run, or a rank does not exist; nothing was sent.
            CellError: The cell failed, or a client ended. If a client ended, all of them were ended.
            KeyboardInterrupt: The cell was interrupted, on all ranks.
        """
        compile(source, name, "exec", dont_inherit=True)
        chosen = self._chosen(ranks)
        request = {"kind": "run", "source": source, "name": name, "draws": len(chosen) == 1}
        done = self._ask(chosen, encoded(request))
        self._raise_if_it_failed(done, name)
        replies = (done.replies[client.rank] for client in chosen)
        return [
            Result(client.rank, reply.get("text"), reply.get("html"))
            for client, reply in zip(chosen, replies, strict=True)
        ]

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the values of a variable, in the order of the ranks.

        Args:
            name: The variable; its values are plain values or NumPy arrays.
            ranks: Ranks whose values are returned; None for all.

        Raises:
            ArgumentTypeError: A rank's value is not plain, or too large.
            CellError: A rank has no such variable.
            KeptClientsError: The clients do not run, or a rank does not exist.
        """
        chosen = self._chosen(ranks)
        _check_name(name)
        done = self._ask(chosen, encoded({"kind": "pull", "name": name}))
        self._raise_if_it_failed(done, f"the pull of {name}")
        missing = [client.rank for client in chosen if done.replies[client.rank].get("missing")]
        if missing:
            raise CellError(f"{name_ranks(missing)} {_have(missing)} no variable {name!r}", missing)
        for client in chosen:
            if "refused" in (reply := done.replies[client.rank]):
                raise ArgumentTypeError(
                    f"{name!r} of rank {client.rank} cannot be pulled: {_PLAIN}. {reply['refused']}"
                )
        return [done.replies[client.rank]["value"] for client in chosen]

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Set variables of the clients.

        Args:
            values: Plain values and NumPy arrays, by name.
            ranks: Ranks whose variables are set; None for all.

        Raises:
            ArgumentTypeError: A value is not plain, or too large; nothing was sent.
            KeptClientsError: The clients do not run, or a rank does not exist.
        """
        chosen = self._chosen(ranks)
        for name, value in values.items():
            _check_name(name)
            try:
                encoded({"value": value})
            except CollectiveError as error:
                raise ArgumentTypeError(f"{name!r} cannot be pushed: {_PLAIN}. {error}") from error
        try:
            request = encoded({"kind": "push", "values": dict(values)})
        except CollectiveError as error:
            raise ArgumentTypeError(
                f"{', '.join(values)} cannot be pushed in one message: {error}"
            ) from error
        self._raise_if_it_failed(self._ask(chosen, request), "the push")

    def status(self) -> list[str]:
        """Return one line for each client."""
        if self.ended:
            return [f"no clients: {self.ended}"]
        return [
            f"rank {client.rank}: pid {client.process.pid}, "
            + (client.process.outcome().how() if client.process.poll() else "waiting for a cell")
            for client in self._clients
        ]

    def close(self) -> None:
        """End the clients like scripts after their last line: they leave their cluster."""
        self._end("they were stopped")

    # Processes and messages ---------------------------------------------------------------------------------

    def _start(self, plan: ClientPlan) -> _Kept:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = ClientProcess(
                    replace(
                        plan,
                        command=(*plan.command, str(theirs.fileno())),
                        descriptors=(theirs.fileno(),),
                    ),
                    Terminal(self._out, self._err),
                    self._selector,
                    self._guard,
                    self._clock(),
                )
        except BaseException:
            ours.close()
            raise
        return _Kept(process, Channel(ours))

    def _chosen(self, ranks: Sequence[int] | None) -> list[_Kept]:
        if self.ended:
            raise KeptClientsError(f"no clients are running: {self.ended}")
        dead = [client.process for client in self._clients if client.process.poll()]
        if dead:
            how = "; ".join(f"rank {one.rank} (pid {one.pid}) {one.outcome().how()}" for one in dead)
            self._end(f"{how}, between two cells")
            raise KeptClientsError(f"no clients are running: {self.ended}. Their variables are gone")
        wanted = range(self.count) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in wanted if not 0 <= rank < self.count]
        if wrong or not wanted:
            asked = name_ranks(wrong) if wrong else "no ranks"
            raise KeptClientsError(f"asked for {asked}, but the ranks are 0-{self.count - 1}")
        return [self._clients[rank] for rank in wanted]

    def _ask(self, chosen: Sequence[_Kept], request: bytes) -> _Round:
        began = self._clock()
        try:
            for client in chosen:
                with contextlib.suppress(OSError):  # it has just died, which `_collect` detects
                    client.channel.send_encoded(request)
        except BaseException:  # interrupted: a client may have received half of it
            self._end("sending them a message was interrupted", at_once=True)
            raise
        return self._collect(chosen, began)

    def _collect(self, chosen: Sequence[_Kept], began: float) -> _Round:
        """Wait for the replies; forward output and interrupts meanwhile."""
        done = _Round({client.rank: client for client in chosen}, began, {}, [])
        with self._interrupts(done) as inbox:
            try:
                if inbox is not None:
                    self._selector.register(inbox, selectors.EVENT_READ, inbox)
                for client in chosen:
                    self._selector.register(client.channel, selectors.EVENT_READ, client)
                while done.waiting:
                    self._wait(done)
            finally:
                for key in [*self._selector.get_map().values()]:
                    if not isinstance(key.data, PipeStream):
                        self._selector.unregister(key.fileobj)
        return done

    def _wait(self, done: _Round) -> None:
        timeout = None if done.deadline is None else max(0.0, done.deadline - self._clock())
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, PipeStream):
                if key.data.open:
                    key.data.read()
            elif isinstance(key.data, _Kept):
                self._take_message(key.data, done)
                if key.data.rank not in done.waiting:
                    self._selector.unregister(key.fileobj)
            else:
                key.data.clear()
        if done.deadline is not None and self._clock() >= done.deadline:
            self._hurry(done)

    def _take_message(self, client: _Kept, done: _Round) -> None:
        try:
            reply = client.channel.receive()
        except CollectiveError:
            reply = None
        if reply is not None and reply.get("begun"):
            done.begun.add(client.rank)
            if client.rank in done.postponed:
                client.process.interrupt()
            return
        seconds, order = self._clock() - done.began, len(done.outcomes)
        if reply is None:
            if not client.process.wait(self._terminate_grace):  # it closed dmesh's descriptor
                client.process.signal_group(signal.SIGKILL)
                client.process.wait(self._terminate_grace)
            client.process.ended_at = client.process.started_at + seconds
            ended = vars(client.process.outcome())
            outcome = CellOutcome(**{**ended, "order": order, "ended_by": None}, alive=False)
        else:
            done.replies[client.rank] = reply
            outcome = outcome_of(client.rank, client.process.pid, order, seconds, reply)
        client.process.catch_up()  # its output comes before the reply's result
        for stream in client.process.streams:
            if stream.open:
                stream.end_line()
        done.outcomes.append(outcome)
        del done.waiting[client.rank]
        if outcome.status != 0 and done.deadline is None and not done.interrupts:
            done.deadline = self._clock() + self._timeout_after_failure

    def _hurry(self, done: _Round) -> None:
        """Interrupt the running ranks after a failure; the second time, report that they do not react."""
        done.deadline = None
        ranks = [*done.waiting]
        if not ranks:
            return
        if done.shown or done.interrupts:
            self._notice(
                f"{name_ranks(ranks)} {_have(ranks)} not reacted to the interrupt yet. "
                "Another interrupt kills the clients"
            )
            return
        done.shown = True
        failed = [one.rank for one in done.outcomes if one.status != 0]
        self._notice(f"{name_ranks(failed)} failed; interrupting {name_ranks(ranks)}, still in the cell")
        for client in done.waiting.values():
            done.interrupt(client)
        done.deadline = self._clock() + self._terminate_grace

    @contextlib.contextmanager
    def _interrupts(self, done: _Round) -> Iterator[SignalInbox | None]:
        """Forward Ctrl-C to the clients; a second one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield None  # signals reach only the main thread
            return

        def on_signal(received: signal.Signals) -> None:
            done.interrupts += 1
            for client in [*done.waiting.values()]:
                if done.interrupts == 1:
                    done.interrupt(client)
                else:
                    client.process.signal_group(signal.SIGKILL)
            done.deadline = self._clock() + self._terminate_grace

        with SignalInbox(on_signal, (signal.SIGINT,)) as inbox:
            yield inbox

    def _raise_if_it_failed(self, done: _Round, name: str) -> None:
        alive = self._all_alive()
        if all(one.status == 0 for one in done.outcomes) and not done.interrupts and alive:
            return
        text, ranks = (
            ("", ()) if all(one.status == 0 for one in done.outcomes) else describe(done.outcomes, name)
        )
        if not alive:
            self._end(
                "a client ended in a cell" if done.interrupts < 2 else "they were killed by an interrupt"
            )
            text += f"\n\nAll {self.count} clients have ended, and their variables are gone."
        if done.interrupts:
            if text:
                self._err.write(f"{text}\n".encode())
            raise KeyboardInterrupt
        raise CellError(text, ranks)

    def _all_alive(self) -> bool:
        return not any(client.process.poll() for client in self._clients)

    def _notice(self, text: str) -> None:
        self._err.write(f"dmesh: {text}\n".encode())

    # The end ------------------------------------------------------------------------------------------------

    def _end(self, why: str, *, at_once: bool = False) -> None:
        """End all clients and the processes they started. Idempotent."""
        if self.ended:
            return
        self.ended = why
        try:
            for client in self._clients:
                client.channel.close()
            if not at_once and not self._drain(self._terminate_grace):
                for client in self._clients:
                    client.process.signal_group(signal.SIGTERM)
                self._drain(_LEFTOVER_GRACE)
        finally:
            for client in self._clients:
                client.process.signal_group(signal.SIGKILL)
                client.process.wait(max(self._terminate_grace, _LEFTOVER_GRACE))  # it has been killed
                client.process.finish()
            self._resources.close()

    def _drain(self, seconds: float) -> bool:
        """Forward output until all clients have closed theirs; return False after the time limit."""
        deadline = self._clock() + seconds
        while self._selector.get_map() and (left := deadline - self._clock()) > 0:
            for key, _ in self._selector.select(left):
                key.data.read()
        return not self._selector.get_map()


def _check_name(name: str) -> None:
    if not name.isidentifier():
        raise ArgumentTypeError(f"expected a variable name, got {name!r}")


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
