"""The settings of a cluster: the first client decides, others agree or are refused, a restart keeps them."""

from __future__ import annotations

import math

import pytest
from tests.server.core.driving import Driver

from dmesh_server.core.cluster_settings import decide
from dmesh_server.core.effects import Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import ClusterSettings, Limits, MemberState, RestartPolicy

FAIL_FAST, REJOIN = RestartPolicy.FAIL_FAST, RestartPolicy.REJOIN


def decided(wish: ClusterSettings, limits: Limits | None = None) -> ClusterSettings:
    d = Driver(2, limits)
    return d.accepted(d.register(0, settings=wish), Registered).settings


def test_what_is_not_wished_for_is_the_servers() -> None:
    assert decided(ClusterSettings()) == ClusterSettings(FAIL_FAST, 3.0, 15.0, 60.0)
    limits = Limits(heartbeat_interval=1.0, lease=4.0, stuck_after=0.0)
    assert decided(ClusterSettings(), limits) == ClusterSettings(FAIL_FAST, 1.0, 4.0, -1.0)


@pytest.mark.parametrize(
    ("wish", "settings"),
    [
        (ClusterSettings(REJOIN, 0.5, 2.0, 7.0), ClusterSettings(REJOIN, 0.5, 2.0, 7.0)),
        (ClusterSettings(stuck_after=-0.001), ClusterSettings(FAIL_FAST, 3.0, 15.0, -1.0)),
        # One that is not wished for keeps the server's proportion to the other.
        (ClusterSettings(lease=2.0), ClusterSettings(FAIL_FAST, 0.4, 2.0, 60.0)),
        (ClusterSettings(lease=100.0), ClusterSettings(FAIL_FAST, 3.0, 100.0, 60.0)),
        (ClusterSettings(heartbeat_interval=20.0), ClusterSettings(FAIL_FAST, 20.0, 100.0, 60.0)),
        (ClusterSettings(heartbeat_interval=0.1), ClusterSettings(FAIL_FAST, 0.1, 15.0, 60.0)),
    ],
)
def test_the_first_client_decides(wish: ClusterSettings, settings: ClusterSettings) -> None:
    assert decided(wish) == settings


@pytest.mark.parametrize(
    ("tasks", "wish", "interval", "lease"),
    [
        (3_000, ClusterSettings(), 3.0, 15.0),
        (10_000, ClusterSettings(), 10.0, 50.0),
        (10_000, ClusterSettings(lease=15.0), 3.0, 15.0),
        (10_000, ClusterSettings(heartbeat_interval=5.0), 5.0, 25.0),
        (10_000, ClusterSettings(heartbeat_interval=2.0, lease=4.0), 2.0, 4.0),
        (10_000_000, ClusterSettings(), 720.0, 3600.0),
    ],
)
def test_large_clusters_send_no_more_heartbeats_than_the_server_can_read(
    tasks: int, wish: ClusterSettings, interval: float, lease: float
) -> None:
    settings = decide(wish, Limits(), tasks)
    assert (settings.heartbeat_interval, settings.lease) == (interval, lease)


@pytest.mark.parametrize(
    "wish",
    [
        ClusterSettings(lease=0.05),
        ClusterSettings(lease=3601.0),
        ClusterSettings(lease=-1.0),
        ClusterSettings(lease=math.nan),
        ClusterSettings(heartbeat_interval=0.001),
        ClusterSettings(heartbeat_interval=math.inf),
        ClusterSettings(heartbeat_interval=2.0, lease=2.0),
        ClusterSettings(heartbeat_interval=3600.0),
        ClusterSettings(stuck_after=math.nan),
        ClusterSettings(stuck_after=1e9),
    ],
)
def test_what_no_cluster_can_have_is_refused(wish: ClusterSettings) -> None:
    d = Driver(2)
    error = d.refused(d.register(0, settings=wish))
    assert error.kind is ErrorKind.INVALID_ARGUMENT
    assert error.fields
    assert all(field.startswith("settings.") for field in error.fields)
    assert d.core.clusters() == ()


def test_others_may_wish_the_same_or_nothing() -> None:
    d = Driver(3)
    settings = ClusterSettings(REJOIN, 0.3, 1.5, 9.0)
    for index, wish in enumerate([settings, ClusterSettings(), settings]):
        assert d.accepted(d.register(index, settings=wish), Registered).settings == settings


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (
            ClusterSettings(FAIL_FAST),
            "another restart policy (fail-fast) than cluster 'c' has (rejoin)",
        ),
        (ClusterSettings(heartbeat_interval=0.2), "heartbeat interval (0.2 s) than cluster 'c' has (0.3 s)"),
        (ClusterSettings(lease=2.0), "lease (2 s) than cluster 'c' has (1.5 s)"),
        (ClusterSettings(stuck_after=-1.0), "stuck (never) than cluster 'c' has (9 s)"),
    ],
)
def test_others_who_wish_something_else_are_told_both_values_and_who_decided(
    wish: ClusterSettings, words: str
) -> None:
    d = Driver(3)
    d.apply(d.register(0, settings=ClusterSettings(REJOIN, 0.3, 1.5, 9.0)))
    error = d.refused(d.register(1, settings=wish))
    assert error.kind is ErrorKind.SPEC_MISMATCH
    assert words in error.message
    assert "/job:worker/task:1 (host host1, pid 71) requests" in error.message
    assert "formed by /job:worker/task:0 (host host0, pid 70)" in error.message
    assert [member.incarnation for member in error.members] == [1000]
    assert d.state().epoch == 1


def test_a_lease_is_the_clusters() -> None:
    d = Driver(2)
    d.accepted(d.register(0, settings=ClusterSettings(lease=2.0)), Registered)
    d.apply(d.register(1))
    d.apply(d.attach(1))
    d.advance(2.0)
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "no sign of life for 2.0 s, and no session"


def test_settings_outlive_a_restart() -> None:
    d = Driver(2)
    settings = ClusterSettings(REJOIN, 0.3, 1.5, 9.0)
    for index in (0, 1):
        d.apply(d.register(index, settings=settings))
    d.restart()
    assert d.accepted(d.register(0), Registered).settings == settings
    assert d.refused(d.register(1, 99, settings=ClusterSettings(lease=9.0))).kind is ErrorKind.SPEC_MISMATCH
    d.advance(1.6)
    assert d.state_of(1) is MemberState.LOST


def test_a_server_whose_own_settings_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than the lease"):
        Limits(heartbeat_interval=2.0, lease=1.0)
