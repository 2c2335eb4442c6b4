"""Quotas of tenants: counted over all clusters that a tenant has formed, also after a restart."""

from __future__ import annotations

import pytest
from tests.server.core.driving import Driver, worker, workers

from dmesh_server.core.core import Core
from dmesh_server.core.effects import KvDeleted, KvRevision, Registered
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import KvDelete, KvSet, Leave
from dmesh_server.core.model import Caller
from dmesh_server.core.quotas import Quota, Quotas

QUOTA = Quota(clusters=2, tasks=5, keys=3, bytes=100)


class Tenants(Driver):
    """A server with a quota for the tenant `t`; the clusters have two tasks unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.core = self._core()

    def _core(self) -> Core:
        return Core(1, self.limits, Quotas({"t": QUOTA}.get))

    def reload(self) -> None:
        """Starts another server from what is durable."""
        self.flush()
        self.core = self._core()
        self.core.restore(self.durable.values(), self.now)

    def form(self, cluster: str, owner: str = "t", incarnation: int = 5) -> object:
        return self.answer(self.register(0, caller=Caller(cluster, worker(0), incarnation), owner=owner))

    def set(self, cluster: str, key: str, value: bytes = b"1") -> object:
        token = self.token()
        return self.answer(KvSet(token, Caller(cluster, worker(0), 5), f"r{token}", key, value, True))

    def end(self, cluster: str) -> None:
        self.answer(Leave(self.token(), Caller(cluster, worker(0), 5), "leave", ""))


def exceeded(answer: object, quota: str) -> bool:
    return (
        isinstance(answer, CoreError)
        and answer.kind is ErrorKind.LIMIT_EXCEEDED
        and f"quota `{quota}` of token t" in answer.message
    )


@pytest.fixture
def d() -> Tenants:
    return Tenants()


@pytest.mark.parametrize("restarted", [False, True])
def test_clusters(d: Tenants, restarted: bool) -> None:
    assert isinstance(d.form("a"), Registered)
    assert isinstance(d.form("b"), Registered)
    if restarted:
        d.reload()
    assert exceeded(d.form("c"), "clusters")
    assert isinstance(d.form("c", owner=""), Registered)
    d.end("a")
    assert isinstance(d.form("d"), Registered)


def test_tasks(d: Tenants) -> None:
    assert isinstance(d.form("a"), Registered)
    d.jobs = workers(4)
    assert exceeded(d.form("b"), "tasks")
    d.jobs = workers(3)
    assert isinstance(d.form("b"), Registered)


@pytest.mark.parametrize("restarted", [False, True])
def test_keys_and_bytes_of_all_its_clusters(d: Tenants, restarted: bool) -> None:
    d.form("a")
    d.form("b")
    d.form("other", owner="")
    assert isinstance(d.set("a", "k1"), KvRevision)
    assert isinstance(d.set("b", "k2"), KvRevision)
    assert isinstance(d.set("b", "k3"), KvRevision)
    if restarted:
        d.reload()
    assert exceeded(d.set("a", "k4"), "keys")
    assert isinstance(d.set("a", "k1", b"2"), KvRevision), "an overwrite is no new key"
    assert exceeded(d.set("a", "k1", bytes(100)), "bytes")
    assert isinstance(d.set("other", "k", bytes(1000)), KvRevision)
    token = d.token()
    deleted = d.answer(KvDelete(token, Caller("b", worker(0), 5), f"r{token}", "k3", False))
    assert isinstance(deleted, KvDeleted)
    assert isinstance(d.set("a", "k4", bytes(50)), KvRevision)


def test_a_cluster_that_begins_again_for_somebody_else_is_theirs(d: Tenants) -> None:
    d.form("a")
    d.form("b")
    d.end("a")
    assert isinstance(d.form("a", owner="", incarnation=6), Registered)
    assert isinstance(d.form("c"), Registered)
    d.end("c")
    assert isinstance(d.form("c", incarnation=6), Registered)
    assert exceeded(d.form("d"), "clusters")
