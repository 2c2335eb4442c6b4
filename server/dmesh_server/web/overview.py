"""Overview of all clusters in numbers: worked out once for all readers of the stream of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from dmesh_server.core.errors import CoreError
from dmesh_server.core.views import Summary
from dmesh_server.runtime import Runtime
from dmesh_server.telemetry import logs
from dmesh_server.web.api.answers import encode
from dmesh_server.web.api.clusters import view_summary

MOST_STREAMS = 128
"""Readers at a time."""
_LOOK = 1.0
"""Seconds between two looks at the numbers of the clusters."""


class Look:
    """A cluster's look as all readers get it, encoded once for all of them."""

    __slots__ = ("_at", "_encoded", "summary")

    def __init__(self, summary: Summary, at: float) -> None:
        self.summary = summary
        self._at = at
        self._encoded: bytes | None = None

    def refresh(self, now: float) -> None:
        """Update the waiting time for new readers; a cluster may look the same for hours."""
        if self.summary.oldest is not None and now - self._at >= _LOOK:
            self._at = now
            self._encoded = None

    def encode(self) -> bytes:
        """Return it as JSON, as of when it was looked at."""
        if self._encoded is None:
            self._encoded = encode(view_summary(self.summary, self._at))
        return self._encoded


Notify = Callable[[Iterable[Look], Iterable[str]], None]
"""Takes the clusters whose look has changed, and the names of those that are gone."""


class Overview:
    """Looks at the numbers of all clusters, once for all readers, as long as there are any."""

    def __init__(self, runtime: Runtime) -> None:
        """Make an idle overview; it looks while it has readers.

        Args:
            runtime: The server's state.
        """
        self._runtime = runtime
        self._readers: set[Notify] = set()
        self._task: asyncio.Task[None] | None = None
        self._seen: dict[str, Look] = {}

    @property
    def full(self) -> bool:
        """True if there are as many readers as allowed."""
        return len(self._readers) >= MOST_STREAMS

    def join(self, notify: Notify) -> None:
        """Send a reader all clusters, and then the changed ones. Pair with `leave`."""
        if not self._readers:
            self._seen = self._look()
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="dmesh-overview")
        self._readers.add(notify)
        now = self._runtime.now()
        for look in self._seen.values():
            look.refresh(now)
        notify(self._seen.values(), ())

    def leave(self, notify: Notify) -> None:
        """Stop sending to a reader."""
        self._readers.discard(notify)
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None

    def _look(self) -> dict[str, Look]:
        """Return the clusters as they look now; an unchanged look is the same object."""
        views, now = self._runtime.views, self._runtime.now()
        found: dict[str, Look] = {}
        for name in views.names():
            summary, seen = views.summary(name), self._seen.get(name)
            found[name] = Look(summary, now) if seen is None or seen.summary != summary else seen
        return found

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            try:
                found = self._look()
            except CoreError:  # the server stops, which the readers learn
                return
            except Exception:  # noqa: BLE001 -- a bug, but without a look no reader would see another change
                logs.error("overview_failed", exc_info=True)
                continue
            changed = [one for name, one in found.items() if self._seen.get(name) is not one]
            gone = self._seen.keys() - found.keys()
            self._seen = found
            for notify in self._readers if changed or gone else ():
                notify(changed, gone)
