"""Whether processes of this host are there."""

from __future__ import annotations

import os
import socket
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


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_who_listens_on_a_port_is_known(family: str, tmp_path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(
        "import socket, sys\n"
        "version = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET\n"
        "taken = socket.create_server((sys.argv[1], 0), family=version)\n"
        "print(taken.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-u", str(script), family, "--secret=abc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        found = host.listener_on(int(holder.stdout.readline()))
        assert found == host.Listener(holder.pid, "holder.py"), "its arguments may be secrets"
        assert found.describe() == f"holder.py (pid {holder.pid})"
        holder.communicate("")


def test_a_port_that_nobody_listens_on_has_no_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert host.listener_on(bound.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["/usr/bin/python3.11", "/usr/bin/dmesh", "serve", "--token=x"], "dmesh serve"),
        (["python", "-u", "-m", "http.server", "80"], "http.server"),
        (["/usr/sbin/nginx", "-g", "daemon off;"], "nginx"),
        (["python3"], "python3"),
        (["evil\x1b[2J"], "evil?[2J"),
        ([], ""),
    ],
)
def test_a_program_is_named_without_its_arguments(words, program: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert host._program(7) == program
    assert host._program(8) == ""
