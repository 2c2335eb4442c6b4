"""Metrics: what they say, that their labels are bounded, and that docs, alerts and dashboard know them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.server.raw_client import RawClient, refusal
from tests.server.web_server import Web, join_all, serving_web

from dmesh.v1 import coordination_pb2, key_value_pb2
from dmesh_server.event_log import KINDS
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry.measures import QUICK, Histogram
from dmesh_server.web.app import create_app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as web:
        yield web


async def scrape(web: Web) -> dict[str, list[Sample]]:
    """Returns the samples by name, as Prometheus reads them."""
    async with web.client() as http:
        response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation, family.name
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    [found] = [sample.value for sample in samples[name] if sample.labels == labels]
    return found


async def test_what_the_server_has_measured(web: Web, make_client: Callable[..., RawClient]) -> None:
    clients = [make_client(index, cluster="train", size=3) for index in range(2)]
    streams = [await client.join() for client in clients]
    for stream in streams:
        await stream.enter("b", participants=(0, 1))
    for stream in streams:
        await stream.result()
    await streams[0].enter("all", timeout_ms=60_000)
    await streams[0].send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    await streams[0].read_kind("heartbeat_ack")
    get = key_value_pb2.GetRequest(caller=clients[0].caller, key="missing")
    await refusal(lambda: clients[0].key_value.Get(get))
    async with web.client(None) as http:
        assert (await http.get("/metrics")).status_code == 401
    samples = await scrape(web)
    assert value(samples, "dmesh_members", condition="CONNECTED") == 2
    assert value(samples, "dmesh_members", condition="VACANT") == 1
    assert value(samples, "dmesh_members", condition="LOST") == 0
    assert value(samples, "dmesh_sessions") == 2
    assert value(samples, "dmesh_barriers_waiting") == 1
    assert value(samples, "dmesh_barrier_oldest_age_seconds") > 0
    assert value(samples, "dmesh_barrier_wait_seconds_count", outcome="passed") == 1
    assert value(samples, "dmesh_barrier_wait_seconds_bucket", outcome="passed", le="+Inf") == 1
    assert value(samples, "dmesh_rpc_duration_seconds_count", method="Register", way="grpc") == 2
    assert value(samples, "dmesh_rpc_errors_total", kind="KEY_NOT_FOUND") == 1
    assert value(samples, "dmesh_callers_refused_total", reason="unauthenticated") == 1
    assert value(samples, "dmesh_heartbeat_lateness_seconds_count") == 1
    assert value(samples, "dmesh_events_total", kind="member_joined") == 2
    assert value(samples, "dmesh_ready") == 1
    assert value(samples, "process_resident_memory_bytes") > 0
    assert samples["dmesh_server_info"][0].labels["version"]


async def test_clients_cannot_add_labels_or_metrics(web: Web, make_client: Callable[..., RawClient]) -> None:
    before = {(s.name, *sorted(s.labels.items())) for found in (await scrape(web)).values() for s in found}
    for number in range(5):
        client = make_client(0, cluster=f"cluster-{number}", size=1)
        stream = await client.join()
        await stream.enter(f"barrier-{number}")
        await stream.result()
        await client.leave(f"reason-{number}")
    after = {(s.name, *sorted(s.labels.items())) for found in (await scrape(web)).values() for s in found}
    assert {what for what in after - before if what[0] != "dmesh_events_total"} == set()


async def test_every_kind_of_event_is_counted_from_the_start(web: Web) -> None:
    # Prometheus takes no series that begins with 1 for an increase: nobody would be told of the first loss.
    counted = {sample.labels["kind"]: sample.value for sample in (await scrape(web))["dmesh_events_total"]}
    assert counted.keys() == KINDS.keys()
    assert counted["member_lost"] == counted["member_failed"] == 0


async def test_a_scrape_of_a_large_cluster_is_small(web: Web) -> None:
    await join_all(web.runtime, 300)
    async with web.client() as http:
        response = await http.get("/metrics")
    assert len(response.content) < 64 << 10
    assert 'dmesh_members{condition="CONNECTED"} 300.0' in response.text


async def test_they_can_be_opened_to_all(served) -> None:
    from dmesh.security import tokens
    from dmesh.security.tokens import TokenSource
    from dmesh_server.security.access import Access

    access = Access(TokenSource("test", value=tokens.generate()))
    for is_open, status in ((True, 200), (False, 401)):
        app = create_app(served.runtime, "127.0.0.1", access, open_metrics=is_open)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1"
        ) as http:
            assert (await http.get("/metrics")).status_code == status
            assert (await http.get("/api/v1/clusters")).status_code == 401
            assert (await http.request("POST", "/metrics")).status_code == 401


async def names(web: Web) -> set[str]:
    """Returns the names of all metrics of ours, with those of no samples yet."""
    async with web.client() as http:
        text = (await http.get("/metrics")).text
    return {
        family.name + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
        for family in text_string_to_metric_families(text)
        if family.name.startswith("dmesh_")
    }


def used_in(text: str) -> set[str]:
    """Returns the metrics that a query or a text names."""
    found = set(re.findall(r"\bdmesh_[a-z_]+\b", text))
    return {
        re.sub(r"_(bucket|count|sum)$", "", name) if not name.endswith("_total") else name for name in found
    }


async def test_alerts_dashboard_and_docs_name_what_there_is(web: Web) -> None:
    there = await names(web)
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(expressions) >= 8
    used = set().union(*map(used_in, expressions))
    assert used - there == set()
    board = json.loads((ROOT / "docker/grafana/dmesh.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 10
    assert set().union(*map(used_in, queries)) - there == set()
    documented = used_in((ROOT / "docs/observability.md").read_text())
    assert documented == there


def test_rules_and_dashboard_are_complete() -> None:
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) >= {"alert", "expr", "labels", "annotations"}, rule
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) >= {"summary", "description"}
    board = json.loads((ROOT / "docker/grafana/dmesh.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] for panel in board["panels"])


@given(st.lists(st.floats(0, 100), max_size=50), st.floats(0.01, 1))
def test_histograms_count_everything(seconds: list[float], part: float) -> None:
    histogram = Histogram(QUICK)
    for one in seconds:
        histogram.observe(one)
    assert histogram.count == len(seconds)
    assert histogram.total == pytest.approx(sum(seconds))
    bound = histogram.quantile(part)
    if not seconds:
        assert bound is None
    else:
        assert bound is not None
        assert sum(one <= bound for one in seconds) >= part * len(seconds) - 1e-9


def test_a_runtime_that_is_not_started_can_be_scraped() -> None:
    from dmesh_server.store.memory import MemoryStore
    from dmesh_server.web.metrics import router

    assert router(Runtime(MemoryStore()), ()).routes
