"""What holds for every test: reproducible examples, and nothing left running."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from tests.e2e import forkserver
from tests.processes import running_after, started

# Shells start background jobs with SIGINT ignored, which our children would inherit; some are tested with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers make a token file at their first start and clients look for it there: not in the home directory of
# whoever runs the tests, and the same for all processes of a run.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="dmesh-tests-")

# The tests start more than a thousand processes, each of which would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Examples are the same in every run, so that a red run can be repeated; DMESH_HYPOTHESIS=explore looks for
# new ones.
settings.register_profile(
    "repeat",
    deadline=None,
    derandomize=True,
    max_examples=70,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("explore", settings.get_profile("repeat"), derandomize=False, max_examples=1000)
settings.load_profile(profile := os.environ.get("DMESH_HYPOTHESIS", "repeat"))
if profile == "repeat":
    # Hypothesis mixes constants of the modules that a process has imported into its examples: of those that
    # the files have imported which this worker happens to have run.
    providers._get_local_constants = lambda: providers._local_constants


_CLUSTER_VARIABLES = (
    "DTENSOR_", "DMESH_", "SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "TF_CONFIG", "RANK", "WORLD_SIZE",
    "LOCAL_", "MASTER_", "TPU_", "MEGASCALE_",
)  # fmt: skip


_KEPT = ("DMESH_HYPOTHESIS", "DMESH_NATIVE", "SLURM_CONF")


LONGEST = (
    "collectives/test_processes.py", "coordination/test_coordination_liveness.py",
    "telemetry/test_processes.py", "collectives/test_rejoin_processes.py",
    "coordination/test_coordination_carriers.py", "coordination/test_coordination_outages.py",
    "e2e/test_failures.py", "engines/test_launch.py", "launch/test_run_hosts.py", "launch/test_run.py",
    "e2e/test_run.py", "collectives/test_values.py", "notebook/test_endings.py", "e2e/test_mistakes.py",
    "server/test_malformed.py",
)  # fmt: skip
"""Files that take the longest. A worker of xdist takes a file at a time, and none should end with these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first; `make test` keeps this order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Keep what ten thousand collected tests consist of out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a cluster configuration of the shell that it was started from."""
    for name in list(os.environ):
        if name.startswith(_CLUSTER_VARIABLES) and name not in _KEPT:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _no_traces():
    """Removes the run's token file."""
    yield
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_orphans():
    """Fails the run if a test left a process behind."""
    before = started()
    yield
    left = started() - before
    forkserver.end_all()
    alive = running_after(left, timeout=10)
    assert not alive, f"processes left behind: {alive}"
