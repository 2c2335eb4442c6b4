"""`dmesh events`: what happened on a coordination server, from its REST interface."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Prints the event log of a coordination server: members that joined, left or were lost, failed barriers, and
operators' actions. The server keeps about ten thousand events and serves them over HTTP only."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer; 2 for an invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.output import add_json, seconds
    from dmesh.cli.rest import add_http
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "events", _DESCRIPTION, _EPILOG, execute)
    add = parser.add_argument
    add_http(parser)
    add("--cluster", metavar="NAME", help="only events of this cluster")
    add("--follow", action="store_true", help="print new events as they happen, until Ctrl-C")
    add("--after", metavar="CURSOR", help="start after the event with this cursor")
    add("--count", metavar="N", type=int, help="exit after N events")
    add(
        "--interval",
        metavar="S",
        type=seconds,
        default=1.0,
        help="seconds between requests with --follow (default 1)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    import os
    import time

    from dmesh.cli.rest import Rest

    rest = Rest.of(args.http, os.environ)
    printed, after = 0, args.after
    while True:
        parameters = {"limit": "100", "cluster": args.cluster, "after": after}
        page = rest.get("/api/v1/events", {name: text for name, text in parameters.items() if text})
        if page.get("gap") and after is not None:
            _print_gap(args)
        for event in page.get("events", ()):
            _print(event, args)
            printed += 1
            if printed == args.count:
                return 0
        after = str(page.get("next") or after or "") or None
        if page.get("more"):
            continue
        if not args.follow:
            return 0
        time.sleep(args.interval)


def _print(event: dict[str, Any], args: argparse.Namespace) -> None:
    import datetime

    from dmesh.cli.output import print_json_line, printable

    if args.json:
        print_json_line(event)
        return
    moment = event.get("time")
    stamp = datetime.datetime.fromtimestamp(moment, datetime.UTC) if isinstance(moment, int | float) else None
    when = "-" if stamp is None else f"{stamp:%Y-%m-%dT%H:%M:%S}Z"
    where = f"{event['cluster']}: " if event.get("cluster") else ""
    what = event.get("message") or event.get("kind")
    text = f"{when} {event.get('severity', '')!s:7} {where}{what}"
    print(printable(text).replace("\n", " "), flush=True)  # noqa: T201


def _print_gap(args: argparse.Namespace) -> None:
    from dmesh.cli.output import print_json_line

    if args.json:
        print_json_line({"gap": True})
    else:
        print("... some events are missing: the server no longer keeps them ...", flush=True)  # noqa: T201
