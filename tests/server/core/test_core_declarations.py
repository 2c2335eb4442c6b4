"""Clusters that are declared before their first client: what it gets, what is refused, what survives."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest
from tests.server.core.driving import OBSERVER, Driver

from dmesh_server.core.effects import Operated, Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import DeclareCluster, WithdrawCluster
from dmesh_server.core.model import ClusterSettings, Limits, RestartPolicy

DECLARED = ClusterSettings(RestartPolicy.REJOIN, lease=30.0)


def declare(
    d: Driver, settings: ClusterSettings = DECLARED, tasks: tuple[tuple[str, int], ...] = (("worker", 2),)
) -> DeclareCluster:
    return DeclareCluster(d.token(), OBSERVER, "ann", tasks, settings)


@pytest.mark.parametrize("restart", [False, True])
def test_the_first_client_gets_what_is_declared(restart: bool) -> None:
    d = Driver(2)
    assert d.accepted(declare(d), Operated).changed
    assert not d.accepted(declare(d), Operated).changed
    if restart:
        d.restart()
    settings = d.accepted(d.register(0), Registered).settings
    assert (settings.restart_policy, settings.lease) == (RestartPolicy.REJOIN, 30.0)
    d.accepted(d.register(1, settings=ClusterSettings(lease=30.0)), Registered)
    assert d.refused(d.register(1, 9, settings=ClusterSettings(lease=7.0))).kind is ErrorKind.SPEC_MISMATCH


def test_other_jobs_and_wishes_are_refused() -> None:
    d = Driver(3)
    d.apply(declare(d))
    error = d.refused(d.register(0))
    assert (error.kind, error.fields) == (ErrorKind.SPEC_MISMATCH, ("jobs",))
    assert "declared with 2 tasks of job 'worker', but the client has 3 tasks" in error.message
    d = Driver(2)
    d.apply(declare(d))
    for wish, field in (
        (ClusterSettings(RestartPolicy.FAIL_FAST), "settings.restart_policy"),
        (ClusterSettings(lease=9.0), "settings.lease_ms"),
    ):
        error = d.refused(d.register(0, settings=wish))
        assert (error.kind, error.fields) == (ErrorKind.SPEC_MISMATCH, (field,))
    wish = ClusterSettings(stuck_after=9.0, lease=30.0)
    assert d.accepted(d.register(0, settings=wish), Registered).settings.stuck_after == 9.0


def test_too_many_tasks_are_refused_before_room_is_made_for_them() -> None:
    d = Driver(2)
    tracemalloc.start()
    try:
        refused = d.refused(declare(d, tasks=(("ps", 1), ("worker", 10_000_000))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (refused.kind, "has 10000001 tasks" in refused.message) == (ErrorKind.LIMIT_EXCEEDED, True)
    refused = d.refused(declare(d, tasks=(("ps", 0), ("worker", 1))))
    assert (refused.kind, refused.fields) == (ErrorKind.INVALID_ARGUMENT, ("jobs",))


def test_a_declaration_outlasts_generations_until_it_is_withdrawn() -> None:
    d = Driver(2)
    d.apply(declare(d))
    for incarnation in (51, 52):
        assert d.accepted(d.register(0, incarnation), Registered).settings.lease == 30.0
        d.apply(dataclasses.replace(d.leave(0), caller=d.caller(0, incarnation)))
        d.restart()
    withdraw = WithdrawCluster(d.token(), OBSERVER, "ann")
    assert d.accepted(withdraw, Operated).changed
    assert not d.accepted(withdraw, Operated).changed
    d.restart()
    assert d.accepted(d.register(0), Registered).settings.lease == 15.0
    assert not [record for record in d.durable.values() if record.key == "declaration"]


def test_what_cannot_be_declared() -> None:
    d = Driver(2, Limits(max_tasks=10))
    for bad, kind in (
        (declare(d, tasks=()), ErrorKind.INVALID_ARGUMENT),
        (declare(d, tasks=(("worker", 0),)), ErrorKind.INVALID_ARGUMENT),
        (declare(d, tasks=(("a b", 1),)), ErrorKind.INVALID_ARGUMENT),
        (declare(d, tasks=(("worker", 11),)), ErrorKind.LIMIT_EXCEEDED),
        (declare(d, ClusterSettings(lease=1e9)), ErrorKind.INVALID_ARGUMENT),
        (declare(d, ClusterSettings(lease=1.0, heartbeat_interval=2.0)), ErrorKind.INVALID_ARGUMENT),
    ):
        assert d.refused(bad).kind is kind
    assert d.core.declarations.names() == []
