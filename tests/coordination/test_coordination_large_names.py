"""Barriers whose names and participants together are longer than any message may be."""

from __future__ import annotations

import pytest
from tests.coordination.conftest import PATIENCE

from dmesh.coordination.agent import Agent
from dmesh.coordination.identity import Identity
from dmesh.coordination.members import MemberState
from dmesh.testing import FaultProxy

SIZE = 5
BARRIERS = 1100
"""The latest 1024 names are presented: 1.7 MB of names and participants. A message may have 1.5 MiB."""
JOBS = {"w" * 127: tuple(f"host:{port}" for port in range(1, SIZE + 2)), "observer": ("host:99",)}


def name(number: int) -> str:
    """Makes a name of nearly as many bytes as a name may have."""
    return f"{number:06}" + "\N{MATHEMATICAL BOLD CAPITAL A}" * 250


@pytest.fixture(params=["same-server", "killed-and-restarted"])
def restart(request) -> bool:
    return request.param == "killed-and-restarted"


@pytest.fixture
def away(restart, standalone, tmp_path, background):
    """A server, and agents that have passed many barriers and whose connections then break."""
    server = standalone("--data-dir", str(tmp_path / "data"))
    with FaultProxy(server.address) as proxy:
        watching = Agent(server.address, Identity.of_this_process("observer", 0, JOBS))
        watching.start()
        agents = [
            Agent(proxy.address, Identity.of_this_process("w" * 127, index, JOBS)) for index in range(SIZE)
        ]
        for agent in agents:
            agent.start()

        def pass_barriers(agent: Agent) -> None:
            for number in range(BARRIERS):
                agent.barrier(name(number), timeout=PATIENCE, participants=range(SIZE))

        for future in [background(pass_barriers, agent) for agent in agents]:
            future.result(PATIENCE)

        def break_connections() -> None:
            if restart:
                server.kill()
                server.start()
            proxy.reset()

        yield watching, agents, break_connections
        for agent in (*agents, watching):
            agent.close()


def test_barriers_go_on_after_a_reset(away, background) -> None:
    _, agents, break_connections = away
    break_connections()
    for number in (0, BARRIERS - 1, BARRIERS):
        for future in [
            background(agent.barrier, name(number), timeout=20.0, participants=range(SIZE))
            for agent in agents
        ]:
            future.result(PATIENCE)


def test_who_leaves_after_a_reset_has_left(away, background) -> None:
    watching, agents, break_connections = away
    break_connections()
    for future in [background(agent.leave) for agent in agents]:
        future.result(PATIENCE)
    left = [member.state for member in watching.cluster_state().members if member.task.job == "w" * 127]
    assert left == [MemberState.LEFT] * SIZE
