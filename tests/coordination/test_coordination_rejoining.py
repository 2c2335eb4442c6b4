"""What an agent, and the client around it, make of a task slot that another process had before."""

from dataclasses import replace

import pytest
from tests.coordination.conftest import PATIENCE, identity

from dmesh.config.settings import Settings
from dmesh.coordination.agent import Agent
from dmesh.coordination.barriers import Barriers
from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy
from dmesh.coordination.dispatcher import EventDispatcher
from dmesh.coordination.members import ClusterState, Device, Member, MemberState, Process, Task
from dmesh.errors import ClientIdTakenError
from dmesh.runtime.membership import Client
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

REJOIN = ClusterSettings(RestartPolicy.REJOIN)


def agent_with_wishes(server, index: int, size: int, wishes: ClusterSettings) -> Agent:
    return Agent(server.address, replace(identity(index, size), settings=wishes), connect_timeout=PATIENCE)


# Which instance of a barrier it is --------------------------------------------------------------------------


def sent(barriers: Barriers) -> list[int]:
    numbers: list[int] = []
    barriers.attach(lambda request: numbers.append(request.instance))
    return numbers


def test_who_joins_late_asks_for_the_number_of_each_name_once():
    barriers = Barriers()
    barriers.join_late()
    numbers = sent(barriers)
    arrival = barriers.enter("b", (), 0)
    assert barriers.instance("b") == -1
    barriers.resolve(pb.BarrierResult(name="b", instance=17, epoch=9))
    assert (arrival.settled, arrival.fault, arrival.epoch) == (True, None, 9)
    barriers.enter("b", (), 0)
    barriers.enter("c", (), 0)
    assert numbers == [-1, 18, -1]


def test_a_refusal_without_a_number_leaves_the_number_open():
    barriers = Barriers()
    barriers.join_late()
    arrival = barriers.enter("b", (), 0)
    error = common_pb2.Error(kind=common_pb2.ERROR_KIND_BARRIER_MISMATCH, message="who are you")
    barriers.resolve(pb.BarrierResult(name="b", instance=-1, error=error))
    assert arrival.fault is not None
    assert barriers.instance("b") == -1


# Taking the slot ------------------------------------------------------------------------------------------


def test_a_successor_and_those_who_stayed(server, join, eventually, background):
    first, former = (agent_with_wishes(server, index, 2, REJOIN) for index in range(2))
    later = agent_with_wishes(server, 1, 2, ClusterSettings())
    told: list[Member] = []
    met: list[tuple[str, int]] = []
    try:
        for agent in (first, former):
            agent.start()
            agent.set_world_barrier_listener(
                lambda epoch, agent=agent: met.append((str(agent.identity.task), epoch))
            )
        first.add_rejoin_listener(told.append)
        waiting = background(first.barrier, "together")
        former.barrier("together")
        waiting.result(PATIENCE)
        assert not first.rejoined
        assert len({epoch for _, epoch in met}) == 1, "all see the same epoch"
        waiting = background(first.barrier, "together")
        former.close()
        eventually(lambda: first.members()[1].state is MemberState.LOST)
        later.start()
        assert later.rejoined
        assert later.cluster_settings.rejoin, "what the cluster has, though it wished for nothing"
        later.set_world_barrier_listener(lambda epoch: met.append(("later", epoch)))
        later.barrier("together")
        waiting.result(PATIENCE)
        eventually(lambda: told)
        assert told[0].incarnation == later.identity.incarnation
        epochs = [epoch for _, epoch in met]
        assert epochs[2] == epochs[3] > epochs[0]
        # A barrier of some is no meeting.
        first.barrier("alone", [0])
        assert len(met) == 4
    finally:
        for agent in (first, former, later):
            agent.close()


def test_a_task_slot_that_is_held_is_waited_for_only_under_the_policy(server, join):
    first = agent_with_wishes(server, 0, 2, ClusterSettings())
    second = agent_with_wishes(server, 0, 2, ClusterSettings())
    try:
        first.start()
        with pytest.raises(ClientIdTakenError):
            second.start()
    finally:
        first.close()
        second.close()


