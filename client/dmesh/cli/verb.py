"""Parsers of the commands, all made alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmesh.cli import VERBS

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verb(
    subparsers: Subparsers,
    name: str,
    description: str,
    epilog: str,
    execute: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a verb to the command line; what `dmesh --help` says of it is in `VERBS`.

    Args:
        subparsers: Of the command line.
        name: The verb.
        description: What it does.
        epilog: Its exit codes.
        execute: Runs it.
    """
    parser = subparsers.add_parser(
        name,
        help=VERBS[name],
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(execute=execute)
    return parser
