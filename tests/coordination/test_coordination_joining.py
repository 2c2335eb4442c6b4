"""Joining a cluster, being refused, leaving it, crashing out of it."""

from __future__ import annotations

import http.server
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent import futures

import grpc
import pytest
from tests.waiting import free_ports

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.joining import _wait_for_listener
from dmesh.coordination.members import Device, MemberState
from dmesh.coordination.session import Session
from dmesh.errors import (
    ClientIdTakenError,
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    FencedError,
    JobMismatchError,
)
from dmesh.v1 import common_pb2
from dmesh_server.core.model import Job, Limits
from dmesh_server.embedded import start as start_server
from dmesh_server.rpc.job_lists import JobLists


def departures(agent: Agent) -> queue.Queue:
    told: queue.Queue = queue.Queue()
    agent.add_departure_listener(told.put)
    return told


def test_members_know_each_other(server, join, eventually) -> None:
    first = join(server.address, 0, 3)
    assert [str(task) for task in first.vacant()] == ["/job:worker/task:1", "/job:worker/task:2"]
    second = join(server.address, 1, 3)
    members = first.members()
    assert [member.task for member in members] == ["/job:worker/task:0", "/job:worker/task:1"]
    # The server's table of members may be a second old.
    eventually(lambda: {member.state for member in first.members()} == {MemberState.CONNECTED})
    assert members[1].process.pid == os.getpid()
    assert members[1].incarnation == second.identity.incarnation
    assert first.server_incarnation == second.server_incarnation != 0
    assert first.cluster_incarnation == second.cluster_incarnation != 0
    assert first.peer_secret == second.peer_secret
    assert len(first.peer_secret) == 32
    assert second.epoch >= 2


