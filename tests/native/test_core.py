"""The native core from C, without Python: epochs, point-to-point, TCP, registered memory, kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.native.library import CORE, compiler

SOURCE = Path(__file__).parent / "c" / "test_core.c"
NAMES = re.findall(r'\{"(\w+)", test_', SOURCE.read_text())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, compiled without Python's headers."""
    command = compiler()
    if command is None:
        pytest.skip("there is no C compiler on this machine")
    built = tmp_path_factory.mktemp("core") / "test_core"
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-I", CORE)
    subprocess.run([command, *flags, *sorted(CORE.glob("*.c")), SOURCE, "-o", built], check=True)
    return built


@pytest.mark.parametrize("name", NAMES)
def test_the_core_works_without_python(program: Path, name: str) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_the_core_includes_no_header_of_python() -> None:
    for path in CORE.glob("*.[ch]"):
        assert not re.search(r"#include <(Python|numpy)", path.read_text()), path
