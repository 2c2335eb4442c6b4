"""Processes that the tests have started, also those whose parents have ended."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable

import psutil
from tests.waiting import PATIENCE

from dmesh.launcher.guard import marked

VARIABLE = "STARTED_BY_TESTS"
"""Variable that all of them inherit, with a value of this run of pytest, or this worker of it."""
os.environ[VARIABLE] = secrets.token_hex(8)


def started() -> set[psutil.Process]:
    """Return the descendants of this process, and what has left them: daemons, and orphans of any kind."""
    found = set(psutil.Process().children(recursive=True))
    for pid in marked(VARIABLE, os.environ[VARIABLE]):
        try:
            found.add(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def running_after(
    processes: Iterable[psutil.Process | int], timeout: float = PATIENCE
) -> list[psutil.Process | int]:
    """Wait until processes have ended, or the time is up; return those that still run. Zombies have ended.

    `psutil.wait_procs` raises a FileNotFoundError if a process is reaped at the wrong moment: `pidfd_open`
    has a new error for that since Linux 6.16.
    """
    deadline, left = time.monotonic() + timeout, list(processes)
    while (left := list(filter(_runs, left))) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def _runs(process: psutil.Process | int) -> bool:
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
