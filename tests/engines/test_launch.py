"""`dmesh.launch` on this machine, from the outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types

import psutil
import pytest
from tests.e2e.clients import Process
from tests.engines import programs

import dmesh
from dmesh.errors import (
    ArgumentTypeError,
    ConfigurationError,
    MissingExtraError,
    PeerLostError,
    RankFailedError,
)

HOST = socket.gethostname()


def test_each_rank_returns_its_result():
    found = dmesh.launch(programs.sums, (10,), {"offset": 1}, n=3)
    assert [rank for rank, _, _ in found] == [0, 1, 2]
    assert len({pid for _, pid, _ in found} | {os.getpid()}) == 4
    assert [total for _, _, total in found] == [[33, 3]] * 3


def test_what_ranks_leave_behind_ends_and_what_the_caller_has_started_does_not():
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        daemons = dmesh.launch(programs.starts_a_daemon, n=2)
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()
    assert not any(psutil.pid_exists(daemon) for daemon in daemons)


def test_signals_that_the_caller_handles_are_left_to_it():
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append("caller"))
    try:
        [heard] = dmesh.launch(programs.signals_its_launcher, (signal.SIGUSR1,), n=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (got, heard) == (["caller"], False)


def test_other_signals_are_passed_on_to_the_ranks():
    assert dmesh.launch(programs.signals_its_launcher, (signal.SIGUSR2,), n=1) == [True]


def test_the_name_is_a_function_whatever_is_imported():
    import dmesh.cli.run
    import dmesh.launcher.supervisor

    assert callable(dmesh.launch)
    assert "launch" in dir(dmesh)
    assert dmesh.launch.__module__ == "dmesh.engines.api"


def test_a_function_of_a_script_needs_no_main_guard_and_its_exceptions_are_the_scripts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import dmesh
            class TooHot(Exception):
                def __init__(self, degrees):
                    super().__init__(f"{degrees} degrees")
                    self.degrees = degrees
            def measure(limit):
                degrees = 10 * dmesh.client_id()
                if degrees > limit:
                    raise TooHot(degrees)
                return degrees
            print("script begins")
            print(dmesh.launch(measure, (99,), n=2))
            try:
                dmesh.launch(measure, (5,), n=2)
            except dmesh.errors.RankFailedError as error:
                print(isinstance(error.__cause__, TooHot), error.__cause__.degrees, error.rank)
                print("raise TooHot(degrees)" in str(error))
            """
        )
    )
    program = Process([sys.executable, str(script)], {}, fresh=True)
    assert program.wait() == 0, program.err
    assert program.out.splitlines() == ["script begins", "[0, 10]", "True 10 1", "True"]


def test_what_ranks_print_comes_out_of_this_process_labeled(capsys):
    dmesh.launch(programs.says_hello, n=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_the_cause_is_raised_and_the_consequences_follow():
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.raises, (1,), n=3)
    error = caught.value
    assert isinstance(error.__cause__, ValueError)
    assert (error.rank, error.host) == (1, HOST)
    text = str(error)
    assert text.startswith(f"rank 1 on host {HOST} (pid {error.pid}) raised ValueError: the learning rate is")
    assert "programs.py" in text
    assert "engines/rank.py" not in text
    assert error.failures[0] is error
    assert sorted(failure.rank for failure in error.failures[1:]) == [0, 2]
    for failure in error.failures[1:]:  # on a busy machine, the launcher may end a rank before it has noticed
        assert isinstance(failure.__cause__, PeerLostError) or "was ended by dmesh.launch" in str(failure)


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailedError) as caught:
        dmesh.launch(programs.dies, (2,), n=3)
    error = caught.value
    assert (error.rank, error.host) == (2, HOST)
    assert str(error).startswith(f"rank 2 on host {HOST} (pid {error.pid}) was killed by SIGKILL")
    assert not psutil.pid_exists(error.pid)


