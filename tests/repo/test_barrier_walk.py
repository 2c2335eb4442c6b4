"""The walk of a barrier in docs/architecture.md: it names every module that one enters, on both sides."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.e2e.clients import Process

ROOT = Path(__file__).resolve().parents[2]
WALK = (
    (ROOT / "docs" / "architecture.md")
    .read_text()
    .partition("## A barrier, step by step")[2]
    .partition("\n## ")[0]
)
MOST = {"client": 8, "server": 11}
"""Modules between the call and its return: those of the client's threads, and those of the server's loop."""

PROGRAM = """
import json, pathlib, sys, threading, time
entered = None

def note(frame, event, argument):
    # Constructors and comparisons that dataclasses generate are no code to be read.
    if event == "call" and entered is not None and frame.f_code.co_filename != "<string>":
        module = frame.f_globals.get("__name__", "")
        if module.startswith("dmesh"):
            entered.append((module, frame.f_code.co_name))

threading.setprofile(note)
import dmesh
from dmesh import coordination

dmesh.initialize_accelerator_system()
sys.setprofile(note)
walks = []
for _ in range(60):
    time.sleep(0.002 * dmesh.client_id())  # so that both arrivals come while client 0 looks
    entered = []
    coordination.barrier("step")
    found, entered = entered, None
    walks.append(found)
if dmesh.client_id() == 0:
    pathlib.Path(sys.argv[1]).write_text(json.dumps(walks))
sys.setprofile(None)
dmesh.shutdown_accelerator_system()
"""


def path(calls: list[tuple[str, str]]) -> set[str]:
    """Returns the modules of a barrier with both arrivals, the server's until it has sent the last result."""
    sends = [at for at, call in enumerate(calls) if call == ("dmesh_server.rpc.session_server", "_send")]
    sent = max(sends, default=0)
    arrivals = calls[:sent].count(("dmesh_server.rpc.session_input", "take"))
    found = {
        module for at, (module, _) in enumerate(calls) if at <= sent or not module.startswith("dmesh_server.")
    }
    return found if arrivals == 2 else set()


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """Modules that warm barriers of two clients enter, where the server is, too; the fewest first.

    Heartbeats come into some of them, and on a busy machine messages come in another order.
    """
    found = tmp_path_factory.mktemp("found") / "walks.json"
    program = tmp_path_factory.mktemp("walk") / "program.py"
    program.write_text(PROGRAM)
    launch = Process([sys.executable, "-m", "dmesh", "run", "-n", "2", str(program), str(found)], {})
    try:
        assert launch.wait() == 0, launch.err
        walks = [path([(module, name) for module, name in calls]) for calls in json.loads(found.read_text())]
    finally:
        launch.end()
    return sorted(filter(None, walks), key=len)


def file_of(module: str) -> str:
    """Returns a module's file within its distribution's folder, without `.py`."""
    top, _, inner = module.partition(".")
    folder = ROOT / {"dmesh": "client", "dmesh_server": "server"}[top] / top / inner.replace(".", "/")
    return inner.replace(".", "/") + ("/__init__" if folder.is_dir() else "")


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_barrier_enters_no_more_modules_than_it_did(walks: list[set[str]], side: str) -> None:
    found = sorted(name for name in walks[0] if name.startswith("dmesh_server.") == (side == "server"))
    assert len(found) <= MOST[side], found


def test_the_drawing_names_the_modules_of_a_barrier_and_no_others(walks: list[set[str]]) -> None:
    drawing = WALK.partition("```text")[2].partition("```")[0]
    drawn = set(re.findall(r"([\w/]+)\.py", drawing))
    found = [{file_of(module) for module in walk} for walk in walks]
    assert drawn in found, min((drawn ^ one for one in found), key=len)
