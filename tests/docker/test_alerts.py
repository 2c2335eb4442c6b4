"""When the alert rules fire and when they do not, as Prometheus works it out from series made for it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.docker.debian import ROOT, program

from dmesh_server.telemetry.measures import QUICK

pytestmark = [pytest.mark.docker]

FOLDER = ROOT / "docker" / "prometheus"
RULES = FOLDER / "alerts.yaml"
TICK = 15
"""Seconds between samples, and between looks at the rules."""

Series = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """Series, and whether an alert fires in them."""

    alert: str
    series: Series
    at: str
    fires: bool

    def __str__(self) -> str:
        return f"{self.alert}-{'fires' if self.fires else 'is-silent'}-at-{self.at}"


def on(name: str, **labels: str) -> str:
    """Returns a series' name."""
    written = [f'{key}="{value}"' for key, value in {"instance": "one", **labels}.items()]
    return f"{name}{{{', '.join(written)}}}"


def buckets(name: str, seconds: float) -> Series:
    """Returns a histogram with the server's bounds: 10 times between two samples, something took so long."""
    return {
        on(f"{name}_bucket", le=bound): f"0+{10 if seconds <= float(bound) else 0}x60"
        for bound in (*map(str, QUICK), "+Inf")
    }


def cases(alert: str, wrong: Series, fires_at: str, not_yet_at: str | None, *well: Series) -> Sequence[Case]:
    early = [Case(alert, wrong, not_yet_at, fires=False)] if not_yet_at else []
    return [Case(alert, wrong, fires_at, True), *early, *(Case(alert, one, "20m", False) for one in well)]


READY = on("dmesh_ready")
FAILED = on("dmesh_store_failed")
CASES = [
    *cases("DmeshServerDown", {"up": "0x80"}, "1m30s", "30s", {READY: "1x80"}, {READY: "0x80"}),
    # A server that goes away: its last sample is forgotten, not shown for ever.
    *cases("DmeshServerDown", {READY: "1x4 stale"}, "4m", "1m30s"),
    *cases("DmeshServerNotReady", {READY: "1 0x80"}, "1m30s", "45s", {READY: "1x80"}, {"up": "0x80"}),
    *cases("DmeshStoreFailed", {FAILED: "0 1x80"}, "1m", "15s", {FAILED: "0x80"}),
    *cases(
        "DmeshMembersLost",
        {on("dmesh_events_total", kind="member_lost"): "0x4 1x80"},
        "2m",
        "45s",
        {on("dmesh_events_total", kind="member_lost"): "3x80"},
        {on("dmesh_events_total", kind="member_joined"): "0+1x80"},
        {on("dmesh_events_total", kind="member_lost"): "0x4 1x80"},  # 20 minutes later
    ),
    *cases("DmeshMembersLost", {on("dmesh_events_total", kind="member_failed"): "0x4 1x80"}, "2m", "45s"),
    *cases(
        "DmeshMembersGetNowhere",
        {on("dmesh_members", condition="STUCK"): "0 1x80"},
        "3m",
        "1m",
        {on("dmesh_members", condition="CONNECTED"): "4x80", on("dmesh_members", condition="STUCK"): "0x80"},
        {on("dmesh_members", condition="BLOCKED"): "1 1 0x80"},
    ),
    *cases("DmeshMembersGetNowhere", {on("dmesh_members", condition="BLOCKED"): "2x80"}, "3m", "1m"),
    *cases(
        "DmeshBarrierWaitsLong",
        {on("dmesh_barrier_oldest_age_seconds"): "0+15x80"},
        "16m",
        "14m",
        {on("dmesh_barrier_oldest_age_seconds"): "0x80"},
        {on("dmesh_barrier_oldest_age_seconds"): "900x80"},
    ),
    *[
        case
        for alert, name, slow, quick in (
            ("DmeshStoreSlow", "dmesh_store_commit_seconds", 0.4, 0.2),
            ("DmeshEventLoopLate", "dmesh_event_loop_lag_seconds", 0.9, 0.4),
            ("DmeshHeartbeatsLate", "dmesh_heartbeat_lateness_seconds", 7.0, 4.0),
        )
        for case in cases(alert, buckets(name, slow), "8m", "4m", buckets(name, quick))
    ],
    *cases(
        "DmeshCallersRefused",
        {on("dmesh_callers_refused_total", reason="token"): "0+30x80"},
        "8m",
        "4m",
        {on("dmesh_callers_refused_total", reason="token"): "0+1x80"},
        {on("dmesh_callers_refused_total", reason="token"): "5x80"},
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def promtool() -> Path:
    found = program("usr/bin/promtool", "prometheus")
    if isinstance(found, str):
        pytest.skip(f"the alert rules are not tried: {found}")
    return found


def run(promtool: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def unit_test(case: Case) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
    return {
        "name": str(case),
        "interval": f"{TICK}s",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": case.at,
                "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
            }
        ],
    }


def check(promtool: Path, folder: Path, case: Case) -> subprocess.CompletedProcess[str]:
    file = folder / "test.yaml"
    tests = {"rule_files": [str(RULES)], "evaluation_interval": f"{TICK}s", "tests": [unit_test(case)]}
    file.write_text(yaml.safe_dump(tests))
    return run(promtool, "test", "rules", file)


def test_every_alert_is_seen_to_fire_and_to_be_silent() -> None:
    rules = yaml.safe_load(RULES.read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {case.alert for case in CASES if case.fires} == names
    assert {case.alert for case in CASES if not case.fires} == names


def test_prometheus_accepts_rules_and_configuration(promtool: Path, tmp_path: Path) -> None:
    done = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stderr
    # It looks for the files that the configuration names: the rules are beside it there, the token a secret.
    text = (FOLDER / "prometheus.yaml").read_text()
    assert "/etc/prometheus/alerts*.yaml" in text
    token = tmp_path / "token"
    token.touch()
    file = tmp_path / "prometheus.yaml"
    file.write_text(
        text.replace("/etc/prometheus", str(FOLDER)).replace("/run/secrets/dmesh_viewer_token", str(token))
    )
    done = run(promtool, "check", "config", file)
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alerts_fire_when_something_is_wrong_and_only_then(
    promtool: Path, tmp_path: Path, case: Case
) -> None:
    done = check(promtool, tmp_path, case)
    assert done.returncode == 0, done.stdout + done.stderr
    # The opposite is refused, so the test can fail.
    opposite = Case(case.alert, case.series, case.at, not case.fires)
    assert check(promtool, tmp_path, opposite).returncode == 1
