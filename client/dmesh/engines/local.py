"""Ranks in processes of this machine, started and watched by the launcher of `dmesh run`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import IO, TextIO

from dmesh._log import announce
from dmesh.engines.coordinator import coordinator
from dmesh.engines.failures import Ended, results
from dmesh.engines.rank import Call, Place, own_place
from dmesh.engines.serialization import dumps, loads
from dmesh.errors import ConfigurationError
from dmesh.launcher.diagnosis import Outcome
from dmesh.launcher.labels import StreamOutput
from dmesh.launcher.local import LocalHost
from dmesh.launcher.plan import LaunchOptions, plan_launch
from dmesh.launcher.ports import reserve_ports
from dmesh.launcher.registry import registered
from dmesh.launcher.report import Reporter
from dmesh.launcher.supervisor import LaunchResult, Supervisor

_RANK = "dmesh.engines.local_rank"


def _output(stream: TextIO) -> StreamOutput:
    return StreamOutput(lambda: stream, colored=stream.isatty() and not os.environ.get("NO_COLOR"))


class _Notices(Reporter):
    """The launcher's own lines. Failures are left to the exception that `results` raises."""

    def notice(self, text: str) -> None:
        """Log one line."""
        announce(f"dmesh.launch: {text}")

    def failure_noticed(self, outcome: Outcome, seconds: float) -> None:
        """Print nothing."""

    def summary(self, failures: Sequence[Outcome], ended_well: Sequence[int], *, visible: bool) -> None:
        """Print nothing: the exception has the summary."""


def run(call: Call) -> list[object]:
    """Run a function in all ranks, in processes of this machine, and return their results by rank.

    Raises:
        RankFailedError: A rank failed.
        ConfigurationError: This is not the main thread, or a variable is malformed.
        MissingExtraError: The function needs cloudpickle.
        ArgumentTypeError: The function or an argument cannot be pickled.
        OSError: The processes could not be started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            'dmesh.launch(on="local") forwards signals to the ranks, so only the main thread can call it. '
            "Call it there, or use `dmesh run`"
        )
    body = dumps((call.function, call.args, dict(call.kwargs)), call.function)
    header = {"path": sys.path, "argv": sys.argv, "initialize": call.initialize, "file": call.file}
    environ = {**os.environ, **call.variables}
    with ExitStack() as stack:
        payload = stack.enter_context(tempfile.TemporaryFile())
        payload.write(json.dumps(header).encode() + b"\n" + body)
        payload.flush()
        reports = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(call.ranks)]
        found = stack.enter_context(coordinator(own_place(), [], environ))
        ports = stack.enter_context(reserve_ports(call.ranks)).ports
        options = LaunchOptions(
            call.ranks, (_RANK, str(payload.fileno())), module=True, max_restarts=call.max_restarts
        )
        plan = plan_launch(options, ports, {**environ, **found})
        clients = [
            replace(
                client,
                command=(*client.command, str(report.fileno())),
                descriptors=(payload.fileno(), report.fileno()),
            )
            for client, report in zip(plan.clients, reports, strict=True)
        ]
        plan = replace(plan, clients=tuple(clients))
        stack.enter_context(registered(plan.clients[0].environment, os.environ))
        out, err = _output(sys.stdout), _output(sys.stderr)
        hosts = LocalHost(shared=True)
        result = Supervisor(plan, out, err, reporter=_Notices(err, ""), hosts=hosts).run()
        ended = [
            _ended(outcome, reports[outcome.rank])
            for outcome in sorted(result.outcomes, key=lambda one: one.order)
        ]
    _raise_received_signal(result, ended)
    return results(ended)


def _raise_received_signal(result: LaunchResult, ended: Sequence[Ended]) -> None:
    """Raise the signal that ended the ranks in this process, for its usual effect."""
    if result.requested is not None and (len(ended) < 1 or any(rank.failed for rank in ended)):
        signal.raise_signal(result.requested)


def _ended(outcome: Outcome, file: IO[bytes]) -> Ended:
    place = Place(socket.gethostname(), outcome.pid)
    file.seek(0)
    data = file.read()
    how = outcome.how()
    if data:  # it may be from an earlier start, or from a process that died while or after writing it
        try:
            pid, report = loads(data)
        except Exception as error:  # noqa: BLE001 - whatever unpickling a result raises
            if outcome.status == 0:
                how = f"returned a result that cannot be unpickled here: {type(error).__name__}: {error}"
                return Ended(outcome.rank, place, None, how, outcome.ended_by, outcome.restarts)
        else:
            if pid == outcome.pid and (outcome.status == 0 or report.failure is not None):
                return Ended(outcome.rank, place, report, "", outcome.ended_by, outcome.restarts)
    if outcome.ended_by is not None:
        how = f"was ended by dmesh.launch ({outcome.ended_by.name})"
    elif outcome.status == 0:
        how = "ended with exit code 0, but without a result"
    lines = () if outcome.traceback is None else outcome.traceback.lines
    return Ended(outcome.rank, place, None, how, outcome.ended_by, outcome.restarts, lines)
