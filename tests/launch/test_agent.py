"""The agent of a host, spoken to as a launcher does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.launch.launching import PATIENCE
from tests.processes import running_after

from dmesh._version import __version__
from dmesh.launcher.frames import Decoder, Frame, frame

WAITS = "import signal; print('up', flush=True); signal.pause()"


class Conversation:
    """An agent under way, and what it has said."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dmesh.launcher.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._decoder = Decoder(expects_magic=True)
        self._heard: list[Frame] = []

    def say(self, message: Frame) -> None:
        self.process.stdin.write(message.encode())

    def hear(self, kind: str) -> Frame:
        """Waits for the next frame of a kind; those before it are dropped."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if message.kind == kind:
                    return message
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"it ended without {kind}"
            self._heard += self._decoder.feed(data)

    def set_up(self, command: list[str], **more) -> Frame:
        setup = {
            "directory": "/",
            "module": False,
            "command": command,
            "clients": 1,
            "way": "ssh",
            "silence": 60.0,
        }
        self.say(frame("setup", {**setup, **more}))
        return self.hear("refused" if "refused" in more else "ready")

    def start_client(self, **environment: str) -> int:
        self.say(frame("start", {"environment": environment, "restarts": 0, "input": True}))
        return self.hear("started").fields()["pid"]


@pytest.fixture
def agent() -> Iterator[Callable[[], Conversation]]:
    started: list[Conversation] = []

    def start() -> Conversation:
        started.append(Conversation())
        assert started[-1].hear("hello").fields() == {"version": __version__}
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(BrokenPipeError):
            one.process.stdin.close()
        one.process.wait(PATIENCE)
        one.process.stdout.close()


def test_a_client_runs_from_its_start_to_its_end(agent, script) -> None:
    one = agent()
    ready = one.set_up([script("import sys; print(sys.stdin.read(), file=sys.stderr); sys.exit(3)")]).fields()
    assert len(ready["ports"]) == 1
    pid = one.start_client()
    one.say(Frame("input", 0, b"some text"))
    one.hear("taken")
    one.say(Frame("input", 0))
    said = one.hear("err").payload
    while not said.endswith(b"\n"):
        said += one.hear("err").payload
    assert said == b"some text\n"
    assert one.hear("ended").fields() == {"status": 3, "ended_by": None}
    one.hear("gone")
    assert not running_after([pid])


def test_signals_are_delivered_and_are_part_of_the_end(agent, script) -> None:
    one = agent()
    one.set_up([script(WAITS)])
    one.start_client()
    one.hear("out")
    one.say(frame("signal", {"number": signal.SIGTERM}))
    assert one.hear("ended").fields() == {"status": -signal.SIGTERM, "ended_by": signal.SIGTERM}


def test_a_python_before_the_script_is_not_taken_for_the_script(agent, script) -> None:
    one = agent()
    one.set_up(["python", script("print('ran')")])
    one.start_client()
    assert one.hear("out").payload.startswith(b"ran")


def test_output_that_comes_with_the_order_to_finish_ends_nothing_else(agent, script, tmp_path: Path) -> None:
    """A rank has ended and left a process behind, whose output the agent finds after that order."""
    one = agent()
    path = script("""
        import os, signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        if os.environ["RANK"] == "1":
            os.write(1, b"up")
            signal.pause()
        if child := os.fork():
            os.write(1, b"%d" % child)
            sys.exit()
        signal.sigwait([signal.SIGUSR1])
        print("late", flush=True)
        open(os.environ["WRITTEN"], "w").close()
        signal.pause()
    """)
    written = tmp_path / "written"
    one.set_up([path], clients=2)
    one.say(frame("start", {"environment": {"RANK": "1"}, "restarts": 0, "input": False}, 1))
    one.hear("out")
    one.start_client(RANK="0", WRITTEN=str(written))
    left = int(one.hear("out").payload)
    one.hear("ended")
    one.process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(one.process.pid, os.WUNTRACED)[1])
    one.say(Frame("finish", 0))
    os.kill(left, signal.SIGUSR1)
    while not written.exists():
        time.sleep(0.01)
    one.process.send_signal(signal.SIGCONT)
    assert one.hear("gone").number == 0
    one.say(frame("signal", {"number": signal.SIGTERM}, 1))
    assert one.hear("ended").number == 1
    one.process.stdin.close()
    assert one.process.wait(PATIENCE) == 0
    assert not running_after([left])


def test_the_end_of_the_connection_ends_the_clients(agent, script) -> None:
    one = agent()
    one.set_up([script(WAITS)])
    pid = one.start_client()
    one.process.stdin.close()
    assert one.process.wait(PATIENCE) == 0
    assert not running_after([pid])


def test_a_launcher_that_says_nothing_counts_as_gone(agent, script) -> None:
    one = agent()
    one.set_up([script(WAITS)], silence=0.3)
    pid = one.start_client()
    assert one.process.wait(PATIENCE) == 0
    assert not running_after([pid])


def test_a_launcher_that_is_stopped_is_waited_for(agent, script) -> None:
    one = agent()
    one.set_up([script(WAITS)], silence=0.3)
    one.say(frame("start", {"environment": {}, "restarts": 0, "input": True}))
    one.say(Frame("pause", 0))
    pid = one.hear("started").fields()["pid"]
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.0)
    os.kill(pid, 0)
    one.say(Frame("ping", 0))  # on its way before it was stopped
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.0)
    one.say(Frame("resume", 0))  # it goes on, and says nothing more
    assert one.process.wait(PATIENCE) == 0


def test_a_notice_to_the_agent_alone_reaches_its_clients(agent, script) -> None:
    """Slurm signals the tasks that it knows: the agents."""
    one = agent()
    one.set_up(
        [
            script("""
        import os, signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.write(1, b"up")
        sys.exit(signal.sigwait([signal.SIGUSR1]))
    """)
        ]
    )
    one.start_client()
    one.hear("out")
    one.process.send_signal(signal.SIGUSR1)
    assert one.hear("ended").fields() == {"status": signal.SIGUSR1, "ended_by": None}


def test_a_terminated_agent_leaves_no_client(agent, script) -> None:
    one = agent()
    one.set_up([script(WAITS)])
    pid = one.start_client()
    one.process.terminate()
    assert one.process.wait(PATIENCE) == 0
    assert not running_after([pid])


def test_the_address_is_that_by_which_ssh_has_come(agent, script, monkeypatch) -> None:
    for connection, expected in (
        ("10.0.0.1 5 10.0.0.2 22", "10.0.0.2"), ("::1 5 2001:db8::2 22", "2001:db8::2"),
        ("fe80::1%eth0 5 fe80::2%eth0 22", ""), ("nonsense", ""), ("", ""),
    ):  # fmt: skip
        monkeypatch.setenv("SSH_CONNECTION", connection)
        assert agent().set_up([script("")]).fields()["address"] == expected
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    assert agent().set_up([script("")], way="srun").fields()["address"] == "127.0.0.1"


def test_what_is_not_there_is_refused(agent, script) -> None:
    for more, message in (
        ({"directory": "/no/where"}, "it has no working directory /no/where"),
        ({}, "there is no script 'nowhere.py' (looked in /)"),
        ({"module": True}, "there is no module 'nowhere.py'"),
    ):
        refused = agent().set_up(["nowhere.py"], refused=True, **more)
        assert message in refused.text()


def test_a_launcher_that_does_not_read_stops_the_output_not_the_agent(agent, script) -> None:
    one = agent()
    path = script("""
        import os, sys
        os.set_blocking(1, False)
        written = 0
        while True:  # until nobody takes more
            try:
                written += os.write(1, b"x" * 10_000)
            except BlockingIOError:
                if written > 300_000:
                    break
        sys.stderr.write("full")
        os.set_blocking(1, True)
        os.write(1, b"x" * 10_000_000)
    """)
    one.set_up([path])
    one.start_client()
    one.say(frame("signal", {"number": signal.SIGKILL}))
    assert one.hear("ended").fields()["status"] == -signal.SIGKILL
