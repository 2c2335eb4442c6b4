"""`make pythons` where a Python cannot be had, which is no failure, and where tests fail, which is one."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from pathlib import Path

import pytest
from tests.packaging import pythons
from tests.packaging.environments import HERE, ROOT, IndexUnreachableError

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, as debootstrap does"
)


class _Archive(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def archive():
    """An archive of nothing, which answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Archive) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """Returns a function that makes a `debootstrap` of a shell script."""
    monkeypatch.setattr(pythons, "FOLDER", tmp_path / "pythons")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(script: str) -> None:
        program = tmp_path / "debootstrap"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    make("exit 0")
    return make


@needs_root
def test_an_archive_that_does_not_answer_is_no_failure(bootstrap, monkeypatch, capsys):
    monkeypatch.setattr(pythons, "_ARCHIVE", "http://127.0.0.1:9")
    assert pythons.main(["--version", "3.13", "--debian"]) == 0
    assert "SKIPPED: Python 3.13: Debian's archive does not answer" in capsys.readouterr().out


@needs_root
@pytest.mark.parametrize(
    ("script", "longest", "message"),
    [("echo E: no python3.13-dev >&2; exit 1", 60, "debootstrap failed: E: no python3.13-dev"),
     ("sleep 60", 0.2, "debootstrap took longer than 0.2 s")],
    ids=["fails", "hangs"],
)  # fmt: skip
def test_a_root_file_system_that_cannot_be_made_is_no_failure(
    bootstrap, archive, monkeypatch, capsys, script, longest, message
):
    bootstrap(script)
    monkeypatch.setattr(pythons, "_ARCHIVE", archive)
    monkeypatch.setattr(pythons, "_LONGEST", longest)
    assert pythons.main(["--version", "3.13", "--debian"]) == 0
    assert f"SKIPPED: Python 3.13: {message}" in capsys.readouterr().out
    assert not (pythons.FOLDER / "trixie").exists(), "the next run makes it"


def test_a_version_that_no_release_of_debian_has_is_no_failure(monkeypatch, capsys):
    assert pythons.main(["--version", "3.12", "--debian"]) == 0
    assert "SKIPPED: Python 3.12: this machine has none" in capsys.readouterr().out


def test_failed_tests_are_a_failure_and_the_other_versions_are_tested_all_the_same(monkeypatch, capsys):
    tested = []

    def make(place: Path, *arguments: object) -> None:
        if place.name == "3.13":
            raise IndexUnreachableError("no route")

    def run_tests(place: Path, arguments: list[str], python: object) -> int:
        tested.append(place.name)
        return 1 if place.name == "3.12" else 0

    monkeypatch.setattr(pythons, "find", lambda version, debian: HERE)
    monkeypatch.setattr(pythons, "make", make)
    monkeypatch.setattr(pythons, "run_tests", run_tests)
    assert pythons.main(["--version", "3.12", "--version", "3.13", "--version", "3.14"]) == 1
    assert tested == ["3.12", "3.14"]
    assert "SKIPPED: Python 3.13: no route" in capsys.readouterr().out


def test_the_chosen_tests_are_there():
    for argument in pythons.PART:
        assert (ROOT / argument.removeprefix("--ignore=")).exists()
