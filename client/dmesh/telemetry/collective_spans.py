"""Spans of collectives and transfers, made from what the flight recorder and the ports have noted of them.

Made on a thread of their own, after the fact, with the times at which the calls began and ended: a call pays
for a look at what surrounds it, and for nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import lru_cache

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from dmesh import errors
from dmesh._log import logger
from dmesh.collectives.following import Followed, Follower
from dmesh.collectives.group import Group
from dmesh.collectives.lane import Lane

RATE = 2000
"""Spans a second; of calls that come faster, the rest is counted. Those that failed have spans anyway."""
_BURST = 2000
_BATCH = 256
"""Spans that are worth fetching calls for, where there are more calls than spans."""
_LONGEST = 1000
_DTYPE = re.compile(r"[(, ](\w+(?: \(big-endian\))?), shape \(")


class CollectiveSpans(Follower):
    """Makes a span of each call of this client's collectives.

    Args:
        tracer: Makes the spans.
        known: Attributes of all spans.
    """

    def __init__(self, tracer: Tracer, known: Mapping[str, str | int]) -> None:
        super().__init__("dmesh-otel", context.get_current)
        self._tracer = tracer
        self._known = dict(known)
        self._left_out = 0
        self._reported = 0
        self._pace = _Pace(RATE, _BURST)
        self._closing = False
        self._broken = False

    def fetch(self, group: Group, lane: Lane) -> None:
        """Fetches what a port has done, unless there would be no spans of it."""
        if self._closing or not self._pace.spent(time.monotonic()):
            super().fetch(group, lane)

    def close(self) -> None:
        """Makes the spans of what is left. Idempotent."""
        self._closing = True
        super().close()

    def _take(self, call: Followed) -> None:
        if not call.error and not self._pace.take(time.monotonic()):
            self._left_out += 1
            return
        try:
            self._make(call)
        except Exception:  # noqa: BLE001 -- of a processor or sampler that is the program's own
            if not self._broken:
                logger.exception("a span of %s could not be made; it is said once", call.call)
            self._broken = True

    def _make(self, call: Followed) -> None:
        epoch = _epoch()
        began = epoch + round(call.began * 1e9)
        ended = began + max(0, round(call.elapsed * 1e9))
        name, dtype = _named(call.call)
        about: dict[str, str | int | float] = {
            **self._known,
            "dmesh.group": call.group[:_LONGEST],
            "dmesh.lane": f"{call.lane:016x}",
            "dmesh.sequence": call.number,
            "dmesh.collective.operation": name,
            "dmesh.collective.call": call.call[:_LONGEST],
            "dmesh.collective.bytes": call.nbytes,
        }
        if dtype:
            about["dmesh.collective.dtype"] = dtype
        if call.queued:
            about["dmesh.collective.queue_seconds"] = call.queued
        if call.waited is not None:
            about["dmesh.collective.wait_seconds"] = call.waited
            about["dmesh.collective.transfer_seconds"] = max(0.0, call.elapsed - call.waited)
        missing = self._left_out + self._lost
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

    def _pause(self) -> None: ...

    def _end(self) -> None: ...


class _Pace:
    """Lets so many pass in a second, and as many at once that have saved up. `take` is for one thread."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left = burst
        self._looked = -1.0
        self._again = 0.0

    def take(self, now: float) -> bool:
        """Returns whether one more may pass."""
        if self._looked >= 0:
            self._left = min(self._burst, self._left + (now - self._looked) * self._rate)
        self._looked = now
        if self._left < 1:
            self._again = now + min(self._burst, _BATCH) / self._rate
            return False
        self._left -= 1
        return True

    def spent(self, now: float) -> bool:
        """Whether too few would pass just now to fetch calls for them. Any thread."""
        return now < self._again


def _epoch() -> int:
    """Returns when the monotonic clock was 0, ns since 1970. Clocks are set: it is looked at for each span.

    The thread may lose its core between looking at one clock and at the other, for milliseconds: of several
    looks, the one that took the shortest counts.
    """
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return now - (before + after) // 2


@lru_cache(maxsize=512)
def _named(call: str) -> tuple[str, str]:
    """Returns operation and dtype of a call; an empty dtype if it has none that is one word."""
    found = _DTYPE.search(call)
    return call.partition("(")[0] or call, found[1] if found else ""
