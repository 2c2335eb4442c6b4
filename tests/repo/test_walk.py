"""The walk of a call in docs/architecture.md: it names every module of the data plane that a call enters."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.e2e.clients import Process

from dmesh import native

ROOT = Path(__file__).resolve().parents[2]
WALK = (
    (ROOT / "docs" / "architecture.md")
    .read_text()
    .partition("## A call, step by step")[2]
    .partition("\n## ")[0]
)
NAMED = set(re.findall(r"(\w+)(?:\.py|/`)", WALK))
WAITING = {"wait"}
"""Modules that a call enters if another rank was late, so that the first look was not enough."""
ASKING = {"position_query", "base", "services", "communicator", "control_messages", "transport"}
"""Modules that a call enters if it asks another rank, which is late, where it is."""
MEDIA = {
    "shared memory": {},
    "tcp": {"DMESH_SHARED_MEMORY": "0"},
    "messages": {"DMESH_NATIVE": "0"},
}
MOST_BY_MESSAGES = 10
"""Modules that a later call enters in a group without the native core."""
MOST = {"warm": 6, "first": 12, "world": 6}
"""Modules that a call enters: a first one, and a later one that the fast path does not take."""

PROGRAM = """
import json, sys
import numpy as np
import dmesh
from dmesh import collectives

def entered(call):
    found = []

    def note(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.split(".")[0] == "dmesh" and module not in found:
            found.append(module)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    # The schedules are one package of pure data.
    parts = [module.split(".") for module in found]
    return list(dict.fromkeys("schedules" if "schedules" in names else names[-1] for names in parts))

dmesh.initialize_accelerator_system()
dmesh.coordination.barrier("so that no rank is late")
x, group = np.ones(4), collectives.world()
walks = {
    "first": entered(lambda: collectives.all_reduce(x, group=group)),
    # Whoever waits for another rank goes on in Python, so one of several calls counts.
    "fast": min((entered(lambda: collectives.all_reduce(x, group=group)) for _ in range(50)), key=len),
    "fast world": min((entered(lambda: collectives.all_reduce(x)) for _ in range(50)), key=len),
    "warm": entered(lambda: collectives.all_reduce(x, group=group, timeout=50.0)),
    "world": entered(lambda: collectives.all_reduce(x, timeout=50.0)),
}
print(json.dumps(walks))
dmesh.shutdown_accelerator_system()
"""

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


def counted(names):
    """Leave out what a call has entered because another rank was late."""
    late = WAITING | ASKING if "position_query" in names else WAITING
    return [name for name in names if name not in late]


@pytest.fixture(scope="module", params=MEDIA)
def medium(request):
    return request.param


@pytest.fixture(scope="module")
def walks(medium, tmp_path_factory):
    """Modules that the calls of each client enter on the threads that make them."""
    program = tmp_path_factory.mktemp("walk") / "program.py"
    program.write_text(PROGRAM)
    launch = Process([sys.executable, "-m", "dmesh", "run", "-n", "3", str(program)], MEDIA[medium])
    try:
        assert launch.wait() == 0, launch.err
        found = [json.loads(line[line.index("{") :]) for line in launch.out.splitlines() if "{" in line]
        assert len(found) == 3
        return [{which: counted(names) for which, names in walk.items()} for walk in found]
    finally:
        launch.end()


def test_the_fast_path_enters_no_module(medium, walks):
    if medium != "messages":  # which have none
        assert [walk["fast"] for walk in walks] == [[]] * 3
        assert [walk["fast world"] for walk in walks] == [[]] * 3


@pytest.mark.parametrize("which", MOST)
def test_a_call_enters_few_modules(medium, walks, which):
    most = MOST_BY_MESSAGES if medium == "messages" and which != "first" else MOST[which]
    for walk in walks:
        assert len(walk[which]) <= most, " ".join(walk[which])


@pytest.mark.parametrize("which", MOST)
def test_the_walk_names_the_modules_of_a_call(walks, which):
    for walk in walks:
        missing = set(walk[which]) - NAMED
        assert not missing, f"docs/architecture.md does not name {sorted(missing)}"
