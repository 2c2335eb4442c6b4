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
    "meeting": "barrier, or rendezvous",
    "neighbourhood": "registry",
    "shelf": "ring buffer",
    "tell": "notify, report, send or print",
    "telling": "reporting",
    "territory": "mapping",
    "told": "seen, reported or notified",
    "untold": "unreported",
    "wording": "messages",
}
"""Private words, and what to call the thing."""


OTHERS = {("Attribute", "tell"), ("Attribute", "last_told"), ("Attribute", "LastTold")}
"""Names that are Python's (of files) or the protocol's (fields keep their names)."""


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
                        if (type(node).__name__, name) not in OTHERS:
                            yield file, name


def test_names_have_the_words_of_the_field():
    found = {
        f"{file.relative_to(ROOT)}: {name}: say {PRIVATE[word]}"
        for file, name in _names()
        for word in _words(name) & PRIVATE.keys()
    }
    assert not found, "\n".join(sorted(found))


def _pattern(words: set[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(sorted(words))})s?\b", re.IGNORECASE)


def test_documents_and_docstrings_have_them_too():
    """Words that are plain English, too, are private in the code's prose; documents may use them."""
    plain = {"acting", "announcing", "tell", "telling"}
    found = list[str]()
    for room, words in (
        ("docs", PRIVATE.keys() - plain - {"meeting", "told"}),
        ("client/dmesh/arrays", PRIVATE.keys() - plain - {"told"}),
        ("client/dmesh", PRIVATE.keys() - plain),
        ("server/dmesh_server", PRIVATE.keys() - plain),
    ):
        pattern = _pattern(words)
        files = [file for file in ROOT.glob("*.md") if file.name != "CHANGELOG.md"] if room == "docs" else []
        files += (ROOT / room).rglob("*.md" if room == "docs" else "*.py")
        found += [
            f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
            for file in files
            if "_pb2" not in file.name and (room != "client/dmesh" or "arrays" not in file.parts)
            for number, line in enumerate(file.read_text().splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found, "\n".join(found)


def test_the_check_sees_private_words():
    assert _words("CensusOfMembers") & PRIVATE.keys()
    assert _words("_on_happenings") & PRIVATE.keys()
    assert _words("note_told") & PRIVATE.keys()
    assert not _words("reach_agreement") & PRIVATE.keys()
    assert _pattern({"told", "meeting"}).search("at the epoch of two meetings")
    assert not _pattern({"told", "meeting"}).search("last_told is a field of the protocol")
