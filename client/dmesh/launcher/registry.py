"""Register of the `dmesh run`s on this machine, by which `dmesh why` in another terminal finds them.

One file for each launcher, in a directory that only its user may read: the address of the job's server, the
cluster, and the token and the names of certificates if the launcher has made some for this run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dmesh._log import logger
from dmesh.config.settings import read_jobs
from dmesh.security import tokens

_MOST_BYTES = 1 << 16
_MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """A `dmesh run` under way on this machine."""

    pid: int
    """Process id of the launcher."""
    address: str
    """HOST:PORT of the job's coordination server."""
    cluster: str
    """Name of its cluster."""
    token: str = field(default="", repr=False)
    """Token for the server; empty if the reader must know it."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """`DMESH_TLS_*` variables with files that the launcher has made for this run."""


def directory() -> Path | None:
    """Return the folder of the register; None without a home directory."""
    token = tokens.default_path()
    return None if token is None else token.parent / "runs"


@contextlib.contextmanager
def registered(environment: Mapping[str, str], own: Mapping[str, str]) -> Iterator[None]:
    """Register a run while it goes on. Failure to write the file is ignored.

    Args:
        environment: Of its clients.
        own: Of the launcher: a token that stands there is not written down.
    """
    path: Path | None = None
    try:
        path = _write(environment, own)
    except OSError as error:
        logger.debug("this run is not written down: %s", error)
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def living() -> list[Run]:
    """Return the current runs of this user on this machine, by process id."""
    place = directory()
    found = []
    for path in sorted(place.glob("*.json"))[:_MOST_RUNS] if place is not None else ():
        run = _read(path)
        if run is not None and _lives(run.pid):
            found.append(run)
    return sorted(found, key=lambda run: run.pid)


def _write(environment: Mapping[str, str], own: Mapping[str, str]) -> Path | None:
    place, jobs = directory(), read_jobs(environment)
    if place is None or not jobs:
        return None
    token = environment.get("DMESH_TOKEN", "")
    content = {
        "pid": os.getpid(),
        "address": environment.get("DMESH_COORDINATOR") or jobs[0],
        "cluster": environment.get("DMESH_CLUSTER") or "default",
        "token": "" if token == own.get("DMESH_TOKEN", "") else token,
        "tls": {
            name: environment[name]
            for name in ("DMESH_TLS_CA", "DMESH_TLS_CERT", "DMESH_TLS_KEY")
            if environment.get(name, "") != own.get(name, "")
        },
    }
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in list(place.glob("*.json"))[:_MOST_RUNS]:  # of launchers that were killed
        run = _read(path)
        if run is not None and not _lives(run.pid):
            path.unlink(missing_ok=True)
    path = place / f"{os.getpid()}.json"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    return path


def _read(path: Path) -> Run | None:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        run = Run(
            found["pid"], found["address"], found["cluster"], found["token"], dict(found.get("tls", {}))
        )
    except (OSError, ValueError, KeyError, TypeError):  # being written, or removed, or not ours
        return None
    texts = (run.address, run.cluster, run.token, *run.tls, *run.tls.values())
    return run if type(run.pid) is int and all(isinstance(text, str) for text in texts) else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0
