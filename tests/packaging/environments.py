"""Environments that dmesh must fit into, each with a wheel of this checkout: `make oldest`, `make beside`.

| environment | what is in it | what is tested |
|---|---|---|
| `oldest` | the oldest allowed version of each dependency | default tests: a part, or those that are named |
| `beside` | TensorFlow, JAX, PyTorch, Ray, Dask | each is imported in two clients that all-reduce |

uv chooses the versions, because pip cannot choose the oldest, and shares files with its cache. Where the
package index does not answer, the environment is skipped, with a message.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
AS_OF = "2026-11-26T00:00:00Z"
"""Time of the package index that versions are chosen from. What constraints.txt names must be older."""
TOOLS = Path(sys.executable).parent
EXTRAS = ("checkpoint", "cli", "google", "kubernetes", "launch", "otel", "security", "server")
"""Extras that the default tests use."""
TEST_PACKAGES = (
    "httpx",
    "hypothesis",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "trustme",
)
"""What runs the tests, of the versions in constraints.txt."""
PART = (
    "tests/collectives/test_objects.py", "tests/collectives/test_operations.py",
    "tests/collectives/test_processes.py", "tests/coordination", "tests/distribute/test_reduce_gather.py",
    "tests/distribute/test_variables.py", "tests/mesh/test_protos.py", "tests/runtime",
    "tests/server/test_rpc_coordination.py", "tests/server/test_rpc_key_value.py",
    "tests/server/test_rpc_server.py", "tests/server/test_session_server.py",
    "tests/telemetry/test_carrying.py", "tests/telemetry/test_collective_spans.py", "tests/testing",
)  # fmt: skip
"""Tests of all that meets a dependency: gRPC, protobuf, msgpack, arrays, OpenTelemetry."""
FRAMEWORKS = ("tensorflow", "jax", "torch", "ray", "distributed")
"""Modules that are imported beside dmesh."""
BESIDE = """
import importlib, sys
framework = importlib.import_module(sys.argv[1])
import numpy as np, dmesh
with dmesh.session("CPU") as me:
    total = dmesh.collectives.all_reduce(np.array([1.0, me.rank]))
    assert total.tolist() == [2.0, 1.0], total
    dmesh.coordination.barrier("beside")
    if me.rank == 0:
        print(f"beside {sys.argv[1]} {framework.__version__}: an all-reduce of two clients")
"""
_UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "Could not connect", "timed out")


class IndexUnreachableError(Exception):
    """The package index does not answer."""


@dataclass(frozen=True)
class Interpreter:
    """Python that an environment is made with."""

    path: Path = Path(sys.executable)
    within: tuple[str, ...] = ()
    """Command that runs another command in the interpreter's root file system; empty if that is this one."""


