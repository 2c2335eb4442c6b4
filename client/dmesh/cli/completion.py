"""`dmesh completion`: prints the script with which a shell completes dmesh's command lines, made by shtab."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dmesh.errors import MissingExtraError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Prints a completion script for your shell: verbs, flags and files (needs `pip install 'dmesh[cli]'`). Use it
like this:

    bash   source <(dmesh completion bash)                        # in ~/.bashrc
    zsh    dmesh completion zsh > DIRECTORY/_dmesh                # a directory of $fpath; before compinit
    fish   dmesh completion fish > ~/.config/fish/completions/dmesh.fish"""
_EPILOG = "exit code: 0; 2 for an invalid command line, or if shtab is not installed."


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "completion", _DESCRIPTION, _EPILOG, execute)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        MissingExtraError: shtab is not installed.
    """
    from dmesh.cli import VERBS, build_parser

    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError(
            "completion needs shtab, which makes the scripts: pip install 'dmesh[cli]'"
        ) from error
    parser = build_parser(tuple(VERBS))
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell), end="\n")  # noqa: T201
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Lets words of the user's own be completed as files, in all parsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below, files)
        elif not action.option_strings and not action.choices:
            action.complete = files  # type: ignore[attr-defined]
