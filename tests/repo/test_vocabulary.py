"""The vocabulary of docs/glossary.md: private words that the field has other words for do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.documents import ROOT

PRIVATE = {
    "acting": "current replica",
    "announcing": "what is announced, or to whom",
    "annex": "attach",
    "arena": "shared memory",
    "census": "views",
    "chronicle": "event log",
    "deaf": "null",
    "errand": "task",
    "happening": "event",
    "hasten": "fast path",
    "inquiry": "query",
    "neighbourhood": "registry",
    "shelf": "ring buffer",
    "telling": "reporting",
    "territory": "mapping",
    "wording": "messages",
}
"""Private words, and what to call the thing."""


def _words(name: str) -> set[str]:
    found = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return found | {word.removesuffix("s") for word in found}


def _names() -> Iterator[tuple[Path, str]]:
    """Return the modules of client and server, and the names that each of them gives."""
    for room in ("client/dmesh", "server/dmesh_server"):
        for file in sorted((ROOT / room).rglob("*.py")):
            if file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            yield file, file.stem
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case (
                        ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name)
                    ):
                        yield file, name
                    case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()):
                        yield file, name


def test_names_have_the_words_of_the_field():
    found = {
        f"{file.relative_to(ROOT)}: {name}: say {PRIVATE[word]}"
        for file, name in _names()
        for word in _words(name) & PRIVATE.keys()
    }
    assert not found, "\n".join(sorted(found))


def test_documents_and_docstrings_have_them_too():
    """And no sentence is about `whoever` or `somebody`."""
    pattern = re.compile(
        rf"\b({'|'.join(PRIVATE.keys() - {'acting', 'telling', 'announcing'})})s?\b", re.IGNORECASE
    )
    files = [file for file in ROOT.glob("*.md") if file.name != "CHANGELOG.md"]
    files += (ROOT / "docs").rglob("*.md")
    files += [
        file for room in ("client/dmesh", "server/dmesh_server") for file in (ROOT / room).rglob("*.py")
    ]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line) and "_pb2" not in file.name
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_private_words():
    assert _words("CensusOfMembers") & PRIVATE.keys()
    assert _words("_on_happenings") & PRIVATE.keys()
    assert not _words("reach_agreement") & PRIVATE.keys()