def test_departures_and_successors_of_a_task_slot():
    notices = EventDispatcher("test-notices")
    slot = Task("worker", 1)
    first = Member("worker", 1, 11, MemberState.LOST, Process())
    second = Member("worker", 1, 12, MemberState.REGISTERED, Process())
    notices.departed([first])
    assert (notices.gone(), notices.replaced()) == ({slot}, frozenset())
    notices.rejoined([second])
    notices.departed([first])  # told again, after a time without a session
    assert (notices.gone(), notices.replaced()) == (frozenset(), {slot})
    notices.departed([replace(second, state=MemberState.LOST)])
    assert notices.gone() == {slot}
    notices.close()


# Taking in a successor --------------------------------------------------------------------------------------


class Collectives:
    """Takes note of what a communicator would be told."""

    def __init__(self) -> None:
        self.said: list[tuple] = []

    def renew(self, peers, generation: int) -> None:
        self.said.append(("renew", [peer.incarnation for peer in peers], generation))

    def lose(self, rank: int, reason: str, incarnation: int, *, hearsay: bool) -> None:
        assert hearsay
        self.said.append(("lost", rank, incarnation))


class Table:
    """An agent that knows the members."""

    def __init__(self, *, rejoined: bool = False, settings: ClusterSettings = REJOIN) -> None:
        self.cluster_settings = settings
        self.rejoined = rejoined
        self.asked = 0
        self.epoch = 0
        self.members: tuple[Member, ...] = ()

    def hold(self, epoch: int, *incarnations: int, lost: tuple[int, ...] = ()) -> None:
        self.epoch = epoch
        self.members = tuple(
            Member(
                "worker", rank, number, MemberState.LOST if rank in lost else MemberState.CONNECTED, Process()
            )
            for rank, number in enumerate(incarnations)
        )

    def cluster_state(self) -> ClusterState:
        self.asked += 1
        return ClusterState(1, 1, self.epoch, self.members, (), ())


def client_of(table: Table) -> Client:
    client = Client(Settings(), table, members=table.members)  # type: ignore[arg-type]
    client.communicator = Collectives()  # type: ignore[assignment]
    return client


def test_all_go_on_to_a_new_generation_when_the_epoch_is_another_one():
    table = Table()
    table.hold(3, 10, 20, 30)
    client = client_of(table)
    client.on_world_barrier(3)  # the first one: initialization
    client.on_world_barrier(3)
    assert (table.asked, client.communicator.said) == (0, [])
    table.hold(5, 10, 21, 30)
    client.on_world_barrier(5)
    client.on_world_barrier(5)
    client.on_world_barrier(4)  # another thread's barrier, which was over before
    assert client.communicator.said == [("renew", [10, 21, 30], 5)]
    assert [member.incarnation for member in client.members] == [10, 21, 30]


def test_a_successor_is_taken_in_at_its_first_meeting_and_no_later():
    table = Table(rejoined=True)
    table.hold(5, 10, 21, 30)
    client = client_of(table)
    client.on_world_barrier(5)
    client.on_world_barrier(5)
    assert client.communicator.said == [("renew", [10, 21, 30], 5)]


def test_a_table_that_is_newer_than_the_meeting_is_not_trusted():
    """Rank 1 was replaced before the barrier, or only after it: that cannot be told. Rank 2 is lost since."""
    table = Table()
    table.hold(3, 10, 20, 30)
    client = client_of(table)
    client.on_world_barrier(3)
    table.hold(6, 10, 21, 30, lost=(2,))
    client.on_world_barrier(5)
    assert client.communicator.said == [
        ("renew", [10, 21, 30], 5),
        ("lost", 2, 30),
        ("lost", 1, 21),
    ]
    table.hold(7, 10, 21, 31)
    client.on_world_barrier(7)
    assert client.communicator.said[3:] == [("renew", [10, 21, 31], 7)]


def test_another_policy_and_the_end_know_no_generations():
    table = Table(settings=ClusterSettings(RestartPolicy.FAIL_FAST))
    table.hold(3, 10, 20)
    client = client_of(table)
    client.on_world_barrier(3)
    client.on_world_barrier(5)
    table.cluster_settings = REJOIN
    client.leaving = True
    client.on_world_barrier(7)
    assert client.communicator.said == []


def test_a_successor_with_other_devices_is_worth_a_word(caplog):
    table = Table()
    table.hold(3, 10, 20)
    client = client_of(table)
    client.on_world_barrier(3)
    table.hold(5, 10, 21)
    table.members = (table.members[0], replace(table.members[1], devices=(Device("CPU", 0),)))
    client.on_world_barrier(5)
    assert "rank 1, /job:worker/task:1" in caplog.text
