"""`%%dmesh` in IPython's own shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dmesh.errors import CellError, ConfigurationError, KeptClientsError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    made.run_line_magic("load_ext", "dmesh")
    yield made
    made.run_line_magic("unload_ext", "dmesh")
    InteractiveShell.clear_instance()


def run(shell: Any, source: str) -> Any:
    return shell.run_cell(source, store_history=True)


def test_cells_from_the_first_to_the_stop(shell: Any, capfd: pytest.CaptureFixture[str]) -> None:
    done = run(shell, "%%dmesh\n1")
    assert isinstance(done.error_in_exec, KeptClientsError)
    assert "start clients with `%%dmesh -n 4`" in capfd.readouterr().out

    assert run(
        shell, "%%dmesh -n 2\nimport os, numpy as np\nme = int(os.environ['RANK'])\nnp.eye(2) * me"
    ).success
    assert capfd.readouterr().out.splitlines() == [
        "dmesh: 2 clients started; `%dmesh stop` ends them",
        "[0] Out: array([[0., 0.],",
        "[0]             [0., 0.]])",
        "[1] Out: array([[1., 0.],",
        "[1]             [0., 1.]])",
    ]

    assert run(shell, "%%dmesh -n 2 --rank 1\nprint('only', me)").success
    assert capfd.readouterr().out == "[1] only 1\n"

    assert run(shell, "found = %dmesh pull me").success
    assert shell.user_ns["found"] == [0, 1]
    shell.user_ns["scale"] = np.float32(3)
    assert run(shell, "%dmesh push scale").success
    assert run(shell, "%%dmesh\nprint(scale * me)").success
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0.0", "[1] 3.0"]

    number = shell.execution_count
    done = run(shell, "%%dmesh\nx = 1\nif me == 1: raise KeyError('gone')")
    assert isinstance(done.error_in_exec, CellError)
    shown = capfd.readouterr()
    text = shown.out + shown.err
    assert "rank 1 (pid " in text
    assert f'  File "<In[{number}]>", line 2, in <module>' in text
    assert "KeyError: 'gone'" in text
    assert "Finished: rank 0." in text
    assert "dmesh/notebook" not in text, "our own frames are noise"

    for line, kind in {
        "%%dmesh -n 3\n1": KeptClientsError,
        "%%dmesh --cpu-devices 2\n1": KeptClientsError,
        "%%dmesh --rank 2\n1": KeptClientsError,
        "%%dmesh -n x\n1": ConfigurationError,
        "%dmesh whatever": ConfigurationError,
    }.items():
        assert isinstance(run(shell, line).error_in_exec, kind), line
    capfd.readouterr()

    assert run(shell, "%dmesh").success
    assert [line.partition(": pid")[0] for line in capfd.readouterr().out.splitlines()] == [
        "dmesh: rank 0", "dmesh: rank 1",
    ]  # fmt: skip
    assert run(shell, "%dmesh restart").success
    assert isinstance(run(shell, "%dmesh pull me").error_in_exec, CellError), "their variables are gone"
    capfd.readouterr()
    assert run(shell, "%dmesh stop").success
    assert run(shell, "%dmesh stop").success
    assert capfd.readouterr().out.splitlines() == [
        "dmesh: the clients have ended",
        "dmesh: no clients are running",
    ]
