"""`dmesh doctor`: diagnoses why clients cannot connect, on this machine and on the way to their server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.checks import Check

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Diagnoses why clients cannot connect to each other. Checks settings, name resolution, ports, proxies, token,
certificates, versions, system limits, shared memory and clock, and queries the coordination server if there
is one. Changes nothing. Run it on the machine, as the user and with the environment of your program."""
_EPILOG = """\
exit code: 0 if there are no problems or only warnings; 3 if something will not work; 2 for an invalid command
line."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "doctor", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code."""
    import dataclasses
    import os

    from dmesh.cli.checks import examine
    from dmesh.cli.output import BAD_NEWS, print_json, print_table
    from dmesh.cli.progress import Bar

    found: list[Check] = []
    with Bar() as bar:
        bar.show("looking", 0, None)
        for check in examine(os.environ, args.coordinator):
            found.append(check)
            bar.show(f"looked at {check.name}", 0, None)
    failed = any(check.verdict == "fail" for check in found)
    if args.json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        rows = [(check.verdict.upper(), check.name, check.message) for check in found]
        print_table(("", "CHECK", "FOUND"), rows, [check.verdict == "fail" for check in found])
    return BAD_NEWS if failed else 0
