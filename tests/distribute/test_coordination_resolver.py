"""`CoordinationServiceResolver`: a real server's clusters, from outside."""

import pytest
from tests.e2e.clients import free_ports

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import Credentials
from dmesh.coordination.members import Device, MemberState
from dmesh.coordination.process import new_incarnation, this_process
from dmesh.distribute.cluster_resolver import CoordinationServiceResolver
from dmesh.errors import (
    AuthenticationError,
    ClusterSpecError,
    ConfigurationError,
    CoordinatorUnavailableError,
)
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource
from dmesh.testing.resolvers import ResolverConformance
from dmesh_server.embedded import start

TOKEN = "t" * 32
JOBS = {"worker": ("w0:1", "w1:1")}


@pytest.fixture(scope="module")
def server():
    server = start("127.0.0.1:0", tokens=TokenSource("the test", value=TOKEN))
    yield server.address
    server.stop(grace=0.1)


@pytest.fixture
def join(server, monkeypatch):
    """Returns what joins a cluster of the server."""
    monkeypatch.setenv("DMESH_TOKEN", TOKEN)
    agents = []

    def join(cluster, index=0, jobs=JOBS, devices=(), at="127.0.0.1:1"):
        identity = Identity(
            cluster=cluster, job="worker", index=index, incarnation=new_incarnation(), jobs=jobs,
            process=this_process(), devices=devices, peer_addresses=(at,),
        )  # fmt: skip
        agents.append(Agent(server, identity, credentials=Credentials(TokenSource("the test", value=TOKEN))))
        agents[-1].start()
        return agents[-1]

    yield join
    for agent in agents:
        agent.leave()
        agent.close()


class TestConformance(ResolverConformance):
    secrets = (TOKEN,)

    @pytest.fixture(autouse=True)
    def _cluster(self, server, join):
        self.server, self.join, self.jobs = server, join, JOBS
        self.name = f"conformance-{tokens.generate()[:8].strip('-_')}x"
        self.agent = join(self.name)

    def make_resolver(self):
        return CoordinationServiceResolver(self.server, self.name, "worker", 0)

    def expected_cluster(self):
        return self.jobs

    def change_cluster(self):
        self.agent.leave()  # the last one: the next to come forms the cluster anew
        self.jobs = {"worker": ("w0:1", "w1:1", "w2:1")}
        self.join(self.name, 2, self.jobs)


def test_members_and_their_accelerators(server, join, monkeypatch):
    join("members", 1, devices=(Device("CPU", 0), Device("GPU", 0), Device("GPU", 1)))
    monkeypatch.setenv("DMESH_COORDINATOR", server)
    monkeypatch.setenv("DMESH_CLUSTER", "members")
    resolver = CoordinationServiceResolver()
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 1) == {"GPU": 2}
    assert resolver.num_accelerators("worker", 0) == {}
    [member] = resolver.members()
    assert (member.index, member.state) == (1, MemberState.CONNECTED)
    assert resolver.master() == "w0:1"
    assert (resolver.task_type, resolver.task_id) == (None, None)


def test_clients_whose_launcher_did_not_know_all_addresses(server, join, monkeypatch):
    """Such as mpirun on several hosts: until a client comes, nobody knows where it is."""
    jobs = {"worker": ("h0:9000", "client-1.invalid:1", "client-2.invalid:1")}
    join("introduced", 0, jobs, at="h0:41000")
    join("introduced", 2, jobs, at="h2:9000")
    resolver = CoordinationServiceResolver(server, "introduced")
    assert resolver.cluster_spec() == {"worker": {0: "h0:9000", 2: "h2:9000"}}
    assert resolver.master("worker", 2) == "h2:9000"
    with pytest.raises(ClusterSpecError, match="no task 1"):
        resolver.master("worker", 1)


def test_a_cluster_that_nobody_has_formed(server, monkeypatch):
    monkeypatch.setenv("DMESH_TOKEN", TOKEN)
    resolver = CoordinationServiceResolver(server, "nobody")
    assert resolver.cluster_spec() == {}
    assert resolver.master() == ""
    assert resolver.num_accelerators() == {}


def test_a_wrong_token(server, monkeypatch):
    monkeypatch.setenv("DMESH_TOKEN", "w" * 32)
    with pytest.raises(AuthenticationError):
        CoordinationServiceResolver(server, "members").cluster_spec()


def test_no_server():
    [port] = free_ports(1)
    resolver = CoordinationServiceResolver(f"127.0.0.1:{port}", timeout=0.3)
    with pytest.raises(
        CoordinatorUnavailableError, match=r"127.0.0.1:\d+ did not answer.*the cluster 'default'"
    ):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "CoordinationServiceResolver has no address"),
        ({"address": "somewhere"}, "address is 'somewhere': it has no port"),
        ({"address": "h:1", "timeout": 0}, "timeout is 0; expected a positive number"),
        ({"address": "h:1", "timeout": float("inf")}, "timeout is inf"),
        ({"address": "h:1", "timeout": "5"}, "timeout is '5'"),
    ],
)
def test_what_it_cannot_be_told(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        CoordinationServiceResolver(**arguments)
