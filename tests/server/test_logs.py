"""Log lines: one event, one line."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc

from dmesh_server.telemetry import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logs.logger.level
    yield
    root.handlers[:], level, own = before
    root.setLevel(level)
    logs.logger.setLevel(own)


def lines(style: logs.LogFormat) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(stream, style)
    return stream


def test_text_line() -> None:
    stream = lines("text")
    logs.info("registered", task="/job:w/task:0", host="a b", age=1.5, none=None, quote='"')
    stamp, rest = stream.getvalue().split(" ", 1)
    assert stamp.endswith("Z")
    line, monotonic = rest.split(" monotonic=")
    assert line == 'INFO registered task=/job:w/task:0 host="a b" age=1.5 none=None quote="\\""'
    assert abs(time.monotonic() - float(monotonic)) < 60


def test_json_line() -> None:
    stream = lines("json")
    logs.warning("left", reason="x\ny", count=3, ratio=float("nan"), missing=None)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["event"]) == ("WARNING", "left")
    assert (line["reason"], line["count"], line["ratio"], line["missing"]) == ("x\ny", 3, "nan", None)


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("evil", ["a\nINFO forged", "a\r\n", "\x1b[31m", "\u202eabc", "\u2028", "\x00", "ü"])
def test_no_name_can_break_or_hide_a_line(style: logs.LogFormat, evil: str) -> None:
    stream = lines(style)
    logs.info("registered", host=evil)
    text = stream.getvalue()
    assert text.isascii()
    assert text.count("\n") == 1
    assert text[:-1].isprintable()


@pytest.mark.parametrize("style", ["text", "json"])
def test_long_values_are_cut(style: logs.LogFormat) -> None:
    stream = lines(style)
    logs.info("registered", host="x" * 100_000)
    assert len(stream.getvalue()) < 2500
    assert "(100000 characters)" in stream.getvalue()


@pytest.mark.parametrize("style", ["text", "json"])
def test_traceback_stays_on_the_line(style: logs.LogFormat) -> None:
    stream = lines(style)
    try:
        raise ValueError("inner")
    except ValueError:
        logs.error("request_failed", exc_info=True)
    assert stream.getvalue().count("\n") == 1
    assert "inner" in stream.getvalue()


def test_debug_is_off_unless_asked_for() -> None:
    stream = lines("text")
    logs.debug("session_attached")
    assert stream.getvalue() == ""
    logs.configure(stream, "text", logging.DEBUG)
    logs.debug("session_attached")
    assert "session_attached" in stream.getvalue()


def test_other_libraries_are_heard_when_they_warn() -> None:
    stream = lines("text")
    logging.getLogger("grpc").info("chatter")
    logging.getLogger("grpc").warning("trouble ahead")
    assert "chatter" not in stream.getvalue()
    assert '"trouble ahead" logger=grpc' in stream.getvalue()


@pytest.mark.parametrize(("level", "lines_of_it"), [(logging.INFO, 0), (logging.DEBUG, 1)])
def test_a_caller_that_went_away_before_its_reply_is_no_error(level: int, lines_of_it: int) -> None:
    """What gRPC logs with a traceback when a call ends, by its deadline say, while its reply is sent."""
    stream = io.StringIO()
    logs.configure(stream, "text", level)
    theirs = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("execute_batch"), RuntimeError("a real one")):
        try:
            raise error
        except (cygrpc.ExecuteBatchError, RuntimeError):
            theirs.exception("raised in core by servicer method [/S/M]")
    text = stream.getvalue()
    assert text.count("Traceback") == 1
    assert "a real one" in text
    assert text.count("DEBUG reply_not_sent") == text.count("\n") - 1 == lines_of_it
