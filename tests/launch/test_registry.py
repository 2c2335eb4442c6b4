"""Where `dmesh run` writes down which job it runs, and how other commands find it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from dmesh.cli import main
from dmesh.launcher import registry
from dmesh.launcher.registry import living, registered

JOB = {"DTENSOR_JOBS": "127.0.0.1:7,127.0.0.1:8", "DMESH_TOKEN": "made-for-this-run"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_a_run_is_there_as_long_as_it_goes_on(home: Path) -> None:
    assert living() == []
    with registered(JOB, {}):
        [run] = living()
        assert (run.pid, run.address, run.cluster, run.token) == (
            os.getpid(), "127.0.0.1:7", "default", "made-for-this-run",
        )  # fmt: skip
        assert "made-for" not in repr(run)
        [path] = (home / "dmesh" / "runs").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert living() == []
    assert not path.exists()


def test_a_token_of_the_users_own_is_not_written_down(home: Path) -> None:
    coordinated = {**JOB, "DMESH_COORDINATOR": "h:1", "DMESH_CLUSTER": "c"}
    with registered(coordinated, {"DMESH_TOKEN": JOB["DMESH_TOKEN"]}):
        [run] = living()
        assert (run.address, run.cluster, run.token) == ("h:1", "c", "")


def test_what_others_left_is_not_taken_for_a_run(home: Path) -> None:
    place = home / "dmesh" / "runs"
    place.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    content = {"pid": dead.pid, "address": "h:1", "cluster": "c", "token": ""}
    (place / "1.json").write_text(json.dumps(content))
    (place / "2.json").write_text("{")
    (place / "3.json").write_text('{"pid":"x","address":1,"cluster":2,"token":3}')
    (place / "4.json").write_text("[]")
    assert living() == []
    with registered(JOB, {}):
        assert len(living()) == 1
        assert not (place / "1.json").exists(), "its launcher was killed"


def test_what_cannot_be_written_is_done_without(home: Path) -> None:
    (home / "dmesh").write_text("not a directory")
    with registered(JOB, {}):
        assert living() == []


def test_several_runs_have_to_be_told_apart(home: Path, capsys, monkeypatch) -> None:
    runs = [registry.Run(pid, f"127.0.0.1:{pid}", "c") for pid in (1, 2)]
    monkeypatch.setattr(registry, "living", lambda: runs)
    assert main(["why"]) == 2
    assert "127.0.0.1:1 (pid 1), 127.0.0.1:2 (pid 2). Name one with --coordinator" in capsys.readouterr().err


def test_why_finds_the_only_run_with_its_token(home: Path, capsys) -> None:
    script = home / "wait.py"
    script.write_text(
        "import time, dmesh\ndmesh.initialize_accelerator_system('CPU')\n"
        "if dmesh.client_id() == 1:\n    time.sleep(600)\n"
        "dmesh.coordination.barrier('here')\n"
    )
    command = [sys.executable, "-m", "dmesh", "run", "-n", "2", str(script)]
    run = subprocess.Popen(command, env={**os.environ, "DMESH_HEARTBEAT_INTERVAL": "0.2"})
    try:
        found: dict = {}

        def explained() -> bool:
            code = main(["why", "--json", "--after", "0"])
            out = capsys.readouterr().out
            if code != 3:
                return False
            found.update(json.loads(out))
            wait = found["waits"][0]
            # What rank 1 said last may be from before it fell asleep.
            return wait["kind"] == "barrier" and wait["suspects"][0]["where"] == f"{script}:4 in <module>"

        eventually(explained, "the explanation")
        [suspect] = found["waits"][0]["suspects"]
        assert suspect["rank"] == 1
    finally:
        run.terminate()
        run.wait(60)
    assert living() == []
