"""Client of a job: its output, its end; and the one that is a process of this machine."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from dmesh.launcher.binding import cpus_for
from dmesh.launcher.diagnosis import ErrorTail, Outcome, Traceback
from dmesh.launcher.folding import ShownTracebacks, TracebackFolder
from dmesh.launcher.labels import LineLabeler, Output
from dmesh.launcher.orphans import Guard, stand_alone
from dmesh.launcher.plan import ClientPlan
from dmesh.launcher.signals import ENDING, NOTIFYING

_CHUNK = 64 * 1024
RESTART_COUNT = "DMESH_RESTART_COUNT"
"""Variable with the number of earlier starts of a client's rank."""
_MOST_CHUNKS = 256  # of one pipe in one go, should somebody never stop writing
_EXEC_CLIENT = Path(__file__).with_name("exec_client.py")


class Sink(Protocol):
    """Destination of one of a client's output streams."""

    @property
    def due(self) -> float | None:
        """Time at which `release` is due; None if nothing is held back."""

    def feed(self, data: bytes) -> None:
        """Add output of the client."""

    def release(self) -> None:
        """Write the output held back."""

    def finish(self) -> None:
        """Take note of the stream's end."""


class Terminal:
    """The launcher's own output, on which the lines of all clients appear.

    Args:
        out: Standard output.
        err: Standard error.
        shown: The tracebacks on the terminal, if they are to be folded.
    """

    def __init__(self, out: Output, err: Output, shown: ShownTracebacks | None = None) -> None:
        self.out = out
        self.err = err
        self._shown = shown

    def sinks(self, plan: ClientPlan, errors: ErrorTail) -> tuple[Sink, Sink]:
        """Return the destinations of a client's standard output and standard error."""
        folder = None if self._shown is None else TracebackFolder(self._shown)
        return (
            LineLabeler(plan.rank if plan.labeled else None, self.out),
            LineLabeler(plan.rank, self.err, errors.feed, folder),
        )


class Stream:
    """One output stream of a client."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.open = True
        """False after its end."""

    @property
    def due(self) -> float | None:
        """Time at which `release` is due; None if nothing is held back."""
        return self._sink.due

    def feed(self, data: bytes) -> None:
        """Forward the client's output."""
        self._sink.feed(data)

    def release(self) -> None:
        """Pass on a traceback that was held back to be completed."""
        self._sink.release()

    def end_line(self) -> None:
        """Pass on the last line, although it is not finished."""
        self._sink.finish()

    def close(self) -> None:
        """Pass on the last, unfinished line and give the stream up."""
        self.end_line()
        self.open = False


class PipeStream(Stream):
    """One output pipe of a client on this machine.

    Args:
        pipe: Its reading end.
        sink: Destination of its content.
        selector: Watches the pipe until its end.
    """

    def __init__(self, pipe: IO[bytes], sink: Sink, selector: selectors.BaseSelector) -> None:
        super().__init__(sink)
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._selector = selector
        selector.register(pipe, selectors.EVENT_READ, self)

    def read(self) -> bool:
        """Pass on what there is, one chunk at most; return False when there is nothing now."""
        if not self.open:  # closed since the selector said that there is something
            return False
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.feed(data)
        else:
            self.close()
        return bool(data)

    def watch(self, wanted: bool) -> None:
        """Watch the pipe, or leave its content there for now."""
        if self.open and wanted != (self._pipe in self._selector.get_map()):
            if wanted:
                self._selector.register(self._pipe, selectors.EVENT_READ, self)
            else:
                self._selector.unregister(self._pipe)

    def close(self) -> None:
        """Pass on the last, unfinished line and give the pipe up."""
        self.watch(False)
        super().close()
        self._pipe.close()


class Client:
    """Client of a job, wherever it runs.

    Args:
        plan: What it is.
        now: Current time, seconds.
        restarts: How often this rank was started before.
    """

    streams: Sequence[Stream] = ()
    """Its standard output and standard error."""

    def __init__(self, plan: ClientPlan, now: float, restarts: int = 0) -> None:
        self.plan = plan
        self.rank = plan.rank
        self.restarts = restarts
        self.started_at = now
        self.ended_at = now
        self.errors = ErrorTail()
        """The end of its standard error output."""
        self.ended_by: signal.Signals | None = None
        """The signal by which the launcher asked it to end last, if any."""
        self._traceback_before: Traceback | None = None
        self.status: int | None = None
        """Exit code, or minus the number of the signal that killed it; None while it runs."""
        self.lost = ""
        """Reason why nothing is known of its end; empty if its end was seen."""
        self.order = -1
        """Number of clients that ended before it; -1 while it runs."""
        self.lines_before_end = 0
        """Lines that the launcher had written when it noticed the end."""
        self.pid = 0
        """Its process id; 0 until it is known."""

    def poll(self) -> bool:
        """Return whether it has ended; `status` is set from then on."""
        return self.status is not None

    def signal_group(self, number: signal.Signals) -> bool:
        """Send a signal to the client and all that it started; return False if nothing of that is left.

        Signals that notify are for the client alone.
        """
        if number in ENDING and not self.poll():
            if self.ended_by is None:
                self._traceback_before = self.errors.traceback
            self.ended_by = number
        return self._deliver(number)

    def _deliver(self, number: signal.Signals) -> bool:
        raise NotImplementedError

    def group_is_left(self) -> bool:
        """Return whether the ended client has left processes behind in its group."""
        raise NotImplementedError

    def catch_up(self, chunks: int = _MOST_CHUNKS) -> None:
        """Pass on the output that is there already."""

    def finish(self) -> bool:
        """Kill the ended client's remaining processes and close its streams; return False if not done yet."""
        raise NotImplementedError

    @property
    def streams_open(self) -> bool:
        """True while its streams have a writer."""
        return any(stream.open for stream in self.streams)

    def outcome(self) -> Outcome:
        """Return how it ended; only after its end."""
        assert self.status is not None
        return Outcome(
            rank=self.rank,
            pid=self.pid,
            status=self.status,
            order=self.order,
            seconds=self.ended_at - self.started_at,
            ended_by=self.ended_by,
            # What it says while it is ended by force is noise.
            traceback=self.errors.traceback if self.ended_by is None else self._traceback_before,
            last_lines=self.errors.last_lines,
            restarts=self.restarts,
            host=self.plan.host,
            lost=self.lost,
        )


