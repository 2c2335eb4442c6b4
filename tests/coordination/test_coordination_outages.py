"""A coordinator that is killed, restarted, frozen or gone; a user who presses Ctrl-C."""

from __future__ import annotations

import itertools
import queue
import re
import signal

import grpc
import pytest
from tests.waiting import free_ports

from dmesh.coordination.credentials import Credentials
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.members import MemberState
from dmesh.coordination.retry import Patience
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, StoreLostError
from dmesh.v1 import common_pb2
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.embedded import start as start_server

LEASE = ("--lease", "120")


@pytest.fixture(params=["memory", "sqlite"])
def durable(request) -> bool:
    return request.param == "sqlite"


@pytest.fixture
def restartable(durable, standalone, tmp_path):
    return standalone(*(("--data-dir", str(tmp_path / "data")) if durable else ("--memory",)), *LEASE)


def test_a_half_arrived_barrier_completes_exactly_once(
    restartable, durable, join, background, eventually, arrived
) -> None:
    agents = [join(restartable.address, index, 3) for index in range(3)]
    for future in [background(agent.barrier, "b") for agent in agents]:
        future.result(60)
    server_before = agents[0].server_incarnation
    life_before = agents[0].cluster_incarnation
    waiting = [background(agent.barrier, "b") for agent in agents[:2]]
    eventually(arrived(agents[2], "b", 2))
    restartable.kill()
    restartable.start()
    agents[2].barrier("b", timeout=60)
    for future in waiting:
        future.result(60)
    again = [background(agent.barrier, "b", timeout=60) for agent in agents]
    for future in again:
        future.result(60)
    assert agents[0].server_incarnation != server_before
    assert (agents[0].cluster_incarnation == life_before) is durable
    members = agents[0].members()
    assert [member.incarnation for member in members] == [agent.identity.incarnation for agent in agents]
    # The server's table may be a second old.
    eventually(lambda: {member.state for member in agents[0].members()} == {MemberState.CONNECTED})
    for agent in agents:
        agent.leave()


def test_calls_made_while_the_server_is_away_take_effect_once(restartable, durable, join, background) -> None:
    agent, reader = join(restartable.address, 0), join(restartable.address, 1)
    agent.key_value_set("kept", "v")
    blocked = background(reader.key_value_get, "later")
    restartable.kill()
    sums = [background(agent.key_value_increment, "n") for _ in range(3)]
    restartable.start()
    if durable:
        assert sorted(future.result(60) for future in sums) == [1, 2, 3]
        assert agent.key_value_try_get("kept") == b"v"
        agent.key_value_set("later", "now")
        assert blocked.result(60) == b"now"
        return
    for future in (*sums, blocked):
        with pytest.raises(StoreLostError, match="it is empty"):
            future.result(60)
    with pytest.raises(StoreLostError):
        agent.key_value_try_get("kept")
    # Everybody knows now; nothing that was under way has taken effect in the new store.
    assert agent.key_value_try_get("kept") is None
    assert agent.key_value_increment("n") == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_the_first_call_after_a_server_has_started_reaches_it(restarted, limits) -> None:
    # gRPC's own channel refuses calls until it has connected in the background; old versions never do.
    address = f"127.0.0.1:{free_ports(1)[0]}"
    link = Link(address, credentials=Credentials(None))
    request = pb.GetProgressRequest(caller=common_pb2.Caller(cluster="default"))

    def code() -> grpc.StatusCode | None:
        answer = link.attempt(link.coordination.GetProgress, request, 60)
        return answer.code if isinstance(answer, Fault) else grpc.StatusCode.OK

    try:
        if restarted:
            server = start_server(address, limits)
            assert code() is grpc.StatusCode.OK
            server.stop(0)
        while code() is not grpc.StatusCode.UNAVAILABLE:
            pass  # the end of the connection may be on its way
        assert code() is grpc.StatusCode.UNAVAILABLE
        server = start_server(address, limits)
        try:
            reached = code()
        finally:
            server.stop(0)
        assert reached is grpc.StatusCode.OK
    finally:
        link.close()