def test_a_client_registers_once_its_host_has_a_listener(limits, join, background, monkeypatch) -> None:
    """A call before that would be refused, and gRPC waits 100 ms and more before it connects again."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    registered: list[bool] = []
    refused = threading.Event()
    register, pause = Session.register, Session.pause

    def noted(session: Session, request_id: str, timeout: float):
        fault = register(session, request_id, timeout)
        registered.append(fault is None)
        return fault

    def paused(session: Session, seconds: float, generation: int) -> None:
        refused.set()
        pause(session, seconds, generation)

    monkeypatch.setattr(Session, "register", noted)
    monkeypatch.setattr(Session, "pause", paused)
    agent = join(address, start=False)
    joined = background(agent.start)
    assert refused.wait(60)
    assert registered == []
    server = start_server(address, limits)
    try:
        joined.result(60)
        assert registered == [True]
        agent.leave()
    finally:
        server.stop(0.1)


def test_a_long_job_list_is_sent_once(server, join, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    learn = JobLists._learn

    def counted(lists: JobLists, messages: Sequence[common_pb2.Job]) -> tuple[Job, ...]:
        sent.append(len(messages[0].addresses))
        return learn(lists, messages)

    monkeypatch.setattr(JobLists, "_learn", counted)
    for index in range(3):
        join(server.address, index, 300)
    assert sent == [300]
    other = Identity.of_this_process("worker", 3, {"worker": tuple(f"other:{n}" for n in range(300))})
    with pytest.raises(JobMismatchError, match="task 0 of job 'worker' is 'other:0' in the client's list"):
        Agent(server.address, other, connect_timeout=60).start()
    assert sent == [300, 300]


def test_devices_and_addresses_are_passed_on(server, join) -> None:
    devices = (Device("CPU", 0, "some cpu"), Device("CPU", 1))
    identity = Identity.of_this_process(
        "worker", 0, {"worker": ("a:1",)}, devices=devices, peer_addresses=("h:7", "h:8")
    )
    agent = Agent(server.address, identity, connect_timeout=60)
    try:
        agent.start()
        (member,) = agent.members()
        assert member.devices == devices
        assert member.peer_addresses == ("h:7", "h:8")
    finally:
        agent.leave()


def test_a_taken_id_names_its_holder(server, join) -> None:
    join(server.address, 1)
    with pytest.raises(ClientIdTakenError) as caught:
        join(server.address, 1)
    holder = caught.value.members[0]
    assert "/job:worker/task:1" in str(caught.value)
    assert holder.process.host in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    assert holder.process.pid == os.getpid()
    assert str(caught.value).endswith("Give each client its own DTENSOR_CLIENT_ID, or end that process.")


def test_job_lists_that_differ_are_refused(server, join) -> None:
    join(server.address, 0, 2)
    with pytest.raises(
        JobMismatchError, match=r"same DTENSOR_JOBS and DTENSOR_JOB_NAME, and each .* DMESH_CLUSTER"
    ):
        join(server.address, 1, 3)


def test_clusters_do_not_see_each_other(server, join) -> None:
    join(server.address, 0, cluster="one")
    other = join(server.address, 0, cluster="two")
    assert len(other.members()) == 1


def test_a_refused_agent_is_closed(server, join) -> None:
    join(server.address, 1)
    loser = join(server.address, 1, start=False)
    with pytest.raises(ClientIdTakenError):
        loser.start()
    with pytest.raises(CoordinationError, match="once"):
        loser.start()
    loser.close()


def test_nothing_listens(join, eventually) -> None:
    with (
        socket.socket() as bound
    ):  # bound, but not listening: connections are refused, and nobody gets the port
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(CoordinatorUnavailableError) as caught:
            join(address, connect_timeout=0.3)
    text = str(caught.value)
    assert address in text
    assert "connection refused" in text
    assert re.search(r"did not answer within \d+\.\d s", text)
    assert "dmesh serve --listen" in text


def test_something_listens_but_does_not_answer(join) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(CoordinatorUnavailableError, match="answer"),
    ):
        join(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.5)


def test_something_else_listens(join) -> None:
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with pytest.raises(CoordinatorUnavailableError, match="does not speak gRPC, perhaps an HTTP port"):
            join(f"127.0.0.1:{web.server_port}", connect_timeout=0.5)
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


def test_another_grpc_server_listens(join) -> None:
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with pytest.raises(CoordinatorUnavailableError, match="is not a dmesh coordinator"):
            join(f"127.0.0.1:{port}")
    finally:
        other.stop(0).wait()


def test_who_waits_for_the_coordinator_is_told_so(join, quick) -> None:
    said: list[str] = []
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(CoordinatorUnavailableError):
            join(address, connect_timeout=1.0, patience=quick, announce=said.append)
    assert said
    assert f"still waiting for the coordinator at {address}" in said[0]
    assert "connection refused" in said[0]


def test_the_coordinator_may_come_later(standalone, join, background) -> None:
    server = standalone("--memory")
    server.kill()
    joining = background(join, server.address, 0, 1)
    server.start()
    assert len(joining.result(60).members()) == 1


def test_leaving_is_no_crash(server, join) -> None:
    stays, goes = join(server.address, 0), join(server.address, 1)
    told = departures(stays)
    goes.leave()
    member = told.get(timeout=60)
    assert (member.rank, member.state) == (1, MemberState.LEFT)


def test_leaving_for_a_reason_is_a_failure(server, join) -> None:
    stays, goes = join(server.address, 0), join(server.address, 1)
    told = departures(stays)
    goes.leave("exited without shutdown")
    member = told.get(timeout=60)
    assert (member.rank, member.state) == (1, MemberState.FAILED)
    assert "exited without shutdown" in member.reason


def test_a_closed_connection_is_a_crash(server, join) -> None:
    stays, goes = join(server.address, 0), join(server.address, 1)
    told = departures(stays)
    goes.close()
    member = told.get(timeout=60)
    assert (member.rank, member.state) == (1, MemberState.LOST)
    assert "goodbye" in member.reason


def test_a_listener_that_comes_late_is_told_of_earlier_departures(server, join, eventually) -> None:
    stays, goes = join(server.address, 0), join(server.address, 1)
    goes.leave()
    eventually(lambda: stays.members()[1].state is MemberState.LEFT)
    assert departures(stays).get(timeout=60).rank == 1


def test_a_killed_process_is_noticed(server, join, spawn) -> None:
    stays = join(server.address, 0)
    told = departures(stays)
    child = spawn("agent.start(); say('ready'); time.sleep(3600)", server.address)
    child.wait_for("ready")
    child.end()
    member = told.get(timeout=60)  # the lease is 120 s: only the connection can have told
    assert (member.rank, member.state) == (1, MemberState.LOST)
    assert member.process.pid == child.pid


def test_an_interpreter_that_just_ends_ends_cleanly_and_is_noticed(server, join, spawn) -> None:
    stays = join(server.address, 0)
    told = departures(stays)
    child = spawn("agent.start(); agent.key_value_set('k', 'v'); say('done')", server.address)
    assert child.wait() == 0
    assert child.err == ""
    assert told.get(timeout=60).state is MemberState.LOST


def test_reporting_an_error_tells_everybody_and_fences_the_caller(server, join) -> None:
    stays, fails = join(server.address, 0), join(server.address, 1)
    told, failures = departures(stays), queue.Queue()
    fails.add_failure_listener(failures.put)
    fails.report_error("loss is not a number")
    member = told.get(timeout=60)
    assert member.state is MemberState.FAILED
    assert "loss is not a number" in member.reason
    assert isinstance(failures.get(timeout=60), FencedError)
    with pytest.raises(FencedError):
        fails.key_value_set("k", "v")
    fails.leave()


@pytest.mark.parametrize("message", ["", "  ", None])
def test_an_error_needs_words(server, join, message) -> None:
    agent = join(server.address, 0, 1)
    with pytest.raises(ConfigurationError, match="a text that says what failed"):
        agent.report_error(message)


@pytest.mark.parametrize("limits", [Limits(heartbeat_interval=0.3, lease=3.0)])
def test_a_process_that_was_stopped_too_long_is_fenced(server, join, spawn) -> None:
    stays = join(server.address, 0)
    told = departures(stays)
    child = spawn(
        """
        agent.start()
        agent.add_failure_listener(lambda error: say("told " + type(error).__name__))
        say("ready")
        try:
            agent.key_value_get("never")
        except Exception as error:
            say("raised " + type(error).__name__)
        agent.leave()
        """,
        server.address,
    )
    child.wait_for("ready")
    child.signal(signal.SIGSTOP)
    member = told.get(timeout=60)
    assert member.state is MemberState.LOST
    assert "no sign of life" in member.reason
    child.signal(signal.SIGCONT)
    child.wait_for("raised FencedError")
    child.wait_for("told FencedError")
    assert child.wait() == 0


def test_a_new_life_begins_when_all_are_gone(server, join, eventually) -> None:
    first = join(server.address, 0, 1)
    first.key_value_set("k", "v")
    life = first.cluster_incarnation
    first.leave()
    second = join(server.address, 0, 1)
    assert second.cluster_incarnation != life
    assert second.key_value_try_get("k") is None


def test_a_task_slot_of_an_ending_cluster_is_waited_for(server, join, background) -> None:
    said: queue.Queue = queue.Queue()
    old, leaver = join(server.address, 0), join(server.address, 1)
    leaver.leave()
    joining = background(join, server.address, 1, announce=said.put)
    assert "/job:worker/task:0" in said.get(timeout=60)
    assert not joining.done()
    old.leave()
    assert joining.result(60).cluster_incarnation


def test_nothing_is_left_after_leaving(server, join, eventually, background) -> None:
    warm = join(server.address, 0, 1, cluster="warm")  # gRPC's own first threads stay
    warm.leave()
    before = set(threading.enumerate())
    agents = [join(server.address, index) for index in range(2)]
    departures(agents[0])
    background(agents[0].barrier, "b")
    agents[1].barrier("b")
    watch = agents[0].watch("")
    agents[1].leave()
    agents[1].leave()
    agents[1].close()
    agents[0].close()
    agents[0].close()
    assert list(watch) == []
    eventually(lambda: set(threading.enumerate()) <= before, "the end of all threads")


def test_a_closed_agent_says_so(server, join) -> None:
    agent = join(server.address, 0, 1)
    agent.leave()
    for call in (
        agent.members,
        lambda: agent.barrier("b"),
        lambda: agent.watch(""),
        lambda: agent.key_value_get("k"),
    ):
        with pytest.raises(CoordinationError, match="closed by this process"):
            call()


def test_closing_ends_what_waits(server, join, background, eventually) -> None:
    agent = join(server.address, 0)
    waiting = [
        background(agent.barrier, "b"),
        background(agent.key_value_get, "never"),
        background(list, agent.watch("")),
    ]
    eventually(lambda: agent.cluster_state().barriers)
    agent.close()
    assert waiting[2].result(60) == []
    for future in waiting[:2]:
        with pytest.raises(CoordinationError, match="closed by this process"):
            future.result(60)


def test_a_watch_ends_even_if_it_looks_at_its_closed_session(server, join, background, monkeypatch) -> None:
    agent = join(server.address, 0)
    iteration = background(list, agent.watch(""))
    session, close = agent._session, agent._session.close

    def close_and_look() -> None:
        close()
        agent._interrupt_watches()
        iteration.exception(60)

    monkeypatch.setattr(session, "close", close_and_look)
    agent.close()
    assert iteration.result(60) == []


def test_a_session_can_be_declared_over_from_outside(server, join, background) -> None:
    agent = join(server.address, 0)
    failures: queue.Queue = queue.Queue()
    agent.add_failure_listener(failures.put)
    waiting = [background(agent.barrier, "b"), background(agent.key_value_get, "never")]
    agent.abandon(CoordinatorUnavailableError("client 0, which hosts the coordinator, died"))
    for future in waiting:
        with pytest.raises(CoordinatorUnavailableError, match="client 0"):
            future.result(60)
    assert "client 0" in str(failures.get(timeout=60))
    agent.leave()


def test_the_secret_is_not_shown(server, join) -> None:
    agent = join(server.address, 0, 1)
    shown = repr(agent._session.registration)
    assert repr(agent.peer_secret) not in shown
    assert "secret" not in shown


def test_a_bad_limit_is_refused_at_once(join) -> None:
    with pytest.raises(ConfigurationError, match="connect_timeout"):
        join("127.0.0.1:1", connect_timeout=0)


class _Over(Exception):
    """Ends a wait."""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_probe_that_the_kernel_connects_with_itself_leaves_the_port_to_the_coordinator(monkeypatch, host):
    """It does so now and then if the port is an ephemeral one; what is left of that lasts for a minute."""
    (port,), connect = free_ports(1), socket.socket.connect

    def connect_with_itself(probe, where):
        probe.bind(where)
        connect(probe, where)

    class Waiting:
        address = f"{host}:{port}"
        probes = 0

        def check(self):
            """Find nothing."""

        def pause(self, seconds, generation):
            self.probes += 1
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as coordinators do
                listener.bind(("127.0.0.1", port))
            raise _Over

    waiting = Waiting()
    with monkeypatch.context() as patch, pytest.raises(_Over):
        patch.setattr(socket.socket, "connect", connect_with_itself)
        _wait_for_listener(waiting, time.monotonic() + 60)
    assert waiting.probes == 1
