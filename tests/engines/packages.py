"""Programs of Debian packages that tests need: installed if they are missing, or the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

_SBIN = "/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Returns a program's path, in the directories of administrators, too."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


def require(programs: dict[str, str]) -> None:
    """Installs what is missing as root with apt; skips the test, with the reason, where that cannot be done.

    Args:
        programs: The package of each program.
    """
    missing = {program: package for program, package in programs.items() if find(program) is None}
    if not missing:
        return
    names = ", ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"needs {names}, and installs them as root with apt only")
    install = ["apt-get", "install", "-y", "--no-install-recommends", *sorted(set(missing.values()))]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # starts no service
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs {names}, which apt did not install: {done.stderr.strip()[-300:]}")
