"""`dmesh run` from the outside: what goes in, what comes out, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.launch.launching import PATIENCE, Launch
from tests.processes import running_after

from dmesh.cli import main
from dmesh.launcher import LaunchResult, Supervisor

SLEEP = """
    import signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python 3.14 may miss one that comes just before pause()
    print("up", flush=True)
    signal.pause()
"""


def pids(lines: list[str]) -> list[int]:
    return [int(line.split("pid=")[1].split()[0]) for line in lines]


@pytest.mark.parametrize(
    "words",
    [("-np", "2", "python", "SCRIPT"), ("-n", "2", "python3", "-u", "SCRIPT"), ("-n2", "-m", "placed")],
)
def test_the_words_of_other_launchers_are_understood(start, script, words: tuple[str, ...]) -> None:
    path = script("import sys, os; print(os.environ['RANK'], sys.argv[1:])", name="placed.py")
    run = start(*[path if word == "SCRIPT" else word for word in words], "a", "-np", "3")
    assert run.wait() == 0
    assert sorted(run.out) == [f"[{rank}] {rank} ['a', '-np', '3']" for rank in (0, 1)]


def test_every_client_gets_its_place_and_its_arguments(start, script) -> None:
    path = script("""
        import os, sys
        for name in ("DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_JOB_NAME", "DMESH_NUM_CPU_DEVICES", "RANK",
                     "WORLD_SIZE", "LOCAL_RANK", "PYTHONUNBUFFERED", "DMESH_COORDINATOR", "DMESH_CLUSTER"):
            print(name, os.environ.get(name))
        print("token", os.environ["DMESH_TOKEN"])
        print("args", sys.argv[1:])
    """)
    run = start("-n", "2", "--cpu-devices", "3", path, "-n", "9", "--", "a b", "--help")
    assert run.wait() == 0
    assert run.err == []
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in run.out if line.startswith(f"[{rank}] ")]
        values = dict(line.split(" ", 1) for line in mine)
        jobs = values["DTENSOR_JOBS"].split(",")
        assert len(set(jobs)) == 2
        assert all(job.startswith("127.0.0.1:") for job in jobs)
        assert values["DTENSOR_CLIENT_ID"] == values["RANK"] == values["LOCAL_RANK"] == str(rank)
        assert values["DTENSOR_JOB_NAME"] == "worker"
        assert values["DMESH_NUM_CPU_DEVICES"] == "3"
        assert values["WORLD_SIZE"] == "2"
        assert values["PYTHONUNBUFFERED"] == "1"
        assert values["DMESH_COORDINATOR"] == values["DMESH_CLUSTER"] == "None"
        assert len(values["token"]) == 64
        assert values["args"] == "['-n', '9', '--', 'a b', '--help']"
    assert len({line for line in run.out if "token" in line[:10]}) == 2  # two labels, one token
    assert len({line.split(" ", 1)[1] for line in run.out if "token" in line[:10]}) == 1


def test_a_module_is_found_in_the_working_directory(start, script) -> None:
    script("import sys; print(__name__, sys.argv[1:])", "some_module.py")
    run = start("-n", "1", "-m", "some_module", "--flag")
    assert run.wait() == 0
    assert run.out == ["[0] __main__ ['--flag']"]


def test_a_missing_script_is_one_line_and_exit_code_2(start) -> None:
    run = start("-n", "2", "nowhere.py")
    assert run.wait() == 2
    assert run.out == []
    assert len(run.err) == 1
    assert "there is no script 'nowhere.py'" in run.err[0]


def test_a_bad_setting_in_the_environment_is_one_line_and_not_n_tracebacks(start, script) -> None:
    run = start("-n", "2", script("print('started')"), env={"DMESH_INIT_TIMEOUT": "soon"})
    assert run.wait() == 2
    assert run.out == []
    assert len(run.err) == 1
    assert "DMESH_INIT_TIMEOUT" in run.err[0]


def test_streams_stay_apart_and_lines_stay_whole(start, script) -> None:
    path = script("""
        import os, sys
        for part in (b"one ", b"line\\n\\n", b"x" * 200_000 + b"\\n", b"no end"):
            os.write(1, part)
        print("to stderr", file=sys.stderr)
        os.write(2, b"\\xff not text, no end")
    """)
    run = start("-n", "2", path)
    assert run.wait() == 0
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in run.out if line.startswith(f"[{rank}] ")]
        assert mine[:2] == ["one line", ""]
        assert "".join(mine[2:-1]) == "x" * 200_000  # too long to hold back: in pieces, none of them lost
        assert mine[-1] == "no end"
        assert f"[{rank}] to stderr" in run.err
    assert len(run.err) == 4


def test_labels_are_colored_on_a_terminal_only_and_not_if_the_user_minds(start, script) -> None:
    path = script("print('hello')")
    for env, expected in (({}, b"\x1b[36m[0]\x1b[0m hello"), ({"NO_COLOR": "1"}, b"[0] hello")):
        master, slave = pty.openpty()
        run = start("-n", "1", path, env=env, stdout=slave)
        os.close(slave)
        assert run.process.wait(PATIENCE) == 0
        assert os.read(master, 1000).strip() == expected
        os.close(master)


def test_standard_input_goes_to_rank_0_alone(start, script) -> None:
    path = script("import sys; print(repr(sys.stdin.read()))")
    run = start("-n", "3", path, stdin=subprocess.PIPE)
    run.process.stdin.write(b"some input")
    run.process.stdin.close()
    assert run.wait() == 0
    assert sorted(run.out) == ["[0] 'some input'", "[1] ''", "[2] ''"]


def test_the_first_failure_is_reported_first_and_gives_the_exit_code(start, script) -> None:
    path = script("""
        import os, sys, signal
        if os.environ["RANK"] == "1":
            def fails():
                raise RuntimeError("of rank 1")
            try:
                fails()
            except RuntimeError:
                import traceback; traceback.print_exc()
            sys.exit(7)
        signal.pause()
    """)
    run = start("-n", "3", "--timeout-after-failure", "0", path)
    assert run.wait() == 7
    report = "\n".join(run.err)
    assert "dmesh run: FAILED: rank 1 on host " in report
    summary = report[report.index("FAILED") :]
    assert "ended with exit code 7 after" in summary.splitlines()[0]
    assert "  RuntimeError: of rank 1" in summary
    assert "in fails" in report
    assert summary.index("RuntimeError: of rank 1") < summary.index("the others followed")
    assert "ranks 0, 2 were ended by dmesh run (SIGTERM)" in summary


@pytest.mark.parametrize("lines", [0, 30])
def test_a_traceback_out_of_sight_is_repeated_in_the_report(start, script, lines) -> None:
    path = script(f"""
        import os, signal
        def fails():
            raise RuntimeError("of rank 1")
        if os.environ["RANK"] == "1":
            open("fifo").read()
            fails()
        def on_term(number, frame):
            for number in range({lines}):
                print("a line", flush=True)
            os._exit(0)
        signal.signal(signal.SIGTERM, on_term)
        open("fifo", "w").close()
        while True:
            signal.pause()
    """)
    os.mkfifo(os.path.join(os.path.dirname(path), "fifo"))
    run = start("-n", "2", "--timeout-after-failure", "0", path)
    assert run.wait() == 1
    report = "\n".join(run.err)
    assert report.count("in fails") == (2 if lines else 1)
    assert report.count("RuntimeError: of rank 1") == 2


def test_a_consequence_does_not_hide_the_cause(start, script) -> None:
    path = script("""
        import os, signal
        class PeerLostError(Exception): pass
        if os.environ["RANK"] == "0":
            raise PeerLostError("/job:worker/task:1 is gone")
        parent = os.getppid()
        os.read(int(os.open("fifo", os.O_RDONLY)), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    fifo = os.path.join(os.path.dirname(path), "fifo")
    os.mkfifo(fifo)
    run = start("-n", "2", "--timeout-after-failure", "600", path)
    run.expect("rank 0 (pid")  # the launcher has noticed rank 0 first
    with open(fifo, "wb") as pipe:
        pipe.write(b"x")
    assert run.wait() == 128 + signal.SIGKILL
    summary = "\n".join(run.err)
    summary = summary[summary.index("FAILED") :]
    assert "rank 1 on host" in summary.splitlines()[0]
    assert "was killed by SIGKILL" in summary.splitlines()[0]
    assert "ended with exit code 1: PeerLostError: /job:worker/task:1 is gone" in summary


def test_who_failed_but_was_slow_to_end_is_the_cause(start, script) -> None:
    path = script("""
        import os, signal, sys, traceback
        class PeerLostError(Exception): pass
        if os.environ["RANK"] == "0":
            try:
                raise ValueError("the reason")
            except ValueError:
                traceback.print_exc()
            signal.pause()  # saying goodbye to somebody who does not answer
        os.read(os.open("fifo", os.O_RDONLY), 1)
        raise PeerLostError("rank 0 is gone")
    """)
    fifo = os.path.join(os.path.dirname(path), "fifo")
    os.mkfifo(fifo)
    run = start("-n", "2", "--timeout-after-failure", "0", path)
    run.expect("ValueError: the reason")
    with open(fifo, "wb") as pipe:
        pipe.write(b"x")
    assert run.wait() == 1
    summary = "\n".join(run.err)
    summary = summary[summary.index("FAILED") :]
    assert "rank 0 on host" in summary.splitlines()[0]
    assert "ValueError: the reason" in summary[: summary.index("the others followed")]
    assert "ended with exit code 1: PeerLostError: rank 0 is gone" in summary


def test_a_crash_in_native_code_has_a_signal_and_a_traceback(start, script) -> None:
    run = start("-n", "1", script("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()"))
    assert run.wait() == 128 + signal.SIGSEGV
    summary = "\n".join(run.err)
    assert "in crash" in summary
    summary = summary[summary.index("dmesh run: FAILED") :]
    assert "was killed by SIGSEGV" in summary


def test_who_ignores_sigterm_is_killed(start, script) -> None:
    path = script("""
        import os, signal, sys
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("deaf", flush=True)
            while True:
                signal.pause()
        os.read(os.open("fifo", os.O_RDONLY), 1)
        sys.exit(3)
    """)
    fifo = os.path.join(os.path.dirname(path), "fifo")
    os.mkfifo(fifo)
    run = start("-n", "2", "--timeout-after-failure", "0", "--terminate-grace", "0.2", path)
    run.expect("[0] deaf")
    with open(fifo, "wb") as pipe:
        pipe.write(b"x")
    assert run.wait() == 3
    assert any("sending SIGKILL to rank 0" in line for line in run.err)
    assert any("rank 0" in line and "was ended by dmesh run (SIGKILL)" in line for line in run.err)


@pytest.fixture
def heeded(number):
    """Has the programs that are started heed a signal, although these tests may run under `nohup`."""
    before = signal.signal(number, signal.default_int_handler)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(start, script, number, heeded) -> None:
    path = script(f"""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
        print("up", flush=True)
        print("got", signal.Signals(signal.sigwait([{int(number)}])).name, flush=True)
    """)
    run = start("-n", "2", path)
    run.expect("] up", times=2)
    run.process.send_signal(number)
    assert run.wait() == 0  # the clients ended well
    assert sorted(run.out)[:2] == [f"[0] got {number.name}", "[0] up"]
    assert f"[1] got {number.name}" in run.out


CHECKPOINTS = """
    import os, signal, subprocess, sys
    notices = [signal.SIGUSR1, signal.SIGUSR2]
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    print(f"pid={os.getpid()} up", flush=True)
    for _ in notices:
        print("got", signal.Signals(signal.sigwait(notices)).name, flush=True)
    child.stdin.close()
    sys.exit(child.wait())  # the signals would have killed it
"""


def test_signals_that_notify_reach_the_clients_alone_and_end_nothing(start, script) -> None:
    run = start("-n", "2", script(CHECKPOINTS))
    run.expect("] pid=", times=2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        run.process.send_signal(number)
        run.expect(f"] got {number.name}", times=2)
    assert run.wait() == 0, run.err
    assert "dmesh run: SIGUSR1: forwarded to the clients" in run.err


def test_a_client_that_dies_of_a_signal_that_notifies_is_a_failure(start, script) -> None:
    run = start("-n", "2", script(SLEEP))
    run.expect("] up", times=2)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 128 + signal.SIGUSR1
    assert any("FAILED: rank" in line and "SIGUSR1" in line for line in run.err)


STOPS = """
    import os, signal
    awaited = {signal.SIGCONT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # signal.pause() misses one that comes just before
    print(f"pid={os.getpid()} up", flush=True)
    while signal.sigwait(awaited) == signal.SIGCONT:
        print("continued", flush=True)
"""


def stopped(numbers: list[int]) -> bool:
    """Waits until all of these processes are stopped."""
    deadline = time.monotonic() + PATIENCE
    while any(psutil.Process(number).status() != psutil.STATUS_STOPPED for number in numbers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def suspend(run: Launch) -> None:
    """Stops a launcher as Ctrl-Z does, and waits until it is stopped."""
    run.process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(run.process.pid, os.WUNTRACED)[1])


def test_ctrl_z_stops_the_clients_and_the_launcher_until_they_are_continued(start, script) -> None:
    run = start("-n", "2", "--terminate-grace", "60", script(STOPS))
    clients = pids(run.expect("] pid=", times=2))
    for _ in range(2):
        suspend(run)
        assert stopped(clients)
        run.process.send_signal(signal.SIGCONT)
        run.expect("] continued", times=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.err


def test_a_stopped_job_is_ended_as_shells_do_it(start, script) -> None:
    """`kill %1` of a stopped job is SIGTERM, then SIGCONT."""
    run = start("-n", "2", "--terminate-grace", "60", script(STOPS))
    clients = pids(run.expect("] pid=", times=2))
    suspend(run)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.err
    assert not running_after(clients)


def test_a_stopped_job_has_lost_no_client_when_it_goes_on(start, script) -> None:
    """It is stopped for longer than a client's lease; the server in client 0 is, too."""
    path = script("""
        import os
        import numpy as np
        import dmesh
        with dmesh.session("CPU"):
            print(f"pid={os.getpid()} up", flush=True)
            if dmesh.rank() == 0:
                input()
            print("sum", dmesh.collectives.all_reduce(np.ones(1)), flush=True)
    """)
    run = start("-n", "2", path, stdin=subprocess.PIPE, env={"DMESH_LEASE": "1"})
    run.expect("] pid=", times=2)
    suspend(run)
    time.sleep(2.5)  # of the processes' lives, not of this test's patience
    run.process.send_signal(signal.SIGCONT)
    run.process.stdin.write(b"go on\n")
    run.process.stdin.close()
    assert run.wait() == 0, run.err
    assert sorted(line for line in run.out if "sum" in line) == ["[0] sum [2.]", "[1] sum [2.]"]


def test_a_client_that_dies_of_the_users_signal_is_no_failure(start, script) -> None:
    run = start("-n", "2", script(SLEEP))
    run.expect("] up", times=2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert not any("FAILED" in line for line in run.err)


def test_the_second_signal_kills(start, script) -> None:
    path = script("""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        print("up", flush=True)
        while signal.sigwait([signal.SIGINT]):
            print("not yet", flush=True)
    """)
    run = start("-n", "2", path)
    run.expect("] up", times=2)
    run.process.send_signal(signal.SIGINT)
    run.expect("] not yet", times=2)
    while True:  # the second one counts if it is not almost at once
        run.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert run.process.wait(5) == 128 + signal.SIGINT
            break
    assert any("killing the clients" in line for line in run.err)


FAMILY = """
    import os, signal, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import signal\\nwhile True: signal.pause()"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"pid={os.getpid()}", flush=True)
    print(f"pid={child.pid}", flush=True)
"""


def test_a_killed_launcher_leaves_no_orphan(start, script) -> None:
    path = script(FAMILY + "    while True: signal.pause()\n")
    run = start("-n", "3", path)
    family = pids(run.expect("pid=", times=6))
    helpers = [p.pid for p in psutil.Process(run.process.pid).children()]
    run.process.kill()
    run.wait()
    assert not running_after(family + helpers)


def test_a_client_that_ends_well_leaves_no_orphan_either(start, script) -> None:
    run = start("-n", "2", script(FAMILY))
    family = pids(run.expect("pid=", times=4))
    assert run.wait() == 0
    assert not running_after(family)


def test_a_job_that_fails_leaves_no_grandchild(start, script) -> None:
    end = "    os.read(os.open('fifo' + os.environ['RANK'], os.O_RDONLY), 1)\n    sys.exit(1)\n"
    path = script(FAMILY + end)
    fifos = [os.path.join(os.path.dirname(path), f"fifo{rank}") for rank in (0, 1)]
    for fifo in fifos:
        os.mkfifo(fifo)
    run = start("-n", "2", "--timeout-after-failure", "0", path)
    family = pids(run.expect("pid=", times=4))
    with open(fifos[1], "wb") as pipe:
        pipe.write(b"x")
    assert run.wait() == 1
    assert not running_after(family)


DAEMON = """
    import os, signal, subprocess, sys
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    waits = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); signal.pause()"
    own = subprocess.Popen([sys.executable, "-c", waits], start_new_session=True, **quiet)
    reading, writing = os.pipe()
    twice = "import os\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n"
    twice += f"os.write({writing}, b'%d' % os.getpid()); os.close({writing}); {waits}"
    subprocess.run([sys.executable, "-c", twice], pass_fds=[writing], env={}, **quiet)
    print(f"pid={own.pid} own session", flush=True)
    print(f"pid={int(os.read(reading, 20))} forked twice", flush=True)
"""
"""Leaves two processes that its group does not have; the second one has an empty environment."""


@pytest.mark.parametrize("end", ["", "    sys.exit(3)"])
def test_daemons_end_with_the_job(start, script, end) -> None:
    run = start("-n", "2", script(DAEMON + end))
    daemons = pids(run.expect("pid=", times=4))
    assert run.wait() == (3 if end else 0)
    assert not any(psutil.pid_exists(daemon) for daemon in daemons)


def test_daemons_have_time_to_end_well(start, script, tmp_path) -> None:
    path = script("""
        import os, signal, subprocess, sys
        ends = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(flush=True)"
        ends += "; signal.sigwait([signal.SIGTERM]); open('ended', 'w').close()"
        pipe = subprocess.PIPE
        daemon = subprocess.Popen([sys.executable, "-c", ends], start_new_session=True, stdout=pipe)
        daemon.stdout.readline()
    """)
    assert start("-n", "1", path).wait() == 0
    assert (tmp_path / "ended").exists()


def test_a_killed_launcher_leaves_no_daemon(start, script) -> None:
    run = start("-n", "2", script(DAEMON.replace("env={}, ", "") + "    signal.pause()"))
    daemons = pids(run.expect("pid=", times=4))
    run.process.kill()
    run.wait()
    assert not running_after(daemons)


def test_children_that_the_launcher_had_before_are_left_alone(start, script) -> None:
    """As in `server & exec dmesh run ...`, the script of many containers."""
    reading, writing = os.pipe()

    def fork() -> None:
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
            os.closerange(0, 3)
            os.execv(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"])

    run = start("-n", "1", script(DAEMON), preexec_fn=fork)
    before = psutil.Process(int(os.read(reading, 20)))
    try:
        daemons = pids(run.expect("pid=", times=2))
        assert run.wait() == 0
        assert before.is_running()
        assert before.status() != psutil.STATUS_ZOMBIE
        assert not any(psutil.pid_exists(daemon) for daemon in daemons)
    finally:
        before.kill()
        os.close(reading)
        os.close(writing)


def test_orphans_that_have_ended_are_no_zombies_while_the_job_goes_on(start, script) -> None:
    path = script("""
        import os, signal, subprocess, sys
        ends = "import os\\nif os.fork(): os._exit(0)\\nos.setsid()\\nprint(os.getpid(), flush=True); input()"
        ended = subprocess.Popen([sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ended.wait()
        number = int(ended.stdout.readline())
        ended.stdin.close()
        ended.stdout.read()  # until it has ended
        print(f"pid={number}", flush=True)
        signal.pause()
    """)
    run = start("-n", "1", path)
    [orphan] = pids(run.expect("pid="))
    deadline = time.monotonic() + PATIENCE
    while psutil.pid_exists(orphan):
        assert time.monotonic() < deadline, psutil.Process(orphan)
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


def test_output_that_nobody_reads_ends_the_job(start, script) -> None:
    path = script("""
        import itertools
        for number in itertools.count():
            print(number)
    """)
    reading, writing = os.pipe()
    run = start("-n", "2", path, stdout=writing)
    os.close(writing)
    os.read(reading, 100)
    os.close(reading)
    assert run.process.wait(PATIENCE) == 128 + signal.SIGPIPE


def test_an_interpreter_is_not_needed_on_the_path(start, script) -> None:
    run = start("-n", "1", script("import sys; print(sys.executable)"), env={"PATH": "/nowhere"})
    assert run.wait() == 0
    assert run.out == [f"[0] {sys.executable}"]


# Clients that are started again -----------------------------------------------------------------------------

FALLS = """
    import os, signal, sys, time
    rank, count = os.environ["RANK"], int(os.environ["DMESH_RESTART_COUNT"])
    print("up", count, os.environ.get("DMESH_RESTART_POLICY"), flush=True)
    if rank == "1" and count < {falls}:
        {how}
    if rank == "1":
        open("risen", "w").close()
    while not os.path.exists("risen"):
        time.sleep(0.01)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("how", "words"),
    [(KILLED, "was killed by SIGKILL"), ("raise KeyError('x')", "ended with exit code 1 (KeyError: 'x')")],
)
def test_a_client_that_fails_is_started_again(start, script, how, words) -> None:
    run = start("-n", "3", "--max-restarts", "2", script(FALLS.format(falls=2, how=how)))
    assert run.wait() == 0
    notices = [line for line in run.err if line.startswith("dmesh run: ")]
    assert len(notices) == 2
    for number, notice in enumerate(notices, 1):
        assert words in notice
        assert notice.endswith(f"; restarting it ({number} of 2)")
    assert sorted(line for line in run.out if line.startswith("[1]")) == [
        f"[1] up {count} rejoin" for count in range(3)
    ]
    assert "[2] up 0 rejoin" in run.out


def test_there_is_an_end_to_restarts(start, script) -> None:
    run = start("-n", "2", "--max-restarts", "1", script(FALLS.format(falls=9, how="sys.exit(7)")))
    assert run.wait() == 7
    assert [line for line in run.out if line.startswith("[1]")] == ["[1] up 0 rejoin", "[1] up 1 rejoin"]
    assert any("FAILED: rank 1" in line and "exit code 7" in line for line in run.err)


def test_the_host_of_the_server_cannot_be_replaced(start, script) -> None:
    run = start(
        "-n",
        "2",
        "--max-restarts",
        "3",
        script(FALLS.replace('"1"', '"0"').format(falls=9, how="sys.exit(7)")),
    )
    assert run.wait() == 7
    assert not any("restarting it (" in line for line in run.err)


def test_rank_0_can_be_replaced_where_the_server_is_elsewhere(start, script) -> None:
    path = script(FALLS.replace('"1"', '"0"').format(falls=1, how=KILLED))
    run = start("-n", "2", "--max-restarts", "1", "--coordinator", "127.0.0.1:1", path)
    assert run.wait() == 0
    assert "[0] up 1 rejoin" in run.out


def test_nobody_is_started_again_after_the_end_was_asked_for(start, script) -> None:
    path = script("""
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("up", flush=True)
        while True:
            signal.pause()
    """)
    run = start("-n", "3", "--max-restarts", "5", path)
    run.expect("] up", times=3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert len([line for line in run.out if line.endswith("up")]) == 3


def test_restarts_need_the_policy(start, script) -> None:
    run = start("-n", "2", "--max-restarts", "1", script("pass"), env={"DMESH_RESTART_POLICY": "fail-fast"})
    assert run.wait() == 2
    assert "--max-restarts needs DMESH_RESTART_POLICY=rejoin, but it is 'fail-fast'" in run.err[0]
    run = start("-n", "2", "--max-restarts", "-1", script("pass"))
    assert run.wait() == 2
    assert "--max-restarts must be at least 0" in run.err[0]


def test_programs_are_told_how_each_rank_ended(start, script) -> None:
    path = script("""
        import os, signal, sys
        rank = os.environ["RANK"]
        print("hello", flush=True)
        if rank == "1":
            open("0").read()  # until rank 0 has ended, and rank 2 has got so far
            open("2").read()
            os.kill(os.getpid(), signal.SIGKILL)
        until_it_ends = open(rank, "w")
        if rank == "2":
            until_it_ends.close()
            signal.pause()
    """)
    for rank in "02":
        os.mkfifo(os.path.join(os.path.dirname(path), rank))
    run = start("-n", "3", "--json", "--timeout-after-failure", "0.2", path)
    assert run.wait() == 137
    found = json.loads("\n".join(run.out))
    assert {line for line in run.err if "hello" in line} == {"[0] hello", "[1] hello", "[2] hello"}
    assert (found["exit_code"], found["failures"]) == (137, [1, 2])
    ranks = found["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1, 2]
    assert [(one["exit_code"], one["signal"]) for one in ranks] == [
        (0, None),
        (None, "SIGKILL"),
        (None, "SIGTERM"),
    ]
    assert [one["role"] for one in ranks] == ["succeeded", "cause", "ended_by_launcher"]
    assert [one["ended_by_launcher"] for one in ranks] == [None, None, "SIGTERM"]
    assert all(0 < one["seconds"] <= found["seconds"] for one in ranks)
    assert f"(pid {ranks[1]['pid']})" in "\n".join(run.err)


def test_programs_are_told_that_clients_cannot_be_started(
    script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(supervisor: Supervisor) -> LaunchResult:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(Supervisor, "run", fail)
    assert main(["run", "-n", "1", "--json", str(script("pass"))]) == 1
    told, errors = capsys.readouterr()
    assert json.loads(told)["error"] == {
        "kind": "BlockingIOError", "message": "the clients could not be started: no more processes",
    }  # fmt: skip
    assert errors == "dmesh run: error: the clients could not be started: no more processes\n"


def test_a_program_that_does_not_read_how_the_job_ended_is_no_failure_to_start(script) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "dmesh", "run", "-n", "1", "--json", str(script("pass"))],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert "could not be started" not in ended.stderr


def test_programs_are_told_of_exceptions_restarts_and_of_what_cannot_start(start, script) -> None:
    path = script("""
        import os, sys
        if os.environ["RANK"] == "1":
            raise ValueError("no such shard")
        sys.stdin.read()
    """)
    run = start("-n", "2", "--json", path)
    assert run.wait() == 1
    found = json.loads("\n".join(run.out))
    assert found["ranks"][1]["exception"] == "ValueError: no such shard"
    assert found["ranks"][1]["restarts"] == 0
    run = start("-n", "2", "--json", "nothing.py")
    assert run.wait() == 2
    assert "there is no script 'nothing.py'" in json.loads("\n".join(run.out))["error"]["message"]
