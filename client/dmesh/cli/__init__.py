"""The `dmesh` command. Each verb is a module with `add_parser(subparsers)` and `execute(args) -> int`.

Only the module of the verb that is asked for is imported, so that `dmesh --help` is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dmesh._lazy_imports import load
from dmesh._version import __version__
from dmesh.errors import AddressInUseError, ConfigurationError, DMeshError, MissingExtraError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_USAGE_ERROR = 2
_FAILURE = 1

VERBS: Mapping[str, str] = {
    "run": "start N clients of a program, on this machine or on several",
    "serve": "run a coordination server",
    "status": "show a cluster's health and progress",
    "why": "explain what a cluster is waiting for, and which ranks hold it up",
    "top": "show what each rank is doing, live",
    "cluster": "declare clusters before their first client",
    "members": "list the members of a cluster",
    "barriers": "list pending barriers and the tasks they are missing",
    "kv": "read, set and delete a cluster's keys",
    "backup": "save the keys of a running cluster to a file",
    "restore": "load the keys of a backup into a running cluster",
    "events": "print the event log of a coordination server",
    "doctor": "diagnose why clients cannot connect to each other",
    "config": "show the settings that this environment gives",
    "audit": "print the audit log of a coordination server",
    "token": "issue, list and revoke tokens of a coordination server",
    "certs": "create a private CA and TLS certificates",
    "trace": "merge the traces of all ranks into one",
    "tune": "measure collectives on this machine or cluster and write a tuning file",
    "completion": "print a shell completion script",
}
"""The verbs, each a module of this package, and their lines in `dmesh --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Exit codes: 0 for success; 2 for a command line, an environment or an address that is invalid, and for a
    missing extra; 1 for other failures; 3 if a verb got an answer that needs attention; and the codes that
    each verb documents.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    argv = sys.argv[1:] if argv is None else argv
    asked = next((argument for argument in argv if not argument.startswith("-")), "")
    parser = build_parser([asked])
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse would show the usage of `dmesh`, not that of the verb
        _parser_of(parser, args).error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = args.execute(args)
    except DMeshError as error:
        from dmesh.cli.output import print_failure

        as_json = getattr(args, "json", False)
        print_failure(args.verb, f"error: {error}", type(error), as_json=as_json)
        return (
            _USAGE_ERROR
            if isinstance(error, (ConfigurationError, AddressInUseError, MissingExtraError))
            else _FAILURE
        )
    except BrokenPipeError:  # the reader of the output has closed the pipe
        sys.stdout = None  # or its flush at the end would fail, too
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """Returns the parser of the verb, and of the verb's verb, that was asked for."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _parser_of(action.choices[getattr(args, action.dest)], args)
    return parser


def build_parser(verbs: Sequence[str]) -> argparse.ArgumentParser:
    """Makes the parser of the command line.

    Args:
        verbs: Verbs to parse in full. For the others, the parser only has their names.
    """
    parser = argparse.ArgumentParser(
        prog="dmesh", description="NumPy programs that span processes and hosts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dmesh {__version__}")
    subparsers = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb, text in VERBS.items():
        if verb in verbs:
            load(f"dmesh.cli.{verb}").add_parser(subparsers)
        else:
            subparsers.add_parser(verb, help=text, add_help=False)
    return parser
