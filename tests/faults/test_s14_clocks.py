"""Scenario 14: the wall clock jumps by an hour, or the monotonic clock is another one."""

from __future__ import annotations

import re
import time

import pytest
from tests.faults.processes import LEASE, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

HOUR = 3600


def unharmed(clients) -> None:
    """Nobody was lost and nothing ended early; timers run at the pace that they had."""
    started = time.monotonic()
    results([client.submit("agent.barrier('b', timeout=60)") for client in clients])
    late = clients[0].submit(
        "begun = time.monotonic()\n"
        "try: agent.barrier('alone', timeout=1.5)\n"
        "except dmesh.errors.BarrierTimeoutError: result = time.monotonic() - begun"
    )
    assert 1.4 <= late.result(60).value <= 60, "a timer ran at another pace"
    # Longer than a lease after the jump.
    time.sleep(max(0.0, started + LEASE * 1.5 - time.monotonic()))
    results([client.submit("agent.barrier('b', timeout=60)") for client in clients])
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []
    assert clients[0].do("[m.state.name for m in agent.members()]") == ["CONNECTED"] * len(clients)


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("where", ["server", "client"])
def test_the_wall_clock_jumps(where, hours, make_server, make_client, wall_clock):
    here, there = wall_clock("server"), wall_clock("client")
    server = make_server(environ=here.environ).start()
    clients = [
        make_client(0, 2, server.address, environ=there.environ),
        make_client(1, 2, server.address),
    ]
    results([client.submit("join()") for client in clients])
    if where == "server":
        here.shift(hours * HOUR)
    else:
        there.shift(hours * HOUR)
        assert clients[0].do("time.time()") - time.time() == pytest.approx(hours * HOUR, abs=60)
    unharmed(clients)


def test_log_lines_carry_both_clocks(make_server, make_client, wall_clock):
    """So that lines from before and after a jump can be put in order."""
    clock = wall_clock("server")
    server = make_server(environ=clock.environ).start()
    clock.shift(-HOUR)
    make_client(0, 1, server.address).join()
    assert server.terminate() == 0
    stamps = re.findall(r"^(\d{4}-\d\d-\d\dT[\d:.]+Z) .*\bmonotonic=([\d.]+)", server.err, re.M)
    assert len(stamps) >= 2, server.err
    assert stamps[-1][0] < stamps[0][0], "the wall clock went backwards"
    assert [float(second) for _, second in stamps] == sorted(float(second) for _, second in stamps)


def test_processes_with_other_monotonic_clocks(make_server, make_client, time_namespace):
    server = make_server(prefix=time_namespace(HOUR)).start()
    clients = [
        make_client(0, 3, server.address),
        make_client(1, 3, server.address, prefix=time_namespace(30 * 24 * HOUR)),
        make_client(2, 3, server.address, prefix=time_namespace(HOUR)),
    ]
    results([client.submit("join()") for client in clients])
    unharmed(clients)


@pytest.mark.parametrize("offsets", [(30 * 24 * HOUR, 0), (0, 30 * 24 * HOUR)])
def test_the_server_comes_back_with_another_monotonic_clock(
    offsets, make_server, make_cluster, time_namespace
):
    """As after a reboot of its machine: what it remembers has nothing to do with the new clock."""
    server = make_server(prefix=time_namespace(offsets[0])).start()
    clients = make_cluster(3, server.address)
    server.kill()
    server.prefix = time_namespace(offsets[1])
    server.start()
    unharmed(clients)
