"""The verbs that look at this machine and its environment alone."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.waiting import free_ports

from dmesh.cli import VERBS, main
from dmesh.cli.checks import Check, examine
from dmesh.cli.progress import Bar
from dmesh.config.settings import VARIABLES
from dmesh.launcher import registry
from dmesh.launcher.registry import Run

TOKEN = "a-token-that-nobody-is-to-see"


def checks(environ: dict[str, str], coordinator: str | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(environ, coordinator)}


def test_config_show_has_every_setting_and_its_origin(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DMESH_CLUSTER", "mine")
    monkeypatch.setenv("DMESH_TOKEN", TOKEN)
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:2")
    assert main(["config", "show", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)["settings"]
    assert set(found) == set(VARIABLES.values())
    assert found["DMESH_CLUSTER"] == {"value": "mine", "origin": "environment variable DMESH_CLUSTER"}
    assert found["DTENSOR_JOBS"]["value"] == ["a:1", "b:2"]
    assert found["DMESH_LEASE"] == {"value": None, "origin": "default"}
    assert main(["config", "show", "--origin"]) == 0
    text = capsys.readouterr().out
    assert TOKEN not in out + text
    assert "DTENSOR_JOBS" in text
    assert "a:1,b:2" in text
    assert "environment variable DMESH_TOKEN" in text
    assert main(["config", "show"]) == 0
    assert "ORIGIN" not in capsys.readouterr().out


def test_config_show_refuses_what_a_client_would_refuse(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DMESH_LEASE", "soon")
    assert main(["config", "show"]) == 2
    assert "DMESH_LEASE is 'soon'" in capsys.readouterr().err


def test_doctor_finds_nothing_in_an_empty_environment(capsys, monkeypatch) -> None:
    monkeypatch.setattr("dmesh.cli.observing.DEFAULT_ADDRESS", "127.0.0.1:1")
    found = checks({})
    assert not [check for check in found.values() if check.verdict == "fail"]
    assert found["settings"].message == "local mode"
    assert found["server"].verdict == found["certificates"].verdict == "skip"
    assert "none is named, and none answers at 127.0.0.1:1" in found["server"].message
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    ("environ", "name", "verdict", "words"),
    [
        ({"DMESH_LEASE": "x"}, "settings", "fail", "DMESH_LEASE"),
        ({"HTTPS_PROXY": "http://p:1"}, "proxies", "warn", "HTTPS_PROXY set"),
        ({"DMESH_TOKEN_FILE": "/nowhere"}, "token", "fail", "cannot be read"),
        ({"DMESH_TLS_CERT": "x.pem"}, "certificates", "fail", "DMESH_TLS_CA is not"),
        ({"DMESH_TLS_CA": "/nowhere.pem"}, "certificates", "fail", "/nowhere.pem"),
        ({"DTENSOR_JOBS": "no-such-host.invalid:1"}, "names", "fail", "no-such-host.invalid"),
        ({"DMESH_SHARED_MEMORY": "0"}, "shared memory", "skip", "share none"),
        ({"DMESH_SHARED_MEMORY": "16000000"}, "shared memory", "warn", "are free"),
        ({"DMESH_COORDINATOR": "127.0.0.1:1"}, "server", "fail", "dmesh serve"),
        ({"DMESH_INTERFACES": "nic9"}, "interfaces", "fail", "names nic9, which is not a network interface"),
        ({"DTENSOR_JOBS": "127.0.0.1:1"}, "server", "warn", "client 0 hosts it"),
    ],
)
def test_doctor_finds_what_is_wrong(environ, name: str, verdict: str, words: str) -> None:
    check = checks(environ)[name]
    assert check.verdict == verdict
    assert words in check.message


def test_doctor_finds_a_port_that_is_taken(capsys, monkeypatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_ports(1)[0]))
        jobs = f"127.0.0.1:{listener.getsockname()[1]}"
        assert checks({"DTENSOR_JOBS": jobs})["own port"].verdict == "fail"
        monkeypatch.setenv("DTENSOR_JOBS", jobs)
        assert main(["doctor"]) == 3
        assert "FAIL  own port" in capsys.readouterr().out
    assert checks({"DTENSOR_JOBS": jobs})["own port"].verdict == "ok"


def test_doctor_looks_at_tokens_and_certificates(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN} role=viewer expires=2001-01-01\n")
    token.chmod(0o600)
    check = checks({"DMESH_TOKEN_FILE": str(token)})["token"]
    assert check.verdict == "fail"
    assert "it has expired" in check.message
    assert TOKEN not in check.message
    assert main(["certs", "init", str(tmp_path)]) == 0
    for name, days in (("long", "300"), ("short", "5")):
        arguments = ("--name", name, "--host", "127.0.0.1", "--days", days)
        assert main(["certs", "issue", str(tmp_path), *arguments]) == 0
        environ = {
            "DMESH_TLS_CA": str(tmp_path / "ca.pem"),
            "DMESH_TLS_CERT": str(tmp_path / f"{name}.pem"),
            "DMESH_TLS_KEY": str(tmp_path / f"{name}.key"),
        }
        check = checks(environ)["certificate"]
        assert check.verdict == ("ok" if name == "long" else "warn")
        assert f"{int(days)} days left" in check.message
        assert "127.0.0.1" in check.message


def test_doctor_asks_the_server(server, join) -> None:
    join(0, 1, "mine")
    found = checks({}, server.address)
    assert found["server's answer"].message == "it has 1 cluster, and accepts the token"
    assert found["versions in 'mine'"].verdict == "ok"


def test_doctor_finds_the_server_that_other_verbs_find(server, join, monkeypatch) -> None:
    join(0, 1, "mine")
    monkeypatch.setattr("dmesh.cli.observing.DEFAULT_ADDRESS", server.address)
    found = checks({})
    assert found["server"].message == f"{server.address}, the default of `dmesh serve`, takes connections"
    assert found["server's answer"].verdict == "ok"
    run = Run(4711, server.address, "mine", "its-token")
    monkeypatch.setattr(registry, "living", lambda: [run])
    monkeypatch.setattr("dmesh.cli.observing.DEFAULT_ADDRESS", "127.0.0.1:1")
    found = checks({})
    assert found["server"].message == f"{server.address}, the `dmesh run` of pid 4711, takes connections"
    assert found["server's answer"].verdict == "ok"
    monkeypatch.setattr(registry, "living", lambda: [run, run])
    assert "2 jobs of `dmesh run` are running" in checks({})["server"].message


needs_shtab = pytest.mark.skipif(find_spec("shtab") is None, reason="no shtab")


@needs_shtab
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_and_flags(capsys, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in VERBS:
        assert verb in script
    assert "--coordinator" in script if shell != "fish" else "-l coordinator" in script


def test_completion_without_shtab_says_what_to_install(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'dmesh[cli]'" in capsys.readouterr().err


@needs_shtab
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["co"], {"config", "completion"}),
        (["config", ""], {"show"}),
        (["config", "show", "--o"], {"--origin"}),
        (["why", "--j"], {"--json"}),
        (["completion", "z"], {"zsh"}),
        (["run", "some_sc"], {"some_script.py"}),
        (["trace", "merge", "some_sc"], {"some_script.py"}),
        (["nonsense", "--j"], set()),
    ],
)
def test_completion_in_bash(capsys, tmp_path: Path, words: list[str], expected: set[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "c").write_text(capsys.readouterr().out)
    (tmp_path / "some_script.py").touch()
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"source ./c; COMP_WORDS=(dmesh {quoted}); COMP_CWORD={len(words)}; "
    script += f"_shtab_dmesh dmesh '{words[-1]}'; "
    script += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert set(done.stdout.split()) == expected


@needs_shtab
@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_completion_in_zsh(capsys, tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "_dmesh").write_text(capsys.readouterr().out)
    script = f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u; print ${{_comps[dmesh]}}"
    done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("_dmesh", "")


@needs_shtab
@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kv ", {"get", "put", "list", "watch", "delete"}),
        ("completion ", {"bash", "zsh", "fish"}),
        ("run some_sc", {"some_script.py"}),
        ("status --j", {"--json"}),
    ],
)
def test_completion_in_fish(capsys, tmp_path: Path, line: str, expected: set[str]) -> None:
    assert main(["completion", "fish"]) == 0
    (tmp_path / "c").write_text(capsys.readouterr().out)
    (tmp_path / "some_script.py").touch()
    script = f"source c; complete -C 'dmesh {line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert {found.split("\t")[0] for found in done.stdout.splitlines()} == expected


def test_what_a_verb_does_not_know_is_answered_with_its_own_usage(capsys) -> None:
    for words, usage in (
        (["serve", "--grpc", "x"], "dmesh serve"),
        (["kv", "get", "k", "--x"], "dmesh kv get"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert capsys.readouterr().err.startswith(f"usage: {usage} [-h]")


def test_certificates_are_told_of_as_json(tmp_path: Path, capsys) -> None:
    assert main(["certs", "init", str(tmp_path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["cert"], made["key"], made["hosts"]) == (
        str(tmp_path / "ca.pem"),
        str(tmp_path / "ca.key"),
        [],
    )
    names = ["--name", "server", "--host", "a.example", "--host", "10.0.0.7"]
    assert main(["certs", "issue", str(tmp_path), *names, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["cert"] == str(tmp_path / "server.pem")
    assert Path(made["key"]).exists()
    assert made["hosts"] == ["a.example", "10.0.0.7"]
    begins, expires = (datetime.fromisoformat(made[name]) for name in ("begins", "expires"))
    assert 364 <= (expires - begins).days <= 366


def test_errors_are_json_too(tmp_path: Path, capsys) -> None:
    assert main(["certs", "issue", str(tmp_path), "--name", "x", "--host", "h", "--json"]) == 2
    found = capsys.readouterr()
    told = json.loads(found.out)["error"]
    assert told["kind"] == "ConfigurationError"
    assert told["message"].startswith("there is no CA in")
    assert found.err == f"dmesh certs: error: {told['message']}\n"
    assert main(["certs", "issue", str(tmp_path), "--name", "x", "--host", "h"]) == 2
    assert capsys.readouterr().out == ""


def test_progress_is_shown_on_a_terminal_alone(monkeypatch, capsys) -> None:
    with Bar() as bar:
        bar.show("reading", 1, 2)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Bar() as bar:
        bar.show("reading [red]a\x1b[2J", 1, 2)
        bar.clear()
        assert "50%" in terminal.getvalue()
        assert "reading [red]a\N{REPLACEMENT CHARACTER}[2J" in terminal.getvalue()
        bar.show("writing", 1, None)
    assert "writing" in terminal.getvalue()
    assert capsys.readouterr().out == ""
