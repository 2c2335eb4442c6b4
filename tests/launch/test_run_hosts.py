"""`dmesh run` on several hosts, over a stand-in for ssh that starts everything here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.launch.launching import PATIENCE, Launch
from tests.launch.test_run import CHECKPOINTS, STOPS, pids, stopped, suspend
from tests.processes import running_after

FAKE_SSH = (sys.executable, str(Path(__file__).with_name("fake_ssh.py")))
TWO_HOSTS = ("--ssh", shlex.join(FAKE_SSH), "--hosts", "host1:2,host2:2")
UP = "import os, signal; print(f'pid={os.getpid()} up', flush=True); signal.pause()"


def agents(run: Launch) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "dmesh.launcher.agent" in child.cmdline()]


def has_rank(agent: psutil.Process, rank: str) -> bool:
    return any(child.environ().get("RANK") == rank for child in agent.children())


def test_four_clients_on_two_hosts_reduce_and_nothing_of_it_is_left(start, script, tmp_path: Path) -> None:
    """The token and the certificates are on no command line, and are gone after the run."""
    path = script("""
        import os, stat, sys
        from pathlib import Path
        import numpy as np
        import dmesh

        dmesh.initialize_accelerator_system("CPU")
        me = dmesh.client_id()
        total = dmesh.collectives.all_reduce(np.array([1.0, me]))
        files = [Path(os.environ[f"DMESH_TLS_{name}"]) for name in ("CA", "CERT", "KEY")]
        modes = {stat.S_IMODE(file.stat().st_mode) for file in files} | {
            stat.S_IMODE(file.parent.stat().st_mode) for file in files}
        print("sum", total, sorted(map(oct, modes)), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
        print("jobs", *dmesh.jobs())
        print("directory", files[0].parent)
        print("token", os.environ["DMESH_TOKEN"])
        dmesh.collectives.barrier()
        if me == 0:
            input()
        dmesh.shutdown_accelerator_system()
    """)
    run = start(*TWO_HOSTS, path, stdin=subprocess.PIPE, env={"XDG_CONFIG_HOME": str(tmp_path)})
    lines = run.expect("token", 4)
    token = lines[0].split()[-1]
    family = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]
    assert not any(token in " ".join(process.cmdline()) for process in family)
    assert len(agents(run)) == 2
    status = start("--json", verb="status", env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert status.wait() == 0, status.err  # it has found the token and the certificates
    assert json.loads("\n".join(status.out))["cluster"] == "default"
    run.process.stdin.write(b"go on\n")
    run.process.stdin.close()
    assert run.wait() == 0, run.err
    for rank in range(4):
        assert f"[{rank}] sum [4. 6.] ['0o600', '0o700'] {rank % 2} 2" in run.out
    jobs = next(line for line in run.out if "jobs" in line).split()[2:]
    assert [job.partition(":")[0] for job in jobs] == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    directories = {line.split()[-1] for line in run.out if "directory" in line}
    assert len(directories) == 2  # one a host
    assert not any(Path(directory).exists() for directory in directories)
    assert not any("dmesh run" in line or "Error" in line for line in run.err)


def test_a_killed_client_is_named_with_its_host_and_the_others_end(start, script) -> None:
    path = script(f"import os, time\nif os.environ['RANK'] == '3': os.kill(os.getpid(), 9)\n{UP}")
    run = start(*TWO_HOSTS, "--timeout-after-failure", "0", "--json", path)
    assert run.wait() == 137
    account = json.loads("\n".join(run.out))
    killed = account["ranks"][3]
    assert (killed["host"], killed["signal"], killed["role"], killed["lost"]) == (
        "host2",
        "SIGKILL",
        "cause",
        None,
    )
    assert account["failures"][0] == 3
    assert [rank["signal"] for rank in account["ranks"][:3]] == ["SIGTERM"] * 3
    assert any(
        f"FAILED: rank 3 on host host2 (pid {killed['pid']}) was killed by SIGKILL" in line
        for line in run.err
    )
    assert any(f"rank 3 (host host2, pid {killed['pid']}) was killed by SIGKILL" in line for line in run.err)


def test_an_exception_is_shown_once_and_reported_with_its_host(start, script) -> None:
    run = start(*TWO_HOSTS, script("raise ValueError('bad luck')"))
    assert run.wait() == 1
    assert sum("in <module>" in line for line in run.err) == 1  # the stack is the same on all ranks
    assert any("FAILED: ranks 0-3 on hosts host1, host2 ended with exit code 1" in line for line in run.err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_clients_on_all_hosts(start, script, number: signal.Signals) -> None:
    path = script("""
        import os, signal, sys
        awaited = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        print(f"pid={os.getpid()} up", flush=True)
        sys.exit("term" if signal.sigwait(awaited) == signal.SIGTERM else "int")
    """)
    run = start(*TWO_HOSTS, path)
    started = pids(run.expect("up", 4))
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    assert sorted(line for line in run.err if line.startswith("[")) == [
        f"[{rank}] {'term' if number is signal.SIGTERM else 'int'}" for rank in range(4)
    ]
    assert not running_after(started)


def test_a_second_signal_kills(start, script) -> None:
    path = script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
        print(f"pid={os.getpid()} up", flush=True)
        while True:
            signal.pause()
    """)
    run = start(*TWO_HOSTS, "--terminate-grace", "60", path)
    started = pids(run.expect("up", 4))
    run.process.send_signal(signal.SIGTERM)
    run.expect("no", 4)
    while True:  # the second one counts if it is not almost at once
        run.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert run.process.wait(8) == 143
            break
    assert any("killing the clients" in line for line in run.err)
    assert not running_after(started)


