"""What `dmesh serve` refuses before it starts anything."""

from __future__ import annotations

import sys

import pytest

from dmesh.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dmesh serve: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "nonsense"], "--listen is 'nonsense'"),
        (["--listen", "127.0.0.1:99999"], "0 (any free one) to 65535"),
        (["--http", "nonsense"], "--http is 'nonsense'"),
        (["--listen", "no-such-host.invalid:1"], "cannot be resolved"),
        (["--http", "127.0.0.1:0", "--no-http"], "exclude each other"),
        (["--listen", "0.0.0.0:0"], "without --tls-cert and --tls-key"),
        (["--allowed-host", "a:1"], "expected a host name without a port"),
        (["--max-tasks", "0"], "--max-tasks is '0'"),
        (["--max-message-rate", "0"], "--max-message-rate is '0'"),
        (["--session-port", "on"], "--session-port is 'on'"),
        (["--session-port", "65536"], "--session-port is '65536'"),
        (["--max-store-size", "much"], "such as 256MiB"),
        (["--max-value-size", "2MiB", "--max-request-size", "1MiB"], "--max-request-size is '1MiB'"),
        (["--tls-cert", "c.pem"], "give both"),
        (["--tls-client-ca", "c.pem"], "need --tls-cert"),
        (["--lease", "soon"], "--lease is 'soon'"),
        (["--lease", "nan"], "--lease is 'nan'"),
        (["--lease", "-1"], "--lease is '-1'"),
        (["--lease", "0"], "heartbeat interval"),
        (["--lease", "1", "--heartbeat-interval", "2"], "shorter than the lease"),
    ],
)
def test_bad_settings(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


def test_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dmesh_server.main", raising=False)
    monkeypatch.delitem(sys.modules, "dmesh_server.web.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'dmesh[server]'" in refused(capsys)


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["serve", "--memory", "--data-dir", "d"], ["serve", "--x"]]
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: dmesh" in capsys.readouterr().err
