"""What docker/compose.yaml works with: Debian 12's docker-compose 1.29, and Compose v2, a plugin."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from tests.docker.debian import program
from tests.docker.engine import Engine

VERSIONS = ("1.29", "2")
_PLUGIN = "usr/libexec/docker/cli-plugins/docker-compose"


@dataclass(frozen=True)
class Compose:
    """One of them."""

    version: str
    """What it says its version is."""

    command: str
    """How it is called, as users do."""

    environ: Mapping[str, str]
    """What it needs, beside the engine's environment."""


def find(engine: Engine, version: str) -> Compose | str:
    """Returns the Compose of a version of `VERSIONS`, or why it cannot be had."""
    if version == "1.29":
        there = shutil.which("docker-compose", path=engine.environ["PATH"])
        said = engine.run(there, "version", "--short", check=False).stdout.strip() if there else ""
        if not said.startswith("1.29"):
            return f"docker-compose is {said or 'not there'}, not 1.29, which is Debian 12's"
        return Compose(said, "docker-compose", {})
    environ = {"DOCKER_BUILDKIT": "1"}  # v2 brings its own builder along
    if engine.run("docker", "compose", "version", check=False).returncode:
        plugin = program(_PLUGIN, "docker-compose", "trixie")
        if isinstance(plugin, str):
            return plugin
        config = engine.folder / "config-v2"
        (config / "cli-plugins").mkdir(parents=True, exist_ok=True)
        shutil.copy(plugin, config / "cli-plugins" / "docker-compose")
        environ["DOCKER_CONFIG"] = str(config)
    said = engine.run("docker", "compose", "version", "--short", environ=environ).stdout.strip()
    return Compose(said, "docker compose", environ)