def test_nothing_is_left_when_the_launcher_is_killed(start, script) -> None:
    path = script(f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(f"pid={{child.pid}} child", flush=True)
        {UP}
    """)
    run = start(*TWO_HOSTS, path)
    started = pids(run.expect("pid=", 8))
    started += [agent.pid for agent in agents(run)]
    run.process.kill()
    assert not running_after(started)


@pytest.mark.parametrize("victim", ["ssh", "agent"])
def test_a_lost_connection_is_the_cause_and_ends_the_job(start, script, victim: str) -> None:
    run = start(*TWO_HOSTS, "--timeout-after-failure", "0", "--json", script(UP))
    started = pids(run.expect("up", 4))
    agent = next(agent for agent in agents(run) if has_rank(agent, "3"))
    ssh = next(process for process in agent.parents() if FAKE_SSH[1] in process.cmdline())
    (ssh if victim == "ssh" else agent).kill()
    assert run.wait() == 255
    assert not running_after(started)
    account = json.loads("\n".join(run.out))
    assert [rank["role"] for rank in account["ranks"]] == ["ended_by_launcher"] * 2 + ["cause"] * 2
    assert "the connection to host host2 is gone: ssh ended with" in account["ranks"][3]["lost"]
    assert any(
        "FAILED: ranks 2-3 on host host2 were lost with the connection to its host" in line
        for line in run.err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hosts", "host1:2,nowhere:2"), "host nowhere: it cannot be reached. Try: "),
        (
            ("--hosts", "host1:2", "--python", "/no/python"),
            "host host1: there is no /no/python. Name the Python",
        ),
        (("--hosts", "host1:2", "--python", "/bin/true"), "host host1: its agent has not started"),
        (("--hosts", "host1:2", "--chdir", "/no/where"), "host host1: it has no working directory /no/where"),
        (("--hosts", "host1:2", "--ssh", "/no/ssh"), "host host1: /no/ssh cannot be started"),
        (("--hosts", "host1:2", "--chdir", "/"), "host host1: there is no script 'script.py' (looked in /)"),
        (("--hosts", "host1:2", "--python", f"{sys.executable} -S"), "host host1: there is no"),
    ],
)
def test_a_host_that_cannot_take_part_is_one_error(start, script, options, message: str) -> None:
    script("print('started')")
    run = start("--ssh", shlex.join(FAKE_SSH), *options, "script.py")
    assert run.wait() == 1
    assert run.out == []
    assert len(run.err) == 1
    assert message in run.err[0]


def test_a_host_without_dmesh_or_with_another_version_is_named(start, script, tmp_path: Path) -> None:
    script("print('started')")
    agent = 'import sys; sys.stdout.write(\'dmesh-agent 1\\nhello 0 20\\n{"version": "0.0.1"}\\n\')'
    python = tmp_path / "python"
    for source, message in (
        ("raise ModuleNotFoundError(\"No module named 'dmesh'\")", "dmesh is not installed for"),
        (agent, "it has dmesh 0.0.1, this machine has"),
    ):
        python.write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(source)}\n")
        python.chmod(0o755)
        run = start("--ssh", shlex.join(FAKE_SSH), "--hosts", "host1:1", "--python", str(python), "script.py")
        assert run.wait() == 1
        assert len(run.err) == 1
        assert message in run.err[0]


def test_settings_and_exported_variables_go_along_and_others_do_not(start, script, tmp_path: Path) -> None:
    path = script("""
        import os, sys
        names = ("DMESH_LEASE", "DMESH_STUCK_AFTER", "MINE", "HERS", "OTHER", "WORLD_SIZE", "RANK",
                 "LOCAL_RANK", "OMP_NUM_THREADS")
        print({name: os.environ[name] for name in names if name in os.environ}, os.getcwd(), sys.argv[1:])
    """)
    ssh = shlex.join((*FAKE_SSH, "DMESH_STUCK_AFTER=7", "OMP_NUM_THREADS=5", "OTHER=theirs"))
    run = start(
        "--ssh", ssh, "--hosts", "host1:1,host2:2", "-n", "2", "-x", "MINE", "-x", "HERS=x y", "--chdir", "/",
        path, "a b", "$HOME", env={"DMESH_LEASE": "20", "MINE": "it's", "UNSAID": "1"},
    )  # fmt: skip
    assert run.wait() == 0, run.err
    for rank in (0, 1):
        expected = {
            "DMESH_LEASE": "20", "MINE": "it's", "HERS": "x y", "OTHER": "theirs", "WORLD_SIZE": "2",
            "RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "5",
        }  # fmt: skip
        assert f"[{rank}] {expected} / ['a b', '$HOME']" in run.out


def test_one_host_meets_at_its_loopback_without_certificates(start, script) -> None:
    path = script("import os; print(os.environ['DTENSOR_JOBS'], os.environ.get('DMESH_TLS_CA'))")
    for hosts in ("host1:2", "localhost:2"):
        run = start("--ssh", shlex.join(FAKE_SSH), "--hosts", hosts, path)
        assert run.wait() == 0, run.err
        for line in run.out:
            jobs, ca = line.split()[1:]
            assert all(job.startswith("127.0.0.1:") for job in jobs.split(","))
            assert ca == "None"


def test_insecure_makes_no_certificates(start, script) -> None:
    path = script("import os; print(os.environ['DMESH_INSECURE'], os.environ.get('DMESH_TLS_CA'))")
    run = start(*TWO_HOSTS, "--insecure", path)
    assert run.wait() == 0, run.err
    assert sorted(run.out) == [f"[{rank}] 1 None" for rank in range(4)]


def test_standard_input_goes_to_rank_0_however_much_it_is(start, script, tmp_path: Path) -> None:
    path = script("""
        import hashlib, sys
        data = sys.stdin.buffer.read()
        print(len(data), hashlib.sha256(data).hexdigest())
    """)
    data = os.urandom(1_000_000)
    (tmp_path / "data").write_bytes(data)
    empty = f"0 {hashlib.sha256(b'').hexdigest()}"
    with (tmp_path / "data").open("rb") as file:
        run = start(*TWO_HOSTS, path, stdin=file.fileno())
        assert run.wait() == 0, run.err
    full = f"{len(data)} {hashlib.sha256(data).hexdigest()}"
    assert sorted(run.out) == [f"[0] {full}", *(f"[{rank}] {empty}" for rank in (1, 2, 3))]


def test_much_output_arrives_whole_and_a_client_that_reads_no_input_is_no_obstacle(
    start, script, tmp_path
) -> None:
    path = script("""
        import sys
        for number in range(2000):
            print(f"{number} " + "x" * 500)
        print("no end", end="")
    """)
    (tmp_path / "data").write_bytes(b"x" * 1_000_000)
    with (tmp_path / "data").open("rb") as file:
        run = start(*TWO_HOSTS, path, stdin=file.fileno())
        assert run.wait() == 0, run.err
    for rank in range(4):
        lines = [line for line in run.out if line.startswith(f"[{rank}] ")]
        assert lines == [*(f"[{rank}] {number} " + "x" * 500 for number in range(2000)), f"[{rank}] no end"]


def test_a_reader_that_has_seen_enough_ends_the_job(start, script) -> None:
    path = script("while True: print('x' * 1000, flush=True)")
    reader, writer = os.pipe()
    run = start(*TWO_HOSTS, path, stdout=writer)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    assert run.process.wait(PATIENCE) == 141


def test_a_failed_client_is_started_again_on_its_host(start, script) -> None:
    path = script("""
        import os, sys, time
        again = int(os.environ["DMESH_RESTART_COUNT"])
        print("start", again, os.environ["DTENSOR_JOBS"].split(",")[int(os.environ["RANK"])], flush=True)
        if os.environ["RANK"] == "3" and not again:
            sys.exit(5)
        if os.environ["RANK"] == "0":
            sys.stdin.readline()
    """)
    run = start(*TWO_HOSTS, "--max-restarts", "1", path, stdin=subprocess.PIPE)
    run.expect("start 1")
    run.process.stdin.close()
    assert run.wait() == 0, run.err
    first, second = [line.split()[-1] for line in run.out if line.startswith("[3] start")]
    assert first == second
    assert any("rank 3 (host host2, pid " in line and "restarting it (1 of 1)" in line for line in run.err)


def check_stop_and_continuation(run, started: list[int]) -> None:
    """Suspends a launcher, which stops its four clients, continues it, which continues them, and ends it."""
    suspend(run)
    assert stopped(started)
    run.process.send_signal(signal.SIGCONT)
    run.expect("] continued", 4)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.err


def test_ctrl_z_stops_the_clients_on_all_hosts_until_they_are_continued(start, script) -> None:
    run = start(*TWO_HOSTS, "--terminate-grace", "60", script(STOPS))
    started = pids(run.expect("up", 4))
    check_stop_and_continuation(run, started)


PINGS = """
    import os, sys, threading, types
    from dmesh.cli import main
    from dmesh.launcher import outbox, remote, supervisor

    on_signal, handled = supervisor.Supervisor._on_signal, threading.Event()

    def write(descriptor, data):
        if threading.current_thread() is not threading.main_thread() and os.path.exists("hold"):
            os.write(2, b"pings\\n")
            handled.wait(60)
            os.remove("hold")
        return os.write(descriptor, data)

    def handle(self, received):
        on_signal(self, received)
        handled.set()

    outbox.os = types.SimpleNamespace(write=write)
    supervisor.Supervisor._on_signal = handle
    remote.PING_INTERVAL = 0.01
    sys.exit(main())
"""


def test_ctrl_z_while_a_sign_of_life_is_being_sent_stops_the_clients_first(start, script, tmp_path) -> None:
    """A launcher that were stopped before could send neither the signal nor a word to the agents."""
    program = sys.executable, script(PINGS, "launcher.py")
    run = start(*TWO_HOSTS, "--terminate-grace", "60", script(STOPS), dmesh=program)
    started = pids(run.expect("up", 4))
    (tmp_path / "hold").touch()
    run.expect("pings")
    check_stop_and_continuation(run, started)


CROWDED = """
    import os, sys, types
    from dmesh.cli import main
    from dmesh.launcher import outbox, supervisor

    def write(descriptor, data):
        if os.path.exists("hold"):
            raise BlockingIOError
        return os.write(descriptor, data)

    outbox.os = types.SimpleNamespace(write=write)
    supervisor._STOP_WITHIN = 0.1
    sys.exit(main())
"""


def test_ctrl_z_says_which_hosts_do_not_take_it(start, script, tmp_path) -> None:
    """What leads there is full: too much input waits, or the network is away."""
    program = sys.executable, script(CROWDED, "launcher.py")
    run = start(*TWO_HOSTS, "--terminate-grace", "60", script(STOPS), dmesh=program)
    run.expect("up", 4)
    (tmp_path / "hold").touch()
    suspend(run)
    run.expect("dmesh run: stopping, but host1, host2 did not take the signal")
    (tmp_path / "hold").unlink()
    run.process.send_signal(signal.SIGCONT)
    run.expect("] continued", 4)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.err


def test_signals_that_notify_reach_the_clients_on_all_hosts(start, script) -> None:
    run = start(*TWO_HOSTS, script(CHECKPOINTS))
    run.expect("] pid=", times=4)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        run.process.send_signal(number)
        run.expect(f"] got {number.name}", times=4)
    assert run.wait() == 0, run.err


def test_a_host_that_does_not_answer_is_given_up(start, script, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho waiting for a friend >&2\nexec sleep 1000\n")
    ssh.chmod(0o755)
    run = start("--ssh", str(ssh), "--hosts", "a:1,b:1", "--start-timeout", "0.5", script(""))
    assert run.wait() == 1
    [line] = run.err
    assert "host a, b: no agent of dmesh has started within 0.5 s" in line
    assert "(waiting for a friend)" in line


def test_what_a_client_leaves_behind_is_ended_on_its_host(start, script) -> None:
    path = script("""
        import subprocess, sys
        for own_session in (False, True):
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                                     start_new_session=own_session)
            print(f"pid={child.pid} child", flush=True)
    """)
    run = start(*TWO_HOSTS, path)
    assert run.wait() == 0, run.err
    assert not running_after(pids(run.out))
