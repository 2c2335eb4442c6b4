"""`dmesh token`: issues tokens of a coordination server, lists them and revokes them."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmesh.cli.rest import Rest

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Issues, lists and revokes tokens of a running coordination server. Needs an admin's token and the server's
HTTP address. The server keeps only hashes, so a new token is printed once and cannot be shown again."""
_EPILOG = """\
exit code: 0; 3 if there is no token with the given ID; 1 if the server does not answer, or refuses; 2 for an
invalid command line or environment."""

_QUOTAS = {
    "clusters": "clusters that it starts and that run at the same time",
    "tasks": "tasks of all these clusters",
    "keys": "keys of all these clusters",
    "bytes": "size of these keys and their values, such as 64MiB",
    "calls-per-second": "calls per second",
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "token", _DESCRIPTION, _EPILOG, execute)
    verbs = parser.add_subparsers(title="verbs", dest="token_verb", metavar="VERB", required=True)
    create = _verb(verbs, "create", "issue a token and print it")
    add = create.add_argument
    add(
        "--cluster",
        metavar="NAME",
        action="append",
        default=[],
        help="limit the token to this cluster; may be repeated (default: all clusters)",
    )
    add("--role", choices=("viewer", "worker", "admin"), default="worker", help="role (default worker)")
    add("--name", metavar="NAME", default="", help="name in logs: letters, digits, _ . -")
    add("--ttl", metavar="TIME", type=_time, help="lifetime, such as 30d, 12h or 90s (default: unlimited)")
    for name, text in _QUOTAS.items():
        kind, shown = (_size, "SIZE") if name == "bytes" else (int, "N")
        add(f"--max-{name}", metavar=shown, type=kind, help=f"quota: {text}")
    _verb(verbs, "list", "list issued tokens by ID; the tokens themselves are never shown")
    _verb(verbs, "revoke", "revoke a token and close the streams opened with it").add_argument(
        "id", metavar="ID"
    )


def _verb(verbs: Subparsers, name: str, text: str) -> argparse.ArgumentParser:
    from dmesh.cli.output import add_json
    from dmesh.cli.rest import add_http

    parser = verbs.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
    add_http(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    import os

    from dmesh.cli.rest import Rest

    rest = Rest.of(args.http, os.environ)
    return {"create": _create, "list": _list, "revoke": _revoke}[args.token_verb](rest, args)


def _create(rest: Rest, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, printable

    names = [name.replace("-", "_") for name in _QUOTAS]
    wanted = {
        "name": args.name,
        "role": args.role,
        "clusters": args.cluster,
        "ttl": args.ttl,
        "quotas": {name: getattr(args, f"max_{name}") for name in names},
    }
    made = rest.send("POST", "/api/v1/tokens", body=wanted)
    if args.json:
        print_json(made)
        return 0
    print(made["token"], flush=True)  # noqa: T201
    revoke = f"dmesh token revoke {made['id']}"
    said = f"id {made['id']}: {_scope(made)}. It is not shown again. To revoke it: {revoke}"
    if not made["durable"]:
        said += ". The server has no --data-dir, so the token is lost when it stops"
    print(printable(said), file=sys.stderr)  # noqa: T201
    return 0


def _list(rest: Rest, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_table, print_text

    tokens = rest.get("/api/v1/tokens", {})["tokens"]
    if args.json:
        print_json(tokens)
    elif not tokens:
        print_text("No tokens were issued. Tokens from the server's token file are not listed here.")
    else:
        rows = [
            (one["id"], one["name"] or "-", one["role"], ",".join(one["clusters"]) or "all",
             _instant(one["expires"]), _quotas(one["quotas"]), one["by"])
            for one in tokens
        ]  # fmt: skip
        head = ("id", "name", "role", "clusters", "expires", "quotas", "issued by")
        print_table(head, rows, [bool(one["expired"]) for one in tokens])
    return 0


def _revoke(rest: Rest, args: argparse.Namespace) -> int:
    from urllib.parse import quote

    from dmesh.cli.output import BAD_NEWS, print_failure, print_json, print_text
    from dmesh.errors import CoordinationError

    found = rest.send("DELETE", f"/api/v1/tokens/{quote(args.id, safe='')}")
    if not found["revoked"]:
        message = f"the server has issued no token with the id {args.id}, or it was revoked before"
        print_failure("token", message, CoordinationError, as_json=args.json)
        return BAD_NEWS
    if args.json:
        print_json(found)
    else:
        print_text(f"Revoked token {args.id}.")
    return 0


def _scope(token: dict[str, Any]) -> str:
    clusters = ", ".join(token["clusters"]) or "all clusters"
    return f"{token['role']} of {clusters}, expires {_instant(token['expires'])}"


def _quotas(quotas: dict[str, int | None]) -> str:
    return " ".join(f"{name}={value}" for name, value in quotas.items() if value is not None) or "-"


def _instant(moment: float | None) -> str:
    import datetime

    if moment is None:
        return "never"
    return f"{datetime.datetime.fromtimestamp(moment, datetime.UTC):%Y-%m-%dT%H:%MZ}"


def _time(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text, re.ASCII)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a lifetime; write a number and s, m, h, d or w, such as 30d"
        )
    return float(int(found[1]) * _UNITS[found[2]])


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15})(KiB|MiB|GiB)?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write a number of bytes, KiB, MiB or GiB, such as 64MiB"
        )
    return int(found[1]) << _SIZES[found[2] or ""]
