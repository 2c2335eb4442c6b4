"""What the manifests of docker/kubernetes promise; `test_chart.py` has Helm and Kubernetes' schemas."""

from __future__ import annotations

from typing import Any

import yaml
from tests.docker.helm import CHART, PLAIN

JOBSET = CHART.parent / "jobset.yaml"


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def pods(text: str) -> list[dict[str, Any]]:
    return [one["spec"]["template"] for one in documents(text) if one["kind"] in ("StatefulSet", "Job")]


def test_the_job_of_the_jobset_is_the_charts() -> None:
    [jobset] = documents(JOBSET.read_text())
    [replicated] = jobset["spec"]["replicatedJobs"]
    theirs = replicated["template"]["spec"]["template"]
    [ours] = [pod for pod in pods(PLAIN.read_text()) if pod["spec"]["containers"][0]["name"] == "worker"]
    assert theirs == {**ours, "spec": {**ours["spec"], "restartPolicy": "Never"}}


def test_pods_are_confined_and_have_probes_and_limits() -> None:
    found = pods(PLAIN.read_text())
    assert len(found) == 2
    for pod in found:
        spec = pod["spec"]
        [container] = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        [volume] = [one for one in spec["volumes"] if one["name"] == "token"]
        assert volume["secret"]["secretName"] == "dmesh-token"
        for name, port in {"coordinator": 8470, "worker": 8480}.items():
            if container["name"] == name:
                assert container["ports"][0]["containerPort"] == port
    coordinator = found[0]["spec"]["containers"][0]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= coordinator.keys()


def test_every_selector_finds_its_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(PLAIN.read_text())]
    for document in documents(PLAIN.read_text()):
        spec = document["spec"]
        selectors = {
            "Service": lambda spec: [spec["selector"]],
            "StatefulSet": lambda spec: [spec["selector"]["matchLabels"]],
            "PodDisruptionBudget": lambda spec: [spec["selector"]["matchLabels"]],
            "NetworkPolicy": lambda spec: [spec["podSelector"]["matchLabels"]],
        }.get(document["kind"], lambda spec: [])(spec)
        for selector in selectors:
            assert sum(selector.items() <= found.items() for found in labels) == 1, document["kind"]


def test_no_secret_is_in_a_file() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert (values["token"], values["viewerToken"]) == ("", "")
    assert "kind: Secret" not in PLAIN.read_text()
    assert PLAIN.stat().st_mode & 0o111 == 0