def test_a_rank_that_is_started_again_takes_its_place():
    found = dmesh.launch(programs.recovers, (1,), n=3, max_restarts=1)
    assert [rejoined for rejoined, _, _ in found] == [False, True, False]
    assert [total for _, _, total in found] == [3, 3, 3]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, None), (None, None), (3, "raised SystemExit: 3"), ("no data", "raised SystemExit: no data")],
)
def test_exits(code, expected):
    if expected is None:
        assert dmesh.launch(programs.exits, (code,), n=1) == [None]
    else:
        with pytest.raises(RankFailedError, match=expected):
            dmesh.launch(programs.exits, (code,), n=1)


def test_a_rank_may_return_before_the_others():
    assert dmesh.launch(programs.leaves_early, n=3) == [0, 2, 2]


def test_a_function_may_initialize_by_itself():
    found = dmesh.launch(
        programs.initializes, ("OWN_VARIABLE",), n=2, initialize=False, env={"OWN_VARIABLE": "x"}
    )
    assert found == [(6, "x"), (6, "x")]


def test_a_result_that_cannot_be_sent_back():
    with pytest.raises(RankFailedError, match=r"its result cannot be pickled: .*lock"):
        dmesh.launch(programs.returns_a_lock, n=1)


def test_a_result_that_cannot_be_read():
    with pytest.raises(
        RankFailedError, match="returned a result that cannot be unpickled here: ValueError: written"
    ):
        dmesh.launch(programs.returns_something_unreadable, n=1)


def test_a_rank_that_cannot_import_the_function_says_so(monkeypatch):
    module = types.ModuleType("only_here")
    exec("def function(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(RankFailedError, match="raised ModuleNotFoundError: No module named 'only_here'"):
        dmesh.launch(module.function, n=1)


def test_a_rank_that_reported_an_exception_and_is_started_again_has_a_result(tmp_path):
    found = dmesh.launch(programs.fails_once, ("1", str(tmp_path)), n=2, initialize=False, max_restarts=1)
    assert found == ["0", "1"]


def test_ctrl_c_ends_the_ranks_and_this_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time, dmesh
            def waits():
                print("pid", os.getpid())
                time.sleep(600)
            try:
                dmesh.launch(waits, n=2)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    program = Process([sys.executable, str(script)], {}, fresh=True)
    pids = [int(program.wait_for(f"[{rank}] pid").split()[-1]) for rank in range(2)]
    program.signal(signal.SIGINT)
    assert program.wait() == 0, program.err
    assert program.out.splitlines()[-1] == "interrupted"
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"fn": 3}, ArgumentTypeError, "fn must be a function, got 3"),
        ({"args": "ab"}, ArgumentTypeError, "args must be a tuple or a list of arguments, got 'ab'"),
        ({"kwargs": [1]}, ArgumentTypeError, "kwargs must be a dict"),
        ({"n": 0}, ConfigurationError, "n must be at least 1, got 0"),
        ({"n": True}, ArgumentTypeError, "n must be an integer, got True"),
        ({"max_restarts": -1}, ConfigurationError, "max_restarts must be at least 0, got -1"),
        ({"env": {"A": 1}}, ArgumentTypeError, "env must be a dict"),
        ({"on": "spark"}, ConfigurationError, "on must be .* got 'spark'"),
        ({"on": 7}, ArgumentTypeError, "on must be .* got 7"),
        (
            {"args": (threading.Lock(),)},
            ArgumentTypeError,
            "says_hello, or one of its arguments, cannot be sent",
        ),
        ({"env": {"DMESH_LEASE": "long"}}, ConfigurationError, "DMESH_LEASE"),
        ({"env": {"DMESH_BACKEND": "mpi"}}, ConfigurationError, "DMESH_BACKEND is mpi"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(arguments, kind, text, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(kind, match=text):
        dmesh.launch(**{"fn": programs.says_hello, **arguments})


def test_a_function_of_a_script_needs_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def local() -> None: ...

    with pytest.raises(MissingExtraError, match=r"pip install 'dmesh\[launch\]'"):
        dmesh.launch(local, n=1)
    assert dmesh.launch(programs.exits, (0,), n=1) == [None]


def test_signals_need_the_main_thread():
    caught: list[Exception] = []

    def call() -> None:
        try:
            dmesh.launch(programs.says_hello, n=1)
        except ConfigurationError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "only the main thread can call it" in str(caught[0])
