"""What a client writes down of its calls, for people and for `dmesh trace merge`."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, Cluster, cluster

from dmesh import native
from dmesh.collectives import trace as tracing
from dmesh.collectives.trace import Trace
from dmesh.errors import ConfigurationError

WAYS = [(), *([("native",), ("dedicated",)] if native.core() is not None else [])]


def begin(ranks: Cluster, directory: Path) -> list[Trace]:
    traces = []
    for communicator in ranks.communicators:
        trace = Trace(str(directory), communicator.rank)
        trace.start("h", "boot", "run")
        communicator.events.add_reader(trace)
        traces.append(trace)
    return traces


def events_of(trace: Trace) -> list[dict]:
    trace.close()
    return json.loads(trace.path.read_text())


def calls_of(trace: Trace) -> list[dict]:
    return sorted((e for e in events_of(trace) if e["ph"] == "X"), key=lambda event: event["ts"])


@pytest.fixture(params=WAYS, ids=lambda ways: "-".join(ways) or "messages")
def ranks(request):
    with cluster(2, shm=request.param) as made:
        yield made


def test_every_call_is_there_once_whichever_way_it_went(ranks, tmp_path: Path) -> None:
    traces = begin(ranks, tmp_path / "new" / "directory")

    def body(communicator):
        for _ in range(700):
            communicator.world.all_reduce(np.zeros(2))
        communicator.world.broadcast(np.zeros(3, "f4"), async_op=True).result(LIMIT)
        if communicator.rank == 0:
            communicator.world.send(np.zeros(3), 1)
        else:
            communicator.world.recv(np.zeros(3), 0)

    ranks.all(body)
    for rank, trace in enumerate(traces):
        calls = calls_of(trace)
        collectives = [
            c for c in calls if c["args"]["group"] == "world" and c["name"] not in ("send", "recv")
        ]
        assert [c["args"]["sequence"] for c in collectives] == list(range(1, 702))
        assert (collectives[-1]["name"], collectives[-1]["args"]["nbytes"]) == ("broadcast", 12)
        [transfer] = [c for c in calls if c["name"] in ("send", "recv")]
        assert transfer["name"] == ("recv" if rank else "send")
        assert {c["pid"] for c in calls} == {rank}
        assert all(c["dur"] >= c["args"].get("waited_us", 0) >= 0 for c in calls)
        lanes = {c["args"]["lane"]: c["tid"] for c in calls}
        assert len(set(lanes.values())) == 2


def test_the_head_says_whose_it_is_and_the_end_what_is_missing(ranks, tmp_path: Path) -> None:
    [trace, _] = traces = begin(ranks, tmp_path)
    ranks.all(lambda c: c.world.barrier())
    head, *_, end = events_of(trace)
    traces[1].close()
    assert (head["name"], head["ph"], head["args"]["format"]) == ("dmesh_trace", "M", 1)
    assert {"rank": 0, "host": "h", "boot_id": "boot", "run": "run"}.items() <= head["args"].items()
    assert head["args"]["wall"] > head["args"]["monotonic"] > 0
    assert end["args"] == {"left_out": 0, "lost": 0}
    trace.close()


def test_a_call_that_failed_says_so(ranks, tmp_path: Path) -> None:
    traces = begin(ranks, tmp_path)
    ranks.run(lambda c: c.world.all_reduce(np.zeros(1 + c.rank)))
    for trace in traces:
        assert calls_of(trace)[-1]["args"]["error"].startswith("CollectiveMismatchError")


def test_what_does_not_fit_is_left_out_and_counted(ranks, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "MOST_BYTES", 4000)
    traces = begin(ranks, tmp_path)
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(600)])
    for trace in traces:
        calls = calls_of(trace)
        assert 0 < len(calls) < 30
        assert trace.path.stat().st_size < 5000
        left = json.loads(trace.path.read_text())[-1]["args"]
        assert left["left_out"] + left["lost"] + len(calls) == 600


def test_what_was_written_can_be_read_before_the_end(ranks, tmp_path: Path) -> None:
    traces = begin(ranks, tmp_path)
    ranks.all(lambda c: [c.world.all_reduce(np.zeros(2)) for _ in range(5)])
    for _ in range(1000):
        text = traces[0].path.read_text()
        if text.count("all_reduce(") >= 5:
            break
        threading.Event().wait(0.01)
    assert not text.rstrip().endswith("]")
    assert len(json.loads(text + "]")) >= 8
    for trace in traces:
        trace.close()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"DMESH_TRACE is .*cannot be written"):
        Trace(str(tmp_path / "file"), 0)
