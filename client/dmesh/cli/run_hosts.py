"""`dmesh run` on several hosts, reached by ssh, or those of a Slurm allocation."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dmesh.errors import ConfigurationError
from dmesh.launcher import LaunchOptions, LaunchResult, Supervisor
from dmesh.launcher.across import check_across, plan_across
from dmesh.launcher.hosts import (
    Host,
    Way,
    agent_command,
    exported,
    is_here,
    parse_hosts,
    read_hostfile,
    split_ssh,
    ssh_command,
    take_slots,
)
from dmesh.launcher.labels import Output
from dmesh.launcher.registry import registered
from dmesh.launcher.remote import RemoteHosts
from dmesh.launcher.slurm import allocated_hosts, srun_command

_ONLY_WITH_HOSTS = ("ssh", "python", "chdir", "export", "insecure", "start_timeout")
_START_TIMEOUT = 60.0
_MOST_DIGITS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `dmesh run`."""
    group = parser.add_argument_group(
        "several hosts", "See docs/how-to/ssh.md and docs/how-to/slurm.md. -n is optional then: all slots."
    )
    add = group.add_argument
    add("--hosts", metavar="A:N,B:N", help="start N clients on each of these hosts, over ssh")
    add(
        "--hostfile",
        metavar="FILE",
        help="read the hosts from a file with lines HOST slots=N, as for Open MPI",
    )
    add("--slurm", action="store_true", help="start clients on the nodes of this Slurm allocation")
    add(
        "--ssh",
        metavar="CMD",
        help="command to run instead of ssh (default: DMESH_SSH)",
    )
    add("--python", metavar="PATH", help="Python on the hosts (default: this one's path)")
    add("--chdir", metavar="DIR", help="working directory on the hosts (default: the current one)")
    add(
        "-x", "--export", metavar="NAME[=VALUE]", action="append", default=[],
        help="pass an environment variable to the clients, in addition to dmesh's; may be repeated",
    )  # fmt: skip
    add(
        "--insecure", action="store_true",
        help="do not encrypt connections to the coordination server, although tokens are sent over them",
    )  # fmt: skip
    add("--start-timeout", metavar="S", help=f"seconds to connect to the hosts (default {_START_TIMEOUT:g})")


def hosts_of(args: argparse.Namespace) -> tuple[Host, ...] | None:
    """Return the hosts that get clients, and set `args.clients` accordingly; None for this machine alone.

    Raises:
        ConfigurationError: The flags, the host file or the allocation cannot work.
    """
    named = [name for name in ("hosts", "hostfile", "slurm") if getattr(args, name)]
    if not named:
        useless = [name for name in _ONLY_WITH_HOSTS if getattr(args, name)]
        if useless:
            flag = f"--{useless[0].replace('_', '-')}"
            raise ConfigurationError(f"{flag} is for --hosts, --hostfile and --slurm; leave it out")
        return None
    if len(named) > 1:
        raise ConfigurationError(f"--{named[0]} and --{named[1]} both choose the hosts; use one of them")
    clients = None if args.clients is None else _whole(args.clients)
    if args.slurm:
        hosts, source = allocated_hosts(os.environ, clients), "this allocation"
    elif args.hosts:
        hosts, source = parse_hosts(args.hosts), f"--hosts {args.hosts}"
    else:
        hosts, source = read_hostfile(args.hostfile), f"--hostfile {args.hostfile}"
    hosts = take_slots(hosts, clients, source)
    args.clients = str(sum(host.slots for host in hosts))
    return hosts


def execute(
    args: argparse.Namespace,
    options: LaunchOptions,
    hosts: Sequence[Host],
    outputs: tuple[Output, Output],
) -> LaunchResult:
    """Run a job on several hosts.

    Raises:
        ConfigurationError: The command line or the environment cannot work; nothing was started.
        HostError: A host cannot be reached, has no dmesh or another version, or refuses.
        OSError: This machine cannot start a process.
    """
    environment = dict(os.environ)
    if args.insecure:
        environment["DMESH_INSECURE"] = "1"
    exports = exported(args.export, environment)
    if not all(is_here(host) for host in hosts):
        check_across(options, environment)
    remote = RemoteHosts(hosts, _ways(args, environment), _seconds(args.start_timeout))
    sys.stdout.flush()
    with remote.connected(options, args.chdir or str(Path.cwd())) as guard:
        directory = Path(tempfile.mkdtemp(prefix="dmesh-run-"))
        guard.remove(directory)
        across = plan_across(options, remote.jobs(), remote.places(), environment, exports, directory)
        remote.hand_over(across.files)
        with registered(across.plan.clients[0].environment, os.environ):
            return Supervisor(across.plan, *outputs, hosts=remote).run()


def _ways(args: argparse.Namespace, environment: Mapping[str, str]) -> Callable[[Host], Way]:
    """Return how each host is reached."""
    python = args.python or sys.executable
    ssh = split_ssh(args.ssh or environment.get("DMESH_SSH", "").strip() or "ssh")

    def way(host: Host) -> Way:
        if args.slurm:
            return Way("srun", tuple(srun_command(host, agent_command(python))), python)
        if is_here(host):
            return Way("here", agent_command(python), python)
        attempt = shlex.join((*ssh, host.target, "true"))
        return Way("ssh", tuple(ssh_command(ssh, host, agent_command(python))), python, attempt)

    return way


def _seconds(text: str | None) -> float:
    if text is None:
        return _START_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"--start-timeout must be a number of seconds above 0, got {text!r}")
    return seconds


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise ConfigurationError(f"-n must be a whole number from 1, got {text!r}")
    return int(text)
