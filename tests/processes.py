"""Processes that the tests have started, also those whose parents have ended."""

from __future__ import annotations

import os
import secrets

import psutil

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
