"""Client process of a job: its process group, its pipes, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from dmesh.launch.diagnosis import ErrorTail, Outcome, Traceback
from dmesh.launch.folding import ShownTracebacks, TracebackFolder
from dmesh.launch.labels import LineLabeler, Output
from dmesh.launch.orphans import stand_alone
from dmesh.launch.plan import ClientPlan

_CHUNK = 64 * 1024
RESTART_COUNT = "DMESH_RESTART_COUNT"
"""Variable with the number of earlier starts of a client's rank."""
_MOST_CHUNKS = 256  # of one pipe in one go, should somebody never stop writing
_EXEC_CLIENT = Path(__file__).with_name("exec_client.py")


class Stream:
    """One output pipe of a client."""

    def __init__(self, pipe: IO[bytes], labeler: LineLabeler) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._labeler = labeler
        self.open = True
        """False after its end."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._pipe.fileno()

    def read(self) -> bool:
        """Pass on what there is, one chunk at most; return False when there is nothing now."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._labeler.feed(data)
        else:
            self.close()
        return bool(data)

    @property
    def due(self) -> float | None:
        """Time at which `release` is due; None if nothing is held back."""
        return self._labeler.due

    def release(self) -> None:
        """Pass on a traceback that was held back to be completed."""
        self._labeler.release()

    def end_line(self) -> None:
        """Pass on the last line, although it is not finished."""
        self._labeler.finish()

    def close(self) -> None:
        """Pass on the last, unfinished line and give the pipe up."""
        self.end_line()
        self._pipe.close()
        self.open = False


class ClientProcess:
    """A running client: the leader of a session and process group of its own, which ends with it.

    Args:
        plan: What to start.
        out: Where its standard output goes, labeled.
        err: Where its standard error goes, labeled.
        now: Current time, seconds.
        restarts: How often this rank was started before.
        shown: The tracebacks on the terminal, if this client's are to be folded.
        inherited: Descriptors of the launcher's that it gets at the same numbers.
        stdin: Its standard input, as `subprocess` has it; None for rank 0's: the launcher's own.
    """

    def __init__(
        self,
        plan: ClientPlan,
        out: Output,
        err: Output,
        now: float,
        restarts: int = 0,
        shown: ShownTracebacks | None = None,
        inherited: Sequence[int] = (),
        stdin: int | None = None,
    ) -> None:
        self.plan = plan
        self.rank = plan.rank
        self.restarts = restarts
        self.started_at = now
        self.ended_at = now
        self.errors = ErrorTail()
        """The end of what it wrote to standard error."""
        self.ended_by: signal.Signals | None = None
        """The signal that the launcher sent to it last, if any."""
        self._traceback_before: Traceback | None = None
        self.status: int | None = None
        """Exit code, or minus the number of the signal that killed it; None while it runs."""
        self.order = -1
        """Number of clients that ended before it; -1 while it runs."""
        self.lines_before_end = 0
        """Lines that the launcher had written when it noticed the end."""
        self._process = subprocess.Popen(  # noqa: S603 - the user's own program is the point of it all
            [*stand_alone(_EXEC_CLIENT), str(os.getpid()), *plan.command],
            env={**plan.environment, RESTART_COUNT: str(restarts)},
            stdin=stdin if plan.rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group that can be ended as a whole; Ctrl-C reaches it through us
            bufsize=0,
            pass_fds=inherited,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.streams: Sequence[Stream] = (
            Stream(self._process.stdout, LineLabeler(plan.rank if plan.labeled else None, out)),
            Stream(
                self._process.stderr,
                LineLabeler(
                    plan.rank, err, self.errors.feed, None if shown is None else TracebackFolder(shown)
                ),
            ),
        )

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

    def signal_group(self, number: signal.Signals) -> bool:
        """Send a signal to the client and all that it started; return False if nothing of that is left."""
        if not self.poll():
            if self.ended_by is None:
                self._traceback_before = self.errors.traceback
            self.ended_by = number
        # The id of an ended leader cannot mean another group: while a member is left the kernel keeps it, and
        # otherwise it says that there is none.
        try:
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

    def catch_up(self) -> None:
        """Pass on the contents of the pipes."""
        for stream in self.streams:
            for _ in range(_MOST_CHUNKS):
                if not stream.open or not stream.read():
                    break

    def close(self) -> None:
        """Pass on the contents of the pipes, then close them."""
        self.catch_up()
        for stream in self.streams:
            if stream.open:
                stream.close()

    @property
    def streams_open(self) -> bool:
        """True while its pipes have a writer."""
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
        )
