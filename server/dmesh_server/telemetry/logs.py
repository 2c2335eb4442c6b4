"""Structured log lines: one event, one line, whatever a client puts into its names.

Everything goes through the standard `logging` module under the logger `dmesh_server`, which is silent until
it is configured: the embedded server lives in a user's process and must not write to its terminal. `dmesh
serve` calls `configure`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any, Literal, TextIO

logger = logging.getLogger("dmesh_server")
logger.addHandler(logging.NullHandler())

LogFormat = Literal["text", "json"]
"""Format of lines: `key=value` pairs for people, or one JSON object a line for programs."""

_LONGEST = 2000
"""Characters of one value that are kept; a client must not be able to flood a log with one name."""


def info(event: str, **fields: object) -> None:
    """Log something that operators expect to see."""
    _log(logging.INFO, event, fields)


def debug(event: str, **fields: object) -> None:
    """Log something of use when looking for a fault."""
    _log(logging.DEBUG, event, fields)


def warning(event: str, **fields: object) -> None:
    """Log something that went wrong for a client or may go wrong soon."""
    _log(logging.WARNING, event, fields)


def error(event: str, *, exc_info: bool = False, **fields: object) -> None:
    """Log something that the server failed to do, with the current exception's traceback if asked to."""
    _log(logging.ERROR, event, fields, exc_info)


def _log(level: int, event: str, fields: dict[str, object], exc_info: bool = False) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={"fields": fields}, exc_info=exc_info)


def configure(stream: TextIO, style: LogFormat = "text", level: int = logging.INFO) -> None:
    """Send the server's log, and warnings of the libraries under it, to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger.setLevel(level)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_failure)


def _is_failure(record: logging.LogRecord) -> bool:
    """Return False for gRPC's report that a caller went away while its reply was sent: no failure of ours."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != "ExecuteBatchError":
        return True
    debug("reply_not_sent", reason=record.getMessage())
    return False


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO event key=value key="two words" monotonic=12345.678`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        parts = [_timestamp(record), record.levelname, _quote_if_needed(_event(record))]
        parts += [f"{key}={_quote_if_needed(_text(value))}" for key, value in _fields(self, record).items()]
        parts.append(f"monotonic={_monotonic():.3f}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "monotonic": _monotonic(),
            "level": record.levelname,
            "event": _event(record),
        }
        for key, value in _fields(self, record).items():
            plain = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
            line[key] = value if value is None or plain else _text(value)
        return json.dumps(line)


def _event(record: logging.LogRecord) -> str:
    return _shorten(record.getMessage())


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, object]:
    fields = dict(getattr(record, "fields", None) or {"logger": record.name})
    if record.exc_info:
        fields["traceback"] = formatter.formatException(record.exc_info)
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


def _monotonic() -> float:
    # Orders lines even across a change of the wall clock. Taken at most a moment after the event.
    return round(time.monotonic(), 3)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return _shorten(str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _quote_if_needed(text: str) -> str:
    # Anything but plain printable words is written as a JSON string: control characters, line breaks and text
    # that runs from right to left come out as escapes, so that no name can forge or hide a line.
    if text and text.isascii() and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    return json.dumps(text)
