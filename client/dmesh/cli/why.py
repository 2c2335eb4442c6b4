"""`dmesh why`: names what a cluster waits for or failed of, the culprit, and the evidence."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Explains what is wrong with a cluster: a headline, the culprit, and the evidence, one fact per line. For a
wait, that is the barrier or collective, its number and arguments, its duration, the missing ranks, their last
calls, and the source lines of their main threads. For a failure, it is the rank that failed first and the
ranks that failed because of it. Clients report these facts with their heartbeats (every 3 s by default), so
they are slightly old; the answer gives their age."""
_EPILOG = """\
exit code: 0 if nothing is wrong; 3 if a rank failed or holds others up; 1 if the server does not answer; 2
for an invalid command line or environment."""


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
        help="ignore waits shorter than S seconds (default 1)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import BAD_NEWS, print_json, print_text
    from dmesh.coordination.explanation import describe, explain, judge

    with Observer.of(args) as observer:
        picture = observer.look()
    explanation = explain(picture, args.after)
    verdict = judge(explanation, picture)
    if args.json:
        found = dataclasses.asdict(verdict) | {"victims": [str(task) for task in verdict.victims]}
        more = dataclasses.asdict(explanation)
        print_json({"cluster": picture.cluster, "waiting": bool(explanation.waits), **found, **more})
    else:
        print_text(f"{picture.cluster}: {describe(verdict)}")
    return BAD_NEWS if explanation.waits else 0
