"""What a client says of itself: who, where, which devices, and what carries its arrays and why."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from tests.e2e.clients import run_clients

import dmesh
from dmesh.config.host import own_nodes
from dmesh.errors import NotInitializedError

SCRIPT = """
import dataclasses, json, numpy as np, dmesh
with dmesh.session("CPU", num_logical_cpu_devices=2):
    before = dmesh.summary()
    assert before.backends == () and "first collective" in before.reason, before
    dmesh.collectives.all_reduce(np.ones(2))
    after = dmesh.summary()
    print(json.dumps(dataclasses.asdict(after)), flush=True)
    print(after)
    dmesh.barrier()
"""


@pytest.mark.parametrize(
    ("environ", "backends", "reason"),
    [
        ({}, ["shm", "messages"], "shares memory: all its ranks are on one host"),
        (
            {"DMESH_SHARED_MEMORY": "0"},
            ["tcp", "messages"],
            "It shares no memory: DMESH_SHARED_MEMORY forbids it",
        ),
        ({"DMESH_NATIVE": "0"}, ["messages"], "this client has no native core"),
    ],
)
def test_it_says_who_and_where_and_what_carries_arrays(environ, backends: list[str], reason: str) -> None:
    with run_clients(2, SCRIPT, environ=environ) as clients:
        for rank, client in clients.items():
            assert client.wait() == 0, client.err
            line, *table = client.out.splitlines()
            said = json.loads(line)
            places = [said[name] for name in ("rank", "size", "local_rank", "local_size", "pid")]
            assert places == [rank, 2, rank, 2, client.pid]
            assert said["numa_nodes"] == list(own_nodes())
            assert said["hosts"] == {said["host"]: [0, 1]}
            assert said["devices"] == [f"/job:worker/replica:0/task:{rank}/device:CPU:{n}" for n in range(2)]
            assert said["coordinator"].startswith("127.0.0.1:")
            assert said["launcher"] == "environment variable DTENSOR_JOBS"
            assert said["backends"] == backends
            assert reason in said["reason"]
            assert table[0].split() == ["rank", str(rank)]
            assert len(table) == len(said)


def test_a_process_alone_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMESH_LAUNCHER", "none")
    monkeypatch.delenv("DTENSOR_JOBS", raising=False)
    with pytest.raises(NotInitializedError):
        dmesh.summary()
    with dmesh.session("CPU"):
        found = dmesh.summary()
    assert (found.rank, found.size, found.pid, found.cluster) == (0, 1, os.getpid(), "")
    assert found.reason == "no other client"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 1  # type: ignore[misc]
