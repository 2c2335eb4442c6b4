"""The flags of `dmesh run` for several hosts, apart from what carries them out: most runs are of one host."""

from __future__ import annotations

import argparse

from dmesh.errors import ConfigurationError

START_TIMEOUT = 60.0
"""Seconds to reach the hosts, unless `--start-timeout` says otherwise."""
_ONLY_WITH_HOSTS = ("ssh", "python", "chdir", "export", "insecure", "start_timeout")


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
    add("--start-timeout", metavar="S", help=f"seconds to connect to the hosts (default {START_TIMEOUT:g})")


def several_hosts(args: argparse.Namespace) -> bool:
    """Return whether the flags name hosts.

    Raises:
        ConfigurationError: They name them twice, or only say how to reach them.
    """
    named = [name for name in ("hosts", "hostfile", "slurm") if getattr(args, name)]
    useless = [name for name in _ONLY_WITH_HOSTS if getattr(args, name)]
    if useless and not named:
        flag = f"--{useless[0].replace('_', '-')}"
        raise ConfigurationError(f"{flag} is for --hosts, --hostfile and --slurm; leave it out")
    if len(named) > 1:
        raise ConfigurationError(f"--{named[0]} and --{named[1]} both choose the hosts; use one of them")
    return bool(named)
