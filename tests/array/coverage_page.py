"""Writes docs/coverage.md: each of NumPy's overridable functions and ufuncs, with what becomes of it.

`python -m tests.array.coverage_page` writes it; a test compares it with what there is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.testing import overrides

import dmesh.arrays
from dmesh.arrays.dispatch.protocol import GENERALIZED
from dmesh.arrays.dispatch.reduction import REDUCTIONS
from dmesh.arrays.dispatch.registry import FUNCTIONS, NOTES, REFUSED, name_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
_HEAD = """# Coverage of NumPy by sharded arrays

<!-- written by `python -m tests.array.coverage_page` -->

What becomes of each of NumPy's functions that can be overridden, and of its ufuncs, for [sharded
arrays](arrays.md), with
NumPy {version}. A function that is refused raises `UnshardableError`, which names it and says why.

| word | meaning |
|---|---|
| distributed | on the blocks, with whatever must move between devices |
| local | on the blocks; nothing moves |
| whole dimension | what must be whole is cut elsewhere, or the [policy](arrays.md#implicit-gathers) decides |
| whole matrices | likewise, of stacks of matrices; a single matrix that is cut would be gathered |
| refused | an error |
"""


def functions() -> dict[str, tuple[str, str]]:
    """Returns what becomes of each function, and why."""
    found: dict[str, tuple[str, str]] = {}
    for function in overrides.get_overridable_numpy_array_functions():
        name = name_of(function)
        if function in FUNCTIONS:
            found[name] = (NOTES[function], "")
        else:
            found[name] = ("refused", REFUSED.get(name, "not built"))
    return found


def ufuncs() -> dict[str, tuple[str, str]]:
    """Returns what becomes of each ufunc's calls and reductions."""
    found: dict[str, tuple[str, str]] = {}
    for ufunc in overrides.get_overridable_numpy_ufuncs():
        if ufunc.signature is not None:
            built = ufunc in GENERALIZED
            found[ufunc.__name__] = ("distributed" if built else "refused", "" if built else "not built")
        elif ufunc.nin == 2 and ufunc.nout == 1:
            way = "partial results" if ufunc in REDUCTIONS else "whole dimension"
            found[ufunc.__name__] = ("distributed", f"reductions and accumulations: {way}")
        else:
            found[ufunc.__name__] = ("distributed", "")
    return found


def page() -> str:
    """Returns the page."""
    lines = [_HEAD.format(version=".".join(np.__version__.split(".")[:2]))]
    for title, table in (("Functions", functions()), ("Ufuncs", ufuncs())):
        built = sum(word != "refused" for word, _ in table.values())
        lines.append(f"## {title}\n\n{built} of {len(table)} are built.\n")
        lines.append(f"| {title.lower().removesuffix('s')} | | |\n|---|---|---|")
        lines += [f"| `{name}` | {word} | {why} |" for name, (word, why) in sorted(table.items())]
        lines.append("")
    lines.append(
        "`at` and `reduceat` of all ufuncs are refused: they read and write elements by index, one "
        "after the other."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert dmesh.arrays
    PAGE.write_text(page())
