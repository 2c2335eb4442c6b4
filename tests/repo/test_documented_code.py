"""Every block of code in the documents runs, or says why it does not (`tests/repo/documents.py` says how)."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.e2e.clients import Process, free_ports, run_clients
from tests.repo.documents import PAGES, ROOT, SHOWN, Block, Program, blocks_of, programs_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELLS = ("console", "sh")
PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
"""Data is read as what it says it is."""
PORTS = ("8470", "8471")
"""Ports of `dmesh serve`, which others on the machine may use."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page: Path) -> None:
    known = {"python", "hidden", *SHOWN, *SHELLS, *PARSERS}
    for block in blocks_of(page):
        assert block.language in known or block.not_run, f"{block.place}: {block.language!r} cannot be run"
        if block.not_run is not None:
            assert len(block.not_run.split()) >= 3, f"{block.place}: says why it is not run"
            assert not block.options, f"{block.place}: is run, or is not run"
        if block.language == "python":
            ast.parse(block.code, block.place)
        if block.language in SHELLS:
            subprocess.run(["bash", "-n", "-c", _commands(block)[0]], check=True)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("1 + 1  # -> 2", False),
        ("1 + 1  # -> 2: two", False),
        ("1 + 1  # -> 22", True),
        ("1 + 11  # -> 1", True),
        ("print(\n    'é',\n    2,\n)  # -> é 2", False),
        ("for x in [1]:\n    print(x)  # -> 2", True),
    ],
)
def test_values_that_are_told_are_checked(code: str, wrong: bool) -> None:
    program = Program([Block(ROOT / "README.md", 2, "python", code)])
    with pytest.raises(AssertionError) if wrong else contextlib.nullcontext():
        exec(compile(program.source(), "README.md", "exec"), {})


def test_a_value_behind_a_statement_is_refused() -> None:
    with pytest.raises(AssertionError, match="no expression"):
        Program([Block(ROOT / "README.md", 2, "python", "x = 1  # -> 1")]).source()


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in PARSERS and b.not_run is None], ids=lambda b: b.place
)
def test_data_can_be_read(block: Block) -> None:
    assert PARSERS[block.language](block.code)


def _parameters() -> Iterator[object]:
    for page in PAGES:
        for program in programs_of(page):
            several = int(program.option("clients", "1")) > 1
            marks = [pytest.mark.slow] if several or "slow" in program.options else []
            if "engines" in program.options:
                marks = [pytest.mark.engines]
            yield pytest.param(program, marks=marks, id=program.place)


@pytest.mark.parametrize("program", list(_parameters()))
def test_programs_run(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := [name for name in _needs(program) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{program.place} needs {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{re.sub('[^a-z]', '_', program.place.partition('.md')[0].lower())}.py"
    script.write_text(program.source())
    environ = {"PYTHONPATH": str(ROOT), **program.environ}
    if "pytest" in program.options:
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-c{ROOT / 'pyproject.toml'}",
            str(script),
        ]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    clients = int(program.option("clients", "1"))
    if clients == 1:
        environ["DTENSOR_JOBS"] = ""  # as nobody had said anything: local mode
    with run_clients(clients, str(script), environ=environ) as running:
        for client in running.values():
            code = client.wait()
            assert code == 0, f"{program.place}\n{client.out}\n{client.err}"


def _needs(program: Program) -> list[str]:
    return [option.partition("=")[2] for option in program.options if option.startswith("needs=")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.language in SHELLS and b.not_run is None for b in blocks_of(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one page in one directory, one after the other, with the output that is shown."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    own = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    with contextlib.ExitStack() as running:
        for block in blocks_of(page):
            options = Program([], list(block.options))
            if name := options.option("file"):
                Path(name).write_text(block.code)
            if block.language not in SHELLS or block.not_run is not None:
                continue
            commands, shown = _commands(block)
            for port, other in own.items():
                commands, shown = (
                    commands.replace(f":{port}", f":{other}"),
                    shown.replace(f":{port}", f":{other}"),
                )
            if "dmesh serve" in commands and "--listen" not in commands:
                addresses = " --http 127.0.0.1:".join(own.values())
                commands = commands.replace("dmesh serve", f"dmesh serve --listen 127.0.0.1:{addresses}")
            if "repository" in block.options:
                commands = f"cd {ROOT}\n{commands}"
            process = Process(
                ["bash", "-euc", f"{'exec ' if 'background' in block.options else ''}{commands}"], {}
            )
            running.callback(process.end)
            if "background" in block.options:
                running.callback(_interrupt, process)
                process.wait_for(shown.splitlines()[-1])
            else:
                code = int(options.option("fails", "0"))
                assert process.wait() == code, f"{block.place}\n{process.out}\n{process.err}"
            _compare(block, shown, f"{process.out}\n{process.err}")


def _commands(block: Block) -> tuple[str, str]:
    """Returns what is typed, and what is shown as its output."""
    if block.language == "sh":
        return block.code, ""
    lines = block.code.splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(typed), "\n".join(line for line in lines if not line.startswith("$ "))


def _compare(block: Block, shown: str, printed: str) -> None:
    """Every line that is shown was printed; where `about` is said, with other numbers."""
    for line in filter(str.strip, shown.splitlines()):
        pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
        if "about" in block.options:
            pattern = re.sub(r"\d+(\\\.\d+)?(e(\\-)?\d+)?", r"[\\d.e-]+", pattern)
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{block.place}: {line!r} not in\n{printed}"


def _interrupt(process: Process) -> None:
    process.signal(signal.SIGINT)
    process.wait()
