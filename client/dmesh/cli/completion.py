"""`dmesh completion`: what makes a shell complete dmesh's command lines."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Prints a script that makes a shell complete verbs and flags:

    bash   source <(dmesh completion bash)                        # in ~/.bashrc
    zsh    source <(dmesh completion zsh)                         # in ~/.zshrc, after compinit
    fish   dmesh completion fish > ~/.config/fish/completions/dmesh.fish"""
_EPILOG = "exit code: 0; 2 for a command line that cannot work."

_BASH = """\
_dmesh() {
  local path="" word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$path $word" in
%(paths)s
    esac
  done
  local words=""
  case "$path" in
%(words)s
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _dmesh dmesh
"""
# `words`, `CURRENT` and `path` are zsh's own; not a name of these may be taken.
_ZSH = """\
#compdef dmesh
_dmesh() {
  local at="" word
  for word in "${(@)words[2,CURRENT-1]}"; do
    case "$at $word" in
%(paths)s
    esac
  done
  local -a found flags
  case "$at" in
%(words)s
  esac
  if [[ ${words[CURRENT]} == -* ]]; then
    _describe -o flag flags
  elif (( $#found )); then
    _describe word found
  else
    _files
  fi
}
compdef _dmesh dmesh
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "completion", _DESCRIPTION, _EPILOG, execute)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](), end="")  # noqa: T201
    return 0


def _parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yields every parser of the command line behind the words that lead to it."""
    from dmesh.cli import VERBS, build_parser

    waiting: list[tuple[tuple[str, ...], argparse.ArgumentParser]] = [((), build_parser(tuple(VERBS)))]
    while waiting:
        path, parser = waiting.pop(0)
        yield path, parser
        waiting += [((*path, name), below) for name, below in _below(parser).items()]


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Returns the flags of a parser with their help."""
    return [
        (flag, action.help or "")
        for action in parser._actions
        for flag in action.option_strings
        if action.help != argparse.SUPPRESS
    ]


def _choices(parser: argparse.ArgumentParser) -> Sequence[str]:
    """Returns the words that may stand in a place of their own, where there are only some."""
    return [
        str(word)
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        for word in action.choices or ()
    ]


def _bash() -> str:
    paths, words = [], []
    for path, parser in _parsers():
        text = " ".join(path)
        known = [*_below(parser), *_choices(parser), *(flag for flag, _ in _options(parser))]
        words.append(f"    {shlex.quote(text)}) words={shlex.quote(' '.join(known))} ;;")
        if path:
            before = " ".join((" ".join(path[:-1]), path[-1]))
            paths.append(f"      {shlex.quote(before)}) path={shlex.quote(text)} ;;")
    return _BASH % {"paths": "\n".join(paths), "words": "\n".join(words)}


def _zsh() -> str:
    paths, words = [], []
    for path, parser in _parsers():
        text = " ".join(path)
        found = [*_helped(parser), *((word, "") for word in _choices(parser))]
        lists = f"found=({_described(found)}) flags=({_described(_options(parser))})"
        words.append(f"    {shlex.quote(text)}) {lists} ;;")
        if path:
            before = " ".join((" ".join(path[:-1]), path[-1]))
            paths.append(f"      {shlex.quote(before)}) at={shlex.quote(text)} ;;")
    return _ZSH % {"paths": "\n".join(paths), "words": "\n".join(words)}


def _described(words: Iterable[tuple[str, str]]) -> str:
    """Returns words with what they mean, as zsh's `_describe` takes them."""
    return " ".join(shlex.quote(f"{word}:{_summary(text)}" if text else word) for word, text in words)


def _summary(text: str) -> str:
    return " ".join(text.replace("%%", "%").split())[:80]


def _helped(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Returns the verbs of a parser with their help."""
    return [
        (choice.dest, choice.help or "")
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    ]


def _takes_files(parser: argparse.ArgumentParser) -> bool:
    """Returns whether words of the user's own follow, which may be files."""
    own = [action for action in parser._actions if not action.option_strings]
    return bool(own) and not _below(parser) and not _choices(parser)


def _fish() -> str:
    lines = ["complete -c dmesh -f"]
    for path, parser in _parsers():
        below = _below(parser)
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        # Until a verb is there, its siblings are offered.
        unseen = [f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else []
        condition = shlex.quote("; and ".join([*seen, *unseen]) or "true")
        for name, text in (*_helped(parser), *((word, "") for word in _choices(parser))):
            summary = f" -d {shlex.quote(_summary(text))}" if text else ""
            lines.append(f"complete -c dmesh -n {condition} -a {shlex.quote(name)}{summary}")
        if _takes_files(parser):
            lines.append(f"complete -c dmesh -n {condition} -F")
        for flag, text in _options(parser):
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"complete -c dmesh -n {condition} {kind} -d {shlex.quote(_summary(text))}")
    return "\n".join(lines) + "\n"
