"""Clusters that the program describes, and several clusters as one."""

import pytest

from dmesh.distribute.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from dmesh.errors import ArgumentTypeError, ClusterSpecError, ConfigurationError, DuplicateTaskError
from dmesh.testing.resolvers import ResolverConformance
from dmesh.train import ClusterSpec

SPEC = ClusterSpec({"ps": ["p0:1"], "worker": ["w0:1", "w1:1"]})


class TestSimpleConformance(ResolverConformance):
    def make_resolver(self):
        return SimpleClusterResolver(SPEC, master="w0:1", task_type="worker", task_id=1, rpc_layer="grpc")

    def expected_cluster(self):
        return SPEC.as_dict()

    def change_cluster(self):
        return False


class Growing(ClusterResolver):
    """Its cluster has one more task at every call of `grow`."""

    def __init__(self):
        self.tasks = ["a:1"]

    def cluster_spec(self):
        return ClusterSpec({"worker": list(self.tasks)})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return "a:1"


class TestUnionConformance(ResolverConformance):
    def make_resolver(self):
        self.growing = Growing()
        return UnionResolver(
            SimpleClusterResolver(SPEC, "w0:1", task_type="worker", task_id=0, rpc_layer="grpc"), self.growing
        )

    def expected_cluster(self):
        return {"ps": ["p0:1"], "worker": ["w0:1", "w1:1", *self.growing.tasks]}

    def change_cluster(self):
        self.growing.tasks.append("b:1")


def test_simple_answers_with_what_it_was_given():
    resolver = SimpleClusterResolver(
        SPEC,
        "m:1",
        task_type="ps",
        task_id=0,
        environment="lab",
        num_accelerators={"TPU": 4},
        rpc_layer="grpc",
    )
    assert resolver.master() == resolver.master("worker") == "grpc://m:1"
    assert resolver.master("worker", 1) == "grpc://w1:1"
    assert resolver.master("worker", 1, "mpi") == "mpi://w1:1"
    assert resolver.environment == "lab"
    assert resolver.num_accelerators("ps", 0, config_proto=object()) == {"TPU": 4}
    resolver.num_accelerators()["GPU"] = 1
    assert resolver.num_accelerators() == {"TPU": 4}
    resolver.rpc_layer = None
    assert resolver.master() == "m:1"


def test_simple_by_default():
    resolver = SimpleClusterResolver(SPEC, rpc_layer="grpc")
    assert resolver.master() == ""
    assert resolver.environment == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.num_accelerators() == {}


def test_what_simple_refuses():
    with pytest.raises(
        TypeError, match=r"cluster_spec must be a dmesh.train.ClusterSpec, got dict. Convert a dict"
    ):
        SimpleClusterResolver({"worker": ["w0:1"]})
    with pytest.raises(ArgumentTypeError, match="master must be a str, got 5"):
        SimpleClusterResolver(SPEC, 5)
    with pytest.raises(ClusterSpecError, match="no job 'chief'"):
        SimpleClusterResolver(SPEC).master("chief", 0)


def simple(cluster, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), **more)


def test_union_numbers_lists_on():
    union = UnionResolver(simple({"worker": ["a:1", "b:1"]}), simple({"worker": ["c:1"], "ps": ["d:1"]}))
    assert union.cluster_spec() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"]}
    assert union.master("worker", 2) == "c:1"


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ({0: "a:1", 2: "c:1"}, {1: "b:1"}, ["a:1", "b:1", "c:1"]),
        ({1: "b:1", 2: "c:1"}, ["a:1"], ["a:1", "b:1", "c:1"]),
        (["a:1"], {5: "f:1"}, {0: "a:1", 5: "f:1"}),
    ],
)
def test_union_keeps_the_indices_of_tasks_with_gaps(first, second, merged):
    assert UnionResolver(simple({"w": first}), simple({"w": second})).cluster_spec() == {"w": merged}


def test_union_refuses_two_tasks_in_one_place():
    union = UnionResolver(simple({"w": {0: "a:1", 2: "c:1"}}), simple({"w": ["b:1"]}))
    with pytest.raises(KeyError, match="more than one cluster has task 0 of job 'w'") as caught:
        union.cluster_spec()
    assert isinstance(caught.value, DuplicateTaskError)


def test_the_first_of_a_union_answers_for_all():
    first = simple(
        {"w": ["a:1"]}, master="a:1", task_type="w", task_id=3, rpc_layer="grpc", environment="lab",
        num_accelerators={"GPU": 2},
    )  # fmt: skip
    union = UnionResolver(first, simple({"w": ["b:1"]}, task_type="x", task_id=9))
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("w", 3, "grpc", "lab")
    assert union.master() == "grpc://a:1"
    assert union.master(rpc_layer="mpi") == "mpi://a:1"
    assert union.num_accelerators() == {"GPU": 2}
    other = UnionClusterResolver(first, task_type="v", task_id=0, rpc_layer="x")
    assert (other.task_type, other.task_id, other.rpc_layer) == ("v", 0, "x")
    assert other.master("w", 0) == "x://a:1"
    union.task_id, union.task_type, union.rpc_layer = 1, "u", "y"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("u", 1, "y")


def test_what_union_refuses():
    with pytest.raises(ValueError, match="no argument master, name; it has rpc_layer, task_type and task_id"):
        UnionResolver(name="x", master="y")
    with pytest.raises(ConfigurationError, match="at least one cluster resolver"):
        UnionResolver(task_id=0)
    with pytest.raises(
        TypeError, match="argument 1 of UnionResolver must be a ClusterResolver, got ClusterSpec"
    ):
        UnionResolver(simple({}), SPEC)
    with pytest.raises(ArgumentTypeError, match="task_id must be int or None, got '0'"):
        UnionResolver(simple({}), task_id="0")


def test_the_base_counts_accelerators_of_this_process(monkeypatch):
    monkeypatch.setattr(
        "dmesh.distribute.cluster_resolver.base.num_local_devices", lambda kind: {"GPU": 2}.get(kind, 0)
    )
    resolver = Growing()
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {"GPU": 2}
    assert resolver.num_accelerators("worker", 1) == {}
    assert resolver.num_accelerators()["TPU"] == 0
    assert resolver.num_processes is None


def test_nobody_makes_a_resolver_without_the_two_methods():
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()
