"""`dmesh.config.experimental_connect_to_cluster`."""

import pytest
from tests.e2e.clients import free_ports

import dmesh
from dmesh.config import experimental_connect_to_cluster
from dmesh.distribute.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from dmesh.errors import AlreadyInitializedError, ConfigurationError
from dmesh.train import ClusterSpec


@pytest.fixture
def spec():
    """A cluster of one task, which this process can be."""
    yield ClusterSpec({"trainer": [f"127.0.0.1:{free_ports(1)[0]}"]})
    if dmesh.runtime.context.current_or_none() is not None:
        dmesh.shutdown_accelerator_system()


def test_joining_by_a_spec(spec):
    assert experimental_connect_to_cluster(spec, "trainer", 0, protocol="grpc") is None
    assert dmesh.full_job_name() == "trainer/replica:0/task:0"
    assert dmesh.jobs() == spec.job_tasks("trainer")
    assert dmesh.collectives.all_reduce(3.0) == 3.0
    experimental_connect_to_cluster(spec, "trainer", 0)  # again, as after initialize_accelerator_system
    other = SimpleClusterResolver(ClusterSpec({"trainer": ["h:1", "h:2"]}), "h:1", "trainer", 1)
    with pytest.raises(AlreadyInitializedError, match="client 0 of 1 already, in another cluster"):
        experimental_connect_to_cluster(other)


def test_joining_by_a_resolver(spec):
    resolver = SimpleClusterResolver(spec, spec.task_address("trainer", 0), "trainer", 0, rpc_layer="grpc")
    experimental_connect_to_cluster(resolver)
    assert dmesh.job_name() == "trainer"
    assert dmesh.distribute.MultiWorkerMirroredStrategy().cluster_resolver is resolver


def test_a_local_master_is_nothing_to_connect_to(capfd):
    experimental_connect_to_cluster(TFConfigClusterResolver())
    experimental_connect_to_cluster(SimpleClusterResolver(ClusterSpec({"w": ["a:1"]})))
    assert dmesh.runtime.context.current_or_none() is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("master", ["", "local"])
def test_a_local_master_of_a_cluster_is_a_mistake_that_the_user_hears_of(master, caplog):
    experimental_connect_to_cluster(SimpleClusterResolver(ClusterSpec({"w": ["a:1", "b:1"]}), master, "w", 0))
    assert dmesh.runtime.context.current_or_none() is None  # as in TensorFlow
    assert f"SimpleClusterResolver has a cluster of 2 tasks, but its master is {master!r}" in caplog.text


RESOLVER = SimpleClusterResolver(ClusterSpec({"w": ["a:1", "b:1"]}), "c:1", "w", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"w": ["a:1"]},), "must be a dmesh.train.ClusterSpec or a ClusterResolver, got dict"),
        ((RESOLVER,), "the resolver's master, c:1, is not a task of its cluster"),
        ((ClusterSpec({"w": ["a:1"]}),), "job_name is 'localhost', its jobs are 'w'"),
        ((ClusterSpec({}),), "its jobs are none"),
        ((ClusterSpec({"w": ["a:1"]}), "w", 1), "task 1 of 1"),
        ((ClusterSpec({"w": ["a:1"]}), "w", 0, "mpi"), "protocol is 'mpi'; expected grpc or None"),
        (
            (ClusterSpec({"w": ["a:1"]}), "w", 0, None, True, object()),
            "cluster_device_filters is not supported",
        ),
    ],
)
def test_what_it_refuses(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        experimental_connect_to_cluster(*arguments)
    assert dmesh.runtime.context.current_or_none() is None
