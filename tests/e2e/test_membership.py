"""In what order a client's end, and what it ended for, become known."""

import threading

from tests.collectives.ranks import LIMIT, cluster

from dmesh.config.settings import Settings
from dmesh.coordination.members import Member, MemberState, Process
from dmesh.runtime.membership import Client

LOST = Member("worker", 1, 7, MemberState.LOST, Process("host"), reason="killed by the test")


class Session:
    """What a client asks of its agent when it leaves."""

    attached = True
    suspicion = LIMIT

    def __init__(self):
        self.left = threading.Event()

    def leave(self, reason, timeout, *, clean=False):
        self.left.set()


def test_the_coordinator_tells_of_a_loss_before_it_tells_of_who_ends_because_of_it():
    with cluster(3) as ranks:
        agent = Session()
        client = Client(Settings(jobs=("a:1", "b:1", "c:1"), coordinator="d:1"), agent=agent)
        client.communicator, other = ranks.communicators[0], ranks.communicators[2].world
        client.communicator.lose(1, "killed by the test")
        leaving = threading.Thread(target=client.leave, args=("the program ended",))
        leaving.start()
        # The goodbye on the data plane is through, and the coordinator has not said that rank 1 is lost.
        assert ranks.wait_until(lambda: other.failure is not None)
        assert not agent.left.is_set()
        client.on_departure(LOST)
        assert agent.left.wait(LIMIT)
        leaving.join(LIMIT)


def test_who_hosted_the_coordinator_cannot_be_told_of():
    with cluster(2) as ranks:
        agent = Session()
        client = Client(Settings(jobs=("a:1", "b:1"), client_id=1), agent=agent)
        client.communicator = ranks.communicators[1]
        client.communicator.lose(0, "killed by the test")
        client.leave("the program ended")
        assert agent.left.is_set()
