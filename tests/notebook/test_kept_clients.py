"""Kept clients run cells: namespaces, output, values, failures that leave them alive."""

from __future__ import annotations

import datetime
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.notebook.conftest import Kept

from dmesh.errors import ArgumentTypeError, CellError, ConfigurationError, KeptClientsError
from dmesh.notebook.clients import KeptClients
from dmesh.notebook.failures import INTERRUPTED


def test_cells_share_a_namespace_and_make_collectives(kept: Kept) -> None:
    kept.clients.run("total = dmesh.collectives.all_reduce(np.array([me, 1.0]))")
    results = kept.clients.run("total")
    assert [(result.rank, result.text) for result in results] == [(r, "array([3., 3.])") for r in range(3)]
    assert [result.text for result in kept.clients.run("total;")] == [None] * 3
    assert [result.text for result in kept.clients.run("_")] == ["array([3., 3.])"] * 3


def test_what_a_cell_defines_is_of_the_main_module(kept: Kept) -> None:
    kept.clients.run("class Thing: pass\ndef double(x): return 2 * x")
    assert (
        kept.clients.run("Thing.__module__, double(me), __name__", [2])[0].text
        == "('__main__', 4, '__main__')"
    )


def test_a_cell_on_some_ranks(kept: Kept) -> None:
    assert [(result.rank, result.text) for result in kept.clients.run("me", [2, 0])] == [(0, "0"), (2, "2")]
    with pytest.raises(KeptClientsError, match=r"asked for ranks 3, 7, but the ranks are 0-2"):
        kept.clients.run("me", [1, 3, 7])
    with pytest.raises(KeptClientsError, match="the ranks are 0-2"):
        kept.clients.run("me", [])


def test_output_is_labeled_and_shown_while_the_cell_runs(kept: Kept, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    kept.out.when["[1] begun\n"] = lambda: gate.write_text("go")
    kept.clients.run(
        f"import sys\nprint('begun'); text = open({str(gate)!r}).read()\n"
        "print('trouble', file=sys.stderr)\nprint('no newline', end='')",
        [1],
    )
    assert kept.clients.pull("text", [1]) == ["go"]
    assert kept.out.take() == ["[1] begun", "[1] no newline"]
    assert kept.err.take() == ["[1] trouble"]


def test_output_of_native_code_and_children_is_shown_too(kept: Kept) -> None:
    kept.clients.run("import os, subprocess\nos.write(1, b'low\\n')\nsubprocess.run(['echo', 'child'])", [0])
    assert kept.out.take() == ["[0] low", "[0] child"]


def test_a_syntax_error_is_refused_before_anything_is_sent(kept: Kept) -> None:
    with pytest.raises(SyntaxError) as caught:
        kept.clients.run("print('sent')\nif", name="<In[7]>")
    assert (caught.value.filename, caught.value.lineno) == ("<In[7]>", 2)
    assert kept.out.take() == []


def test_an_error_on_one_rank_comes_first_and_the_others_are_interrupted(kept: Kept) -> None:
    with pytest.raises(CellError) as caught:
        kept.clients.run(
            "def step(x):\n    if me == 1:\n        raise ValueError(f'bad {x}')\n"
            "    return dmesh.collectives.all_reduce(x)\nstep(5.0)",
            name="<In[3]>",
        )
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("rank 1 (pid ")
    assert "failed in <In[3]> after" in head
    assert [line for line in lines if line.strip("~^ ")][:6] == [  # markers differ by version of Python
        "Traceback (most recent call last):",
        '  File "<In[3]>", line 5, in <module>',
        "    step(5.0)",
        '  File "<In[3]>", line 3, in step',
        "    raise ValueError(f'bad {x}')",
        "ValueError: bad 5.0",
    ]
    assert sum("interrupted in line" in line for line in lines) >= 1, "in the collective, or on the way there"
    assert "dmesh.collectives.reset()" in lines[-1]
    assert caught.value.ranks[0] == 1
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert caught.value._render_traceback_() == [head, *lines]
    assert kept.err.take() == ["dmesh: rank 1 failed; interrupting ranks 0, 2, still in the cell"]
    kept.clients.run("dmesh.collectives.reset()")
    assert [result.text for result in kept.clients.run("dmesh.collectives.all_reduce(me).item()")] == [
        "3"
    ] * 3


def test_an_interrupt_before_the_cell_begins_is_not_lost(kept: Kept) -> None:
    for _ in range(20):
        with pytest.raises(CellError, match="ZeroDivisionError"):
            kept.clients.run("1 / 0 if me == 1 else __import__('time').sleep(600)")


def test_an_error_inside_a_collective_is_told_by_the_rank_that_began_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kept.clients, "_timeout_after_failure", 3.0
    )  # the default: all ranks fail by themselves
    with pytest.raises(CellError) as caught:
        kept.clients.run("dmesh.collectives.all_reduce(np.ones(3 if me == 2 else 4))")
    text = str(caught.value)
    assert text.count("Traceback (most recent call last):") == 1
    assert "CollectiveMismatchError" in text
    kept.clients.run("dmesh.collectives.reset()")


