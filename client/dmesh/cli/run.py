"""`dmesh run`: starts N clients of a program, on this machine or on several, and stays with them."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from dmesh.cli import host_arguments
from dmesh.cli.output import add_json, tell_failure, tell_json
from dmesh.errors import ConfigurationError
from dmesh.launcher import LaunchOptions, Supervisor, plan_launch
from dmesh.launcher.job_report import job_report
from dmesh.launcher.labels import Output
from dmesh.launcher.plan import check_options
from dmesh.launcher.ports import reserve_ports
from dmesh.launcher.registry import registered

if TYPE_CHECKING:
    from dmesh.launcher import LaunchPlan, LaunchResult

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_USAGE = """\
dmesh run -n N [options] script.py [args ...]
       dmesh run -n N [options] -m module [args ...]
       dmesh run --hosts A:N,B:N | --hostfile FILE | --slurm [options] script.py [args ...]
       dmesh run -n N [options] python script.py [args ...]"""
_DESCRIPTION = """\
Starts N clients of a Python program, on this machine or on several hosts, with DTENSOR_JOBS and
DTENSOR_CLIENT_ID set so that dmesh.initialize_accelerator_system() finds the others. Each line of their
output is labeled with [rank]; standard input goes to rank 0 alone. When one fails, the others are ended and
the first failure is reported first."""
_EPILOG = """\
exit code: 0 when all clients ended with 0; else that of the first failure, 128 + the number for a signal;
2 for a command line that cannot work. Ctrl-C and SIGTERM are passed on to the clients, a second one kills
them. With --json, the clients' standard output goes to standard error, and one JSON object about how each of
them ended is printed at the end: failures are listed with the cause first."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="start N clients of a program, on this machine or on several",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "-np", "--clients", metavar="N", help="number of clients (required on one machine)")
    add("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    add(
        "--cpu-devices",
        metavar="K",
        help="logical CPU devices of each client, unless its script says otherwise",
    )
    add(
        "--bind",
        metavar="TO",
        default="",
        help="bind each client to its share of the host's cores (core), or to the CPUs of one NUMA node, "
        "neighboring ranks to the same (numa); default: neither",
    )
    add(
        "--coordinator",
        metavar="H:P",
        help="use the server of `dmesh serve` at this address, not one inside client 0",
    )
    add("--cluster", metavar="NAME", help="cluster name at that server; default: a fresh one for this run")
    add(
        "--timeout-after-failure",
        metavar="S",
        default="3",
        help="seconds that the others have after a failure to end by themselves, before SIGTERM (default 3)",
    )
    add("--terminate-grace", metavar="S", default="5", help="seconds between SIGTERM and SIGKILL (default 5)")
    add(
        "--max-restarts",
        metavar="N",
        default="0",
        help="start each client that fails again, up to N times, to take its own place in the running job "
        "(sets DMESH_RESTART_POLICY=rejoin; needs --coordinator for rank 0; default 0)",
    )
    add_json(parser)
    host_arguments.add_arguments(parser)
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py [args ...]",
        help="the program and its arguments",
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Run the verb; return the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work; nothing was started.
    """
    elsewhere = host_arguments.several_hosts(args)
    if elsewhere:
        from dmesh.cli import run_hosts

        hosts = run_hosts.hosts_of(args)
    options = _options(args)
    check_options(options, os.environ, elsewhere=elsewhere)
    try:
        if elsewhere:
            began = time.monotonic()
            result = run_hosts.execute(args, options, hosts, _outputs(as_json=args.json))
            if args.json:
                tell_json(job_report(result, socket.gethostname(), time.monotonic() - began))
            return result.exit_code
        with reserve_ports(options.clients) as reservation:
            plan = plan_launch(options, reservation.ports, os.environ)
            sys.stdout.flush()
            with registered(plan.clients[0].environment, os.environ):
                began = time.monotonic()
                result = _supervise(plan, as_json=args.json)
    except ConfigurationError:
        raise
    except OSError as error:
        message = f"error: the clients could not be started: {error}"
        tell_failure("run", message, type(error), as_json=args.json)
        return 1
    if args.json:
        tell_json(job_report(result, socket.gethostname(), time.monotonic() - began))
    return result.exit_code


def _supervise(plan: LaunchPlan, *, as_json: bool) -> LaunchResult:
    return Supervisor(plan, *_outputs(as_json=as_json)).run()


def _outputs(*, as_json: bool) -> tuple[Output, Output]:
    """Return where the clients' standard output and standard error go."""
    errors = Output(2, os.environ)
    return (errors if as_json else Output(1, os.environ)), errors


def _options(args: argparse.Namespace) -> LaunchOptions:
    command: list[str] = args.command
    if command[:1] == ["--"]:
        command = command[1:]
    if args.clients is None:
        raise ConfigurationError("-n is required: the number of clients, for example -n 4")
    return LaunchOptions(
        clients=_integer("-n", args.clients),
        command=tuple(command),
        module=args.module,
        cpu_devices=None if args.cpu_devices is None else _integer("--cpu-devices", args.cpu_devices),
        bind=args.bind,
        coordinator=args.coordinator,
        cluster=args.cluster,
        timeout_after_failure=_seconds("--timeout-after-failure", args.timeout_after_failure),
        terminate_grace=_seconds("--terminate-grace", args.terminate_grace),
        max_restarts=_integer("--max-restarts", args.max_restarts),
    )


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{flag} must be a whole number, got {text!r}") from None


def _seconds(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{flag} must be a number of seconds, got {text!r}") from None
