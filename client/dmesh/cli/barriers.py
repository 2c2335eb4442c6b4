"""`dmesh barriers`: the barriers under way, and who is missing at them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Shows a cluster's pending barriers: the missing tasks, how long the first arrival has waited, and the time
left."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer; 2 for an invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "barriers", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import print_json, print_table, print_text
    from dmesh.coordination.explanation import ranks_text, seconds_text

    with Observer.of(args) as observer:
        barriers = observer.state().barriers
        cluster = observer.cluster
    if args.json:
        found = [
            {
                "name": barrier.name,
                "instance": barrier.instance,
                "arrived": [str(task) for task in barrier.arrived],
                "missing": [str(task) for task in barrier.missing],
                "age": barrier.age,
                "remaining": barrier.remaining,
            }
            for barrier in barriers
        ]
        print_json({"cluster": cluster, "barriers": found})
    elif not barriers:
        print_text(f"Cluster {cluster!r} has no pending barriers.")
    else:
        print_table(
            ("BARRIER", "INSTANCE", "ARRIVED", "AGE", "LEFT", "MISSING"),
            [
                (
                    barrier.name,
                    barrier.instance,
                    f"{len(barrier.arrived)} of {len(barrier.arrived) + len(barrier.missing)}",
                    seconds_text(barrier.age),
                    "-" if barrier.remaining is None else seconds_text(barrier.remaining),
                    ranks_text([task.index for task in barrier.missing]),
                )
                for barrier in barriers
            ],
        )
    return 0
