"""`dmesh tune` from the outside: what it says and writes, and who uses it."""

from __future__ import annotations

import json
import re

import psutil
import pytest

from dmesh import native
from dmesh.cli import main
from dmesh.cli.progress import Bar
from dmesh.cli.tune_output import Presenter, Receiver, Sender
from dmesh.collectives.tuning import SHIPPED, Tuning, read, write
from dmesh.launcher.labels import Output

needs_core = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")

SHOW = """
    import logging, sys
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    import dmesh
    dmesh.initialize_accelerator_system()
    world = dmesh.collectives.world()
    world.barrier()
    endpoint = world.endpoint
    print("uses", world.backend("messages").tuning, *(["flat", endpoint.one_step_bytes] if endpoint else []))
    dmesh.shutdown_accelerator_system()
"""


@needs_core
@pytest.mark.slow
def test_a_cluster_uses_what_was_measured(start, script, tmp_path) -> None:
    out = tmp_path / "new" / "tuning.json"
    tune = start("--seconds", "0.2", "--out", "new/tuning.json", verb="tune")
    assert tune.wait() == 0, tune.err
    assert tune.err == []
    found = read(out)
    text = "\n".join(tune.out)
    assert tune.out[-1] == f"Wrote {out}: {found}"
    assert len(re.findall(r"^ +bytes +one step +two steps$", text, re.M)) == 2
    assert re.search(r"^ +bytes +tree +dealt out$", text, re.M)
    assert f"piece = {found.piece}" in text
    assert f"\nflat = {found.flat}" in text
    assert f"\nstreams = {found.streams}" in text
    assert f"\nmessage_flat = {found.message_flat}" in text
    assert f"\nmessage_tree = {found.message_tree}" in text
    assert f"\nmessage = {found.message}\nbyte = {found.byte}" in text
    assert "loopback stood for the network" in text
    assert found.rows == SHIPPED.rows
    show = start("-n", "2", script(SHOW), env={"DMESH_SHARED_MEMORY": "0", "DMESH_TUNING": str(out)})
    assert len(show.expect(f"uses {found} flat {found.flat}", 2)) == 2
    assert show.wait() == 0


