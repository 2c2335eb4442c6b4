"""`dmesh kv` against a real server."""

from __future__ import annotations

import base64
import io
import json
import threading
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def agent(join):
    return join(0, 1)


def test_put_get_list_and_delete(dmesh, agent) -> None:
    assert dmesh("kv", "put", "config/seed", "17").out == "config/seed: 2 bytes, revision 1\n"
    assert agent.key_value_get("config/seed") == b"17"
    assert dmesh("kv", "get", "config/seed").out == "17"
    agent.key_value_set("config/raw", b"\xff\x00")
    found = dmesh("kv", "get", "config/raw", "--json").json
    assert (found["key"], found["text"], found["revision"]) == ("config/raw", None, 2)
    assert base64.b64decode(found["base64"]) == b"\xff\x00"
    listed = dmesh("kv", "list", "config/", "--json").json
    assert [key["key"] for key in listed["keys"]] == ["config/raw", "config/seed"]
    assert listed["revision"] == 2
    assert dmesh("kv", "list", "other/").out.split() == ["KEY", "REVISION", "CREATED"]
    assert dmesh("kv", "list").out.splitlines()[1].split() == ["config/raw", "2", "2"]
    assert dmesh("kv", "delete", "config/", "--prefix").out == "2 keys deleted\n"
    assert dmesh("kv", "delete", "config/seed").code == 3


def test_increment(dmesh, agent) -> None:
    assert dmesh("kv", "increment", "runs").out == "1\n"
    assert dmesh("kv", "increment", "runs", "41", "--json").json == {
        "key": "runs",
        "value": 42,
        "revision": 2,
    }
    assert agent.key_value_get("runs") == b"42"
    assert dmesh("kv", "put", "word", "x").code == 0
    assert dmesh("kv", "increment", "word").code == 1
    assert dmesh("kv", "increment", "runs", "-50").out == "-8\n"


def test_a_key_with_a_time_to_live(dmesh, agent) -> None:
    with agent.watch("k") as watch:
        assert dmesh("kv", "put", "k", "1", "--ttl", "0.2").code == 0
        assert [next(watch).deleted, next(watch).deleted] == [False, True]
    assert dmesh("kv", "put", "k", "1", "--ttl", "-1").code == 2


def test_put_from_standard_input(dmesh, agent, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\x00\x01")))
    assert dmesh("kv", "put", "k", "-").code == 0
    assert agent.key_value_get("k") == b"\x00\x01"


def test_what_is_not_there_and_what_is(dmesh) -> None:
    answer = dmesh("kv", "get", "nothing")
    assert (answer.code, answer.out) == (3, "")
    assert "nothing" in answer.err
    assert dmesh("kv", "get", "nothing", "--wait", "0.05").code == 3
    assert dmesh("kv", "put", "k", "1").code == 0
    answer = dmesh("kv", "put", "k", "2")
    assert answer.code == 3
    assert "--overwrite" in answer.err
    assert dmesh("kv", "put", "k", "2", "--overwrite", "--json").json == {"key": "k", "revision": 2}


def test_a_key_that_comes_is_waited_for(dmesh, agent) -> None:
    timer = threading.Timer(0.1, agent.key_value_set, ("late", "here"))
    timer.start()
    assert dmesh("kv", "get", "late", "--wait", "60").out == "here"
    timer.join()


def test_keys_of_dmesh_itself_are_not_written(dmesh) -> None:
    for words in (("put", "dmesh/x", "1"), ("delete", "dmesh/x"), ("increment", "dmesh/x")):
        answer = dmesh("kv", *words)
        assert answer.code == 2
        assert "are reserved for dmesh" in answer.err


def test_watch_prints_each_change_once(dmesh, agent) -> None:
    agent.key_value_set("w/a", "1")
    agent.key_value_set("w/b", b"\xff\x1b")
    agent.key_value_delete("w/a")
    answer = dmesh("kv", "watch", "w/", "--from", "1", "--count", "3")
    assert answer.out.splitlines() == ["1 set w/a 1", "2 set w/b (2 bytes that are no text)", "3 deleted w/a"]
    lines = dmesh("kv", "watch", "w/", "--from", "2", "--count", "2", "--json").out.splitlines()
    assert [(json.loads(line)["revision"], json.loads(line)["deleted"]) for line in lines] == [
        (2, False),
        (3, True),
    ]


def test_programs_are_told_of_what_is_not_there_and_what_is(dmesh) -> None:
    answer = dmesh("kv", "get", "nothing", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (3, "KeyNotFoundError")
    assert dmesh("kv", "put", "k", "1").code == 0
    answer = dmesh("kv", "put", "k", "2", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (3, "KeyExistsError")
    assert "--overwrite" in answer.json["error"]["message"]
    assert answer.json["error"]["message"] in answer.err
