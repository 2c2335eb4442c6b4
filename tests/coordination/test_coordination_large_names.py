"""Barriers whose names and participants together are longer than any message may be."""

from __future__ import annotations

import pytest
from tests.coordination.conftest import PATIENCE

from dmesh.coordination.agent import Agent
from dmesh.coordination.identity import Identity
from dmesh.coordination.members import MemberState
from dmesh.testing import FaultProxy

SIZE = 5
JOB = "w" * 127
JOBS = {JOB: tuple(f"host:{port}" for port in range(1, SIZE + 1)), "observer": ("host:99",)}
SMALL = ("--max-value-size", "32KiB", "--max-request-size", "128KiB")


def name(number: int) -> str:
    """Makes a name of nearly as many bytes as a name may have; with its participants 1.7 kB."""
    return f"{number:06}" + "\N{MATHEMATICAL BOLD CAPITAL A}" * 250


@pytest.fixture(params=["same-server", "killed-and-restarted"])
def restart(request) -> bool:
    return request.param == "killed-and-restarted"


@pytest.fixture(params=[150, pytest.param(2000, marks=pytest.mark.slow)])
def barriers(request) -> int:
    """How many there are: 250 kB where messages may have 128 KiB, 3.4 MB where they may have 1.5 MiB."""
    return request.param


@pytest.fixture
def away(restart, barriers, standalone, tmp_path, background):
    """An observer, agents that have passed many barriers, and a function that breaks their connections."""
    server = standalone("--data-dir", str(tmp_path / "data"), *(SMALL if barriers < 1000 else ()))
    with FaultProxy(server.address) as proxy:
        observer = Agent(server.address, Identity.of_this_process("observer", 0, JOBS))
        agents = [Agent(proxy.address, Identity.of_this_process(JOB, index, JOBS)) for index in range(SIZE)]
        for agent in (observer, *agents):
            agent.start()

        def pass_barriers(agent: Agent) -> None:
            for number in range(barriers):
                agent.barrier(name(number), timeout=PATIENCE, participants=range(SIZE))

        for future in [background(pass_barriers, agent) for agent in agents]:
            future.result(PATIENCE)

        def break_connections() -> None:
            if restart:
                server.kill()
                server.start()
            proxy.reset()

        yield observer, agents, break_connections
        for agent in (observer, *agents):
            agent.close()


def test_barriers_go_on_after_a_reset(away, barriers, background) -> None:
    _, agents, break_connections = away
    break_connections()
    for number in (0, barriers - 1, barriers):
        for future in [
            background(agent.barrier, name(number), timeout=20.0, participants=range(SIZE))
            for agent in agents
        ]:
            future.result(PATIENCE)


def test_who_leaves_after_a_reset_has_left(away, background) -> None:
    observer, agents, break_connections = away
    break_connections()
    for future in [background(agent.leave) for agent in agents]:
        future.result(PATIENCE)
    left = [member.state for member in observer.cluster_state().members if JOB in member.task]
    assert left == [MemberState.LEFT] * SIZE
