"""What the documents say is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.repo.documents import PAGES, ROOT

from dmesh.cli import main
from dmesh.config.settings import OTHER_VARIABLES, VARIABLES


def test_the_readme_shows_the_first_program_as_it_is() -> None:
    assert (ROOT / "examples" / "hello_mesh.py").read_text() in (ROOT / "README.md").read_text()


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    missing = [name for name in VARIABLES.values() if f"| `{name}` |" not in text]
    assert not missing


def test_every_variable_that_is_read_is_known() -> None:
    read = set()
    for path in [
        *(ROOT / "client" / "dmesh").rglob("*.py"),
        *(ROOT / "server" / "dmesh_server").rglob("*.py"),
    ]:
        read |= set(re.findall(r"\"(DMESH_[A-Z_]+[A-Z])\"", path.read_text()))
    assert read <= {*VARIABLES.values(), *OTHER_VARIABLES}


def test_every_option_of_run_that_is_documented_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for path in (ROOT / "README.md", ROOT / "docs" / "configuration.md"):
        for command in re.findall(r"dmesh run ([^`\n]*)", path.read_text()):
            before_script = re.split(r"\S+\.py|\s-m\s", command)[0]
            assert set(re.findall(r"--[a-z-]+", before_script)) <= known, command


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
