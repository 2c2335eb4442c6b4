"""One engine, one pair of images and one cluster for all tests with Docker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docker.cluster import Cluster
from tests.docker.compose import VERSIONS, find
from tests.docker.debian import ROOT
from tests.docker.engine import Engine, base_image, missing, run_engine, wheelhouse

BASE = "dmesh-test-base:latest"
CONTEXT = ("client", "server", "examples", "docker", "pyproject.toml", "hatch_build.py", "constraints.txt",
           "README.md", "LICENSE", ".dockerignore", "Makefile")  # fmt: skip


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine of the tests' own."""
    reason = missing()
    if reason is not None:
        pytest.skip(f"no containers are tested: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="dmesh-docker-", dir="/var/tmp"))
    try:
        with run_engine(folder / "engine") as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def repository() -> Iterator[Path]:
    """A copy of the repository, as somebody has it who has just got it."""
    folder = Path(tempfile.mkdtemp(prefix="dmesh-context-", dir="/var/tmp"))
    try:
        for name in CONTEXT:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "secrets", "*.whl", "*.crt", "*.pem")
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy(source, folder / name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def context(repository: Path) -> Iterator[Path]:
    """The same, as somebody without a network has it: with wheels."""
    folder = repository.with_name(f"{repository.name}-wheels")
    try:
        shutil.copytree(repository, folder)
        wheelhouse(folder / "wheels")
        for wheel in (folder / "wheels").iterdir():
            wheel.rename(folder / "docker" / "wheelhouse" / wheel.name)
        (folder / "wheels").rmdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The image that the others are made of."""
    base_image(engine, BASE)
    return BASE


@pytest.fixture(scope="session")
def images(engine: Engine, base: str, context: Path) -> dict[str, str]:
    """The images, by target, built without a network."""
    for target in ("server", "worker"):
        engine.docker(
            "build", "--quiet", "--network", "none", "--file", str(context / "docker" / "Dockerfile"),
            "--target", target, "--build-arg", f"BASE_IMAGE={base}", "--tag", f"dmesh-{target}:latest",
            str(context),
        )  # fmt: skip
    return {target: f"dmesh-{target}:latest" for target in ("server", "worker")}


@pytest.fixture(scope="module", params=VERSIONS)
def cluster(
    request: pytest.FixtureRequest, engine: Engine, context: Path, images: dict[str, str]
) -> Iterator[Cluster]:
    """The coordinator of compose.yaml, up; each test starts its own workers."""
    compose = find(engine, request.param)
    if isinstance(compose, str):
        pytest.skip(f"Compose {request.param} is not tried: {compose}")
    running = Cluster(engine, compose, context)
    try:
        yield running
    finally:
        running.down()
