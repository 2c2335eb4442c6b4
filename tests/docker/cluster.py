"""The cluster of docker/compose.yaml, and what is seen of it from outside."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeVar

from tests.docker.compose import Compose
from tests.docker.engine import Engine

T = TypeVar("T")

DEADLINE = 120.0
DIGITS = "/opt/dmesh/examples/digits_softmax.py"


def until(what: str, look: Callable[[], T | None], timeout: float = DEADLINE) -> T:
    """Waits until `look` sees something; returns it."""
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.2)


def files(engine: Engine, image: str, *names: str) -> list[str]:
    """Returns the files and directories of an image with such names, but for those of the base image."""
    either = [part for name in names for part in ("-o", "-name", name)][1:]
    return engine.docker(
        "run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "find", image, "/", "-xdev",
        "(", *either, ")", "-not", "-path", "/proc/*", "-not", "-path", "/usr/*",
    ).splitlines()  # fmt: skip


class Cluster:
    """A compose project.

    Args:
        engine: Where it runs.
        compose: What runs it.
        folder: A copy of the repository.
    """

    def __init__(self, engine: Engine, compose: Compose, folder: Path) -> None:
        self._engine = engine
        self._compose = compose
        self._file = folder / "docker" / "compose.yaml"
        self.script("tokens")
        self.token = (folder / "docker" / "secrets" / "token").read_text().split()[0]
        self.viewer_token = (folder / "docker" / "secrets" / "viewer-token").read_text()
        self._environ: dict[str, str] = {}

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Runs Compose by hand."""
        done = self._engine.run(
            *self._compose.command.split(), "--file", str(self._file), *arguments,
            environ={**self._compose.environ, **self._environ}, check=check,
        )  # fmt: skip
        return done.stdout.strip()

    def script(self, *arguments: str, check: bool = True, **environ: str) -> CompletedProcess[str]:
        """Runs docker/cluster, as users do."""
        return self._engine.run(
            str(self._file.with_name("cluster")), *arguments, check=check,
            environ={"COMPOSE": self._compose.command, **self._compose.environ, **environ},
        )  # fmt: skip

    def up(self, workers: int, program: str = DIGITS, *arguments: str, **environ: str) -> list[str]:
        """Starts the coordinator, if it is not up, and workers in the place of others; returns their ids."""
        self._environ = {"WORKERS": str(workers), "DMESH_PROGRAM": program, **environ}
        self.compose("rm", "--stop", "--force", "worker")
        self.compose("up", "--detach", "--no-build", *arguments, "coordinator", "worker")
        return self.workers()

    def down(self) -> None:
        """Ends all of it."""
        self.compose("--profile", "observability", "down", "--volumes", "--remove-orphans", check=False)

    def workers(self) -> list[str]:
        """Returns the workers' containers."""
        return self.compose("ps", "--quiet", "--all", "worker").split()

    def coordinator(self) -> str:
        """Returns the coordinator's container."""
        return self.compose("ps", "--quiet", "coordinator")

    def inspect(self, container: str) -> dict[str, Any]:
        """Returns what Docker knows of a container."""
        [found] = json.loads(self._engine.docker("inspect", container))
        return found

    def logs(self, container: str) -> str:
        """Returns what a container has written."""
        done = self._engine.run("docker", "logs", container)
        return done.stdout + done.stderr

    def exit_code(self, container: str) -> int:
        """Waits until a container has ended; returns its exit code."""
        try:
            return int(self._engine.run("docker", "wait", container, timeout=DEADLINE).stdout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{container} goes on: {self.logs(container)[-3000:]}") from error

    def fetch(self, path: str, token: str = "", port: int = 8471, method: str = "GET") -> tuple[int, str]:
        """Asks from outside of the containers; returns the status and the answer."""
        header = ("--header", f"Authorization: Bearer {token}") if token else ()
        text = self._engine.outside(
            "curl", "--silent", "--request", method, "--max-time", "10", "--write-out", "\n%{http_code}",
            *header, f"http://127.0.0.1:{port}{path}", check=False,
        )  # fmt: skip
        body, _, status = text.rpartition("\n")
        return int(status or 0), body

    def members(self, workers: int) -> dict[str, dict[str, Any]]:
        """Returns the dashboard's members of the cluster of so many workers, by container id."""
        status, body = self.fetch(f"/api/v1/clusters/digits-{workers}/members", self.token)
        members = json.loads(body)["members"] if status == 200 else []
        return {member["host"]: member for member in members}

    def connected(self, workers: int, containers: list[str]) -> dict[str, dict[str, Any]]:
        """Waits until these are all members; returns them by container."""

        def look() -> dict[str, dict[str, Any]] | None:
            members = self.members(workers)
            found = {one: members.get(one[:12]) for one in containers}
            if all(member and member["state"] == "CONNECTED" for member in found.values()):
                return {one: member for one, member in found.items() if member}
            ended = [one for one in containers if not self.inspect(one)["State"]["Running"]]
            assert not ended, "\n".join(self.logs(one)[-2000:] for one in ended)
            return None

        return until(f"{workers} workers are members", look)
