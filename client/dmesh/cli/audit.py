"""`dmesh audit`: who did what on a coordination server, from its audit log."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Prints the audit log of a coordination server, the latest entries last: changes by operators, tokens issued
or revoked, and refused attempts. Needs an admin's token. A server with --data-dir keeps the log across
restarts."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer, or refuses; 2 for an invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.output import add_json
    from dmesh.cli.rest import add_http
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "audit", _DESCRIPTION, _EPILOG, execute)
    add = parser.add_argument
    add_http(parser)
    add("--count", metavar="N", type=int, default=100, help="print at most N entries (default 100)")
    add("--before", metavar="NUMBER", type=int, help="only entries before the one with this number")
    add("--action", metavar="ACTION", help="only entries of this action, such as evict_member")
    add("--who", metavar="WHO", help="only entries of this token, by its fingerprint, name or id")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    import os

    from dmesh.cli.rest import Rest

    asked = {"limit": args.count, "before": args.before, "action": args.action, "who": args.who}
    rest = Rest.of(args.http, os.environ)
    page = rest.get("/api/v1/audit", {name: str(value) for name, value in asked.items() if value is not None})
    for entry in reversed(page["entries"]):
        _print(entry, as_json=args.json)
    return 0


def _print(entry: dict[str, Any], *, as_json: bool) -> None:
    import datetime

    from dmesh.cli.output import print_json_line, printable

    if as_json:
        print_json_line(entry)
        return
    when = f"{datetime.datetime.fromtimestamp(entry['time'], datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"
    detail = f" ({entry['detail']})" if entry["detail"] else ""
    text = (
        f"{entry['number']} {when} {entry['who']} from {entry['remote']}: {entry['action']} "
        f"{entry['target']}: {entry['outcome']}{detail}"
    )
    print(printable(text).replace("\n", " "), flush=True)  # noqa: T201
