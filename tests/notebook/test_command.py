"""Options of `%%dmesh` and `%dmesh`."""

from __future__ import annotations

import pytest

from dmesh.errors import ConfigurationError
from dmesh.notebook.command import Command, parse_cell, parse_line, parse_ranks


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("", Command("run")),
        ("-n 4", Command("run", 4)),
        ("--clients 4 --cpu-devices 2", Command("run", 4, 2)),
        ("--rank 0", Command("run", ranks=(0,))),
        ("-n 8 --rank 0,5-7", Command("run", 8, ranks=(0, 5, 6, 7))),
    ],
)
def test_a_cells_line(line: str, command: Command) -> None:
    assert parse_cell(line) == command


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("", Command("status")),
        ("stop", Command("stop")),
        ("restart -n 2", Command("restart", 2)),
        ("push a b --rank 1", Command("push", ranks=(1,), names=("a", "b"))),
        ("pull loss", Command("pull", names=("loss",))),
    ],
)
def test_a_line_of_its_own(line: str, command: Command) -> None:
    assert parse_line(line) == command


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-n", "expected one argument"),
        ("-n four", "invalid int value"),
        ("--ranks 1", "unrecognized arguments"),
        ("something", "unrecognized arguments"),
        ("--rank 'a", "cannot be parsed"),
    ],
)
def test_a_cells_line_that_makes_no_sense(line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_cell(line)


@pytest.mark.parametrize("line", ["stopp", "pull", "pull a b", "push", "stop -n 2", "status --rank 1"])
def test_a_line_that_makes_no_sense(line: str) -> None:
    with pytest.raises(ConfigurationError, match="%dmesh"):
        parse_line(line)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999999", "²"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--rank"):
        parse_ranks(text)
