"""Supervisor of a job: one thread, one selector, no polling."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dmesh.launcher.diagnosis import Outcome, rank_failures
from dmesh.launcher.escalation import Escalation, Phase
from dmesh.launcher.folding import ShownTracebacks
from dmesh.launcher.labels import Output
from dmesh.launcher.local import LocalHost
from dmesh.launcher.plan import ClientPlan, LaunchPlan
from dmesh.launcher.process import Client, Terminal
from dmesh.launcher.report import Reporter
from dmesh.launcher.signals import ENDING, FORWARDED, SignalInbox

_LEFTOVER_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that a client left behind."""
_VISIBLE = 20
"""Lines that can come after a traceback before the report of the job repeats it."""
_LAST_WORDS = 16
"""Chunks of a failed client's output that are shown before the launcher says that it failed."""
_STOP_WITHIN = 2.0
"""Seconds in which the hosts must learn that this process is about to be stopped."""
_LOOK_EVERY = 0.02
"""Seconds between looks at whether they have."""
_SIGPIPE_EXIT = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class LaunchResult:
    """Result of a job."""

    outcomes: tuple[Outcome, ...]
    """Ends of the clients that were started, by rank."""
    exit_code: int
    """Exit code of `dmesh run`."""
    requested: signal.Signals | None = None
    """The first signal that the launcher itself received."""