@pytest.mark.parametrize("durable", [True])
def test_a_watch_goes_on_after_a_restart_with_each_change_once(restartable, join, background) -> None:
    writer, reader = join(restartable.address, 0), join(restartable.address, 1)
    total = 30
    with reader.watch("n") as watch:
        consumed = background(lambda: list(itertools.islice(watch, total)))
        for number in range(total):
            if number == 10:
                restartable.kill()
                restartable.start()
            writer.key_value_increment("n")
        events = consumed.result(60)
    assert [int(event.value) for event in events] == list(range(1, total + 1))
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))


@pytest.mark.parametrize("durable", [False])
def test_a_watch_does_not_pass_from_one_life_to_the_next(restartable, join, background) -> None:
    agent = join(restartable.address, 0, 1)
    agent.key_value_set("n", "1")
    watch = agent.watch("n")
    waiting = background(next, watch)
    restartable.kill()
    restartable.start()
    with pytest.raises(StoreLostError):
        agent.key_value_set("n", "0")
    for number in range(3):
        agent.key_value_set("n", str(number), allow_overwrite=True)
    with pytest.raises(StoreLostError, match="watches cannot go on"):
        waiting.result(60)
    watch.close()


@pytest.mark.parametrize("durable", [True])
def test_departures_during_an_outage_are_told_afterwards(restartable, join, eventually) -> None:
    # The lease is the cluster's, from its first member on, whatever the server is told when it starts again.
    restartable.kill()
    restartable.options = (*restartable.options[:2], "--lease", "3", "--heartbeat-interval", "0.5")
    restartable.start()
    stays, goes = join(restartable.address, 0), join(restartable.address, 1)
    stays.members()
    told: queue.Queue = queue.Queue()
    stays.add_departure_listener(told.put)
    restartable.kill()
    goes.close()
    restartable.start()
    member = told.get(timeout=60)
    assert (member.rank, member.state) == (1, MemberState.LOST)


def test_a_coordinator_that_stays_away_is_given_up(
    standalone, join, background, quick, eventually, arrived
) -> None:
    server = standalone("--memory", *LEASE, "--heartbeat-interval", "0.5")
    agent = join(server.address, 0, 2, patience=quick)
    failures: queue.Queue = queue.Queue()
    agent.add_failure_listener(failures.put)
    waiting = [
        background(agent.barrier, "b"),
        background(agent.key_value_get, "never"),
        background(next, agent.watch("")),
    ]
    eventually(arrived(agent, "b", 1))
    server.kill()
    for future in waiting:
        with pytest.raises(CoordinatorUnavailableError) as caught:
            future.result(60)
        text = str(caught.value)
        assert re.search(rf"no contact with the coordinator at {server.address} for \d+\.\d s", text)
        assert "connection refused" in text
    assert isinstance(failures.get(timeout=60), CoordinatorUnavailableError)
    with pytest.raises(CoordinatorUnavailableError, match="whether that took effect is unknown"):
        agent.key_value_set("k", "v")
    assert failures.empty(), "told once per absence"
    server.start()
    eventually(lambda: answers(agent), "the return to the restarted coordinator")
    with pytest.raises(StoreLostError):
        agent.key_value_set("k", "v", allow_overwrite=True)
    agent.key_value_set("k", "v", allow_overwrite=True)
    assert agent.key_value_get("k") == b"v"
    server.kill()
    with pytest.raises(CoordinatorUnavailableError, match="while leaving"):
        agent.leave(timeout=0.5)


def test_a_program_that_ends_without_its_coordinator_ends(standalone, spawn) -> None:
    server = standalone("--memory", *LEASE)
    child = spawn(
        """
        import atexit
        from dmesh.errors import CoordinatorUnavailableError

        def leave():
            try:
                agent.leave(timeout=1.0)
            except CoordinatorUnavailableError:
                say("unavailable")

        atexit.register(leave)
        agent.start()
        say("running")
        while agent.attached:
            time.sleep(0.01)
        """,
        server.address,
    )
    child.wait_for("running")
    server.kill()
    assert child.wait(60) == 0
    assert child.out.endswith("unavailable")


