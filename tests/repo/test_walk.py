"""The walk of a call in docs/architecture.md: it names every module of the data plane that a call enters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh import collectives, native

ROOT = Path(__file__).resolve().parents[2]
WALK = (
    (ROOT / "docs" / "architecture.md")
    .read_text()
    .partition("## A call, step by step")[2]
    .partition("\n## ")[0]
)
NAMED = set(re.findall(r"(\w+)\.py", WALK))
WAITING = {"waiting", "base", "taking"}
"""Modules that a call enters only if another rank is late."""
NETWORK = {"local", "transport"}
"""Modules of the network within this process that the test uses in place of sockets."""
MOST = {"warm": 6, "first": 12}
"""Modules that a call enters: a first one, and a later one that the fast path does not take."""

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


def entered(call):
    """Returns the modules of dmesh that a call enters on its own thread."""
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
    return found


@pytest.fixture(scope="module", params=["native", "dedicated"])
def walks(request):
    x = np.ones(4)
    with cluster(2, shm=(request.param,)) as ranks:

        def body(communicator):
            group = communicator.world
            return {
                "first": entered(lambda: collectives.all_reduce(x, group=group)),
                "fast": entered(lambda: collectives.all_reduce(x, group=group)),
                "warm": entered(lambda: collectives.all_reduce(x, group=group, timeout=50.0)),
            }

        return ranks.all(body)[0]


def test_the_fast_path_enters_no_module(walks):
    assert walks["fast"] == []


@pytest.mark.parametrize("which", ["warm", "first"])
def test_a_call_enters_no_more_modules_than_it_did(walks, which):
    names = [name for name in walks[which] if name.rpartition(".")[2] not in WAITING | NETWORK]
    assert len(names) <= MOST[which], names


@pytest.mark.parametrize("which", ["warm", "first"])
def test_the_walk_names_the_modules_of_a_call(walks, which):
    missing = {name.rpartition(".")[2] for name in walks[which]} - NAMED - WAITING - NETWORK
    assert not missing, f"docs/architecture.md does not name {sorted(missing)}"
