"""Meshes and layouts as notebooks draw them."""

from __future__ import annotations

import html
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given
from tests.mesh.meshes import grid, layouts, meshes

from dmesh.layout import MATCH, UNSHARDED, Layout
from dmesh.mesh import Mesh

VOID = {"br"}
BOUND = 60_000
"""Characters of any drawing, at most."""


class Parsed(HTMLParser):
    """What a browser shows: the text of each cell; fails at tags that do not match or are none of ours."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in {"div", "table", "tr", "th", "td", "br"}
        assert {name for name, _ in attrs} <= {"style"}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.cells[-1] if self.open[-1] == "td" else self.texts).append(data)


def names_of(mesh: Mesh) -> list[str]:
    if mesh.is_single_device():
        return [mesh.single_device]
    local = dict(zip(mesh.local_device_ids(), mesh.local_devices(), strict=True))
    first = mesh.min_global_device_id()
    return mesh.global_devices() or [local.get(i, f"device {i}") for i in range(first, first + mesh.size)]


@given(meshes())
def test_a_small_mesh_shows_every_device_once(mesh: Mesh) -> None:
    parsed = Parsed(mesh._repr_html_())
    assert Counter(cell[0] for cell in parsed.cells) == Counter(names_of(mesh))
    for name in mesh.dim_names:
        assert any(name in text for text in parsed.texts)
    assert len(mesh._repr_html_()) <= BOUND


@given(layouts())
def test_a_small_layout_shows_the_shard_of_every_device(layout: Layout) -> None:
    parsed = Parsed(layout._repr_html_())
    if MATCH in layout.sharding_specs or not layout.rank:
        assert all(len(cell) == 1 for cell in parsed.cells)
        return
    shards = [f"shard {shard}" for shard in layout.offset_to_shard()]
    assert Counter(map(tuple, parsed.cells)) == Counter(zip(names_of(layout.mesh), shards, strict=True))


@pytest.mark.parametrize(
    "dims",
    [
        {"x": 65},
        {"x": 1 << 16},
        {"x": 1000, "y": 3},
        {"a": 20, "b": 20, "c": 20},
        {f"d{i}": 2 for i in range(12)},
    ],
    ids=str,
)
def test_a_large_mesh_is_abbreviated(dims: dict[str, int]) -> None:
    mesh = grid(dims)
    drawn = mesh._repr_html_()
    assert len(drawn) <= BOUND
    cells = [cell[0] for cell in Parsed(drawn).cells]
    assert "…" in drawn
    assert max(Counter(cell for cell in cells if cell != "…").values()) == 1
    assert {mesh.local_devices()[0], mesh.local_devices()[-1]} <= set(cells)
    assert len(Layout([*dims, UNSHARDED], mesh)._repr_html_()) <= BOUND


def test_names_are_escaped_and_long_ones_cut() -> None:
    mesh = grid({"<b>&'\"": 2, "y" * 900: 2}, name="<script>alert(1)</script>" * 30)
    drawn = mesh._repr_html_()
    Parsed(drawn)
    assert "<script" not in drawn
    assert html.escape("<b>&'\"") in drawn
    assert len(drawn) < 5_000


def test_what_it_looks_like() -> None:
    mesh = grid({"batch": 2, "model": 2}, clients=2, name="train")
    text = " ".join(re.sub(r"<[^>]+>", " ", mesh._repr_html_()).split())
    assert text == (
        "Mesh &#x27;train&#x27;, batch 2 x model 2: 4 devices model 0 model 1 "
        "batch 0 /job:worker/replica:0/task:0/device:CPU:0 /job:worker/replica:0/task:0/device:CPU:1 "
        "batch 1 device 2 device 3"
    )
    assert "color:#" not in mesh._repr_html_(), "the page's own colors, light or dark"
    assert Parsed(Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:0")._repr_html_()).cells == [
        ["/job:localhost/replica:0/task:0/device:CPU:0"]
    ]
    assert Parsed(Mesh.from_string("empty_mesh")._repr_html_()).cells == []
