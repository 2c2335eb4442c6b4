"""The chart, as Helm renders it, against Kubernetes' schemas; and the dashboard against Grafana's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker import helm
from tests.docker.debian import ROOT
from tests.docker.test_kubernetes import JOBSET, documents, pods

pytestmark = [pytest.mark.manifests]

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
"""Of Kubernetes: `ReadWriteOncePod` is there since 1.29, schemas are up to 1.37."""

SECRETS = {"token": "t" * 32, "viewerToken": "12345678901234567890"}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "secrets": SECRETS,
    "large": {
        "workers": 64,
        "workerCpu": 8,
        "workerMemory": "16Gi",
        "backoffLimit": 0,
        "restartPolicy": "rejoin",
    },
    "program": {
        "program": "/program/train.py --epochs 3",
        "workerImage": "registry.example:5000/train@sha256:00ff",
    },
    "places": {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "dmesh", "effect": "NoSchedule"}],
        "coordinatorAccessMode": "ReadWriteOnce",
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no workers": ({"workers": 0}, "workers"),
    "workers by name": ({"workers": "four"}, "workers"),
    "misspelt": ({"worker": 4}, "worker"),
    "policy": ({"restartPolicy": "Always"}, "restartPolicy"),
    "half a CPU": ({"workerCpu": "500m"}, "workerCpu"),
    "short token": ({"token": "short", "viewerToken": "v" * 32}, "token"),
    "one token": ({"token": "t" * 32}, "viewerToken must be set with token"),
}


@pytest.fixture(params=helm.find())
def program(request: pytest.FixtureRequest) -> Path:
    """Each Helm that there is."""
    found = helm.find()[request.param]
    if isinstance(found, str):
        pytest.skip(found)
    return found


def rendered(program: Path, values: dict[str, Any]) -> str:
    done = helm.template(program, "training", values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def schemas() -> Any:
    """Returns the package with Kubernetes' schemas."""
    return pytest.importorskip(
        "kubernetes_validate", reason="pip install 'dmesh[manifests]' (make manifests does)"
    )


def test_helm_finds_nothing_wrong(program: Path) -> None:
    done = helm.run(program, "lint", "--strict", str(helm.CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_manifests_are_what_every_kubernetes_describes(program: Path, values: dict[str, Any]) -> None:
    kubernetes = schemas()
    found = documents(rendered(program, values))
    assert sorted(one["kind"] for one in found) == sorted(
        ["Service", "StatefulSet", "Job", *["PodDisruptionBudget", "NetworkPolicy"] * 2]
        + ["Secret"] * ("token" in values)
    )
    for document in found:
        assert document["metadata"]["name"].startswith("training-")
        for version in VERSIONS:
            assert kubernetes.validate(document, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plain_ones_and_the_jobset_are_too(version: str) -> None:
    kubernetes = schemas()
    for document in documents(helm.PLAIN.read_text()):
        kubernetes.validate(document, version, strict=True)
    [jobset] = documents(JOBSET.read_text())
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    kubernetes.validate(job, version, strict=True)
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes.ValidationError, match="'name' is a required property"):
        kubernetes.validate(job, version, strict=True)


def test_the_plain_manifests_are_the_chart(program: Path) -> None:
    done = helm.template(program, "dmesh", {})
    assert sorted(documents(done.stdout), key=str) == sorted(documents(helm.PLAIN.read_text()), key=str)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_values_that_cannot_work_are_refused_by_name(program: Path, case: tuple[dict[str, Any], str]) -> None:
    values, says = case
    done = helm.template(program, "training", values)
    assert done.returncode != 0
    assert says in done.stderr


def test_every_value_has_an_effect_and_a_schema(program: Path) -> None:
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    changed = {name: value for case in VALUES.values() for name, value in case.items()}
    changed |= {"serverImage": "x:1", "imagePullPolicy": "Always"}
    changed |= {"coordinatorCpu": "3", "coordinatorMemory": "3Gi", "coordinatorStorage": "3Gi"}
    assert changed.keys() == values.keys(), "VALUES changes every value"
    before = rendered(program, SECRETS)
    for name, value in changed.items():
        assert name in SECRETS or rendered(program, {**SECRETS, name: value}) != before, name


def test_values_arrive_where_they_should(program: Path) -> None:
    _, worker = sorted(
        pods(rendered(program, VALUES["program"])), key=lambda pod: pod["spec"]["containers"][0]["name"]
    )
    [container] = worker["spec"]["containers"]
    assert container["args"] == ["/program/train.py", "--epochs", "3"]
    assert container["image"] == "registry.example:5000/train@sha256:00ff"
    for pod in pods(rendered(program, VALUES["places"])):
        for name in ("imagePullSecrets", "nodeSelector", "tolerations"):
            assert pod["spec"][name] == VALUES["places"][name]
    [secret] = [one for one in documents(rendered(program, SECRETS)) if one["kind"] == "Secret"]
    assert secret["stringData"] == {
        "token": f"{SECRETS['token']}\n{SECRETS['viewerToken']} role=viewer name=prometheus\n",
        "viewer-token": SECRETS["viewerToken"],
    }


def test_helm_tells_what_comes_next(program: Path) -> None:
    done = helm.run(program, "install", "--dry-run=client", "training", str(helm.CHART))
    if done.returncode and "cluster unreachable" in done.stderr:
        pytest.skip("Helm 3 asks a cluster even for this")
    assert "port-forward statefulset/training-coordinator 8471" in done.stdout
    assert "waits for the secret training-token" in done.stdout


def lost(before: Any, after: Any, where: str = "dashboard") -> list[str]:
    """Returns what is in `before` and is not, or is something else, in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = [
            lost(value, after[key], f"{where}.{key}") if key in after else [f"{where}.{key}"]
            for key, value in before.items()
        ]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = [lost(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(before, after, strict=True))]
    else:
        return [] if before == after else [where]
    return [one for part in parts for one in part]


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    pytest.importorskip(
        "grafana_foundation_sdk", reason="pip install 'dmesh[manifests]' (make manifests does)"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def as_read_by_grafana(board: dict[str, Any]) -> Any:
        return json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))

    board = json.loads((ROOT / "docker" / "grafana" / "dmesh.json").read_text())
    assert lost(board, as_read_by_grafana(board)) == []
    board["panels"][0]["titel"] = "misspelt"
    board["panels"][0]["targets"][0]["expression"] = "misspelt"
    assert lost(board, as_read_by_grafana(board)) == [
        "dashboard.panels[0].targets[0].expression",
        "dashboard.panels[0].titel",
    ]
