"""The public conformance tests fail for a resolver that breaks the contract; others show that they pass."""

import pytest

from dmesh.distribute.cluster_resolver import ClusterResolver, SimpleClusterResolver
from dmesh.testing.resolvers import ResolverConformance
from dmesh.train import ClusterSpec

FIRST, SECOND = {"worker": ["a:1"]}, {"worker": ["a:1", "b:1"]}


class Good(ClusterResolver):
    """What the broken ones derive from."""

    def __init__(self, system):
        self.system = system
        self.task_type, self.task_id, self.rpc_layer = "worker", 0, "grpc"

    def cluster_spec(self):
        return ClusterSpec(self.system["cluster"])

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        address = self.cluster_spec().task_address(task_type or "worker", task_id or 0)
        return f"{rpc_layer or self.rpc_layer}://{address}"

    def __repr__(self):
        return "<Good>"


class Remembers(Good):
    def cluster_spec(self):
        self.spec = getattr(self, "spec", None) or super().cluster_spec()
        return self.spec


class DeafToLayers(Good):
    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return super().master(task_type, task_id)


class KnowsNobody(Good):
    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return super().master() if task_id in (0, None) else "grpc://elsewhere:1"


class LeadsElsewhere(Good):
    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return super().master(task_type, task_id, rpc_layer) if task_type else "grpc://elsewhere:1"


class IsNobody(Good):
    task_id = property(lambda self: 7, lambda self, value: None)


class CountsInWords(Good):
    def num_accelerators(self, task_type=None, task_id=None, config_proto=None):
        return {"gpu": 1}


class Talks(Good):
    def __repr__(self):
        return "<Talks: token hunter2>"


class Suite(ResolverConformance):
    secrets = ("hunter2",)

    def __init__(self, kind):
        self.kind, self.system = kind, {"cluster": FIRST}

    def make_resolver(self):
        return self.kind(self.system)

    def expected_cluster(self):
        return self.system["cluster"]

    def change_cluster(self):
        self.system["cluster"] = SECOND


def failures(kind, suite=Suite):
    failed = []
    for name in [name for name in dir(Suite) if name.startswith("test_")]:
        try:
            getattr(suite(kind), name)()
        except AssertionError:
            failed.append(name)
    return failed


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        (Good, []),
        (Remembers, ["test_it_asks_again"]),
        (DeafToLayers, ["test_every_task_has_a_master_url"]),
        (KnowsNobody, ["test_an_unknown_task_is_an_error", "test_every_task_has_a_master_url"]),
        (LeadsElsewhere, ["test_the_master_is_a_task_or_nobody"]),
        (
            IsNobody,
            ["test_it_keeps_its_arguments", "test_it_knows_which_task_this_is_or_says_that_it_does_not"],
        ),
        (CountsInWords, ["test_accelerators_are_counted_by_type"]),
        (Talks, ["test_it_does_not_reveal_secrets"]),
    ],
)
def test_who_breaks_the_contract_is_found(kind, failed):
    assert failures(kind) == failed


def test_what_a_suite_must_define():
    class Empty(ResolverConformance):
        pass

    for name in ("make_resolver", "expected_cluster", "change_cluster"):
        with pytest.raises(NotImplementedError, match=f"Empty must define {name}"):
            getattr(Empty(), name)()


def test_a_cluster_that_cannot_change():
    class Fixed(Suite):
        def make_resolver(self):
            return SimpleClusterResolver(ClusterSpec(FIRST))

        def change_cluster(self):
            return False

    Fixed(None).test_it_asks_again()
