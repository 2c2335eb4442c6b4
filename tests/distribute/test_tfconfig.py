"""`TFConfigClusterResolver`: the cluster in `TF_CONFIG`."""

import pytest
from tests.distribute.launches import tf_config

from dmesh.distribute.cluster_resolver import TFConfigClusterResolver
from dmesh.errors import ArgumentTypeError, ClusterSpecError, ConfigurationError
from dmesh.testing.resolvers import ResolverConformance

CLUSTER = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"]}


@pytest.fixture
def config(monkeypatch):
    def put(*arguments, **more):
        monkeypatch.setenv("TF_CONFIG", tf_config(*arguments, **more))

    return put


class TestConformance(ResolverConformance):
    @pytest.fixture(autouse=True)
    def _config(self, config):
        self.config, self.cluster = config, CLUSTER
        config(CLUSTER, {"type": "worker", "index": 1}, rpc_layer="grpc")

    def make_resolver(self):
        return TFConfigClusterResolver()

    def expected_cluster(self):
        return self.cluster

    def change_cluster(self):
        self.cluster = {"worker": {"0": "w0:1", "7": "w7:1"}}
        self.config(self.cluster)


def test_it_says_what_the_variable_says(config):
    config(CLUSTER, {"type": "worker", "index": "1"}, rpc_layer="grpc+x")
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc+x")
    assert resolver.master() == "grpc+x://w1:1"
    assert resolver.master("chief", 0, rpc_layer="mpi") == "mpi://c:1"
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}


def test_arguments_come_first(config):
    config(CLUSTER, {"type": "worker", "index": 1}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver("chief", 0, "x", "lab")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 0, "x")
    assert resolver.environment == "lab"
    assert resolver.master() == "x://c:1"
    resolver.task_type = "worker"
    assert resolver.master() == "x://w0:1"


def test_a_session_master_is_taken_as_it_is(config):
    config(CLUSTER, session_master="sessionmaster:2222", rpc_layer="grpc")
    assert TFConfigClusterResolver().master() == "sessionmaster:2222"


@pytest.mark.parametrize("value", [None, "", "{}", '{"cluster": {}}', '{"cluster": {"worker": ["w0:1"]}}'])
def test_at_most_one_task_has_no_master(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("TF_CONFIG", value)
    resolver = TFConfigClusterResolver()
    assert resolver.master() == ""
    assert resolver.cluster_spec().jobs == (["worker"] if value and "w0" in value else [])
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)


def test_who_is_meant_must_be_known(config):
    config(CLUSTER)
    with pytest.raises(ConfigurationError, match="TF_CONFIG has no task"):
        TFConfigClusterResolver().master()
    with pytest.raises(ClusterSpecError, match="'worker' has no task 5"):
        TFConfigClusterResolver().master("worker", 5)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("{", ConfigurationError, "TF_CONFIG is not JSON: .*It begins '{'; expected an object such as"),
        ("[" * 100_000, ConfigurationError, "TF_CONFIG is not JSON"),
        ("[]", ConfigurationError, "TF_CONFIG is '.*'; expected an object"),
        ('{"cluster": ["w0:1"]}', ArgumentTypeError, "a cluster must be a dict"),
        ('{"cluster": {"worker": "w0:1"}}', ArgumentTypeError, "tasks of job 'worker' must be a list"),
        ('{"cluster": {"worker": {"x": "w0:1"}}}', ClusterSpecError, "'x' is not a task index"),
    ],
)
def test_malformed_clusters(monkeypatch, value, error, message):
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(error, match=message):
        TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize("index", ["one", -1, 1.5, True, [], "-1"])
def test_malformed_indices(config, index):
    config(CLUSTER, {"type": "worker", "index": index})
    with pytest.raises(ConfigurationError, match="the task's index in TF_CONFIG is"):
        _ = TFConfigClusterResolver().task_id


def test_a_malformed_task(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"task": "worker"}')
    with pytest.raises(ConfigurationError, match="the task in TF_CONFIG is 'worker'"):
        _ = TFConfigClusterResolver().task_type
