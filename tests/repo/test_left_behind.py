"""The check that tests leave no process behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
from tests.processes import started

DAEMON = """
import os
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
input()
"""


def test_it_sees_a_daemon_whose_parents_have_ended():
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.wait(60) == 0
        daemon = psutil.Process(int(parent.stdout.readline()))
        assert daemon not in psutil.Process().children(recursive=True)
        assert daemon in started()
        parent.stdin.close()
        parent.stdout.read()
