"""Fixtures that write scripts and run them with `dmesh run`."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.launch.launching import DMESH, Launch

Start = Callable[..., Launch]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(source: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `dmesh run`, or another verb, with the given arguments, in the test's directory."""
    started: list[Launch] = []

    def launch(
        *args: str,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        verb: str = "run",
        dmesh: Sequence[str] = DMESH,
        **more,
    ) -> Launch:
        process = subprocess.Popen(
            [*dmesh, verb, *args],
            env={**os.environ, **(env or {})},
            cwd=tmp_path,
            stdin=stdin,
            stdout=more.pop("stdout", subprocess.PIPE),
            stderr=subprocess.PIPE,
            **more,
        )
        started.append(Launch(process))
        return started[-1]

    yield launch
    for one in started:
        one.close()
