"""Ranks on workers of another system, which this file plays."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping

import pytest
from tests.engines import programs

from dmesh.engines import gang as gangs
from dmesh.engines.gang import Ending, distinct
from dmesh.engines.rank import Call, Failure, Place, Report, own_place
from dmesh.errors import ConfigurationError, EngineError, RankFailedError

BAD = Report(failure=Failure("ValueError: bad", ()))
LOST = Report(failure=Failure("PeerLostError: lost rank 1", ()))


class Workers:
    """As many workers as the script has ranks; the script says how ranks end, in order."""

    def __init__(self, size: int, *script: Ending, spare: bool = True, place: Place | None = None) -> None:
        self.places = [place or Place("h", 100 + rank, own_place().network) for rank in range(size)]
        self.script = deque(script)
        self.spare = spare
        self.started: list[tuple[int, Mapping[str, str]]] = []
        self.log: list[str] = []

    def start(self, rank: int, variables: Mapping[str, str], call: Call) -> None:
        self.started.append((rank, variables))

    def wait(self, timeout: float | None) -> Ending | None:
        if self.script:
            return self.script.popleft()
        assert timeout is not None, "all would wait for ever"
        return None

    def replace(self, rank: int, timeout: float) -> None:
        if not self.spare:
            raise EngineError("no spare worker")
        self.log.append(f"replace {rank} within {timeout:g}")
        self.places[rank] = Place("other", 200 + rank)

    def abandon(self, cluster: str) -> None:
        self.log.append("abandon")

    def close(self) -> None:
        self.log.append("close")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def run(workers: Workers, size: int, max_restarts: int = 0, **variables: str) -> list[object]:
    call = Call(programs.sums, ranks=size, max_restarts=max_restarts, variables=variables)
    return gangs.run(workers, call, Clock())


def test_all_ranks_find_one_coordinator_by_their_variables():
    workers = Workers(2, Ending(1, Report("b")), Ending(0, Report("a")))
    assert run(workers, 2, OWN="x") == ["a", "b"]
    assert workers.log == ["close"]
    (_, first), (_, second) = workers.started
    assert first["DMESH_COORDINATOR"].startswith("127.0.0.1:")
    assert len(first["DMESH_TOKEN"]) > 20
    assert {name for name in first if first[name] != second[name]} == {"DTENSOR_CLIENT_ID", "RANK"}
    assert (first["DMESH_NUM_CLIENTS"], first["DTENSOR_JOBS"], first["OWN"]) == ("2", "", "x")
    assert "DMESH_RESTART_POLICY" not in first
    assert first["DMESH_TOKEN"] not in repr(Call(programs.sums, variables=first))


def test_a_coordinator_that_runs_is_used(monkeypatch):
    monkeypatch.setenv("DMESH_COORDINATOR", "192.0.2.9:8470")
    monkeypatch.setenv("DMESH_TOKEN", "a-token-that-the-server-knows")
    workers = Workers(1, Ending(0, Report(1)), place=Place("elsewhere", 1, "another kernel"))
    assert run(workers, 1) == [1]
    variables = workers.started[0][1]
    assert variables["DMESH_COORDINATOR"] == "192.0.2.9:8470"
    assert variables["DMESH_TOKEN"] == "a-token-that-the-server-knows"
    assert variables["DMESH_CLUSTER"].startswith("launch-")


def test_a_token_travels_unencrypted_only_where_the_user_says_so(monkeypatch):
    away = Place("elsewhere", 1, "another kernel", "127.0.0.1")
    workers = Workers(1, Ending(0, Report(1)), place=away)
    with pytest.raises(
        ConfigurationError, match=r"on other hosts \(elsewhere\).*DMESH_TLS_CA.*DMESH_INSECURE=1"
    ):
        run(workers, 1)
    assert (workers.started, workers.log) == ([], ["close"])
    monkeypatch.setenv("DMESH_INSECURE", "1")
    assert run(Workers(1, Ending(0, Report(1)), place=away), 1) == [1]


def test_after_a_failure_the_others_have_some_time():
    workers = Workers(3, Ending(0, LOST), Ending(1, how="was lost"))
    with pytest.raises(
        RankFailedError, match=r"(?s)^rank 1 on host h.*rank 0.*still running: rank 2"
    ) as caught:
        run(workers, 3)
    assert caught.value.pid == 101
    assert workers.log == ["abandon", "close"]


def test_a_rank_whose_process_is_gone_gets_another_one():
    script = Ending(1, how="was lost"), Ending(0, Report("a")), Ending(1, Report("b"))
    workers = Workers(2, *script)
    assert run(workers, 2, max_restarts=1) == ["a", "b"]
    assert workers.log == ["replace 1 within 300", "close"]
    assert [(rank, v["DMESH_RESTART_COUNT"]) for rank, v in workers.started] == [(0, "0"), (1, "0"), (1, "1")]
    assert {variables["DMESH_RESTART_POLICY"] for _, variables in workers.started} == {"rejoin"}


def test_a_rank_that_raises_is_started_again_where_it_was():
    workers = Workers(2, Ending(1, BAD), Ending(1, BAD), Ending(0, LOST))
    with pytest.raises(RankFailedError, match=r"^rank 1 on host h \(pid 101\) .* after 1 restart\n"):
        run(workers, 2, max_restarts=1)
    assert [rank for rank, _ in workers.started] == [0, 1, 1]


def test_the_last_rank_is_not_started_again_because_nobody_is_left_to_join():
    workers = Workers(2, Ending(1, Report(1)), Ending(0, BAD))
    with pytest.raises(RankFailedError):
        run(workers, 2, max_restarts=3)
    assert len(workers.started) == 2


def test_without_a_spare_worker_the_launch_fails():
    workers = Workers(2, Ending(1, how="was lost"), spare=False)
    with pytest.raises(EngineError, match="no spare worker") as caught:
        run(workers, 2, max_restarts=1)
    assert str(caught.value.__cause__) == "rank 1 on host h (pid 101) was lost"
    assert workers.log == ["abandon", "close"]


def test_distinct_processes():
    places = [Place("h", 1), Place("h", 1), Place("i", 1), Place("h", os.getpid())]
    assert distinct(places, Place("h", os.getpid())) == [0, 2]
