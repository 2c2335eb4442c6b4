"""Programs out of Debian's packages, which are unpacked into the cache and not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "docker-test"
"""What takes long to make, and may be kept: `make clean` removes it."""

_PATIENCE = 300.0
_SOURCE = """Types: deb
URIs: http://deb.debian.org/debian
Suites: {suite}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def program(path: str, package: str, suite: str | None = None) -> Path | str:
    """Returns a program, or why it cannot be had.

    Args:
        path: Where it is in the package.
        package: The package.
        suite: The release of Debian; that of this machine unless given. Of another release, only
            programs that need nothing but an old C library do, as Go's are.
    """
    found = CACHE / "programs" / (suite or "own") / Path(path).name
    if found.exists():
        return found
    if sys.platform != "linux" or shutil.which("apt-get") is None:
        return f"{package} is taken from Debian's packages, and there is no apt-get"
    folder = found.parent / f"{package}.new"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        options = _another_release(folder, suite) if suite is not None else []
        if options and (reason := _run("apt-get", *options, "update", folder=folder)):
            return f"the packages of Debian {suite} cannot be had: {reason}"
        if reason := _run("apt-get", *options, "download", package, folder=folder):
            return f"Debian's {package} cannot be had: {reason}"
        [archive] = folder.glob(f"{package}_*.deb")
        if reason := _run("dpkg", "-x", str(archive), str(folder / "unpacked"), folder=folder):
            return f"Debian's {package} cannot be unpacked: {reason}"
        (folder / "unpacked" / path).rename(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _another_release(folder: Path, suite: str) -> list[str]:
    """Makes apt's state for another release, and leaves this machine's alone; returns apt's options."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "own.sources").write_text(_SOURCE.format(suite=suite))
    settings = {
        "Dir::Etc::sourcelist": folder / "own.sources",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",  # another one might not be let into this folder
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def _run(*command: str, folder: Path) -> str | None:
    """Returns what a command complains of; None if it does what it should."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE)
    return (done.stderr.strip() or f"exit code {done.returncode}")[-300:] if done.returncode else None
