"""The harness of the fault scenarios: real processes, real signals, networks, disks and clocks that fail.

| variable | meaning |
|---|---|
| DMESH_FAULTS_SEED | seed of every random choice; printed in every run, drawn if not set |
| DMESH_FAULTS_ARTEFACTS | where tests keep logs and histories; pytest's temporary directories if not set |
| DMESH_FAULTS_FIGURES | file that measured figures are added to (`.faults/figures.jsonl`) |
| DMESH_FAULTS_SOAK | seconds that the soak runs (60) |
"""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.clients import free_ports
from tests.faults import clocks as _clocks
from tests.faults import disks as _disks
from tests.faults import network as _network
from tests.faults.figures import Figures, keep, scenario_of
from tests.faults.processes import ClientProcess, ServerProcess

# Read before the fixture that hides DMESH_* from the tests does its work.
SEED = int(os.environ.get("DMESH_FAULTS_SEED") or secrets.randbelow(1 << 32))
ARTEFACTS = os.environ.get("DMESH_FAULTS_ARTEFACTS")
SOAK = float(os.environ.get("DMESH_FAULTS_SOAK") or 60)

LONGEST = ["s34", "s03", "s22", "s41", "s05", "s08", "s17", "s10", "s14"]
"""Scenarios that take 20 s to a minute, mostly waiting. They begin first, beside those that compute."""


def pytest_report_header() -> str:
    return f"faults: DMESH_FAULTS_SEED={SEED} DMESH_FAULTS_SOAK={SOAK:g}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{scenario}": place for place, scenario in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name[:8], len(LONGEST)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        file = item.path.name
        keep({"scenario": scenario_of(item.path), "file": file, "test": item.name, "outcome": report.outcome})
    kept = getattr(item, "faults_artefacts", None)
    if report.failed and kept is not None:
        seed = getattr(item, "faults_seed", SEED)
        how = f'DMESH_FAULTS_SEED={SEED} make faults ARGS="{item.nodeid}"'
        report.sections.append(("reproduce", f"artefacts: {kept}\nseed of this test: {seed}\n{how}"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test; print nothing: a failure's report has it."""
    drawn = random.Random(f"{SEED}/{request.node.nodeid}").getrandbits(32)
    request.node.faults_seed = drawn
    return drawn


@pytest.fixture
def chance(seed: int) -> random.Random:
    """Where every random choice of the test comes from."""
    return random.Random(seed)


@pytest.fixture
def artefacts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where logs and histories of this test go; kept if it fails."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name)[:80]
    directory = Path(ARTEFACTS) / name if ARTEFACTS else tmp_path / "artefacts"
    directory.mkdir(parents=True, exist_ok=True)
    request.node.faults_artefacts = directory
    return directory


@pytest.fixture
def figures(request: pytest.FixtureRequest, seed: int) -> Figures:
    """Takes measured figures for docs/robustness.md, under the scenario that the file is named after."""
    return Figures(scenario_of(request.node.path), seed)


@pytest.fixture
def make_server(artefacts: Path, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Makes a `ServerProcess` with a data directory (`data_dir=None` for memory); not started yet."""
    made: list[ServerProcess] = []

    def make(*options: str, **more: object) -> ServerProcess:
        more.setdefault("data_dir", tmp_path / f"data-{len(made)}")
        more.setdefault("name", f"server-{len(made)}" if made else "server")
        made.append(ServerProcess(artefacts, *options, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def make_client(artefacts: Path) -> Iterator[Callable[..., ClientProcess]]:
    """Makes a `ClientProcess`: make_client(index, size, server.address, ...); killed at the end."""
    made: list[ClientProcess] = []

    def make(index: int, size: int, address: str, **more: object) -> ClientProcess:
        taken = [client.name for client in made]
        name = f"client-{index}"
        if name in taken:
            name += f"-{sum(other.startswith(name) for other in taken)}"
        more.setdefault("name", name)
        made.append(ClientProcess(artefacts, index, size, address, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.kill()


@pytest.fixture
def make_cluster(make_client: Callable[..., ClientProcess]) -> Callable[..., list[ClientProcess]]:
    """Makes `size` clients that have joined: make_cluster(size, server.address, sdk=True ...)."""

    def make(size: int, address: str, **more: object) -> list[ClientProcess]:
        if more.get("sdk"):
            more.setdefault("ports", free_ports(size))
        clients = [make_client(index, size, address, **more) for index in range(size)]
        joining = [client.submit("join()") for client in clients]
        for future in joining:
            future.result(90)
        return clients

    return make


@pytest.fixture
def make_network() -> Iterator[Callable[..., _network.Network]]:
    """Makes a `Network` of hosts; skips the test where there can be none."""
    if reason := _network.missing():
        pytest.skip(reason)
    made: list[_network.Network] = []

    def make(hosts: int, networks: int = 1) -> _network.Network:
        made.append(_network.Network(hosts, networks))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., _disks.SmallDisk]]:
    """Mounts small file systems: small_disk("64k"); skips the test where that cannot be done."""
    if reason := _disks.missing():
        pytest.skip(reason)
    made: list[_disks.SmallDisk] = []

    def make(size: str = "1m") -> _disks.SmallDisk:
        made.append(_disks.SmallDisk(tmp_path / f"disk-{len(made)}", size))
        return made[-1]

    yield make
    for disk in made:
        disk.close()


@pytest.fixture
def wall_clock(tmp_path: Path) -> Callable[[str], _clocks.WallClock]:
    """Makes wall clocks that can be set: wall_clock("server"); skips the test where that cannot be done."""
    if reason := _clocks.missing():
        pytest.skip(reason)
    return lambda name: _clocks.WallClock(tmp_path, name)


@pytest.fixture
def time_namespace() -> Callable[[int], list[str]]:
    """Returns command prefixes that shift the monotonic clock; skips the test where there can be none."""
    if reason := _clocks.time_namespace_missing():
        pytest.skip(reason)
    return _clocks.time_namespace
