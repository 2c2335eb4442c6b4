"""Spans of collectives and transfers, made from the records of the event ring.

The thread of the ring's readers makes the spans after the calls, with the recorded times of their begin and
end. A call itself only looks up its trace context.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from dmesh import errors
from dmesh._log import logger
from dmesh.collectives.events import CallRecord, EventReader

RATE = 2000
"""Maximum rate of spans per second; further calls are only counted. Failed calls always have spans."""
_BURST = 2000
_BATCH = 256
"""Minimum number of available spans for which calls are fetched, while the rate is limited."""
_LONGEST = 1000
_DTYPE = re.compile(r"[(, ](\w+(?: \(big-endian\))?), shape \(")


class CollectiveSpans(EventReader):
    """Event reader that makes a span for each of this client's collectives.

    Args:
        tracer: Tracer of the spans.
        known: Attributes of all spans.
    """

    def __init__(self, tracer: Tracer, known: Mapping[str, str | int]) -> None:
        super().__init__(context.get_current)
        self._tracer = tracer
        self._known = dict(known)
        self._left_out = 0
        self._reported = 0
        self._pace = _Pace(RATE, _BURST)
        self._broken = False

    def paused(self) -> bool:
        """Return whether the rate limit allows too few spans to fetch calls for them."""
        return self._pace.spent(time.monotonic())

    def read(self, calls: Sequence[CallRecord]) -> None:
        """Make spans of calls, except barriers, which have their own spans."""
        for call in calls:
            if call.stream:
                self._take(call)

    def finish(self) -> None:
        """See `EventReader.finish`."""

    def _take(self, call: CallRecord) -> None:
        if not call.error and not self._pace.take(time.monotonic()):
            self._left_out += 1
            return
        try:
            self._make(call)
        except Exception:  # noqa: BLE001 -- of the program's own span processor or sampler
            if not self._broken:
                logger.exception("could not make a span of %s; later errors are not logged", call.call)
            self._broken = True

    def _make(self, call: CallRecord) -> None:
        assert call.began is not None
        assert call.ended is not None
        elapsed = call.ended - call.began
        began = _epoch() + round(call.began * 1e9)
        ended = began + max(0, round(elapsed * 1e9))
        name, dtype = _named(call.call)
        about: dict[str, str | int | float] = {
            **self._known,
            "dmesh.group": call.group[:_LONGEST],
            "dmesh.lane": f"{call.stream:016x}",
            "dmesh.sequence": call.sequence,
            "dmesh.collective.operation": name,
            "dmesh.collective.call": call.call[:_LONGEST],
            "dmesh.collective.bytes": call.nbytes,
        }
        if dtype:
            about["dmesh.collective.dtype"] = dtype
        if call.began > call.called:
            about["dmesh.collective.queue_seconds"] = call.began - call.called
        if call.timed:
            about["dmesh.collective.wait_seconds"] = call.waited
            about["dmesh.collective.transfer_seconds"] = max(0.0, elapsed - call.waited)
        missing = self._left_out + self.lost
        if missing > self._reported:
            about["dmesh.collective.left_out"] = missing - self._reported
            self._reported = missing
        scope = call.scope if isinstance(call.scope, Context) else Context()
        span = self._tracer.start_span(
            name, scope, kind=SpanKind.INTERNAL, attributes=about, start_time=began
        )
        if call.error:
            kind, _, message = call.error.partition(": ")
            span.set_attribute("error.type", kind)
            qualified = f"{errors.__name__}.{kind}" if hasattr(errors, kind) else kind
            event = {"exception.type": qualified, "exception.message": message}
            span.add_event("exception", event, timestamp=ended)
            span.set_status(Status(StatusCode.ERROR, call.error))
        span.end(ended)


class _Pace:
    """Rate limit: `rate` per second, up to `burst` at once. Only one thread may call `take`."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left = burst
        self._looked = -1.0
        self._again = 0.0

    def take(self, now: float) -> bool:
        """Return whether one more is allowed, and count it."""
        if self._looked >= 0:
            self._left = min(self._burst, self._left + (now - self._looked) * self._rate)
        self._looked = now
        if self._left < 1:
            self._again = now + min(self._burst, _BATCH) / self._rate
            return False
        self._left -= 1
        return True

    def spent(self, now: float) -> bool:
        """Return whether too few are allowed now to fetch calls for them. Any thread may call it."""
        return now < self._again


def _epoch() -> int:
    """Return the time at which the monotonic clock was 0, ns since 1970.

    It is computed for each span, because the wall clock may be changed. Of several attempts, the shortest
    counts: the thread may be descheduled for milliseconds between reading the two clocks.
    """
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return now - (before + after) // 2


@lru_cache(maxsize=512)
def _named(call: str) -> tuple[str, str]:
    """Return operation and dtype of a call; an empty dtype if it has none or a structured one."""
    found = _DTYPE.search(call)
    return call.partition("(")[0] or call, found[1] if found else ""
