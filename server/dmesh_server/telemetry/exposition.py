"""The server's measures for Prometheus. The sets of labels are bounded: no client can add to them.

docs/observability.md lists every metric; a test compares the list, the alert rules and the dashboard with
this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.views import CONDITIONS, Summary
from dmesh_server.telemetry.measures import Histogram, Measures

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of `Exposition.render`'s result."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the server at the moment of a scrape."""

    now: float
    """Seconds of the server's monotonic clock."""
    ready: bool
    """True if it can serve requests."""
    store_failed: bool
    """True if the store refuses to write."""
    clusters: Iterable[Summary]
    """All clusters in numbers."""
    sessions: int
    """Open sessions."""
    unanswered: int
    """Requests that are not answered yet."""
    streams: int
    """Readers of the stream of events."""
    events: Mapping[str, int]
    """Events so far, of each kind that there can be."""
    refusals: Mapping[str, int]
    """Callers that were refused so far, by the event that the log calls it."""


class Exposition(Collector):
    """Shows measures to Prometheus."""

    def __init__(self, version: str, measures: Measures, look: Callable[[], Snapshot]) -> None:
        """Make a registry of its own.

        Args:
            version: Version of dmesh.
            measures: Counts and durations of the server.
            look: Returns the server's present state.
        """
        self._version = version
        self._measures = measures
        self._look = look
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance: the registry need not ask for all numbers to know the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield InfoMetricFamily("dmesh_server", "Version of dmesh.", {"version": self._version})
        snapshot = self._look()
        yield from _gauges(snapshot)
        yield from self._counted(snapshot)
        yield from self._timed()

    def _counted(self, snapshot: Snapshot) -> Iterator[Metric]:
        measures = self._measures
        refused = CounterMetricFamily(
            "dmesh_rpc_errors", "Calls that were answered with an error, by its kind.", labels=["kind"]
        )
        for kind in ErrorKind:
            refused.add_metric([kind.name], measures.refused[kind.name])
        yield refused
        callers = CounterMetricFamily(
            "dmesh_callers_refused", "Callers that were refused, by reason.", labels=["reason"]
        )
        for reason, count in sorted(snapshot.refusals.items()):
            callers.add_metric([reason], count)
        yield callers
        events = CounterMetricFamily("dmesh_events", "What happened, by kind.", labels=["kind"])
        for what, count in snapshot.events.items():
            events.add_metric([what], count)
        yield events
        yield CounterMetricFamily(
            "dmesh_store_records", "Records that were made durable.", value=measures.records
        )
        yield CounterMetricFamily(
            "dmesh_sessions_dropped",
            "Sessions that were dropped because their clients did not read.",
            value=measures.sessions_dropped,
        )
        yield CounterMetricFamily(
            "dmesh_event_streams_dropped",
            "Readers of the stream of events that were dropped because they did not read.",
            value=measures.readers_dropped,
        )

    def _timed(self) -> Iterator[Metric]:
        measures = self._measures
        rpcs = HistogramMetricFamily(
            "dmesh_rpc_duration_seconds",
            "Time until a call was answered, by method and way (grpc, session); blocked reads wait.",
            labels=["method", "way"],
        )
        for (method, way), histogram in sorted(measures.rpcs.items()):
            _add(rpcs, [method, way], histogram)
        yield rpcs
        barriers = HistogramMetricFamily(
            "dmesh_barrier_wait_seconds",
            "Time from a barrier's first arrival to its end, by outcome (passed, failed).",
            labels=["outcome"],
        )
        for outcome, histogram in measures.barriers.items():
            _add(barriers, [outcome], histogram)
        yield barriers
        for name, help_text, histogram in (
            ("dmesh_store_commit_seconds", "Commits of the store: write and sync to disk.", measures.commits),
            ("dmesh_heartbeat_lateness_seconds", "How late heartbeats came.", measures.lateness),
            ("dmesh_event_loop_lag_seconds", "How late the event loop came to what was due.", measures.lag),
        ):
            family = HistogramMetricFamily(name, help_text, labels=[])
            _add(family, [], histogram)
            yield family


def _gauges(snapshot: Snapshot) -> Iterator[Metric]:
    members = Counter[str]()
    vacant = barriers = keys = key_bytes = waiters = count = running = 0
    oldest = 0.0
    for cluster in snapshot.clusters:
        count += 1
        running += not cluster.ended
        members.update(cluster.members)
        vacant += cluster.vacant
        barriers += cluster.barriers
        keys += cluster.keys
        key_bytes += cluster.key_bytes
        waiters += cluster.waiters
        if cluster.oldest is not None:
            oldest = max(oldest, snapshot.now - cluster.oldest.started_at)
    family = GaugeMetricFamily(
        "dmesh_members", "Members of all clusters, by condition.", labels=["condition"]
    )
    for condition in CONDITIONS:
        family.add_metric([condition], members[condition])
    family.add_metric(["VACANT"], vacant)
    yield family
    for name, help_text, value in (
        ("dmesh_ready", "Whether the server can do its work.", snapshot.ready),
        ("dmesh_store_failed", "Whether the store refuses to write.", snapshot.store_failed),
        ("dmesh_clusters", "Clusters, those that have ended included.", count),
        ("dmesh_clusters_running", "Clusters with members that have not departed.", running),
        ("dmesh_barriers_waiting", "Barriers under way.", barriers),
        ("dmesh_barrier_oldest_age_seconds", "Age of the oldest barrier under way.", oldest),
        ("dmesh_sessions", "Clients that are connected.", snapshot.sessions),
        ("dmesh_requests_unanswered", "Requests not answered yet, with blocked reads.", snapshot.unanswered),
        ("dmesh_keys", "Keys of all clusters.", keys),
        ("dmesh_key_bytes", "Bytes of all keys and values.", key_bytes),
        ("dmesh_key_waiters", "Blocked reads and watches of keys.", waiters),
        ("dmesh_event_streams", "Readers of the stream of events.", snapshot.streams),
    ):
        yield GaugeMetricFamily(name, help_text, value=float(value))


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets, seen = list[tuple[str, float]](), 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), seen))
    family.add_metric(labels, buckets, sum_value=histogram.total)
