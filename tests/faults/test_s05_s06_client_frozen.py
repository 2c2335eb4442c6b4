"""Scenarios 5 and 6: a client is stopped, for less and for more than its lease."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import INTERVAL, LEASE, RemoteError, errors, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def test_half_a_lease_is_nothing(make_server, make_cluster):
    server = make_server().start()
    clients = make_cluster(3, server.address)
    for _ in range(3):
        waiting = [client.submit("agent.barrier('b', timeout=80)") for client in clients[1:]]
        clients[0].freeze()
        time.sleep(LEASE / 2)  # the pause is what is injected
        clients[0].thaw()
        results([*waiting, clients[0].submit("agent.barrier('b', timeout=80)")])
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []
        assert client.do("[m.state.name for m in agent.members()]") == ["CONNECTED"] * 3


def test_three_leases_are_the_end(make_server, make_cluster, figures):
    """Declared dead; when it wakes up, its calls are refused as fenced and nothing it writes is accepted."""
    server = make_server().start()
    noticed, fenced, stopped = [], [], []
    for number in range(3):
        clients = make_cluster(3, server.address, cluster=f"c{number}")
        waiting = [client.submit("agent.barrier('b', timeout=80)") for client in clients[:2]]
        stopped_at = time.monotonic()
        clients[2].freeze()
        # What it does in the instant in which it wakes up, before anybody can tell it what has happened.
        write = clients[2].submit("agent.key_value_set('late', 'written by the dead')")
        stopped.append((stopped_at, clients, waiting, write))
    for stopped_at, clients, waiting, write in stopped:
        frozen, others = clients[2], clients[:2]
        for error in errors(waiting):
            assert error.members[0]["rank"] == 2
            assert error.members[0]["pid"] == frozen.pid
            noticed.append(error.at - stopped_at)
        time.sleep(max(0.0, stopped_at + 3 * LEASE - time.monotonic()))  # the rest of the pause
        woken_at = time.monotonic()
        frozen.thaw()
        [error] = errors([write])
        assert error.kind == "FencedError", error
        fenced.append(error.at - woken_at)
        for source in (
            "agent.key_value_set('late', 'x', True)",
            "agent.key_value_increment('n')",
            "agent.barrier('c', timeout=5)",
        ):
            with pytest.raises(RemoteError) as caught:
                frozen.do(source)
            assert caught.value.kind == "FencedError"
        assert frozen.wait_event("failure")["kind"] == "FencedError"
        assert others[0].do("agent.key_value_try_get('late')") is None
        assert others[0].do("agent.key_value_try_get('n')") is None
    figures.add(f"SIGSTOP to the error of each waiter (lease {LEASE:g} s)", noticed)
    figures.add("SIGCONT to FencedError", fenced)
    assert max(noticed) <= LEASE + INTERVAL + 1.0


def test_a_script_that_was_given_up_ends_with_an_error(make_server, make_cluster):
    """The whole SDK: the program gets the exception, and its process ends with exit code 1 by it."""
    server = make_server().start()
    clients = make_cluster(2, server.address, sdk=True)
    frozen = clients[1]
    frozen.freeze()
    clients[0].wait_event("departed", rank=1)
    frozen.submit(
        "try: dmesh.collectives.all_reduce(np.ones(3))\n"
        "except dmesh.errors.DMeshError as error:\n"
        "    say('error', kind=type(error).__name__, message=str(error))\n"
        "    import traceback; traceback.print_exc(); os._exit(1)"
    )
    frozen.thaw()
    event = frozen.wait_event("error")
    assert frozen.process.wait() == 1
    assert any(word in event["message"].lower() for word in ("given up", "lost", "fenced")), event
