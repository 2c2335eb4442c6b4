"""A Docker engine of the test's own, and a base image, made from Debian's packages alone.

The engine runs in network, mount and process namespaces of its own: its bridges and packet filter rules are
not this machine's, nothing else that uses Docker here meets it, and whatever it has started ends with it,
even if the tests are killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.docker.debian import CACHE, ROOT, program

PROGRAMS = {"dockerd": "docker.io", "debootstrap": "debootstrap", "curl": "curl"}
"""What is needed, and Debian's packages that have it."""

PACKAGE_INDEX = "https://pypi.org/simple/pip/"

_START = 60.0
_PATIENCE = 600.0
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"


def missing() -> str | None:
    """Returns why there can be no engine here; None if there can."""
    if sys.platform != "linux":
        return "these tests run a Docker engine, which takes Linux"
    if os.geteuid() != 0:
        return "these tests start a Docker engine, which takes root"
    lacking = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if lacking:
        return f"apt-get install {' '.join(lacking)} (make docker-test does)"
    return None


class Engine:
    """A running engine.

    Args:
        folder: What it keeps; short, for the path of a socket is.
        process: The one that is its namespaces' first.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self._process = process
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")},
            "DOCKER_HOST": f"unix://{folder}/sock",
            "DOCKER_BUILDKIT": "0",  # Debian's package has no other builder
            "DOCKER_CONFIG": str(folder / "config"),
            "PATH": f"/usr/bin:/usr/sbin:{os.environ['PATH']}",
        }

    def run(
        self,
        *arguments: str,
        check: bool = True,
        environ: dict[str, str] | None = None,
        timeout: float = _PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program that uses the engine."""
        done = subprocess.run(
            arguments, env={**self.environ, **(environ or {})}, capture_output=True, text=True,
            timeout=timeout, cwd=ROOT,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Runs `docker`; returns its output."""
        return self.run("docker", *arguments, check=check).stdout.strip()

    def outside(self, *arguments: str, check: bool = True, timeout: float = 60.0) -> str:
        """Runs a program on what the containers take for their machine: where their ports are published."""
        first = self._child()
        return self.run(
            "nsenter", "--net", f"--target={first}", "--", *arguments, check=check, timeout=timeout
        ).stdout

    @contextlib.contextmanager
    def way_out(self) -> Iterator[str | None]:
        """Connects what the containers take for their machine to this one's network, by slirp4netns.

        Says why if it cannot, or if no package index answers there.
        """
        if shutil.which("slirp4netns") is None:
            yield "apt-get install slirp4netns (make docker-test does)"
            return
        ready, write = os.pipe()
        try:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "slirp4netns", "--configure", "--disable-host-loopback",
                 f"--ready-fd={write}", str(self._child()), "way-out"],
                pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(write)
        try:
            with os.fdopen(ready, "rb") as pipe:
                started = pipe.read(1)  # nothing, if it has ended
            asked = (
                "curl",
                "--silent",
                "--show-error",
                "--fail",
                "--max-time",
                "20",
                "--output",
                "/dev/null",
            )
            answer = self.run(
                "nsenter", "--net", f"--target={self._child()}", "--", *asked, PACKAGE_INDEX, check=False
            )
            if not started:
                yield "slirp4netns does not start"
            elif answer.returncode:
                yield f"{PACKAGE_INDEX} does not answer: {answer.stderr.strip()}"
            else:
                yield None
        finally:
            process.terminate()
            process.wait(30)

    def _child(self) -> int:
        [child] = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split() or [0]
        )[:1]
        return int(child)


@contextlib.contextmanager
def run_engine(folder: Path) -> Iterator[Engine]:
    """Runs an engine; nothing of it is left when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    script = (
        'ip link set lo up && exec dockerd --data-root "$0/data" --exec-root "$0/exec" --pidfile "$0/pid" '
        '--host "unix://$0/sock" --log-level warn >"$0/log" 2>&1'
    )
    process = subprocess.Popen(
        ["nice", "-n", "19", "setpriv", "--pdeathsig", "KILL",
         "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
         "sh", "-c", script, str(folder)],
        env={**os.environ, "PATH": f"/usr/sbin:/usr/bin:/sbin:{os.environ['PATH']}"},
    )  # fmt: skip
    engine = Engine(folder, process)
    try:
        deadline = time.monotonic() + _START
        while engine.run("docker", "info", check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text()[-4000:] if (folder / "log").exists() else ""
                raise AssertionError(f"dockerd does not start: {log}")
            time.sleep(0.1)  # it has no other way of saying that it is ready
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError, IndexError, ValueError, OSError):
            os.kill(engine._child(), signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()  # and with it, everything in its process namespace
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def base_image(engine: Engine, name: str) -> None:
    """Makes the image that stands in for python:slim: Debian with Python, from its own archive."""
    archive = CACHE / "base.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        root = CACHE / "root"
        shutil.rmtree(root, ignore_errors=True)
        try:
            subprocess.run(
                ["nice", "-n", "19", "debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}",
                 "bookworm", str(root)],
                check=True, stdout=subprocess.DEVNULL, timeout=_PATIENCE,
            )  # fmt: skip
            partial = archive.with_suffix(".new")
            with tarfile.open(partial, "w") as tar:
                tar.add(root, arcname=".", filter=_without_caches)
            partial.rename(archive)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    engine.docker("import", str(archive), name)


def prometheus_image(engine: Engine, base: str, name: str) -> str | None:
    """Makes an image of Debian's own Prometheus; returns why it cannot."""
    binary = program("usr/bin/prometheus", "prometheus")
    if isinstance(binary, str):
        return binary
    folder = engine.folder / "prometheus"
    folder.mkdir(exist_ok=True)
    shutil.copy(binary, folder / "prometheus")
    (folder / "Dockerfile").write_text(
        f"FROM {base}\nRUN install -d -o 65534 /prometheus\nCOPY prometheus /bin/prometheus\n"
        'USER 65534\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    engine.docker("build", "--quiet", "--network", "none", "--tag", name, str(folder))
    return None


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    caches = ("./var/cache/apt/archives/", "./var/lib/apt/lists/", "./usr/share/doc/", "./usr/share/locale/")
    return None if member.name.startswith(caches) and member.isfile() else member


def wheelhouse(folder: Path) -> None:
    """Puts everything that is installed in an image into `folder`, as users without a network do.

    The wheels are for the base image's Python, 3.11.
    """
    folder.mkdir(parents=True)
    python = sys.executable if sys.version_info[:2] == (3, 11) else "python3.11"
    command: Sequence[str] = [
        "nice", "-n", "19", python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
        "--wheel-dir", str(folder), f"{ROOT}[server]",
    ]  # fmt: skip
    pins = str(ROOT / "constraints.txt")  # also of what builds the wheel, for pips of all ages
    environ = {**os.environ, "PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}
    subprocess.run(command, env=environ, check=True, timeout=_PATIENCE, stderr=subprocess.DEVNULL)
