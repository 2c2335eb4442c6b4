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
        help="the same from a file of lines HOST slots=N, as Open MPI has it",
    )
    add("--slurm", action="store_true", help="start clients on the nodes of this Slurm allocation")
    add(
        "--ssh",
        metavar="CMD",
        help="program and arguments in the place of ssh (default: DMESH_SSH)",
    )
    add("--python", metavar="PATH", help="the hosts' Python (default: the path of this one)")
    add("--chdir", metavar="DIR", help="the program's working directory on the hosts (default: this one)")
    add(
        "-x", "--export", metavar="NAME[=VALUE]", action="append", default=[],
        help="hand an environment variable to the clients, beside those of dmesh; may be repeated",
    )  # fmt: skip
    add(
        "--insecure", action="store_true",
        help="do not encrypt the way to the coordination server; a token is sent over it",
    )  # fmt: skip
    add("--start-timeout", metavar="S", help=f"seconds to reach the hosts (default {START_TIMEOUT:g})")


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
        raise ConfigurationError(f"--{named[0]} and --{named[1]} both say where clients run; use one of them")
    return bool(named)
