"""Kept clients end: by a stop, a death in or between cells, a second interrupt, with the notebook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from tests.notebook.conftest import Kept, Start
from tests.processes import running_after

from dmesh.errors import CellError, KeptClientsError
from dmesh.launcher import registry

NOTEBOOK = """
import os
from dmesh.launcher.labels import Output
from dmesh.notebook.clients import KeptClients
clients = KeptClients(2, Output(1, os.environ), Output(2, os.environ))
clients.run("import subprocess, os\\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)")
clients.run("print('pids', os.getpid(), child.pid)")
{then}
"""


def processes(kept: Kept) -> list[psutil.Process]:
    return [
        psutil.Process(int(line.partition("pid ")[2].partition(",")[0])) for line in kept.clients.status()
    ]


def test_a_stop_ends_them_as_the_end_of_a_script_does(start: Start) -> None:
    kept = start(2)
    kept.clients.run(
        "import atexit, dmesh\ndmesh.initialize_accelerator_system()\natexit.register(print, 'goodbye')"
    )
    found = processes(kept)
    kept.out.take()
    assert os.getpid() in [run.pid for run in registry.living()], "`dmesh why` finds them"
    kept.clients.close()
    assert os.getpid() not in [run.pid for run in registry.living()]
    assert sorted(kept.out.take()) == ["[0] goodbye", "[1] goodbye"]
    assert "Traceback" not in kept.err.text
    assert not running_after(found)
    assert kept.clients.status() == ["no clients: they were stopped"]
    with pytest.raises(KeptClientsError, match="no clients are running: they were stopped"):
        kept.clients.run("1")


def test_a_death_in_a_cell_ends_all_and_says_how(start: Start) -> None:
    kept = start(2)
    kept.clients.run(
        "import os, signal, dmesh\ndmesh.initialize_accelerator_system()\nme = dmesh.client_id()"
    )
    found = processes(kept)
    with pytest.raises(CellError) as caught:
        kept.clients.run("if me == 1: os.kill(os.getpid(), signal.SIGKILL)\ndmesh.collectives.barrier()")
    text = str(caught.value)
    assert re.match(r"rank 1 \(pid \d+\) was killed by SIGKILL in <cell> after", text)
    assert "All 2 clients have ended, and their variables are gone." in text
    assert caught.value.ranks[0] == 1
    assert not running_after(found)
    with pytest.raises(KeptClientsError, match="a client ended in a cell"):
        kept.clients.pull("me")


def test_a_death_between_cells_is_told_by_the_next_one(start: Start) -> None:
    kept = start(2)
    found = processes(kept)
    found[1].kill()
    os.waitid(os.P_PID, found[1].pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its status is still there
    with pytest.raises(KeptClientsError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL, between"):
        kept.clients.run("1")
    assert not running_after(found[:1])


def test_a_second_interrupt_kills_them(start: Start) -> None:
    kept = start(1)
    kept.out.when["here\n"] = lambda: signal.raise_signal(signal.SIGINT)
    kept.out.when["deaf\n"] = lambda: signal.raise_signal(signal.SIGINT)
    found = processes(kept)
    with pytest.raises(KeyboardInterrupt):
        kept.clients.run(
            "import time\ntry:\n    print('here'); time.sleep(600)\n"
            "except KeyboardInterrupt:\n    print('deaf'); time.sleep(600)"
        )
    assert not running_after(found)
    assert kept.clients.status() == ["no clients: they were killed by an interrupt"]
    assert "was killed by SIGKILL" in kept.err.text


def test_a_rank_that_ignores_the_interrupt_is_named(start: Start, tmp_path) -> None:
    kept = start(2, terminate_grace=0.0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    kept.err.when["has not reacted to the interrupt yet"] = lambda: gate.write_text("go")
    kept.clients.run("import os, signal\nme = int(os.environ['RANK'])")
    with pytest.raises(CellError, match="ValueError"):
        kept.clients.run(
            "signal.signal(signal.SIGINT, signal.SIG_IGN) if me == 0 else None\n"
            f"if me == 1: raise ValueError('first')\nopen({str(gate)!r}).read()"
        )
    assert (
        "dmesh: rank 0 has not reacted to the interrupt yet. Another interrupt kills the clients"
        in kept.err.text
    )
    assert [result.text for result in kept.clients.run("me")] == ["0", "1"]


@pytest.mark.parametrize(
    ("then", "number"),
    [
        ("import time; print('idle', flush=True); time.sleep(600)", signal.SIGKILL),
        ("clients.run('import time; print(\"busy\"); time.sleep(600)')", signal.SIGKILL),
        ("print('over', flush=True)", None),
    ],
    ids=["killed while idle", "killed in a cell", "ends by itself"],
)
def test_they_end_with_the_notebooks_process(then: str, number: signal.Signals | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK.format(then=then)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as notebook:
        assert notebook.stdout is not None
        pids: list[int] = []
        for line in notebook.stdout:
            pids += [int(word) for word in line.split()[2:] if "pids" in line]
            if any(word in line for word in ("idle", "busy", "over")):
                break
        if number is not None:
            notebook.send_signal(number)
    assert len(pids) == 4
    assert not running_after(pids)
