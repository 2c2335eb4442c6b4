"""The script that draws the README's animated picture."""

from __future__ import annotations

import importlib.util
from xml.etree import ElementTree as Xml

from tests.repo.documents import ROOT

LINES = [
    (0.0, "$ dmesh why"),
    (1.5, "default: Rank 3 is holding up 5 ranks"),
    (1.5, "  line <module> & more"),
]


def drawing():
    spec = importlib.util.spec_from_file_location("recording", ROOT / "docs" / "_site" / "recording.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw(LINES)


def test_each_line_is_shown_at_its_time():
    svg = Xml.fromstring(drawing())
    space = "{http://www.w3.org/2000/svg}"
    texts = svg.findall(f"{space}text")
    assert [text.text for text in texts] == [text for _, text in LINES]
    assert [text.get("class").split() for text in texts] == [
        ["line", "command"],
        ["line", "headline"],
        ["line"],
    ]
    style = svg.find(f"{space}style").text
    assert "@keyframes at1500 { 0%, 20.00% { opacity: 0; }" in style
    assert all("infinite" in text.get("style") for text in texts)


def test_the_picture_is_one_that_the_script_draws():
    picture = (ROOT / "docs" / "images" / "why.svg").read_text()
    Xml.fromstring(picture)
    assert "$ dmesh why" in picture
    assert "is holding up 5 ranks" in picture
