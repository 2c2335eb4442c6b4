"""`dmesh run` on several hosts, reached by ssh, or those of a Slurm allocation."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dmesh.cli.host_arguments import START_TIMEOUT
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

_MOST_DIGITS = 9


def hosts_of(args: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts that get clients, and set `args.clients` accordingly.

    Raises:
        ConfigurationError: The host file or the allocation cannot work.
    """
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
        return START_TIMEOUT
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