HERE = Interpreter()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment that the command line names, test it, and return the exit code."""
    parser = argparse.ArgumentParser(description="Tests dmesh in environments of its users.")
    parser.add_argument("environment", choices=("oldest", "beside"))
    parser.add_argument("tests", nargs="*", help="pytest's arguments for `oldest`; default: a part")
    options = parser.parse_args(arguments)
    place = ROOT / "build" / options.environment
    try:
        if options.environment == "oldest":
            make(place, oldest())
            return run_tests(place, options.tests or [*PART])
        make(place, [_torch(), "tensorflow-cpu", "jax", "ray", "dask", "distributed"])
        return run_beside(place)
    except IndexUnreachableError as error:
        print(f"SKIPPED: make {options.environment}, for the package index does not answer: {error}")
        return 0


def oldest() -> list[str]:
    """Return the oldest versions of all dependencies that are allowed together, and what runs the tests."""
    version = ".".join(map(str, sys.version_info[:3]))
    extras = [f"--extra={extra}" for extra in EXTRAS]
    chosen = choose(
        ROOT / "pyproject.toml", *extras, "--resolution=lowest-direct", f"--python-version={version}"
    )
    pinned = re.findall(r"^[\w.-]+==\S+", CONSTRAINTS.read_text(), re.M)
    return [*chosen.split(), *(pin for pin in pinned if pin.partition("==")[0] in TEST_PACKAGES)]


def choose(*arguments: object) -> str:
    """Return versions that go together, one a line, of which there are wheels: `uv pip compile`.

    Raises:
        IndexUnreachableError: The package index does not answer.
    """
    fixed = ("--only-binary=:all:", "--no-annotate", "--no-header", f"--exclude-newer={AS_OF}")
    return _uv("pip", "compile", *fixed, *arguments)


def make(place: Path, packages: Sequence[str], python: Interpreter = HERE, extras: str = "") -> None:
    """Make an environment with packages and a wheel of this checkout.

    Args:
        place: Its directory.
        packages: What is installed besides the wheel, and other arguments of `uv pip install`.
        python: Its interpreter, which also builds the wheel.
        extras: Extras of the wheel, in brackets.

    Raises:
        IndexUnreachableError: The package index does not answer.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=place.parent) as scratch:
        build = ("build", "--quiet", "--wheel", "--python", python.path, "--build-constraints", CONSTRAINTS)
        _uv(*build, "--out-dir", scratch, ROOT, within=python.within)
        [wheel] = Path(scratch).glob("*.whl")
        _uv("venv", "--quiet", "--python", python.path, place, within=python.within)
        install = ("pip", "install", "--quiet", "--only-binary=:all:", f"--exclude-newer={AS_OF}")
        _uv(*install, "--python", place, *packages, f"{wheel}{extras}", within=python.within)


def run_tests(place: Path, arguments: Sequence[str], python: Interpreter = HERE) -> int:
    """Run tests in an environment; return pytest's exit code."""
    print(_uv("pip", "list", "--python", place, "--format=freeze", within=python.within).replace("\n", " "))
    command = [place / "bin" / "python", "-m", "pytest", "-q", "-n", "4", "--dist", "loadfile", *arguments]
    everything = [*python.within, *map(str, command)]
    return subprocess.run(everything, cwd=ROOT, env=_environment()).returncode


def cache_of_uv() -> Path:
    """Return the directory of uv's cache."""
    return Path(_uv("cache", "dir").strip())


def run_beside(place: Path) -> int:
    """Import each framework in two clients of dmesh; return the first exit code that is not 0."""
    with tempfile.TemporaryDirectory(prefix="dmesh-beside-") as scratch:
        script = Path(scratch, "beside.py")
        script.write_text(BESIDE)
        for framework in FRAMEWORKS:
            command = [place / "bin" / "dmesh", "run", "-n", "2", script, framework]
            done = subprocess.run(
                [str(part) for part in command], cwd=scratch, env=_environment(), timeout=300
            )
            if done.returncode:
                return done.returncode
    print(f"{len(FRAMEWORKS)} passed, 0 failed")
    return 0


def _torch() -> str:
    """Return what to install as PyTorch: a wheel without CUDA, which is gigabytes, where pip knows of one."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = [path for folder in folders for path in Path(folder).glob(f"torch-*+cpu-{python}-{python}-*.whl")]
    return f"torch @ {max(found).as_uri()}" if found else "torch"


def _environment() -> dict[str, str]:
    dropped = ("PYTHON", "DMESH_", "DTENSOR_", "VIRTUAL_ENV")
    kept = ("DMESH_BUILD_NATIVE",)
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(dropped)}


def _uv(*arguments: object, within: Sequence[str] = ()) -> str:
    command = [*within, str(TOOLS / "uv"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), cwd=ROOT)
    if done.returncode:
        if any(sign in done.stderr for sign in _UNREACHABLE):
            raise IndexUnreachableError(done.stderr.strip().splitlines()[-1])
        raise RuntimeError(f"uv {' '.join(map(str, arguments[:2]))} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
