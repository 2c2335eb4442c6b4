"""`make cluster` as users with a network run it: images from the package index, without any wheels."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import pytest
from tests.docker.cluster import Cluster, files
from tests.docker.compose import VERSIONS, find
from tests.docker.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def trusted() -> Path | None:
    """Returns the file of certificates that this machine's pip goes by, if it has one of its own."""
    names = (
        os.environ.get("PIP_CERT"),
        os.environ.get("SSL_CERT_FILE"),
        ssl.get_default_verify_paths().cafile,
    )
    return next((Path(name) for name in names if name and Path(name).is_file()), None)


@pytest.mark.parametrize("version", VERSIONS[-1:])
def test_make_cluster_needs_nothing_but_docker_and_a_network(
    engine: Engine, repository: Path, base: str, version: str
) -> None:
    compose = find(engine, version)
    if isinstance(compose, str):
        pytest.skip(f"Compose {version} is not tried: {compose}")
    with engine.way_out() as reason:
        if reason is not None:
            pytest.skip(f"no images are built from the package index: {reason}")
        if (certificates := trusted()) is not None:
            shutil.copy(certificates, repository / "docker" / "certificates" / "this-machine.crt")
        running = Cluster(engine, compose, repository)
        try:
            done = engine.run(
                "make", "--directory", str(repository), "cluster", "WORKERS=2",
                environ={
                    **compose.environ,
                    "BASE_IMAGE": base,
                    "COMPOSE": compose.command,
                    "DMESH_SERVER_IMAGE": "dmesh-server:index",
                    "DMESH_WORKER_IMAGE": "dmesh-worker:index",
                },
            )  # fmt: skip
            assert "2 clients share" in done.stdout
            assert "equals the single-process run to 1e-6: yes" in done.stdout
            assert running.fetch("/api/v1/clusters", running.token)[0] == 200
        finally:
            running.down()
    for image in ("dmesh-server:index", "dmesh-worker:index"):
        assert len(files(engine, image, "_native*.so")) == 1, "the native core was compiled"
        assert files(engine, image, "this-machine.crt", "own.pem") == [], (
            "certificates are for the build alone"
        )
