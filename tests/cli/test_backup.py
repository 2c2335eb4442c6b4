"""`dmesh backup` and `dmesh restore` against a real server."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmesh.cli.observing import Observer
from dmesh.coordination import Put
from dmesh.errors import DMeshError
from dmesh.security.tokens import Role
from dmesh.v1 import common_pb2
from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.security.roles import role_for_rpc


@pytest.fixture(autouse=True)
def agent(join):
    return join(0, 1)


def fill(agent) -> dict[str, bytes]:
    values = {"a": b"1", "config/raw": b"\xff\x00\n\r", "e\n\u2028\u00e9": b"", "large": bytes(1 << 20)}
    for key, value in values.items():
        agent.key_value_set(key, value)
    agent.key_value_set("gone", "x")
    agent.key_value_delete("gone")
    agent.key_value_set("dmesh/preemption/x", "own")
    return values


def test_a_backup_has_all_keys_of_one_revision(dmesh, agent, tmp_path) -> None:
    values = fill(agent)
    file = tmp_path / "keys.backup"
    assert dmesh("backup", str(file)).out == f"{file}: 4 keys of cluster 'default', revision 7\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    head, *lines, last = file.read_bytes().splitlines()
    described = json.loads(head)
    assert (described["dmesh_backup"], described["keys"], described["revision"]) == (1, 4, 7)
    assert described["cluster_incarnation"] == f"{agent.cluster_incarnation:016x}"
    found = [json.loads(line) for line in lines]
    assert {key["key"]: base64.b64decode(key["value"]) for key in found} == values
    assert [key["mod_revision"] for key in found] == [1, 2, 3, 4]
    content = file.read_bytes()
    assert json.loads(last)["sha256"] == hashlib.sha256(content[: -len(last) - 1]).hexdigest()
    # Another one takes its place.
    assert dmesh("backup", str(file), "--json").json == {
        "file": str(file), "cluster": "default", "revision": 7, "keys": 4
    }  # fmt: skip


def test_a_restore_is_one_change(dmesh, agent, tmp_path) -> None:
    values = fill(agent)
    file = str(tmp_path / "keys.backup")
    assert dmesh("backup", file).code == 0
    agent.key_value_set("a", "2", allow_overwrite=True)
    agent.key_value_delete("large")
    agent.key_value_set("later", "x")
    with agent.watch("", from_revision=11) as watch:
        assert dmesh("restore", file, "--json").json == {
            "cluster": "default", "set": 2, "deleted": 1, "revision": 11
        }  # fmt: skip
        events = [next(watch) for _ in range(3)]
    assert {event.revision for event in events} == {11}
    assert [event.key for event in events] == ["a", "large", "later"]
    assert [event.deleted for event in events] == [False, False, True]
    assert dict(agent.key_value_list("")) == {**values, "dmesh/preemption/x": b"own"}
    answer = dmesh("restore", file)
    assert answer.out == "cluster 'default': 0 keys set, 0 deleted, 4 unchanged; revision 11\n"


def test_a_merge_deletes_nothing(dmesh, agent, tmp_path) -> None:
    file = str(tmp_path / "keys.backup")
    agent.key_value_set("a", "1")
    assert dmesh("backup", file).code == 0
    agent.key_value_set("later", "x")
    agent.key_value_delete("a")
    answer = dmesh("restore", file, "--merge", "--json").json
    assert (answer["set"], answer["deleted"]) == (1, 0)
    assert dict(agent.key_value_list("")) == {"a": b"1", "later": b"x"}


def test_through_pipes(dmesh, agent, monkeypatch, tmp_path) -> None:
    written = io.BytesIO()
    agent.key_value_set("a", "1")
    monkeypatch.setattr(
        sys, "stdout", SimpleNamespace(buffer=written, flush=lambda: None, isatty=lambda: False)
    )
    assert dmesh("backup", "-").code == 0
    monkeypatch.undo()
    agent.key_value_delete("a")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(written.getvalue())))
    assert dmesh("restore", "-").code == 0
    assert agent.key_value_try_get("a") == b"1"


def test_a_damaged_file_is_refused_before_anything_is_changed(dmesh, agent, tmp_path) -> None:
    agent.key_value_set("a", "1")
    agent.key_value_set("b", "22")
    file = tmp_path / "keys.backup"
    assert dmesh("backup", str(file)).code == 0
    content = file.read_bytes()
    agent.key_value_delete("b")
    damaged = [content[:end] for end in range(0, len(content), 7)]
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        damaged.append(bytes(changed))
    lines = content.splitlines(keepends=True)
    damaged += [b"".join([lines[0], *lines[2:]]), content + lines[-1], b"\xff" * 100]
    for bad in damaged:
        file.write_bytes(bad)
        answer = dmesh("restore", str(file))
        assert answer.code == 2, (bad, answer)
        assert str(file) in answer.err
    assert dict(agent.key_value_list("")) == {"a": b"1"}
    assert dmesh("kv", "list", "--json").json["revision"] == 3


def test_a_newer_version_and_another_cluster_are_refused(dmesh, agent, join, tmp_path) -> None:
    agent.key_value_set("a", "1")
    file = tmp_path / "keys.backup"
    assert dmesh("backup", str(file)).code == 0
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dmesh_backup":1', b'"dmesh_backup":2'))
    answer = dmesh("restore", str(file))
    assert (answer.code, answer.out) == (2, "")
    assert "has format version 2" in answer.err
    file.write_bytes(content)
    other = join(0, 1, cluster="second")
    answer = dmesh("restore", str(file), "--cluster", "second")
    assert answer.code == 2
    assert "is a backup of cluster 'default'" in answer.err
    assert dmesh("restore", str(file), "--cluster", "second", "--any-cluster").code == 0
    assert other.key_value_try_get("a") == b"1"


def test_files_that_cannot_be_used(dmesh, tmp_path) -> None:
    for words in (("backup", str(tmp_path / "none" / "x")), ("restore", str(tmp_path / "none"))):
        answer = dmesh(*words)
        assert answer.code == 2
        assert "No such file" in answer.err
    assert list(Path(tmp_path).iterdir()) == []


def test_a_backup_of_a_busy_cluster_is_of_one_revision(dmesh, agent, tmp_path) -> None:
    file, ended = tmp_path / "keys.backup", threading.Event()

    def write() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            agent.transaction(then=[Put("first", str(number)), Put("second", str(number))])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        agent.key_value_get("second", timeout=60)
        revisions = set()
        backups = 0
        while backups < 20 or len(revisions) < 2:
            backups += 1
            revisions.add(dmesh("backup", str(file), "--json").json["revision"])
            first, second = (json.loads(line) for line in file.read_bytes().splitlines()[1:-1])
            assert (first["value"], first["mod_revision"]) == (second["value"], second["mod_revision"])
            assert first["mod_revision"] in revisions
    finally:
        ended.set()
        writer.join()


def requests(agent, keys: int, *values: str, **changes) -> list[pb.RestoreRequest]:
    first = pb.RestoreRequest(caller=common_pb2.Caller(cluster="default"), keys=keys, **changes)
    return [first, *(pb.RestoreRequest(kvs=[pb.KeyValue(key=value, value=b"x")]) for value in values)]


@pytest.mark.parametrize(
    ("keys", "values", "reason"),
    [
        (2, ("a",), "1 keys came, 1 of them different, but 2 were announced"),
        (2, ("a", "a"), "2 keys came, 1 of them different"),
        (1, ("dmesh/x",), "is reserved for dmesh"),
        (1, ("",), "key"),
        (1, ("k" * 2000,), "k"),
        (0, ("a",), "1 keys came"),
    ],
)
def test_a_restore_that_is_refused_changes_nothing(agent, server, keys, values, reason) -> None:
    agent.key_value_set("kept", "1")
    with Observer(server.address) as observer, pytest.raises(DMeshError, match=reason):
        observer.send(observer.link.key_value.Restore, iter(requests(agent, keys, *values)), 60)
    assert dict(agent.key_value_list("")) == {"kept": b"1"}
    assert agent.key_value_list("").revision == 1


def test_a_restore_that_breaks_off_changes_nothing(agent, server) -> None:
    agent.key_value_set("kept", "1")

    def some():
        yield from requests(agent, 2, "a")
        raise OSError("as when the command is killed")

    with Observer(server.address) as observer, pytest.raises(DMeshError):
        observer.send(observer.link.key_value.Restore, some(), 60)
    assert dict(agent.key_value_list("")) == {"kept": b"1"}


def test_both_need_the_role_admin() -> None:
    for method in ("Backup", "Restore"):
        assert role_for_rpc(f"/dmesh.v1.KeyValueService/{method}") is Role.ADMIN
