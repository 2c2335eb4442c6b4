"""Scenario 11: two processes claim one client id."""

from __future__ import annotations

import socket

import pytest
from tests.faults.processes import INTERVAL, LEASE, RemoteError, errors, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

REJOIN = "restart_policy=RestartPolicy.REJOIN"


def holder_is_named(error: RemoteError, pid: int) -> None:
    assert error.kind == "ClientIdTakenError", error
    assert f"pid {pid}" in error.message
    assert socket.gethostname() in error.message
    assert error.members[0]["pid"] == pid


def test_simultaneous_exactly_one_wins(make_server, make_client):
    server = make_server().start()
    for round_ in range(4):
        rivals = [make_client(0, 1, server.address, cluster=f"c{round_}") for _ in range(4)]
        for rival in rivals:
            rival.do("1")  # all are up before any of them begins
        joining = {rival: rival.submit("join()") for rival in rivals}
        winners = []
        for rival, future in joining.items():
            if future.exception(90) is None:
                winners.append(rival)
        [winner] = winners
        for rival, future in joining.items():
            if rival is not winner:
                holder_is_named(future.exception(), winner.pid)
        assert winner.do("agent.key_value_set('k', 'v')") >= 1
        for rival in rivals:
            rival.kill()


def test_staggered_the_first_keeps_it(make_server, make_client):
    server = make_server().start()
    first = make_client(0, 1, server.address).join()
    for _ in range(3):
        rival = make_client(0, 1, server.address)
        [error] = errors([rival.submit("join()")])
        holder_is_named(error, first.pid)
        rival.kill()
    assert first.do("agent.key_value_set('k', 'v')") >= 1
    assert first.told("failure") == []


def test_a_dead_holders_id_is_free_after_it_was_declared_dead(make_server, make_client):
    server = make_server().start()
    other = make_client(1, 2, server.address, settings=REJOIN).join()
    first = make_client(0, 2, server.address, settings=REJOIN).join()
    successor = make_client(0, 2, server.address, settings=REJOIN)
    successor.do("1")  # it is up: from now on it is quick
    first.freeze()
    # The holder may come back: until it is declared dead, nobody else may be it. A successor waits for that.
    joined = successor.submit("join()").result(90)
    assert joined.ended >= other.wait_event("departed", rank=0)["at"] - INTERVAL
    assert joined.ended - joined.started >= 0.6 * LEASE - INTERVAL, "nobody is declared dead so soon"
    first.thaw()
    eventually(lambda: first.told("failure", kind="FencedError"), "the former holder to be fenced")
    with pytest.raises(RemoteError) as caught:
        first.do("agent.key_value_set('k', 'x')")
    assert caught.value.kind == "FencedError"
    assert successor.do("agent.key_value_set('k', 'y')") >= 1
    assert not successor.told("failure")
