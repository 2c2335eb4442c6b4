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
NAMED = set(re.findall(r"(\w+)\.py", WALK))
WAITING = {"waiting", "base", "inquiry"}
"""Modules that a call enters only if another rank is late."""
NETWORK = {"connection"}
"""Modules of the TCP transport below `channel`, which a call by messages enters besides."""
MOST = {"warm": 6, "first": 12}
"""Modules that a call enters: a first one, and a later one that the fast path does not take."""
MOST_BELOW = {"warm": 0, "first": 1}
"""Those of the transport."""

PROGRAM = """
import json, sys
import numpy as np
import dmesh
from dmesh import collectives

def entered(call):
    found = []

    def note(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("dmesh.") and module not in found:
            found.append(module)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [module.rpartition(".")[2] for module in found]

dmesh.initialize_accelerator_system()
x, group = np.ones(4), collectives.world()
walks = {
    "first": entered(lambda: collectives.all_reduce(x, group=group)),
    # Whoever waits for another rank goes on in Python, so one of several calls counts.
    "fast": min((entered(lambda: collectives.all_reduce(x, group=group)) for _ in range(50)), key=len),
    "warm": entered(lambda: collectives.all_reduce(x, group=group, timeout=50.0)),
    "world": entered(lambda: collectives.all_reduce(x, timeout=50.0)),
}
if dmesh.client_id() == 0:
    print(json.dumps(walks))
dmesh.shutdown_accelerator_system()
"""

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


@pytest.fixture(scope="module", params=["1", "0"], ids=["shared memory", "tcp"])
def walks(request, tmp_path_factory):
    """Modules that calls of client 0 enter on their own threads."""
    program = tmp_path_factory.mktemp("walk") / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "dmesh", "run", "-n", "2", str(program)]
    launch = Process(command, {} if request.param == "1" else {"DMESH_SHARED_MEMORY": "0"})
    try:
        assert launch.wait() == 0, launch.err
        (line,) = [line for line in launch.out.splitlines() if "{" in line]
        return json.loads(line[line.index("{") :])
    finally:
        launch.end()


def test_the_fast_path_enters_no_module(walks):
    assert walks["fast"] == []


@pytest.mark.parametrize("which", ["warm", "first"])
def test_a_call_enters_no_more_modules_than_it_did(walks, which):
    names = [name for name in walks[which] if name not in WAITING | NETWORK]
    assert len(names) <= MOST[which], names
    assert len([name for name in walks[which] if name in NETWORK]) <= MOST_BELOW[which], walks[which]


def test_without_a_group_only_the_world_is_looked_up_besides(walks):
    assert set(walks["world"]) - set(walks["warm"]) - WAITING <= {"context"}


@pytest.mark.parametrize("which", ["warm", "first", "world"])
def test_the_walk_names_the_modules_of_a_call(walks, which):
    missing = set(walks[which]) - NAMED - WAITING
    assert not missing, f"docs/architecture.md does not name {sorted(missing)}"
