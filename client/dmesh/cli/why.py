"""`dmesh why`: names what a cluster waits for or failed of, the culprit, and the evidence."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Says what is wrong with a cluster: a headline, the culprit, and the evidence, one fact a line. That is the
barrier or collective that it waits in, its number and arguments, since when, who is missing, their last
calls, and the position of their main threads; after a failure, the rank with which it began and those that
followed. Clients report these with their heartbeats (every 3 s unless set otherwise), so the answer is at
most that old; it says how old it is."""
_EPILOG = """\
exit code: 0 if nothing waits for long; 3 if something does; 1 if the server cannot be asked; 2 for a command
line or an environment that cannot work."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json, seconds
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "why", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    parser.add_argument(
        "--after",
        metavar="S",
        type=seconds,
        default=1.0,
        help="seconds of waiting that need no explanation (default 1)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import BAD_NEWS, tell, tell_json
    from dmesh.coordination.explanation import describe, explain, judge

    with Observer.of(args) as observer:
        picture = observer.look()
    explanation = explain(picture, args.after)
    verdict = judge(explanation, picture)
    if args.json:
        found = dataclasses.asdict(verdict) | {"victims": [str(task) for task in verdict.victims]}
        more = dataclasses.asdict(explanation)
        tell_json({"cluster": picture.cluster, "waiting": bool(explanation.waits), **found, **more})
    else:
        tell(f"{picture.cluster}: {describe(verdict)}")
    return BAD_NEWS if explanation.waits else 0
