"""What is published: it installs by itself, says what it is, and has nothing in it that is not for others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from tests.packaging.environments import CONSTRAINTS, IndexUnreachableError, choose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11.7", "3.12", "3.13", "3.14")
LARGE = {"dev", "nccl", "nccl-cuda13", "torch"}
"""Extras of gigabytes, and the one that is not for users."""

LOCAL = """
import numpy as np, dmesh
assert dmesh.initialize_accelerator_system("CPU") == "CPU"
mesh = dmesh.create_mesh([("batch", dmesh.num_local_devices("CPU"))])
print(dmesh.__version__, mesh.size, dmesh.collectives.all_reduce(np.arange(3.0)))
dmesh.shutdown_accelerator_system()
"""


def run(*arguments: object, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(argument) for argument in arguments], env={**clean, **environ}, capture_output=True, text=True,
        timeout=600, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel for all platforms, and the sources."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, DMESH_BUILD_NATIVE="0")
    [wheel], [sources] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sources


def test_nothing_is_in_them_that_should_not_be(distributions: tuple[Path, Path]) -> None:
    wheel, sources = distributions
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"dmesh", "dmesh_server"}
        assert "dmesh/py.typed" in archive.namelist()
    with tarfile.open(sources) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"docker/Dockerfile", "docker/compose.yaml", "pyproject.toml", "LICENSE"} <= set(names)
    unwanted = [name for name in names if name.endswith((".whl", ".so", ".pyc")) or "secrets/" in name]
    assert not unwanted
    assert sources.stat().st_size < 8 << 20


def test_without_extras_it_imports_and_runs_alone(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = distributions
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, wheel)
    version = run(tmp_path / "env" / "bin" / "dmesh", "--version").strip()
    assert version == f"dmesh {wheel.name.split('-')[1]}"
    assert run(python, "-c", LOCAL).strip() == f"{version.split()[1]} 1 [0. 1. 2.]"
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "dmesh", "serve", "--http", "127.0.0.1:0"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'dmesh[server]'" in done.stderr


@pytest.mark.parametrize("python", [PYTHONS[0], PYTHONS[-1]])
def test_all_extras_go_together(python: str) -> None:
    resolve(python, ROOT / "pyproject.toml", *extras(LARGE))


@pytest.mark.parametrize("python", PYTHONS)
def test_wheels_of_the_pinned_versions_exist(python: str) -> None:
    development = extras(LARGE - {"dev"})
    found = resolve(python, ROOT / "pyproject.toml", *development, "--constraints", CONSTRAINTS)
    pinned = {_normal(name) for name in re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), re.M)}
    chosen = {_normal(name) for name in re.findall(r"^([\w.-]+)==", found, re.M)}
    assert len(chosen) > 100
    brought_by_torch = re.compile(r"(nvidia|cuda)-|triton$")  # by that of the index; of these versions
    assert {name for name in chosen - pinned if not brought_by_torch.match(name)} == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_all_that_make_installs_is_pinned() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    installing = [line for line in makefile.splitlines() if " -m pip" in line and " install" in line]
    assert len(installing) >= 5
    for line in installing:
        assert re.search(r"--constraint constraints\.txt|\$\(PINS\)|--no-deps|--requirement \$<", line), line


@pytest.mark.parametrize(
    "neighbor",
    [
        "tensorflow-cpu==2.18.1",  # with protobuf 5
        "tensorflow-cpu==2.19.1 protobuf<6",
        "tensorflow-cpu>=2.21",
        "protobuf==6.*",
        "ray==2.50.1",
        "opentelemetry-sdk==1.30.0",
    ],
)
def test_it_goes_with_older_frameworks(tmp_path: Path, neighbor: str) -> None:
    wanted = tmp_path / "wanted.in"
    wanted.write_text("\n".join(neighbor.split()))
    resolve("3.11.7", ROOT / "pyproject.toml", wanted, "--extra=server", "--extra=otel")


def extras(without: set[str]) -> list[str]:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [f"--extra={name}" for name in sorted(known.keys() - without)]


def resolve(python: str, *arguments: object) -> str:
    """Return versions that go together, of which there are wheels."""
    try:
        return choose(*arguments, f"--python-version={python}")
    except IndexUnreachableError as error:
        pytest.skip(f"the package index does not answer: {error}")
