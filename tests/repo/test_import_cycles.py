"""The check of import cycles that `make lint` and test_house.py run."""

import grimp
import pytest
from tests.repo import import_cycles


def graph(text: str) -> grimp.ImportGraph:
    """Makes a graph of imports: `a b, b c` for two of them."""
    made = grimp.ImportGraph()
    for number, line in enumerate(text.split(","), 1):
        importer, imported = line.split()
        for name in (importer, imported):
            made.add_module(name)
        made.add_import(
            importer=importer, imported=imported, line_number=number, line_contents=f"import {imported}"
        )
    return made


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("a b, b c, a c", []),
        ("a b, b a", [["a", "b"]]),
        ("a b, b c, c d, d a, c a", [["a", "b", "c"]]),
        ("a b, b a, b c, c d, d c", [["c", "d"], ["a", "b"]]),
        ("p p.x, p.x p.y, p.y p", [["p", "p.x", "p.y"]]),
        (",".join(f"m{i} m{i + 1}" for i in range(3000)) + ", m3000 m2999", [["m2999", "m3000"]]),
    ],
)
def test_shortest_cycles_are_found(imports, expected):
    assert list(import_cycles.cycles(graph(imports))) == expected


def test_a_cycle_is_described_by_its_imports():
    made = graph("a b, b a")
    assert import_cycles.describe(made, ["a", "b"]) == (
        "import cycle of 2 modules:\n  a -> b  (line 1: import b)\n  b -> a  (line 2: import a)"
    )
