"""Who is blocked and who is gone, with processes that hold their interpreter or are stopped."""

from __future__ import annotations

import os
import queue
import re
import signal

import grpc
import pytest

from dmesh.coordination.agent import Agent
from dmesh.coordination.channel import grpc_variables, prepare_grpc
from dmesh.coordination.members import Liveness, MemberState
from dmesh.coordination.retry import Patience
from dmesh_server.core.model import Limits

LEASE = 3.0
HOLDS_ITS_INTERPRETER = """
import ctypes
agent.start()
say("ready")
agent.key_value_get("hold")
ctypes.PyDLL(None).sleep({seconds})  # PyDLL keeps the lock of the interpreter: no thread of this process runs
agent.key_value_set("back", "")
agent.barrier("end")
agent.leave()
"""


def liveness_of(agent: Agent) -> queue.Queue:
    told: queue.Queue = queue.Queue()
    agent.add_liveness_listener(told.put)
    return told


@pytest.mark.parametrize("limits", [Limits(heartbeat_interval=0.5, lease=LEASE)])
def test_a_process_that_holds_its_interpreter_is_blocked_and_not_lost(server, join, spawn) -> None:
    agent = join(server.address, 0)
    departed: queue.Queue = queue.Queue()
    agent.add_departure_listener(departed.put)
    told = liveness_of(agent)
    child = spawn(HOLDS_ITS_INTERPRETER.format(seconds=int(2.5 * LEASE)), server.address)
    child.wait_for("ready")
    agent.key_value_set("hold", "")
    blocked = told.get(timeout=60)
    assert (blocked.rank, blocked.liveness) == (1, Liveness.BLOCKED)
    assert blocked.state is MemberState.CONNECTED
    live = told.get(timeout=60)
    assert (live.rank, live.liveness) == (1, Liveness.LIVE)
    assert agent.key_value_get("back", timeout=60) == b""
    agent.barrier("end", timeout=60)
    assert child.wait() == 0, child.err
    assert departed.get(timeout=60).state is MemberState.LEFT


@pytest.mark.parametrize("limits", [Limits(heartbeat_interval=0.5, lease=LEASE)])
def test_a_stopped_process_is_lost_because_nothing_answers_for_it(server, join, spawn) -> None:
    agent = join(server.address, 0)
    departed: queue.Queue = queue.Queue()
    agent.add_departure_listener(departed.put)
    child = spawn("agent.start(); say('ready'); time.sleep(600)", server.address)
    child.wait_for("ready")
    child.signal(signal.SIGSTOP)
    member = departed.get(timeout=60)
    assert (member.rank, member.state) == (1, MemberState.LOST)
    # Ping interval and ping timeout, a third of a lease each, and the grace: the rest is for a busy machine.
    assert member.last_seen_age < 3 * LEASE


def test_a_blocked_coordinator_is_waited_for(server, join, spawn, background) -> None:
    """It is in the process of client 0, whose interpreter may be held like any other's."""
    host = spawn(
        """
        import ctypes
        from dmesh_server.core.model import Limits
        from dmesh_server.embedded import start
        server = start("127.0.0.1:0", Limits(heartbeat_interval=0.2, lease=1.0))
        say(f"at {server.address}")
        agent = Agent(server.address, Identity.of_this_process("worker", 0, jobs))
        agent.start()
        agent.key_value_get("hold")
        ctypes.PyDLL(None).sleep(7)
        agent.barrier("after")
        agent.leave()
        server.stop()
        """,
        "127.0.0.1:1",
        0,
    )
    address = host.wait_for("at ").split()[-1]
    said: queue.Queue = queue.Queue()
    # With a lease of 1 s and this margin, a coordinator that is gone is given up after 3 s.
    patience = Patience(margin=2.0, announce_interval=0.5)
    agent = join(address, 1, patience=patience, announce=said.put)
    agent.key_value_set("hold", "")
    waiting = background(agent.barrier, "after")
    blocked_for = 0
    while blocked_for < 5:
        found = re.search(r"has been blocked for (\d+) s: its connection lives", said.get(timeout=60))
        blocked_for = int(found[1]) if found else 0
    waiting.result(60)
    assert host.wait() == 0, host.err


def test_grpc_that_needs_the_interpreter_to_answer_pings_is_told_to_poll_without_it() -> None:
    """The tests above pass with these versions only for that: `make oldest` runs them."""
    polls = {"GRPC_VERBOSITY": "ERROR", "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "100"}
    assert grpc_variables("1.68.1") == polls | {"GRPC_EXPERIMENTS": "-event_engine_dns"}
    both = polls | {"GRPC_EXPERIMENTS": "-event_engine_dns,-event_engine_callback_cq"}
    assert grpc_variables("1.69.0rc1") == grpc_variables("1.72.2") == both
    assert grpc_variables("1.73.0") == grpc_variables("2.0.0.dev0") == {"GRPC_VERBOSITY": "ERROR"}


def test_what_a_user_has_set_for_grpc_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.72.0")
    monkeypatch.setattr(os, "environ", {"GRPC_EXPERIMENTS": "promise_based_http2_client_transport"})
    prepare_grpc()
    assert os.environ == grpc_variables("1.72.0") | {
        "GRPC_EXPERIMENTS": "promise_based_http2_client_transport"
    }