@needs_core
def test_the_default_file_is_found(start, script, tmp_path) -> None:
    made = Tuning(flat=12345, piece=64)
    write(tmp_path / "config" / "dmesh" / "tuning.json", made)
    env = {"DMESH_SHARED_MEMORY": "0", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    show = start("-n", "2", script(SHOW), env=env)
    assert show.wait() == 0, show.err
    said, uses = (
        f"group world has dedicated connections with the tuning of rank 0 ({made})",
        f"uses {made} flat 12345",
    )
    assert sum(said in line for line in show.out) == sum(uses in line for line in show.out) == 2
    show = start("-n", "2", script(SHOW), env={**env, "DMESH_TUNING": "0"})
    show.expect(f"uses {SHIPPED} flat {SHIPPED.flat}", 2)
    assert show.wait() == 0


class Kept(Output):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__(2, {})
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def test_the_launcher_takes_nobody_elses_lines_for_its_own(capsys) -> None:
    """A library may print JSON, too, and even say how far it is."""
    others = [b'{"step": 3}\n', b'{"finish": "all"}\n', b"[1]\n", b"no JSON\n"]
    Sender().show("of the one that measures")
    ours = capsys.readouterr().out.encode()
    kept = Kept()
    with Bar() as bar:
        Receiver(Presenter(bar, as_json=False), kept).write(b"".join([*others, ours]))
    assert kept.data == b"".join(others)
    assert capsys.readouterr().out == "of the one that measures\n"


@needs_core
@pytest.mark.slow
def test_clients_of_a_cluster_measure_its_network(start, script, tmp_path) -> None:
    """As they do on several hosts; those of a host that share memory hear what to do."""
    command = ("-n", "2", "-m", "dmesh", "tune", "--seconds", "0.2", "--out", "tuning.json")
    assert (tune := start(*command, env={"DMESH_SHARED_MEMORY": "0"})).wait() == 0, tune.err
    assert f"[0] Wrote tuning.json: {read(tmp_path / 'tuning.json')}" in tune.out
    assert not any(line.startswith("[1]") for line in tune.out)
    failed = start(*command)
    assert failed.wait() == 1
    assert any("the clients share memory" in line and "DMESH_SHARED_MEMORY=0" in line for line in failed.err)


@pytest.mark.parametrize(
    ("arguments", "jobs", "says"),
    [
        (["-n", "1"], "", "-n is '1'; expected a whole number from 2 to 64"),
        (["-n", "x"], "", "-n is 'x'"),
        (["--seconds", "0"], "", "--seconds is '0'; expected a number greater than 0"),
        (["--seconds", "nan"], "", "--seconds is 'nan'"),
        (["-n", "2"], "localhost:1,localhost:2", "but DTENSOR_JOBS is set"),
    ],
)
def test_command_lines_that_cannot_work(monkeypatch, capsys, arguments, jobs, says) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", jobs)
    assert main(["tune", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_without_the_native_core_messages_are_measured(start, script, tmp_path) -> None:
    tune = start("--seconds", "0.05", "--out", "tuning.json", verb="tune", env={"DMESH_NATIVE": "0"})
    assert tune.wait() == 0, tune.err
    found = read(tmp_path / "tuning.json")
    assert (found.flat, found.piece, found.rows) == (SHIPPED.flat, SHIPPED.piece, SHIPPED.rows)
    text = "\n".join(tune.out)
    assert tune.err == []
    assert "the clients have no dedicated connections" in text
    assert f"message_flat = {found.message_flat}" in text
    made = Tuning(message_flat=1, message_tree=2)
    write(tmp_path / "tuning.json", made)
    env = {"DMESH_NATIVE": "0", "DMESH_SHARED_MEMORY": "0", "DMESH_TUNING": str(tmp_path / "tuning.json")}
    show = start("-n", "2", script(SHOW), env=env)
    assert show.wait() == 0, show.err
    said = f"group world exchanges messages with the tuning of rank 0 ({made})"
    assert sum(said in line for line in show.out) == sum(f"uses {made}" in line for line in show.out) == 2


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (".", "is a directory"),
        ("file/tuning.json", "is not a directory"),
        (f"{'x' * 300}/tuning.json", "cannot be written: File name too long"),
    ],
    ids=["directory", "below a file", "too long"],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, out, says
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["tune", "--out", out]) == 2
    assert says in capsys.readouterr().err


def test_programs_are_told_that_nothing_could_be_measured(start, tmp_path) -> None:
    tune = start("--seconds", "600", "--out", "tuning.json", "--json", verb="tune")
    launcher = psutil.Process(tune.process.pid)
    while len(clients := launcher.children()) < 3:
        assert tune.process.poll() is None
    clients[1].kill()
    code = tune.wait()
    assert code != 0
    [line] = tune.out
    error = json.loads(line)["error"]
    assert error["kind"] == "DMeshError"
    assert f"ended with exit code {code}" in error["message"]
    assert not (tmp_path / "tuning.json").exists()


def test_programs_are_told_what_was_measured(start, tmp_path) -> None:
    command = ("--seconds", "0.05", "--out", "tuning.json", "--json")
    tune = start(*command, verb="tune", env={"DMESH_NATIVE": "0"})
    assert tune.wait() == 0, tune.err
    found = json.loads("\n".join(tune.out))
    assert found["file"] == str(tmp_path / "tuning.json")
    assert (found["clients"], found["loopback"]) == (3, True)
    assert Tuning(**found["tuning"]) == read(tmp_path / "tuning.json")
    assert [table["ways"] for table in found["measured"]] == [
        ["one step", "two steps"],
        ["tree", "dealt out"],
    ]
    for table in found["measured"]:
        assert [len(row) for row in table["seconds"]] == [2] * len(table["bytes"])
        assert all(seconds > 0 for row in table["seconds"] for seconds in row)
    assert tune.err == []
