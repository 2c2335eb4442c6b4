"""Scenario 29: names that look like paths lead to no file, and the server's own files are private."""

from __future__ import annotations

import http.client
import os
import stat
from pathlib import Path

import pytest
from tests.faults.secured import DEADLINE, serving, write_tokens

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import Credentials
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource

PATHS = (
    "/../../../../etc/passwd", "/static/../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd",
    "/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/..%5c..%5cetc%5cpasswd", "/api/v1/../../../etc/passwd",
    "//etc/passwd", "/livez/../api/v1/clusters", "/api/v1/clusters/..%2f..", "/%00", "/etc/passwd",
)  # fmt: skip

KEYS = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "a/../../b",
    "C:\\windows",
    "~/.ssh/id",
    "%2e%2e/x",
    "a\nb",
)


def test_no_path_leads_to_a_file(tmp_path: Path) -> None:
    token = tokens.generate()
    path = write_tokens(tmp_path / "t", token)
    with serving("--memory", "--token-file", str(path)) as server:
        for target in PATHS:
            for shown, statuses in ((token, {400, 404}), (None, {400, 401})):
                # httpx would tidy the path up before it sends it.
                connection = http.client.HTTPConnection(server.http.removeprefix("http://"), timeout=DEADLINE)
                connection.putrequest("GET", target, skip_accept_encoding=True)
                if shown:
                    connection.putheader("Authorization", f"Bearer {shown}")
                connection.endheaders()
                answer = connection.getresponse()
                body = answer.read()
                connection.close()
                assert answer.status in statuses, (target, answer.status)
                assert b"root:" not in body
                assert b"clusters" not in body


def test_keys_are_no_paths_and_files_are_private(tmp_path: Path) -> None:
    token = tokens.generate()
    path = write_tokens(tmp_path / "t", token)
    data = tmp_path / "data"
    previous = os.umask(0)  # an operator's careless mask must not open the files
    try:
        with serving("--data-dir", str(data), "--token-file", str(path)) as server:
            agent = Agent(
                server.grpc,
                Identity.of_this_process("worker", 0, {"worker": ("h:1",)}),
                connect_timeout=DEADLINE,
                credentials=Credentials(TokenSource("test", value=token)),
            )
            agent.start()
            before = _files(tmp_path)
            for key in KEYS:
                agent.key_value_set(key, key.encode())
            for key in KEYS:
                assert agent.key_value_get(key) == key.encode()
            assert _files(tmp_path) == before
            agent.leave()
            modes = {entry.name: stat.S_IMODE(entry.lstat().st_mode) for entry in data.rglob("*")}
    finally:
        os.umask(previous)
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert modes
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}


def _files(root: Path) -> set[str]:
    return {str(entry) for entry in root.rglob("*")}


@pytest.mark.parametrize("kind", ["token", "certificate"])
def test_generated_files_are_made_anew_and_never_through_a_link(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    if kind == "token":
        link = tmp_path / "config" / "token"
        link.parent.mkdir()
        link.symlink_to(victim)
        tokens.create_file(link)  # one is there: nothing is made
    else:
        from dmesh.cli import main

        (tmp_path / "tls").mkdir()
        (tmp_path / "tls" / "ca.key").symlink_to(victim)
        assert main(["certs", "init", str(tmp_path / "tls")]) == 2
        assert not (tmp_path / "tls" / "ca.pem").exists(), "both files, or none"
    assert victim.read_text() == "mine"
