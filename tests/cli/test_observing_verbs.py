"""The verbs that look at a cluster, against a real server; one of them with real processes that hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.pictures import group, member, picture, said
from tests.waiting import eventually, free_ports

from dmesh.cli import VERBS, build_parser, main
from dmesh.cli.observing import named_coordinator
from dmesh.cli.output import print_table, print_text
from dmesh.coordination.members import MemberState, Task
from dmesh.errors import ConfigurationError

LATE = """
import sys, time
import numpy as np
import dmesh

dmesh.initialize_accelerator_system("CPU")

def train(step):
    if dmesh.client_id() == 2 and step == 5:
        time.sleep(600)  # the line that is to be named
    dmesh.collectives.all_reduce(np.ones(1000))

for step in range(6):
    train(step)
"""
LATE_LINE = 1 + LATE.splitlines().index("        time.sleep(600)  # the line that is to be named")


@pytest.mark.parametrize("native", ["1", "0"])
def test_why_names_the_rank_that_sleeps_the_call_and_the_line(
    server, dmesh, tmp_path: Path, native: str
) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    environment = {
        **os.environ,
        "DMESH_HEARTBEAT_INTERVAL": "0.2",
        "DMESH_NATIVE": native,
        "DMESH_COORDINATOR": server.address,
        "DTENSOR_JOBS": ",".join(f"127.0.0.1:{port}" for port in free_ports(4)),
    }
    clients = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "DTENSOR_CLIENT_ID": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]
    try:

        def explained() -> bool:
            answer = dmesh("why", "--json", "--after", "0.3")
            if answer.code != 3:
                return False
            found.update(answer.json)
            waits = found["waits"]
            if not waits or (waits[0]["kind"], waits[0]["present"]) != ("collective", [0, 1, 3]):
                return False
            # What rank 2 said last may be from before it fell asleep, where the others have said more since.
            return waits[0]["suspects"][0]["where"] == f"{script}:{LATE_LINE} in train"

        found: dict = {}
        eventually(explained, "the explanation")
        wait = found["waits"][0]
        assert (wait["sequence"], wait["call"]) == (6, "all_reduce(sum, float64, shape (1000,))")
        [suspect] = wait["suspects"]
        assert (suspect["rank"], suspect["last_sequence"], suspect["pid"]) == (2, 5, clients[2].pid)
        text = dmesh("why", "--after", "0.3").out
        assert "Rank 2 is holding up 3 ranks · " in text
        assert (
            "collective #6 of group world, all_reduce(sum, float64, shape (1000,)): ranks 0, 1, 3 are there"
            in text
        )
        assert found["headline"].startswith("Rank 2 is holding up 3 ranks · ")
        assert found["victims"] == [f"/job:worker/task:{rank}" for rank in (0, 1, 3)]
        assert f"late.py:{LATE_LINE} in train" in text

        def late() -> bool:
            top[:] = json.loads(dmesh("top", "--json").out)["ranks"]
            return bool(top[0]["behind"])

        top: list[dict] = []
        eventually(late, "a wait of a second")
        assert [row["rank"] for row in top if row["behind"]] == [2]
        assert [row["state"] for row in top[1:]] == ["waiting"] * 3
        assert dmesh("status", "--json").json["groups"][0]["behind"] == [2]
        places = {m["rank"]: m["where"] for m in dmesh("members", "--json").json["members"]}
        assert places[2] == suspect["where"]
        assert places[0].endswith("late.py:11 in train")
    finally:
        for client in clients:
            client.kill()
        for client in clients:
            client.wait()


def test_barriers_and_who_is_missing(dmesh, join) -> None:
    agents = [join(rank) for rank in range(2)]
    assert "has no pending barriers" in dmesh("barriers").out
    waiter = threading.Thread(target=agents[0].barrier, args=("load",))
    waiter.start()
    eventually(lambda: dmesh("barriers", "--json").json["barriers"], "the barrier")
    [barrier] = dmesh("barriers", "--json").json["barriers"]
    assert (barrier["name"], barrier["instance"], barrier["remaining"]) == ("load", 0, None)
    assert (barrier["arrived"], barrier["missing"]) == (["/job:worker/task:0"], ["/job:worker/task:1"])
    head, line = dmesh("barriers").out.splitlines()
    assert head.split() == ["BARRIER", "INSTANCE", "ARRIVED", "AGE", "LEFT", "MISSING"]
    assert line.split()[:5] == ["load", "0", "1", "of", "2"]
    text = dmesh("why", "--after", "0")
    assert text.code == 3
    assert "barrier 'load' (instance 0)" in text.out
    agents[1].barrier("load")
    waiter.join(60)
    assert dmesh("why").code == 0


def test_single_members_and_waiting_for_the_next_epoch(dmesh, join) -> None:
    join(0, 3)
    found = dmesh("members", "0", "/job:worker/task:2", "--json").json["members"]
    assert [(one["rank"], one["state"]) for one in found] == [(0, "connected"), (2, "vacant")]
    assert dmesh("members", "3").code == 2
    epoch = dmesh("members", "--json").json["epoch"]
    answer = dmesh("members", "--after", str(epoch), "--timeout", "0.05")
    assert answer.code == 3
    assert "nobody came or went within 0.05 s" in answer.err
    join(1, 3)
    found = dmesh("members", "--after", str(epoch), "--json").json
    assert (found["epoch"], len(found["members"])) == (epoch + 1, 3)


def test_members_and_status(dmesh, join, server) -> None:
    agent = join(0)
    answer = dmesh("members", "--json").json
    assert answer["cluster"] == "default"
    first, second = answer["members"]
    assert (first["rank"], first["state"], first["pid"]) == (0, "connected", os.getpid())
    assert second == {"rank": 1, "task": "/job:worker/task:1", "state": "vacant"}
    status = dmesh("status", "--json")
    assert (status.code, status.json["healthy"], status.json["members"]["vacant"]) == (0, True, 1)
    other = join(1)
    other.report_error("out of memory")
    eventually(lambda: dmesh("status").code == 3, "the failure")
    answer = dmesh("status")
    assert "NOT WELL. Members: 1 connected, 1 failed." in answer.out
    assert "out of memory" in dmesh("members").out
    assert agent.address == server.address


def test_a_cluster_is_found_by_itself_or_named(dmesh, join) -> None:
    assert "has no cluster" in dmesh("status").out
    answer = dmesh("members")
    assert (answer.code, answer.out) == (2, "")
    assert "has no cluster: no client has registered yet" in answer.err
    first = join(0, 1, "first")
    assert dmesh("members", "--json").json["cluster"] == "first"
    join(0, 1, "second")
    answer = dmesh("barriers")
    assert answer.code == 2
    assert "has 2 clusters: first, second. Name one with --cluster" in answer.err
    assert dmesh("barriers", "--cluster", "second", "--json").json["cluster"] == "second"
    head, *lines = dmesh("status").out.splitlines()
    assert head.split() == ["CLUSTER", "MEMBERS", "EPOCH"]
    assert [line.split()[:4] for line in lines] == [["first", "1", "of", "1"], ["second", "1", "of", "1"]]
    assert [c["name"] for c in dmesh("status", "--json").json["clusters"]] == ["first", "second"]
    first.leave()
    assert dmesh("barriers", "--json").json["cluster"] == "second", "the other one has ended"
    assert dmesh("status", "--json").json["cluster"] == "second"


def test_status_hides_what_is_over(dmesh, join) -> None:
    first, second = join(0, 1, "first"), join(0, 1, "second")
    first.leave()
    assert dmesh("status", "--json").json["cluster"] == "second"
    both = dmesh("status", "--all")
    assert [line.split()[:2] for line in both.out.splitlines()[1:]] == [["first", "over"], ["second", "1"]]
    join(0, 1, "third")
    lines = dmesh("status").out.splitlines()
    assert [line.split()[0] for line in lines] == ["CLUSTER", "second", "third", "1"]
    assert lines[-1] == "1 cluster is over; --all lists them."
    found = dmesh("status", "--json").json
    assert ([one["name"] for one in found["clusters"]], found["hidden"]) == (["second", "third"], 1)
    assert [one["over"] for one in dmesh("status", "--json", "--all").json["clusters"]] == [
        True,
        False,
        False,
    ]
    over = dmesh("status", "--cluster", "first")
    assert (over.code, "Cluster 'first'" in over.out, ": over. Members: 1 left." in over.out) == (
        0,
        True,
        True,
    )
    second.leave()
    assert dmesh("status", "--json").json["cluster"] == "third"


def test_status_says_so_if_all_is_over(dmesh, join, server) -> None:
    join(0, 1).leave()
    answer = dmesh("status")
    assert answer.out == f"No cluster is running at {server.address}. 1 cluster is over; --all lists them.\n"
    assert answer.code == 0
    assert dmesh("status", "--all", "--json").json["over"] is True


def test_status_hides_groups_of_members_that_are_gone() -> None:
    seen = picture(
        [member(0), member(1, MemberState.LEFT)], [said(0, group(3, 3)), said(1, group(9, 9, name="old"))]
    )
    assert [task.index for task in seen.of({Task("worker", 0)}).reports] == [0]


@pytest.mark.parametrize("verb", ["why", "status", "members", "barriers", "top"])
def test_a_server_that_is_not_there_is_an_error_that_says_what_to_do(dmesh, verb: str) -> None:
    answer = dmesh(verb, "--cluster", "c", at="127.0.0.1:1")
    assert (answer.code, answer.out) == (1, "")
    assert "nothing listens there" in answer.err
    assert "dmesh serve --listen 127.0.0.1:1" in answer.err


def test_the_default_address_is_said_to_be_one(monkeypatch, capsys) -> None:
    """Where no server is named and no job runs, nobody has set a variable that could be corrected."""
    monkeypatch.setattr("dmesh.cli.observing.DEFAULT_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("dmesh.cli.observing.only_run", lambda: None)
    for name in ("DMESH_COORDINATOR", "DTENSOR_JOBS", "DMESH_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["why"]) == 1
    said = capsys.readouterr().err
    assert "no `dmesh run` of this user goes on on this machine" in said
    assert "no server answers at 127.0.0.1:1, the default of `dmesh serve`" in said
    assert "--coordinator" in said
    assert "correct" not in said


def test_an_unknown_cluster_and_names_that_cannot_be(dmesh, join) -> None:
    join(0, 1)
    assert dmesh("members", "--cluster", "another").code == 1
    answer = dmesh("members", "--cluster", "a/b")
    assert answer.code == 2
    assert "cannot be the name of a cluster" in answer.err
    assert dmesh("members", at="nowhere").code == 2


def test_where_the_server_is() -> None:
    jobs = {"DTENSOR_JOBS": "a:1,b:2"}
    assert named_coordinator(None, {}) is None
    assert named_coordinator(None, jobs) == "a:1"
    assert named_coordinator(None, {**jobs, "DMESH_COORDINATOR": "c:3"}) == "c:3"
    assert named_coordinator("d:4", {**jobs, "DMESH_COORDINATOR": "c:3"}) == "d:4"
    with pytest.raises(ConfigurationError, match="--coordinator"):
        named_coordinator("d", {})


def test_hostile_names_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME",), [("\x1b[2Jboo\nhoo",), ("[red]x[/red]",)], [True, False])
    print_text("\x9b31m\u202egnp")
    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert out.splitlines()[1:3] == ["\ufffd[2Jboo hoo", "[red]x[/red]"]


def test_every_verb_says_the_same_of_itself_everywhere_and_documents_its_exit_codes() -> None:
    for verb, text in VERBS.items():
        [action] = [a for a in build_parser([verb])._actions if a.dest == "verb"]
        assert [pseudo.help for pseudo in action._choices_actions if pseudo.dest == verb] == [text]
        parser = action.choices[verb]
        below = next((a.choices for a in parser._actions if a.dest.endswith("_verb")), {"": parser})
        if verb not in ("certs", "tune"):
            assert any("exit code" in (p.epilog or "").lower() for p in (parser, *below.values())), verb


def test_help_is_there_at_once() -> None:
    script = (
        "import sys\nfrom dmesh.cli import main\ntry:\n main(['--help'])\nexcept SystemExit: pass\n"
        "assert not sys.modules.keys() & {'numpy', 'grpc', 'google.protobuf', 'rich', "
        "'dmesh.config.settings'}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for verb in VERBS:
        assert f"\n    {verb} " in done.stdout or f"\n    {verb}\n" in done.stdout


def test_what_is_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["whyy"])
    assert ended.value.code == 2
    assert "whyy" in capsys.readouterr().err
