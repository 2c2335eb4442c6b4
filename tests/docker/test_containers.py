"""The cluster of docker/compose.yaml, by both Composes: real containers, with real failures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.docker.cluster import DIGITS, Cluster, files, until
from tests.docker.compose import VERSIONS
from tests.docker.debian import ROOT
from tests.docker.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

LONG = f"{DIGITS} --epochs 1000 --step-delay 0.02"
BRIEF = f"{DIGITS} --epochs 5"
SHORT = f"{DIGITS} --epochs 20 --step-delay 0.05"
EQUAL = "equals the single-process run to 1e-6: yes"

by_one_of_them = pytest.mark.parametrize("cluster", VERSIONS[:1], indirect=True)
"""What no Compose has a part in, once the containers run."""


def address(cluster: Cluster, container: str) -> str:
    [network] = cluster.inspect(container)["NetworkSettings"]["Networks"].values()
    return network["IPAddress"]


@by_one_of_them
def test_the_images_are_small_and_bare(engine: Engine, images: dict[str, str], cluster: Cluster) -> None:
    [base] = json.loads(engine.docker("image", "inspect", "dmesh-test-base:latest"))
    for target, image in images.items():
        [facts] = json.loads(engine.docker("image", "inspect", image))
        added = (facts["Size"] - base["Size"]) / 1e6
        print(f"{image}: {facts['Size'] / 1e6:.0f} MB, {added:.0f} MB of it beyond the base image")
        assert added < 150
        assert facts["Config"]["User"] == "10001:10001"
        assert facts["Config"]["Healthcheck"]["Test"][-1] == target
        assert facts["Config"]["Labels"]["org.opencontainers.image.title"] == f"dmesh-{target}"
        assert files(engine, image, "*.whl", "gcc", "token", "pip") == []
        assert len(files(engine, image, "_native*.so")) == 1, "the native core is in the wheel"
        history = engine.docker("history", "--no-trunc", image)
        assert cluster.token not in history
    version = engine.docker("run", "--rm", "--network", "none", images["server"][:-7], "--help")
    assert "coordination server" in version


@by_one_of_them
def test_the_documented_image_has_a_library_more(
    cluster: Cluster, engine: Engine, context: Path, tmp_path: Path
) -> None:
    [text] = re.findall(r"```dockerfile\n(.*?)```", (ROOT / "docs/how-to/docker.md").read_text(), re.DOTALL)
    shutil.copytree(context / "docker" / "wheelhouse", tmp_path / "wheels")
    first, *rest = text.replace("pandas", "--no-index --find-links /wheels click").splitlines(keepends=True)
    (tmp_path / "Dockerfile").write_text("".join([first, "COPY wheels /wheels\n", *rest]))
    engine.docker("build", "--quiet", "--network", "none", "--tag", "dmesh-mine", str(tmp_path))
    for image, code in (("dmesh-mine", 0), ("dmesh-worker", 1)):
        run = ("docker", "run", "--rm", "--network", "none", image, "-c", "import dmesh, click")
        assert engine.run(*run, check=False).returncode == code
    done = cluster.script(
        "up", BUILD="--no-build", WORKERS="2", DMESH_PROGRAM=BRIEF, DMESH_WORKER_IMAGE="dmesh-mine"
    )
    assert EQUAL in done.stdout


def test_four_containers_learn_digits_and_the_dashboard_shows_them(cluster: Cluster, engine: Engine) -> None:
    workers = cluster.up(4, SHORT)
    members = cluster.connected(4, workers)
    assert sorted(member["index"] for member in members.values()) == [0, 1, 2, 3]
    assert len({address(cluster, one) for one in workers}) == 4
    for container in (*workers, cluster.coordinator()):
        facts = cluster.inspect(container)
        assert facts["HostConfig"]["ReadonlyRootfs"]
        assert facts["HostConfig"]["CapDrop"] == ["ALL"]
        assert facts["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"]
        assert facts["HostConfig"]["Memory"] == 1 << 30
        assert facts["HostConfig"]["NanoCpus"] > 0
        assert facts["HostConfig"]["PidsLimit"] == 512
        assert engine.docker("exec", container, "id", "-u") == "10001"
        for place in ("/anywhere", "/opt/dmesh/anywhere", "/etc/anywhere"):
            done = engine.run("docker", "exec", container, "touch", place, check=False)
            assert "Read-only file system" in done.stderr
        assert cluster.token not in json.dumps(facts), "the token is in no variable, label or argument"
    assert cluster.fetch("/api/v1/clusters")[0] == 401
    assert cluster.fetch("/api/v1/clusters", cluster.viewer_token)[0] == 200
    assert [cluster.exit_code(one) for one in workers] == [0] * 4
    [first] = [one for one in workers if members[one]["index"] == 0]
    assert EQUAL in cluster.logs(first)
    assert cluster.inspect(cluster.coordinator())["State"]["Health"]["Status"] == "healthy"


def test_a_second_command_scales_it(cluster: Cluster) -> None:
    workers = cluster.up(6, BRIEF, "--scale", "worker=6")
    assert len(workers) == 6
    assert [cluster.exit_code(one) for one in workers] == [0] * 6
    assert any("6 clients share" in cluster.logs(one) and EQUAL in cluster.logs(one) for one in workers)


def test_one_command_brings_it_up_and_ends_as_the_workers_do(cluster: Cluster) -> None:
    done = cluster.script("up", BUILD="--no-build", WORKERS="3", DMESH_PROGRAM=BRIEF)
    assert "3 clients share" in done.stdout
    assert EQUAL in done.stdout
    assert "dashboard: http://localhost:8471/" in done.stdout
    failed = cluster.script(
        "up", check=False, BUILD="--no-build", WORKERS="2", DMESH_PROGRAM="/program/none.py"
    )
    assert failed.returncode == 1
    assert failed.stderr.count("ended with exit code 2") == 2
    assert "can't open file '/program/none.py'" in failed.stdout


def check_that_the_others_name(cluster: Cluster, workers: list[str], lost: str, task: str) -> None:
    for one in workers:
        if one != lost:
            assert cluster.exit_code(one) != 0
            log = cluster.logs(one)
            assert f"/job:worker/task:{task}" in log, log[-3000:]
            assert lost[:12] in log, log[-3000:]


@by_one_of_them
def test_a_killed_worker_is_named_by_the_others(cluster: Cluster, engine: Engine) -> None:
    workers = cluster.up(4, LONG)
    members = cluster.connected(4, workers)
    until("training", lambda: any("epoch  1" in cluster.logs(one) for one in workers))
    victim = next(one for one in workers if members[one]["index"] == 2)
    engine.docker("kill", victim)
    check_that_the_others_name(cluster, workers, victim, "2")


@by_one_of_them
def test_a_worker_without_its_network_is_noticed_and_named(cluster: Cluster, engine: Engine) -> None:
    workers = cluster.up(4, LONG)
    members = cluster.connected(4, workers)
    until("training", lambda: any("epoch  1" in cluster.logs(one) for one in workers))
    victim = next(one for one in workers if members[one]["index"] == 1)
    engine.docker("network", "disconnect", "--force", "dmesh_default", victim)
    check_that_the_others_name(cluster, workers, victim, "1")
    assert cluster.exit_code(victim) != 0, "it gives up, too"


@by_one_of_them
def test_the_coordinator_is_killed_and_comes_back_while_they_train(cluster: Cluster, engine: Engine) -> None:
    workers = cluster.up(4, f"{DIGITS} --epochs 40 --step-delay 0.06")
    members = cluster.connected(4, workers)
    until("training", lambda: any("epoch  1" in cluster.logs(one) for one in workers))
    coordinator = cluster.coordinator()
    engine.docker("kill", coordinator)
    assert cluster.fetch("/livez")[0] != 200
    engine.docker("start", coordinator)
    again = cluster.connected(4, workers)
    assert {one: member["incarnation"] for one, member in again.items()} == {
        one: member["incarnation"] for one, member in members.items()
    }
    assert [cluster.exit_code(one) for one in workers] == [0] * 4
    assert any(EQUAL in cluster.logs(one) for one in workers)


def test_nothing_is_left_running(cluster: Cluster, engine: Engine) -> None:
    cluster.script("down", "--volumes")
    assert engine.docker("ps", "--all", "--quiet") == ""
    assert engine.docker("volume", "ls", "--quiet") == ""
    networks = engine.docker("network", "ls", "--format", "{{.Name}}").split()
    assert "dmesh_default" not in networks