def _cpus(plan: ClientPlan) -> str:
    """Return the CPUs to which a client is bound, separated by commas; empty if it is not."""
    if not plan.bind:
        return ""
    place, clients = (int(plan.environment[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return ",".join(map(str, cpus_for(plan.bind, place, clients, os.sched_getaffinity(0))))


class Listener(Protocol):
    """Receiver of the clients' output."""

    def sinks(self, plan: ClientPlan, errors: ErrorTail) -> tuple[Sink, Sink]:
        """Return the destinations of a client's standard output and standard error."""


class ClientProcess(Client):
    """A client on this machine: the leader of a session and process group of its own, which ends with it.

    Args:
        plan: What to start.
        listener: Where its output goes.
        selector: Watches its output.
        guard: Kills its group should this process end before it.
        now: Current time, seconds.
        restarts: How often this rank was started before.
        stdin: Its standard input, as `subprocess` has it.
    """

    def __init__(
        self,
        plan: ClientPlan,
        listener: Listener,
        selector: selectors.BaseSelector,
        guard: Guard,
        now: float,
        restarts: int = 0,
        stdin: int | None = subprocess.DEVNULL,
    ) -> None:
        super().__init__(plan, now, restarts)
        self._guard = guard
        self._process = subprocess.Popen(  # noqa: S603 - the user's own program is the point of it all
            [*stand_alone(_EXEC_CLIENT), str(os.getpid()), _cpus(plan), *plan.command],
            env={**guard.mark(plan.environment), RESTART_COUNT: str(restarts)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group that can be ended as a whole; Ctrl-C reaches it through us
            bufsize=0,
            pass_fds=plan.descriptors,
        )
        self.pid = self._process.pid
        guard.watch(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, err = listener.sinks(plan, self.errors)
        self._pipes = (
            PipeStream(self._process.stdout, out, selector),
            PipeStream(self._process.stderr, err, selector),
        )
        self.streams = self._pipes

    @property
    def stdin(self) -> IO[bytes] | None:
        """Writing end of its standard input, if that is a pipe."""
        return self._process.stdin

    def poll(self) -> bool:
        """Return whether it has ended; `status` is set from then on."""
        if self.status is None:
            self.status = self._process.poll()
        return self.status is not None

    def wait(self, seconds: float) -> bool:
        """Wait for its end, for some seconds at most; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll()

    def interrupt(self) -> None:
        """Send SIGINT to the client and all that it started, which may well go on after it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGINT)

    def _deliver(self, number: signal.Signals) -> bool:
        # The id of an ended leader cannot mean another group: while a member is left the kernel keeps it, and
        # otherwise it says that there is none.
        try:
            if number in NOTIFYING:
                self._process.send_signal(number)
            else:
                os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # the latter is what macOS says of zombies
            return False
        return True

    def group_is_left(self) -> bool:
        """Return whether the ended client has left processes behind in its group."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:  # those that ended and that we adopted
                pass
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def watch_output(self, wanted: bool) -> None:
        """Watch the client's output, or leave it in its pipes for now."""
        for pipe in self._pipes:
            pipe.watch(wanted)

    def catch_up(self, chunks: int = _MOST_CHUNKS) -> None:
        """Pass on the contents of the pipes.

        Args:
            chunks: Most chunks of each pipe.
        """
        for pipe in self._pipes:
            for _ in range(chunks):
                if not pipe.open or not pipe.read():
                    break

    def finish(self) -> bool:
        """Kill the client's remaining processes, forward the contents of the pipes, then close them."""
        self.signal_group(signal.SIGKILL)
        self._guard.forget(self.pid)
        self.catch_up()
        for pipe in self._pipes:
            if pipe.open:
                pipe.close()
        return True
