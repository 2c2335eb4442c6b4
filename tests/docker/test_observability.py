"""Profile "observability" of docker/compose.yaml: what dashboard and rules get from a real Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from tests.docker.cluster import DIGITS, Cluster, until
from tests.docker.debian import ROOT
from tests.docker.engine import Engine, prometheus_image

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

BOARD = json.loads((ROOT / "docker" / "grafana" / "dmesh.json").read_text())
RULES = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yaml").read_text())
EXPRESSIONS = sorted({target["expr"] for panel in BOARD["panels"] for target in panel["targets"]})
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}
"""What Grafana puts in their places: all servers; four times the interval between scrapes, or more."""


class Prometheus:
    """What a Prometheus says."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def ask(self, path: str) -> Any:
        """Returns an answer; None if there is none yet."""
        status, body = self.cluster.fetch(f"/api/v1/{path}", port=9090)
        assert status != 400, f"Prometheus refuses {path}: {body}"
        return json.loads(body)["data"] if status == 200 else None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series that an expression has now."""
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        answer = self.ask(f"query?query={quote(expression, safe='')}")
        return list(answer["result"]) if answer else []

    def firing(self) -> set[str]:
        """Returns the alerts that are firing."""
        answer = self.ask("alerts") or {"alerts": []}
        return {alert["labels"]["alertname"] for alert in answer["alerts"] if alert["state"] == "firing"}


@pytest.fixture(scope="module")
def images_beside(
    engine: Engine, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Prometheus, and what stands in for Grafana, which no registry within reach has: it shows its files."""
    reason = prometheus_image(engine, "dmesh-test-base:latest", "dmesh-test-prometheus:latest")
    if reason is not None:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("grafana")
    (folder / "Dockerfile").write_text(
        "FROM dmesh-test-base:latest\nRUN install -d -o 65534 /var/lib/grafana\nUSER 65534\n"
        "STOPSIGNAL SIGKILL\n"
        'ENTRYPOINT ["python3", "-m", "http.server", "--directory", "/etc", "3000"]\n'
    )
    engine.docker("build", "--quiet", "--network", "none", "--tag", "dmesh-test-grafana:latest", str(folder))
    return {
        "PROMETHEUS_IMAGE": "dmesh-test-prometheus:latest",
        "GRAFANA_IMAGE": "dmesh-test-grafana:latest",
    }


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, images_beside: dict[str, str]) -> Iterator[Prometheus]:
    """A Prometheus that has seen four workers train, beside a coordinator that goes on."""
    done = cluster.script(
        "watch",
        BUILD="--no-build",
        WORKERS="4",
        DMESH_PROGRAM=f"{DIGITS} --epochs 20 --step-delay 0.05",
        **images_beside,
    )
    assert "4 clients share" in done.stdout
    assert cluster.fetch("/api/v1/clusters", "a wrong token")[0] == 401
    yield Prometheus(cluster)
    cluster.script("down", "--volumes")


def test_it_reads_the_metrics_by_a_token_that_can_do_nothing_else(prometheus: Prometheus) -> None:
    until("Prometheus has metrics", lambda: prometheus.query("dmesh_ready"))
    [ready] = prometheus.query("dmesh_ready")
    assert ready["value"][1] == "1"
    [target] = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["scrapeUrl"]) == ("up", "http://coordinator:8471/metrics")
    cluster = prometheus.cluster
    assert cluster.fetch("/api/v1/clusters", cluster.viewer_token)[0] == 200
    path = "/api/v1/clusters/digits-4/keys?key=any&revision=1"
    assert cluster.fetch(path, cluster.viewer_token, method="DELETE")[0] == 403


def test_the_dashboards_variables_have_values(prometheus: Prometheus) -> None:
    [variable] = [one for one in BOARD["templating"]["list"] if one["type"] == "query"]
    assert variable["query"] == "label_values(dmesh_ready, instance)"
    assert prometheus.ask("label/instance/values?match[]=dmesh_ready") == ["coordinator:8471"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, expression: str) -> None:
    def numbers() -> list[str]:
        values = [series["value"][1] for series in prometheus.query(expression)]
        return [value for value in values if value != "NaN"]  # as quantiles of nothing are

    until(f"{expression} has a number", numbers, timeout=60)


def test_every_rule_is_evaluated_and_silent_while_all_is_well(prometheus: Prometheus) -> None:
    def looked_at() -> dict[str, dict[str, Any]] | None:
        groups = (prometheus.ask("rules") or {"groups": []})["groups"]
        found = {rule["name"]: rule for group in groups for rule in group["rules"]}
        return found if found and all(rule["health"] != "unknown" for rule in found.values()) else None

    rules = until("the rules are looked at", looked_at)
    assert rules.keys() == {rule["alert"] for group in RULES["groups"] for rule in group["rules"]}
    assert {name: rule["lastError"] for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert prometheus.firing() == set()


def test_the_first_member_that_is_lost_raises_an_alert(prometheus: Prometheus, engine: Engine) -> None:
    assert prometheus.query('dmesh_events_total{kind="member_lost"}')[0]["value"][1] == "0"
    cluster = prometheus.cluster
    workers = cluster.up(2, f"{DIGITS} --epochs 1000 --step-delay 0.02")
    cluster.connected(2, workers)
    engine.docker("kill", workers[0])
    until("the alert fires", lambda: prometheus.firing() == {"DmeshMembersLost"})


def test_grafana_is_given_the_dashboard_and_its_source(prometheus: Prometheus) -> None:
    cluster = prometheus.cluster
    for path in ("dmesh/dashboards/dmesh.json", "grafana/provisioning/datasources/prometheus.yaml"):
        own = path.replace("dmesh/dashboards", "grafana").replace(
            "grafana/provisioning", "grafana-provisioning"
        )
        assert cluster.fetch(f"/{path}", port=3000) == (200, (ROOT / "docker" / own).read_text())
    [provider] = yaml.safe_load((ROOT / "docker/grafana-provisioning/dashboards/dmesh.yaml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == "/etc/dmesh/dashboards"
    for service in ("prometheus", "grafana"):
        facts = cluster.inspect(cluster.compose("--profile", "observability", "ps", "--quiet", service))
        assert facts["HostConfig"]["ReadonlyRootfs"]
        assert facts["HostConfig"]["CapDrop"] == ["ALL"]
        assert facts["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"]
        assert facts["HostConfig"]["Memory"] > 0
