"""`dmesh cluster`: declares clusters before their first client, lists the declarations and withdraws them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.rest import Rest

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Declares the jobs, timeouts and policies of clusters on a running coordination server, before the first client
registers. The server refuses clients whose settings differ. A declaration holds for all runs of this name
until it is deleted. Needs the server's HTTP address and, to change anything, an admin's token."""
_EPILOG = """\
exit code: 0; 3 if there is no declaration to delete; 1 if the server does not answer, or refuses; 2 for an
invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "cluster", _DESCRIPTION, _EPILOG, execute)
    verbs = parser.add_subparsers(title="verbs", dest="cluster_verb", metavar="VERB", required=True)
    create = _verb(verbs, "create", "declare a cluster, or change its declaration")
    create.add_argument("name", metavar="NAME")
    create.add_argument(
        "--jobs", metavar="JOB=N[,JOB=N]", type=_jobs, required=True, help="number of tasks of each job"
    )
    create.add_argument("--restart-policy", choices=("fail-fast", "rejoin"))
    create.add_argument(
        "--lease", metavar="S", type=float, help="seconds of silence after which a member is declared lost"
    )
    create.add_argument("--heartbeat-interval", metavar="S", type=float)
    create.add_argument(
        "--stuck-after",
        metavar="S",
        type=float,
        help="seconds of waiting after which a member counts as stuck; negative: never",
    )
    _verb(verbs, "list", "list the declared clusters")
    _verb(verbs, "delete", "delete a declaration; a running cluster continues").add_argument(
        "name", metavar="NAME"
    )


def _verb(verbs: Subparsers, name: str, text: str) -> argparse.ArgumentParser:
    from dmesh.cli.output import add_json
    from dmesh.cli.rest import add_http

    parser = verbs.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
    add_http(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)
    return parser


def _jobs(text: str) -> dict[str, int]:
    jobs: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = part.partition("=")
        if not name or not equals or not count.isdecimal() or int(count) < 1 or name in jobs:
            raise argparse.ArgumentTypeError(f"{text!r} is not JOB=N[,JOB=N]")
        jobs[name] = int(count)
    return jobs


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    import os

    from dmesh.cli.rest import Rest

    rest = Rest.of(args.http, os.environ)
    return {"create": _create, "list": _list, "delete": _delete}[args.cluster_verb](rest, args)


def _path(name: str) -> str:
    from urllib.parse import quote

    return f"/api/v1/clusters/{quote(name, safe='')}/declaration"


def _create(rest: Rest, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_text

    policy = args.restart_policy
    wanted = {
        "jobs": args.jobs,
        "restart_policy": policy.upper().replace("-", "_") if policy else None,
        "lease": args.lease,
        "heartbeat_interval": args.heartbeat_interval,
        "stuck_after": args.stuck_after,
    }
    done = rest.send("PUT", _path(args.name), body=wanted)
    if args.json:
        print_json(done)
    else:
        print_text(f"Declared cluster {args.name}: {done['target']}.")
    return 0


def _list(rest: Rest, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_table

    found = rest.get("/api/v1/declarations", {})["declarations"]
    if args.json:
        print_json(found)
        return 0
    rows = [
        (
            one["cluster"], ",".join(f"{job}={count}" for job, count in one["jobs"].items()),
            *("-" if one[name] is None else one[name] for name in _SETTINGS),
        )
        for one in found
    ]  # fmt: skip
    print_table(("CLUSTER", "JOBS", *(name.replace("_", " ").upper() for name in _SETTINGS)), rows)
    return 0


def _delete(rest: Rest, args: argparse.Namespace) -> int:
    from dmesh.cli.output import BAD_NEWS, print_failure, print_json, print_text
    from dmesh.errors import CoordinationError

    declared = [one["cluster"] for one in rest.get("/api/v1/declarations", {})["declarations"]]
    if args.name not in declared:
        message = f"no cluster {args.name!r} is declared"
        print_failure("cluster", message, CoordinationError, as_json=args.json)
        return BAD_NEWS
    done = rest.send("DELETE", _path(args.name))
    if args.json:
        print_json(done)
    else:
        print_text(f"Deleted the declaration of cluster {args.name}.")
    return 0


_SETTINGS = ("restart_policy", "heartbeat_interval", "lease", "stuck_after")
