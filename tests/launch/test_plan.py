"""What is refused before anything starts, and what the clients are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dmesh.cli import main
from dmesh.errors import ConfigurationError
from dmesh.launcher import LaunchOptions, plan_launch


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-n", "2", "nowhere.py"), "there is no script 'nowhere.py' (looked in "),
        (("-n", "2", "-m", "no_such_module_anywhere"), "there is no module 'no_such_module_anywhere'"),
        (("-n", "0", "SCRIPT"), "-n must be at least 1, got 0"),
        (("-n", "-3", "SCRIPT"), "-n must be at least 1, got -3"),
        (("-n", "four", "SCRIPT"), "-n must be an integer, got 'four'"),
        (("SCRIPT",), "-n is required"),
        (("-n", "2"), "no script given"),
        (("-np", "two", "SCRIPT"), "-n must be an integer, got 'two'"),
        (("--hosts", "localhost:2", "-n", "9" * 5000, "SCRIPT"), "-n must be a whole number from 1, got '99"),
        (("-n", "2", "python"), "no script given. Example: dmesh run -n 4 python script.py"),
        (("-n", "2", "python", "nowhere.py"), "there is no script 'nowhere.py' (looked in "),
        (("-n", "2", "/nowhere/python3.99", "SCRIPT"), "there is no interpreter '/nowhere/python3.99'"),
        (("-n", "2", "--cpu-devices", "0", "SCRIPT"), "--cpu-devices must be at least 1, got 0"),
        (("-n", "2", "--bind", "socket", "SCRIPT"), "--bind must be core or numa, got 'socket'"),
        (("-n", "2", "--coordinator", "somewhere", "SCRIPT"), "--coordinator"),
        (("-n", "2", "--coordinator", "host:99999", "SCRIPT"), "--coordinator"),
        (("-n", "2", "--cluster", "a b", "SCRIPT"), "--cluster must be"),
        (("-n", "2", "--timeout-after-failure", "-1", "SCRIPT"), "--timeout-after-failure must be"),
        (("-n", "2", "--terminate-grace", "nan", "SCRIPT"), "--terminate-grace must be"),
    ],
)
def test_a_command_line_that_cannot_work_is_one_line_and_exit_code_2(
    script, args, message, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("print('started')")
    assert main(["run", *[path if arg == "SCRIPT" else arg for arg in args]]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("dmesh run: error: ")
    assert message in err


def commands(*command: str, **options) -> list[str]:
    plan = plan_launch(LaunchOptions(clients=1, command=command, **options), [10_001], {})
    return list(plan.clients[0].command)


def test_an_interpreter_before_the_script_is_not_taken_for_the_script(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script("")
    assert commands("python", path, "-v") == commands(path, "-v") == [sys.executable, path, "-v"]
    assert commands("python3", "-m", "json.tool", "x") == [sys.executable, "-m", "json.tool", "x"]
    assert commands("json.tool", "x", module=True) == [sys.executable, "-m", "json.tool", "x"]
    other = tmp_path / "env" / "bin" / "python3"
    other.parent.mkdir(parents=True)
    other.symlink_to(sys.executable)
    assert commands(str(other), "-u", path) == [str(other), "-u", path], (
        "as it is: a link names an environment"
    )
    monkeypatch.chdir(tmp_path)
    Path("python").write_text("print('a script of this name')")
    assert commands("python") == [sys.executable, "python"]


def environment_of(script: str, environ: dict[str, str], **options) -> dict[str, str]:
    plan = plan_launch(LaunchOptions(clients=2, command=(script,), **options), [10_001, 10_002], environ)
    return dict(plan.clients[1].environment)


def test_flags_come_before_the_environment_and_the_environment_before_defaults(script) -> None:
    path = script("")
    given = {
        "DMESH_COORDINATOR": "a:1",
        "DMESH_CLUSTER": "mine",
        "DMESH_NUM_CPU_DEVICES": "5",
        "DMESH_TOKEN": "s" * 32,
        "DTENSOR_JOB_NAME": "trainer",
        "OMP_NUM_THREADS": "7",
    }
    kept = environment_of(path, {**given, "DTENSOR_JOBS": "x:1", "DTENSOR_CLIENT_ID": "0"})
    assert {name: kept[name] for name in given} == given
    assert kept["DTENSOR_JOBS"] == "127.0.0.1:10001,127.0.0.1:10002"  # these two are what it is for
    assert kept["DTENSOR_CLIENT_ID"] == "1"
    flags = environment_of(path, given, coordinator="b:2", cluster="yours", cpu_devices=3)
    assert (flags["DMESH_COORDINATOR"], flags["DMESH_CLUSTER"]) == ("b:2", "yours")
    assert flags["DMESH_NUM_CPU_DEVICES"] == "3"


def test_every_run_against_a_coordinator_has_a_cluster_of_its_own(script) -> None:
    options = LaunchOptions(2, (script(""),), coordinator="127.0.0.1:4321")
    runs = [plan_launch(options, [10_001, 10_002], {}) for _ in range(2)]
    clusters = [{client.environment["DMESH_CLUSTER"] for client in run.clients} for run in runs]
    assert all(len(names) == 1 for names in clusters)
    assert clusters[0] != clusters[1]


def test_an_empty_variable_is_an_unset_one(script) -> None:
    environ = environment_of(script(""), {"DMESH_COORDINATOR": "", "DTENSOR_JOB_NAME": ""})
    assert environ["DTENSOR_JOB_NAME"] == "worker"
    assert "DMESH_CLUSTER" not in environ  # there is no server on which it could meet another run


def test_the_token_is_in_no_repr(script) -> None:
    plan = plan_launch(LaunchOptions(1, (script(""),)), [10_001], {})
    token = plan.clients[0].environment["DMESH_TOKEN"]
    assert len(token) == 64
    assert token not in repr(plan)


def test_a_bad_coordinator_in_the_environment_is_named(script) -> None:
    with pytest.raises(ConfigurationError, match="DMESH_COORDINATOR"):
        environment_of(script(""), {"DMESH_COORDINATOR": "nonsense"})
