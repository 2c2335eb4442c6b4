"""The session's stream, both ways of reading it: with the threads of gRPC's streams, and without."""

from __future__ import annotations

import threading

import pytest

from dmesh.coordination import stream
from dmesh.errors import CoordinatorUnavailableError


@pytest.fixture(params=["direct", "public"])
def way(request, monkeypatch) -> str:
    if request.param == "public":
        monkeypatch.setattr(stream, "_core", None)
    return request.param


def test_messages_of_many_threads_arrive_and_are_answered(way, server, join, background) -> None:
    agents = [join(server.address, index) for index in range(2)]
    names = {thread.name for thread in threading.enumerate()}
    assert ("dmesh-session-send" in names) == (way == "direct")
    calls = [
        background(lambda agent=agent: [agent.key_value_increment("n") for _ in range(25)])
        for agent in agents
        for _ in range(4)
    ]
    numbers = [number for call in calls for number in call.result(60)]
    assert sorted(numbers) == list(range(1, 201)), "each exactly once"
    for call in [background(agent.barrier, "b", timeout=60) for agent in agents]:
        call.result(60)


def test_a_stream_that_ends_says_why(way, server, join, background, quick) -> None:
    agent = join(server.address, 0, 1, patience=quick)
    waiting = background(agent.key_value_get, "never")
    server.stop(0.1)
    with pytest.raises(CoordinatorUnavailableError, match="no contact with the coordinator"):
        waiting.result(60)


def test_no_thread_outlives_its_agent(way, server, join) -> None:
    before = set(threading.enumerate())
    agent = join(server.address, 0, 1)
    agent.key_value_set("k", "v")
    agent.leave()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("dmesh-session"):
            thread.join(60)
            assert not thread.is_alive(), thread.name