def test_who_waits_is_told_of_an_absence(standalone, join, background) -> None:
    server = standalone("--memory", *LEASE, "--heartbeat-interval", "0.1")
    said: queue.Queue = queue.Queue()
    agent = join(server.address, 0, 2, patience=Patience(announce_interval=0.1), announce=said.put)
    waiting = [background(agent.barrier, "b"), background(agent.key_value_get, "never")]
    server.kill()
    absent = f"no contact with the coordinator at {server.address} for"
    told = set()
    while told != {"barrier 'b'", "key 'never'"}:
        line = said.get(timeout=60)
        told.update(what for what in ("barrier 'b'", "key 'never'") if what in line and absent in line)
    agent.close()
    for future in waiting:
        with pytest.raises(CoordinationError, match="closed by this process"):
            future.result(60)


def answers(agent) -> bool:
    try:
        return bool(agent.members())
    except CoordinatorUnavailableError:
        return False


def test_a_frozen_coordinator_is_given_up(standalone, join, background, quick, eventually, arrived) -> None:
    server = standalone("--memory", *LEASE, "--heartbeat-interval", "0.5")
    agent = join(server.address, 0, 2, patience=quick)
    waiting = [background(agent.barrier, "b"), background(agent.key_value_get, "never")]
    eventually(arrived(agent, "b", 1))
    server.child.signal(signal.SIGSTOP)
    try:
        for future in waiting:
            with pytest.raises(CoordinatorUnavailableError, match="no contact"):
                future.result(60)
    finally:
        server.child.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "call",
    [
        "agent.barrier('b')",
        "agent.key_value_get('never')",
        "next(agent.watch(''))",
        "while True: agent.key_value_increment('n')",  # wherever it strikes, no lock may be left behind
    ],
)
def test_ctrl_c_ends_a_wait(server, join, spawn, call) -> None:
    stays = join(server.address, 0)
    told: queue.Queue = queue.Queue()
    stays.add_departure_listener(told.put)
    child = spawn(
        f"""
        agent.start()
        try:
            say("waiting")
            {call}
        except KeyboardInterrupt:
            say("interrupted")
            agent.leave()
            say("left")
        """,
        server.address,
    )
    child.wait_for("waiting")
    child.signal(signal.SIGINT)
    child.wait_for("interrupted")
    child.wait_for("left")
    assert child.wait() == 0
    assert child.err == ""
    assert told.get(timeout=60).state is MemberState.LEFT


def test_ctrl_c_ends_the_search_for_a_coordinator(spawn) -> None:
    child = spawn(
        """
        try:
            say("waiting")
            agent.start()
        except KeyboardInterrupt:
            say("interrupted")
        """,
        "127.0.0.1:1",
    )
    child.wait_for("waiting")
    child.signal(signal.SIGINT)
    child.wait_for("interrupted")
    assert child.wait() == 0
    assert child.err == ""


def test_what_was_interrupted_can_be_called_again(server, join, spawn, eventually, arrived) -> None:
    stays = join(server.address, 0)
    child = spawn(
        """
        agent.start()
        try:
            agent.barrier("b")
        except KeyboardInterrupt:
            say("interrupted")
            agent.barrier("b")
            agent.barrier("b")
            say("passed")
        agent.leave()
        """,
        server.address,
    )
    eventually(arrived(stays, "b", 1))
    child.signal(signal.SIGINT)
    child.wait_for("interrupted")  # if the barrier is over first, the next call is another one
    stays.barrier("b", timeout=60)
    stays.barrier("b", timeout=60)
    child.wait_for("passed")
    assert child.wait() == 0


def test_what_a_restarted_server_says_elsewhere_is_not_taken_for_the_sessions(server, join) -> None:
    # A watch may be served by the next server while the session still belongs to the one before.
    session = join(server.address, 0, 1)._session
    told = session.last_seen()
    session.note_seen(told.server_incarnation + 1, epoch=told.epoch + 1, revision=99)
    assert session.last_seen() == told
    session.note_seen(told.server_incarnation, revision=99)
    assert session.last_seen().revision == 99