class Hosts(Protocol):
    """Place where a job's clients run: this machine, or hosts that agents answer for."""

    selector: selectors.BaseSelector
    """Watches the clients' output. The data of a key is an object whose method `read` takes what there is."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which clients can be started; at its end none of them is left."""

    def start(self, plan: ClientPlan, terminal: Terminal, now: float, restarts: int) -> Client:
        """Start a client.

        Raises:
            OSError: It could not be started.
        """

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `on_time`; None for none."""

    def on_time(self, now: float) -> None:
        """Take note of the time."""

    def pause(self) -> None:
        """Take note that this process is about to be stopped, once nothing is `unsent`."""

    @property
    def unsent(self) -> Sequence[str]:
        """Names of hosts for which something waits to be sent, such as a signal for their clients."""

    def resume(self) -> None:
        """Take note that this process goes on."""


class Supervisor:
    """Starts the clients of a plan and stays with them until the last one has ended.

    Must be used in the main thread, because it handles signals.

    Args:
        plan: What to start.
        out: The launcher's standard output.
        err: The launcher's standard error.
        clock: Monotonic time in seconds.
        reporter: Writer of the launcher's own lines; one that writes to `err` if None.
        hosts: Where the clients run; this machine if None.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        out: Output,
        err: Output,
        clock: Callable[[], float] = time.monotonic,
        reporter: Reporter | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._plan = plan
        self._out = out
        self._err = err
        self._clock = clock
        self._reporter = reporter or Reporter(err, socket.gethostname())
        self._escalation = Escalation(plan.options.timeout_after_failure, plan.options.terminate_grace)
        self._hosts = hosts or LocalHost()
        self._selector = self._hosts.selector
        self._notices: deque[str] = deque()
        folds = plan.clients[0].environment.get("DMESH_TRACEBACK", "").strip().lower() != "full"
        self._terminal = Terminal(out, err, ShownTracebacks() if folds else None)
        self._clients: list[Client] = []
        self._settled = 0
        self._leaving: dict[Client, float] = {}
        """Ended clients that may have left processes or unread output, and the time limit for these."""
        self._replacing: set[Client] = set()
        """Clients among these that are to be started again once nothing is left of them."""
        self._stop_by: float | None = None
        """Time by which this process is to stop, because Ctrl-Z was pressed."""

    def run(self) -> LaunchResult:
        """Run the job.

        Raises:
            OSError: A client could not be started; those that were are gone.
        """
        with SignalInbox(self._on_signal) as inbox, self._hosts.entered():
            self._selector.register(inbox, selectors.EVENT_READ)
            try:
                self._start()
                while any(client.order < 0 for client in self._clients) or self._leaving:
                    self._wait(inbox)
                    self._settle_ended()
                    self._finish_leaving()
                    self._escalate()
                    self._print_notices()
                    self._stop_in_time()
            finally:
                self._send(signal.SIGKILL)  # nothing is left of it, unless we are here for an error
        return self._conclude()

    # Starting ----------------------------------------------------------------------

    def _start(self) -> None:
        for plan in self._plan.clients:
            if self._escalation.requested is not None:
                return
            self._clients.append(self._start_one(plan))
        if self._escalation.requested is not None:  # it came while the last one was started
            self._send(self._escalation.requested)

    def _start_one(self, plan: ClientPlan, restarts: int = 0) -> Client:
        return self._hosts.start(plan, self._terminal, self._clock(), restarts)

    def _replace(self, client: Client) -> None:
        """Start a failed client again, if the job still goes on."""
        self._replacing.discard(client)
        if self._job_goes_on():
            self._clients[client.rank] = self._start_one(client.plan, client.restarts + 1)

    # The loop's steps ----------------------------------------------------------------------

    def _wait(self, inbox: SignalInbox) -> None:
        self._hosts.on_time(self._clock())
        deadlines = [deadline for deadline in self._leaving.values() if deadline < math.inf]
        deadlines += [due for due in (self._escalation.deadline, self._hosts.deadline) if due is not None]
        held = [stream for client in self._clients for stream in client.streams if stream.due is not None]
        deadlines += [stream.due for stream in held if stream.due is not None]
        timeout = max(0.0, min(deadlines) - self._clock()) if deadlines else None
        if any(client.order < 0 and client.status is not None for client in self._clients):
            timeout = 0.0  # it was lost, which is no event of the selector's
        if self._stop_by is not None:  # another thread may be sending what it waits for
            timeout = _LOOK_EVERY if timeout is None else min(timeout, _LOOK_EVERY)
        for key, _ in self._selector.select(timeout):
            if key.fileobj is inbox:
                inbox.clear()
            else:
                key.data.read()
        for stream in held:
            if stream.due is not None and stream.due <= self._clock():
                stream.release()

    def _settle_ended(self) -> None:
        """Take note of clients that have ended, and end the processes that they left in their groups."""
        for client in self._clients:
            if client.order >= 0 or not client.poll():
                continue
            now = self._clock()
            client.order, client.ended_at = self._settled, now
            client.lines_before_end = self._lines_written()
            self._settled += 1
            client.signal_group(signal.SIGTERM)
            self._leaving[client] = now + _LEFTOVER_GRACE
            if client.status != 0 and client.ended_by is None:
                if self._may_be_replaced(client):
                    self._replacing.add(client)
                    self._reporter.replacing(client.outcome(), client.restarts + 1, client.plan.restarts)
                else:
                    self._on_failure(client, now)

    def _may_be_replaced(self, client: Client) -> bool:
        return client.restarts < client.plan.restarts and not client.lost and self._job_goes_on()

    def _job_goes_on(self) -> bool:
        """Return whether there is a running job that another process can take part in."""
        return (
            self._escalation.phase is Phase.RUNNING
            and self._escalation.requested is None
            and any(client.order < 0 for client in self._clients)
        )

    def _on_failure(self, client: Client, now: float) -> None:
        first = self._escalation.phase is Phase.RUNNING
        self._send(self._escalation.on_failure(now))
        if first:
            client.catch_up(_LAST_WORDS)  # they come before ours
            if any(not other.poll() for other in self._clients):
                self._reporter.failure_noticed(client.outcome(), self._plan.options.timeout_after_failure)

    def _finish_leaving(self) -> None:
        """Close ended clients that have left nothing, or whose time is up."""
        now = self._clock()
        for client, deadline in [*self._leaving.items()]:
            left = client.streams_open or client.group_is_left()
            if left and (now < deadline or deadline == math.inf):
                continue
            if not client.finish():
                self._leaving[client] = math.inf
                continue
            del self._leaving[client]
            if client in self._replacing:
                self._replace(client)

    def _escalate(self) -> None:
        if self._out.closed:
            self._send(self._escalation.on_output_closed(self._clock()))
        action = self._escalation.on_time(self._clock())
        if action is not None:
            left = ", ".join(str(client.rank) for client in self._clients if client.order < 0)
            if left:
                self._notices.append(f"sending {action.name} to rank {left}")
            self._send(action)

    def _print_notices(self) -> None:
        while self._notices:
            self._reporter.notice(self._notices.popleft())

    # Signals ----------------------------------------------------------------------

    def _on_signal(self, received: signal.Signals) -> None:
        """Handle a signal: runs in the signal handler, between any two steps of the loop."""
        if received in ENDING:
            self._end(received)
        elif received is signal.SIGTSTP:
            self._send(FORWARDED[received])
            self._hosts.pause()
            if not self._hosts.unsent:
                self._stop()  # now: this thread may be held up by its terminal
            elif self._stop_by is None:
                self._stop_by = self._clock() + _STOP_WITHIN
        else:
            self._send(FORWARDED[received])
            if received is signal.SIGCONT:
                self._stop_by = None
                self._hosts.resume()
            else:
                self._notices.append(f"{received.name}: forwarded to the clients")

    def _stop_in_time(self) -> None:
        """Stop this process, if it is to, once the hosts know of it or their time is up."""
        if self._stop_by is None:
            return
        unsent = self._hosts.unsent
        if unsent and self._clock() < self._stop_by:
            return
        if unsent:
            self._reporter.notice(
                f"stopping, but {', '.join(unsent)} did not take the signal within {_STOP_WITHIN:g} s: the "
                "clients there may run on, and are killed if they hear nothing for two minutes"
            )
        self._stop()

    def _stop(self) -> None:
        """Stop this process, until it is continued; the clients have been signaled."""
        self._stop_by = None
        began = self._clock()
        os.kill(os.getpid(), signal.SIGSTOP)
        stopped = self._clock() - began
        self._escalation.postpone(stopped)
        for client in self._leaving:
            self._leaving[client] += stopped

    def _end(self, received: signal.Signals) -> None:
        again = self._escalation.requested is not None
        action = self._escalation.on_signal(received, self._clock())
        if action is None:
            return
        self._send(action)
        if again:
            self._notices.append("killing the clients")
        else:
            self._notices.append(f"{received.name}: forwarded to the clients; a second one kills them")

    def _send(self, number: signal.Signals | None) -> None:
        if number is None:
            return
        for client in self._clients:
            if client.order < 0:
                client.signal_group(number)

    # The end ----------------------------------------------------------------------

    def _lines_written(self) -> int:
        return self._out.lines + self._err.lines

    def _conclude(self) -> LaunchResult:
        outcomes = tuple(client.outcome() for client in self._clients)
        failures = rank_failures(outcomes)
        requested = self._escalation.requested
        if any(outcome.ended_by is None for outcome in failures):
            since = self._lines_written() - self._clients[failures[0].rank].lines_before_end
            ended_well = [outcome.rank for outcome in outcomes if outcome.status == 0]
            self._reporter.summary(failures, ended_well, visible=since <= _VISIBLE)
            code = failures[0].exit_code
        elif self._out.closed:
            code = _SIGPIPE_EXIT
        elif requested is not None and (failures or len(outcomes) < len(self._plan.clients)):
            code = 128 + requested
        else:
            code = failures[0].exit_code if failures else 0
        return LaunchResult(outcomes, code, requested)
