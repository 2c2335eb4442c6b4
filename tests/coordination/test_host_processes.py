"""Whether processes of this host are there."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from dmesh.config import host

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_there_until_it_is_killed(sleeper):
    started = host.start_ticks(sleeper.pid)
    assert started > 0
    assert not host.is_gone(sleeper.pid, started)
    assert not host.is_gone(sleeper.pid, 0)
    sleeper.kill()
    deadline = time.monotonic() + 30
    while not host.is_gone(sleeper.pid, started):  # a zombie: nobody has waited for it yet
        assert time.monotonic() < deadline
    assert sleeper.returncode is None
    sleeper.wait()
    assert host.is_gone(sleeper.pid, started)


def test_a_stopped_process_is_there(sleeper):
    sleeper.send_signal(19)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert not host.is_gone(sleeper.pid, host.start_ticks(sleeper.pid))


def test_another_process_with_the_same_id_is_not_the_one_that_was_meant(sleeper):
    assert host.is_gone(sleeper.pid, host.start_ticks(sleeper.pid) - 1)


def test_a_process_whose_first_thread_has_ended_is_there():
    program = (
        "import ctypes, threading, sys\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 30
    while host._stat(process.pid)[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        if host._stat(process.pid)[0] == "Z":
            assert not host.is_gone(process.pid, host.start_ticks(process.pid))
    finally:
        process.kill()
        process.communicate()


def test_processes_of_others_and_impossible_ids():
    assert not host.is_gone(1, host.start_ticks(1))
    assert not host.is_gone(1 << 80, 0)
    assert host.start_ticks(1 << 22) == 0


def test_this_process_has_a_place():
    assert host.pid_namespace().startswith("pid:[")
    assert len(host.boot_id()) == 36
    assert host.start_ticks(os.getpid()) > 0
