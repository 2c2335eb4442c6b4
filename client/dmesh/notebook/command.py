"""Options of `%%dmesh` and `%dmesh`. No IO."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import NoReturn

from dmesh.errors import ConfigurationError

VERBS = ("status", "stop", "restart", "push", "pull")
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Command:
    """A parsed line of a magic."""

    verb: str
    """`run` for a cell; else one of VERBS."""
    clients: int | None = None
    """Requested number of clients; None if not given."""
    cpu_devices: int | None = None
    """Logical CPU devices of each started client; None for the default."""
    ranks: tuple[int, ...] | None = None
    """Ranks that run the command; None for all."""
    names: tuple[str, ...] = ()
    """Variables to push or to pull."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog}: {message}. {self.format_usage().strip()}")


def parse_cell(line: str) -> Command:
    """Parse the arguments of `%%dmesh`.

    Raises:
        ConfigurationError: An argument is invalid.
    """
    parser = _parser("%%dmesh", starts=True, ranks=True)
    found = parser.parse_args(_split(line))
    return Command("run", found.clients, found.cpu_devices, found.rank)


def parse_line(line: str) -> Command:
    """Parse the arguments of `%dmesh`.

    Raises:
        ConfigurationError: An argument is invalid.
    """
    verb, *words = _split(line) or ["status"]
    if verb not in VERBS:
        raise ConfigurationError(f"%dmesh: unknown command {verb!r}; expected one of {', '.join(VERBS)}")
    parser = _parser(f"%dmesh {verb}", starts=verb == "restart", ranks=verb in ("push", "pull"))
    if verb in ("push", "pull"):
        parser.add_argument("names", metavar="NAME", nargs="+" if verb == "push" else 1)
    found = vars(parser.parse_args(words))
    return Command(
        verb,
        found.get("clients"),
        found.get("cpu_devices"),
        found.get("rank"),
        tuple(found.get("names", ())),
    )


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks such as `0`, `0,2` or `1-3`.

    Raises:
        ConfigurationError: `text` has another form.
    """
    ranks: list[int] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(high or low) >= _MOST_RANKS:
            raise ConfigurationError(f"--rank must be ranks such as 0, 0,2 or 1-3, got {text!r}")
        ranks += range(int(low), int(high or low) + 1)
    if not ranks:
        raise ConfigurationError(f"--rank names no rank: {text!r}")
    return tuple(sorted(set(ranks)))


def _parser(name: str, *, starts: bool, ranks: bool) -> _Parser:
    parser = _Parser(prog=name.replace("%", "%%"), add_help=False, allow_abbrev=False)
    if starts:
        parser.add_argument("-n", "--clients", metavar="N", type=int)
        parser.add_argument("--cpu-devices", metavar="K", type=int)
    if ranks:
        parser.add_argument("--rank", metavar="RANKS", type=parse_ranks)
    return parser


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigurationError(f"dmesh: {line!r} cannot be parsed: {error}") from error
