"""Scenario 7: a client is alive, but its program hangs while the others wait for it (jax #38503)."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import errors, eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

STUCK_AFTER = 2.0
"""Instead of 60 s, seconds: the time decides when the server asks, not whom it names."""
SETTINGS = f"stuck_after={STUCK_AFTER}"
HANG = """
def hang_in_the_data_loader():
    while not os.path.exists({path!r}):
        time.sleep(0.05)
hang_in_the_data_loader()
agent.barrier('b', timeout=80)
"""


def look(client, rank: int) -> dict:
    """How the server sees a member."""
    return client.do(f"[m for m in agent.members() if m.rank == {rank}][0]", thread=True)


def named(client, rank: int) -> dict:
    """Waits until a member is called stuck; returns how the server sees it then."""

    def stuck() -> dict | None:
        seen = look(client, rank)
        return seen if seen.get("liveness") == "STUCK" else None

    return eventually(stuck, "the straggler to be named")


def test_the_straggler_is_named_with_its_stack_and_never_killed(make_server, make_cluster, figures, tmp_path):
    server = make_server().start()
    clients = make_cluster(3, server.address, settings=SETTINGS)
    go_on = tmp_path / "go-on"
    stuck = clients[1].submit(HANG.format(path=str(go_on)))
    started = time.monotonic()
    waiting = [clients[rank].submit("agent.barrier('b', timeout=80)") for rank in (0, 2)]
    seen = named(clients[0], 1)
    figures.add(f"last arrival to STUCK (stuck_after {STUCK_AFTER:g} s)", time.monotonic() - started)
    assert "barrier 'b'" in seen["reason"]
    assert "hang_in_the_data_loader" in seen["activity"]
    assert seen["state"] == "CONNECTED", "named, but not dead"
    assert look(clients[0], 0)["liveness"] == "LIVE", "who waits is not stuck"
    event = clients[2].wait_event("liveness", rank=1, liveness="STUCK")
    assert "hang_in_the_data_loader" in event["activity"]
    time.sleep(STUCK_AFTER * 2)  # however long it takes: nothing else happens to it
    assert look(clients[0], 1)["state"] == "CONNECTED"
    go_on.touch()
    results([stuck, *waiting])
    clients[2].wait_event("liveness", rank=1, liveness="LIVE")
    # The table of members may be a second old.
    eventually(lambda: look(clients[0], 1)["liveness"] == "LIVE", "the table to say so, too")
    assert not any(client.told("departed") for client in clients)


def test_a_timeout_says_who_is_stuck_and_where(make_server, make_cluster, tmp_path):
    server = make_server().start()
    clients = make_cluster(2, server.address, settings=SETTINGS)
    go_on = tmp_path / "go-on"
    stuck = clients[1].submit(HANG.format(path=str(go_on)))
    [error] = errors([clients[0].submit(f"agent.barrier('b', timeout={STUCK_AFTER * 3})")])
    assert error.kind == "BarrierTimeoutError"
    assert "stuck" in error.message
    assert "hang_in_the_data_loader" in error.message
    assert error.members[0]["rank"] == 1
    go_on.touch()
    errors([stuck])  # late: it gets the same outcome


def test_a_straggler_in_a_collective_is_named(make_server, make_cluster, tmp_path):
    """The server sees no collective: the one that waits tells it."""
    server = make_server().start()
    clients = make_cluster(2, server.address, sdk=True, environ={"DMESH_STUCK_AFTER": str(STUCK_AFTER)})
    go_on = tmp_path / "go-on"
    stuck = clients[1].submit(
        HANG.format(path=str(go_on)).replace("agent.barrier('b', timeout=80)", "dmesh.collectives.barrier()")
    )
    waiting = clients[0].submit("dmesh.collectives.barrier(timeout=80)")
    seen = named(clients[0], 1)
    assert "hang_in_the_data_loader" in seen["activity"]
    go_on.touch()
    results([stuck, waiting])
    eventually(lambda: look(clients[0], 1)["liveness"] == "LIVE", "it to be live again")
