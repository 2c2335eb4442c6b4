"""`dmesh tune`: measures how collectives are fast on this machine, or in a cluster, and writes it down."""

from __future__ import annotations

import argparse
import math
import os
import stat
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dmesh._files import status
from dmesh.cli.output import add_json, print_failure
from dmesh.errors import ConfigurationError, DMeshError

if TYPE_CHECKING:
    from dmesh.cli.tune_output import Presenter, Sender

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Measures collectives between hosts, by messages and, if the clients have the native core, over dedicated
connections. Prints the results and writes a tuning file, which clients on this machine use from their next
start on. By default, it starts clients on this machine that talk over loopback. If DTENSOR_JOBS is set, it
joins that cluster and measures its network: start it on all hosts like your program. Each client then writes
its own file."""
_EPILOG = """\
Loopback is only a rough model of a network. DMESH_TUNING=FILE makes clients read another tuning file,
DMESH_TUNING=0 none."""
_MOST_SECONDS = 3600.0
_CLIENTS = 3
"""As few as there can be, so that cores do for them: two send as much one way as another."""
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure collectives on this machine or cluster and write a tuning file",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--clients", metavar="RANKS", help=f"clients to start on this machine (default {_CLIENTS})")
    add(
        "--out",
        metavar="FILE",
        help="output file (default: the file in DMESH_TUNING, or ~/.config/dmesh/tuning.json)",
    )
    add("--seconds", metavar="S", default="20", help="approximate duration of the measurement (default 20)")
    add("--to-launcher", action="store_true", help=argparse.SUPPRESS)
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work, or the file cannot be written.
        DMeshError: The clients could not meet, or share memory.
    """
    from dmesh.cli.progress import Bar
    from dmesh.cli.tune_output import Presenter, Sender

    seconds = _seconds(args.seconds)
    out = _out(args.out)
    if not os.environ.get("DTENSOR_JOBS", "").strip():
        clients = _CLIENTS if args.clients is None else _clients(args.clients)
        return _start(clients, out, seconds, as_json=args.json)
    if args.clients is not None:
        raise ConfigurationError(
            "-n starts clients on this machine, but DTENSOR_JOBS is set, which makes this process a "
            "client of a cluster. Use only one of them"
        )
    if args.to_launcher:
        return _take_part(out, seconds, Sender())
    with Bar() as bar:
        return _take_part(out, seconds, Presenter(bar, as_json=args.json))


def _start(clients: int, out: Path, seconds: float, *, as_json: bool) -> int:
    """Starts clients on this machine that do it, with nothing set but what keeps them from sharing memory."""
    from dmesh.cli.progress import Bar
    from dmesh.cli.tune_output import Presenter, Receiver
    from dmesh.launcher import LaunchOptions, Supervisor, plan_launch
    from dmesh.launcher.labels import Output
    from dmesh.launcher.ports import reserve_ports

    environment = {
        name: value
        for name, value in os.environ.items()
        if name == "DMESH_NATIVE" or not name.startswith(("DTENSOR_", "DMESH_"))
    }
    environment["DMESH_SHARED_MEMORY"] = "0"
    command = ("dmesh", "tune", "--out", str(out.absolute()), "--seconds", str(seconds), "--to-launcher")
    options = LaunchOptions(clients=clients, command=command, module=True, labels=False)
    try:
        with Bar() as bar, reserve_ports(clients) as reservation:
            plan = plan_launch(options, reservation.ports, environment)
            sys.stdout.flush()
            errors = Output(2, os.environ)
            presenter = Presenter(bar, as_json=as_json)
            code = Supervisor(plan, Receiver(presenter, errors), errors).run().exit_code
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(f"the clients could not be started: {error}") from error
    if code and as_json and not presenter.finished:
        message = f"the clients that measure have ended with exit code {code}, and said why on standard error"
        print_failure("tune", message, DMeshError, as_json=True)
    return code


def _take_part(out: Path, seconds: float, audience: Presenter | Sender) -> int:
    """Measures as one client of a cluster."""
    import dmesh
    from dmesh.collectives.communicator import Communicator
    from dmesh.collectives.measurement import measure
    from dmesh.collectives.tuning import write
    from dmesh.runtime import context

    jobs = os.environ["DTENSOR_JOBS"].split(",")
    os.environ["DMESH_TUNING"] = "0"  # the file is about to be written: whether there is one does not matter
    dmesh.initialize_accelerator_system()
    shows = dmesh.client_id() == 0
    communicator = context.current().get(Communicator)
    found = measure(communicator, seconds, audience.show if shows else lambda what: None)
    write(out, found)
    if shows:
        loopback = all(job.strip().startswith(_LOOPBACK) for job in jobs)
        if loopback:
            audience.show(
                "All clients were on this machine: loopback stood for the network, which has other limits."
            )
        result = {
            "file": str(out), "clients": dmesh.num_clients(), "loopback": loopback, "tuning": asdict(found)
        }  # fmt: skip
        audience.finish(result, f"Wrote {out}: {found}")
    dmesh.shutdown_accelerator_system()
    return 0


def _out(given: str | None) -> Path:
    from dmesh.collectives.tuning import default_path

    named = given or os.environ.get("DMESH_TUNING", "").strip()
    if named and (given or named != "0"):
        out = Path(named)
    elif (default := default_path()) is not None:
        out = default
    else:
        raise ConfigurationError("there is no home directory for the file; name one with --out")
    _check_place(out)
    return out


def _check_place(out: Path) -> None:
    """Finds out before anything is measured whether there can be such a file."""
    try:
        found = status(out)
        place = next(place for place in out.absolute().parents if place.exists())
    except OSError as error:  # a name that is too long, a directory that this user may not look into
        raise ConfigurationError(f"the tuning file {out} cannot be written: {error.strerror}") from error
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"the tuning file {out} is a directory; name a file in it with --out")
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the tuning file {out} cannot be written: {place} is not a directory that this user can "
            "write to. Name another file with --out"
        )


def _clients(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 2 <= int(text[:9]) <= 64:
        raise ConfigurationError(f"-n is {text!r}; expected a whole number from 2 to 64")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_SECONDS:  # false for NaN, too
        raise ConfigurationError(
            f"--seconds is {text!r}; expected a number greater than 0 and at most {_MOST_SECONDS:.0f}"
        )
    return seconds