def test_the_same_error_on_all_ranks_is_shown_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kept.clients, "_timeout_after_failure", 3.0
    )  # the default: all ranks fail by themselves
    with pytest.raises(CellError) as caught:
        kept.clients.run("nothing_of_that_name")
    text = str(caught.value)
    assert text.startswith("ranks 0-2 failed in <cell> after")
    assert text.count("NameError: name 'nothing_of_that_name' is not defined") == 1
    assert "reset" not in text


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "import sys; sys.exit(3)", "quit(3)"])
def test_an_exit_ends_the_cell_and_not_the_client(kept: Kept, statement: str) -> None:
    before = kept.clients.status()
    with pytest.raises(CellError, match="SystemExit: 3"):
        kept.clients.run(statement, [0])
    assert kept.clients.run("me", [0])[0].text == "0"
    assert kept.clients.status() == before


def test_an_interrupt_reaches_all_ranks(kept: Kept) -> None:
    kept.out.when["[0] here\n"] = lambda: None
    seen: list[int] = []

    def one_more() -> None:
        seen.append(1)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    kept.out.when.update({f"[{rank}] here\n": one_more for rank in range(3)})
    with pytest.raises(KeyboardInterrupt):
        kept.clients.run("import time\nprint('here'); time.sleep(600)", name="<In[9]>")
    head, *rest = [line for line in kept.err.take() if line]
    assert head.startswith("ranks 0-2 were interrupted in line 2 of <In[9]>")
    assert rest == [INTERRUPTED]
    assert [result.text for result in kept.clients.run("me")] == ["0", "1", "2"]


VALUES = [
    None, True, 7, 2.5, 1 + 2j, "text", b"bytes", [1, (2, "x")], {"a": {1, 2}}, datetime.date(2026, 1, 2),
    1 << 70,
]  # fmt: skip


def test_plain_values_and_arrays_go_there_and_back(kept: Kept) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    kept.clients.push({"values": VALUES, "array": array})
    assert kept.clients.pull("values") == [VALUES] * 3
    for found in kept.clients.pull("array", [0, 2]):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
    assert kept.clients.pull("me") == [0, 1, 2]


def test_a_value_that_is_not_plain_is_refused_on_both_sides(kept: Kept) -> None:
    with pytest.raises(ArgumentTypeError, match="'code' cannot be pushed: only None"):
        kept.clients.push({"fine": 1, "code": print})
    with pytest.raises(CellError, match="ranks 0-2 have no variable 'fine'"):
        kept.clients.pull("fine")
    with pytest.raises(ArgumentTypeError, match="'dmesh' of rank 0 cannot be pulled"):
        kept.clients.pull("dmesh")
    for name in ("a.b", "", "a()"):
        with pytest.raises(ArgumentTypeError, match="a variable name"):
            kept.clients.pull(name)
        with pytest.raises(ArgumentTypeError, match="a variable name"):
            kept.clients.push({name: 1})


def test_a_drawing_is_sent_by_a_cell_of_one_rank(kept: Kept) -> None:
    kept.clients.run("class Drawn:\n    def _repr_html_(self): return '<b>drawn</b>'")
    assert kept.clients.run("Drawn()", [1])[0].html == "<b>drawn</b>"
    assert {result.html for result in kept.clients.run("Drawn()")} == {None}


def test_a_number_that_cannot_be_is_refused(kept: Kept) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        KeptClients(0, kept.out, kept.err)
