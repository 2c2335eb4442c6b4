"""Resolvers whose launchers tell ranks, not addresses: Open MPI's mpirun, and torchrun."""

import pytest
from tests.distribute.launches import open_mpi, torchrun

from dmesh.config.addresses import split_address
from dmesh.distribute.cluster_resolver import OpenMPIClusterResolver, TorchElasticClusterResolver
from dmesh.distribute.cluster_resolver.variables import port_base
from dmesh.errors import ArgumentTypeError, ClusterSpecError, ConfigurationError, ResolverError
from dmesh.testing.resolvers import ResolverConformance

KINDS = {"openmpi": (OpenMPIClusterResolver, open_mpi), "torchrun": (TorchElasticClusterResolver, torchrun)}


@pytest.fixture(params=KINDS)
def launched(request, monkeypatch):
    """Returns what makes this process one of a launch, and a resolver."""
    kind, variables = KINDS[request.param]

    def launch(rank, size, local_rank=None, local_size=None, **arguments):
        for name, value in variables(rank, size, local_rank, local_size).items():
            monkeypatch.setenv(name, value)
        return kind(**arguments)

    return launch


class Conformance(ResolverConformance):
    kind = "openmpi"

    @pytest.fixture(autouse=True)
    def _launch(self, monkeypatch):
        self.monkeypatch, self.size = monkeypatch, 3
        self._set()

    def _set(self):
        for name, value in KINDS[self.kind][1](1, self.size).items():
            self.monkeypatch.setenv(name, value)

    def make_resolver(self):
        return KINDS[self.kind][0](port_base=9000)

    def expected_cluster(self):
        return {"worker": [f"127.0.0.1:{9000 + index}" for index in range(self.size)]}

    def change_cluster(self):
        self.size = 2
        self._set()


class TestOpenMPIConformance(Conformance):
    kind = "openmpi"


class TestTorchElasticConformance(Conformance):
    kind = "torchrun"


del Conformance  # a base only


def test_one_host(launched):
    resolver = launched(2, 4)
    tasks = resolver.cluster_spec().job_tasks("worker")
    base = split_address(tasks[0], "the first")[1]
    assert tasks == [f"127.0.0.1:{base + index}" for index in range(4)]
    assert (resolver.task_type, resolver.task_id, resolver.num_processes) == ("worker", 2, None)
    assert resolver.master() == tasks[0]
    assert resolver.master(task_id=3, rpc_layer="grpc") == f"grpc://{tasks[3]}"


def test_hosts_that_are_known(launched):
    resolver = launched(2, 4, 0, 2, hosts={"h1": 1, "fd00::2": 3}, port_base=9000, job_name="trainer")
    assert resolver.cluster_spec() == {
        "trainer": ["h1:9000", "[fd00::2]:9000", "[fd00::2]:9001", "[fd00::2]:9002"]
    }
    assert resolver.task_type == "trainer"


def test_several_hosts_of_which_only_the_first_is_known(launched):
    """The launchers say that rank 0 is at 127.0.0.1."""
    resolver = launched(3, 4, 1, 2, port_base=9000)
    assert resolver.cluster_spec() == {"worker": {0: "127.0.0.1:9000", 3: "127.0.0.1:9001"}}
    assert resolver.num_processes == 4
    with pytest.raises(ClusterSpecError, match="no task 1"):
        resolver.master(task_id=1)
    first = launched(0, 4, 0, 2, port_base=9000)
    assert first.cluster_spec() == {"worker": {0: "127.0.0.1:9000"}}


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [("127.0.0.2", "127.0.0.2:9000"), ("127.0.0.2:7", "127.0.0.2:7"), ("::1", "[::1]:9000")],
)
def test_a_coordinator_that_is_given(launched, coordinator, address):
    resolver = launched(1, 2, 0, 1, port_base=9000, coordinator=coordinator)
    assert resolver.master() == address


def test_this_hosts_address_can_be_given(launched, monkeypatch):
    monkeypatch.setenv("DMESH_BIND_HOST", "10.9.8.7")
    assert launched(1, 2, 0, 1, port_base=9000).cluster_spec().task_address("worker", 1) == "10.9.8.7:9000"
    monkeypatch.setenv("DMESH_BIND_HOST", "0.0.0.0")
    assert launched(1, 2, 0, 1, port_base=9000).cluster_spec().task_address("worker", 1) == "127.0.0.1:9000"


