"""`dmesh config show`: what this environment sets, and where each value came from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Shows the settings that a client would get from this environment, after the client's own checks. Tokens are
never shown."""
_EPILOG = """\
exit code: 0; 2 if a client could not start with these settings: the error names the wrong one."""
_SECRET = frozenset({"token"})
_HIDDEN = "(set; not shown)"


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.output import add_json

    parser = subparsers.add_parser(
        "config", help="show the settings that this environment gives", allow_abbrev=False
    )
    verbs = parser.add_subparsers(title="verbs", dest="config_verb", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show",
        help="print all settings",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    show.add_argument("--origin", action="store_true", help="show where each value comes from")
    add_json(show)
    show.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs `config show`; returns the process's exit code.

    Raises:
        ConfigurationError: A setting cannot work.
    """
    from dmesh.cli.output import print_json, print_table
    from dmesh.config.settings import VARIABLES, Settings

    settings = Settings.load()
    values = {field: _value(field, getattr(settings, field)) for field in VARIABLES}
    if args.json:
        found = {
            VARIABLES[field]: {"value": value, "origin": settings.origins[field]}
            for field, value in values.items()
        }
        print_json({"settings": found})
        return 0
    head = ("VARIABLE", "VALUE", "ORIGIN") if args.origin else ("VARIABLE", "VALUE")
    rows = [
        (VARIABLES[field], _text(value), *([settings.origins[field]] if args.origin else []))
        for field, value in values.items()
    ]
    print_table(head, rows)
    return 0


def _value(field: str, value: object) -> object:
    if field in _SECRET and value is not None:
        return _HIDDEN
    return list(value) if isinstance(value, tuple) else value


def _text(value: object) -> str:
    if value is None or value == [] or value == "":
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