def test_who_shares_the_host_of_rank_0_is_at_the_same_name(launched):
    """The name of a host often leads to its loopback there, an address that is no good on other hosts."""
    resolver = launched(1, 4, 1, 2, port_base=9000, coordinator="localhost")
    assert resolver.cluster_spec() == {"worker": {0: "localhost:9000", 1: "localhost:9001"}}


def test_nobody_knows_where_rank_0_is(monkeypatch):
    for name, value in open_mpi(1, 2, 0, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri")
    with pytest.raises(ResolverError, match=r"the address of rank 0 is unknown. Pass coordinator=HOST:PORT"):
        OpenMPIClusterResolver()
    monkeypatch.setenv("DMESH_COORDINATOR", "127.0.0.1:8470")  # then all meet there
    assert OpenMPIClusterResolver(port_base=9000).cluster_spec() == {"worker": {1: "127.0.0.1:9000"}}


@pytest.mark.parametrize("rank", [0, 1])
def test_where_all_meet_at_a_server_nobody_guesses_where_rank_0_is(monkeypatch, rank):
    """It need not be on the host of mpirun."""
    for name, value in open_mpi(rank, 2, 0, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://198.51.100.1:5")
    monkeypatch.setenv("DMESH_COORDINATOR", "127.0.0.1:8470")
    resolver = OpenMPIClusterResolver(port_base=9000)
    assert resolver.cluster_spec() == {"worker": {rank: "127.0.0.1:9000"}}
    assert resolver.master() == "127.0.0.1:9000"  # not empty, which would mean that there is no cluster
    with pytest.raises(ClusterSpecError):
        resolver.master(task_id=1 - rank)
    told = OpenMPIClusterResolver(port_base=9000, coordinator="h0").cluster_spec()
    assert told.task_address("worker", 0) == "h0:9000"


def test_no_way_to_rank_0(launched):
    with pytest.raises(ResolverError, match=r"no route to the rendezvous address no-such-host.invalid:9000"):
        launched(1, 2, 0, 1, port_base=9000, coordinator="no-such-host.invalid")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"port_base": 0}, ConfigurationError, "port_base is 0; expected the first of 2 free ports"),
        ({"port_base": 65_535}, ConfigurationError, "from 1 to 65534"),
        ({"hosts": ["a"]}, ArgumentTypeError, "hosts must be a dict"),
        ({"hosts": {"a": "2"}}, ArgumentTypeError, "hosts must be a dict"),
        ({"hosts": {"a:1": 2}}, ConfigurationError, "hosts has 'a:1' with 2 processes"),
        ({"hosts": {"a": 0}}, ConfigurationError, "hosts has 'a' with 0 processes"),
        ({"hosts": {"a": 3}}, ConfigurationError, "has 3 processes, but 2 were started"),
    ],
)
def test_what_they_cannot_be_told(launched, arguments, error, message):
    with pytest.raises(error, match=message):
        launched(1, 2, **arguments)


def test_a_malformed_coordinator(launched):
    with pytest.raises(ConfigurationError, match="the address of rank 0 is 'http://x:1'"):
        launched(1, 2, 0, 1, coordinator="http://x:1")


@pytest.mark.parametrize(
    ("kind", "variables", "name"),
    [
        (kind, variables(0, 2), name)
        for kind, variables in KINDS.values()
        for name in variables(0, 2)
        if name.endswith(("RANK", "SIZE")) and not name.startswith("GROUP")
    ],
)
def test_outside_of_a_launch(monkeypatch, kind, variables, name):
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=f"{name} is not in the environment"):
        kind()
    monkeypatch.setenv(name, "many")
    with pytest.raises(ConfigurationError, match=f"{name} is 'many'"):
        kind()
    monkeypatch.setenv(name, "99")
    if name != "WORLD_SIZE" and not name.endswith("WORLD_SIZE"):
        with pytest.raises(ConfigurationError, match="contradict each other"):
            kind()


def test_launches_have_ports_of_their_own(monkeypatch):
    bases = {port_base(f"job {number}", 8) for number in range(400)}
    assert len(bases) > 320
    assert all(base >= 10_000 and base + 256 <= 32_768 for base in bases)
    assert port_base("job 1", 8) == port_base("job 1", 8)
    monkeypatch.setenv("DMESH_PORT_BASE", "4000")
    assert port_base("job 1", 8) == 4000
    monkeypatch.setenv("DMESH_PORT_BASE", "65530")
    with pytest.raises(
        ConfigurationError, match="DMESH_PORT_BASE is 65530; expected the first of 8 free ports"
    ):
        port_base("job 1", 8)
