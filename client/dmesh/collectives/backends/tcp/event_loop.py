"""Event loop on a daemon thread: waits for sockets, timers and calls from other threads. Knows no peers."""

from __future__ import annotations

import heapq
import itertools
import selectors
import threading
import time
from collections.abc import Callable

from dmesh._log import logger
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.coordination.waiting import Inbox, Worker

Action = Callable[[], None]
OnReady = Callable[[int], None]


class Timer:
    """An action in the future that can be cancelled."""

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Cancel the action; on the loop's thread."""
        self.action = None


class EventLoop:
    """The thread that owns a transport's sockets.

    `call`, `stop` and `join` may be used by any thread, everything else only on the loop's own. An action
    that raises is a bug: the loop ends after it, and `on_crash` is called. `on_end` is the last action.
    """

    def __init__(self, name: str, on_crash: Callable[[Exception], None], on_end: Action) -> None:
        self._on_crash = on_crash
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._inbox = Inbox()
        self.call: Callable[[Action], None] = self._inbox.put
        """Runs an action on the loop's thread, in the order of the calls; never waits."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._ended = False
        self._selector.register(self._inbox.wakee, selectors.EVENT_READ, lambda _: self._inbox.woken())
        self._thread = Worker(self._run, name)
        self._started = False

    def start(self) -> None:
        """Start the thread."""
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current action."""
        self._ended = True
        self._inbox.wake()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, for `timeout` seconds at most; not on the thread itself."""
        if not self._started:
            self._release()
        self._thread.join(timeout)

    def after(self, delay: float, action: Action) -> Timer:
        """Run an action after `delay` seconds."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._order), timer))
        return timer

    def watch(self, sock: Stream, events: int, on_ready: OnReady) -> None:
        """Call `on_ready(events)` whenever a socket is ready for some of `events`; 0 ends the watch."""
        watched = sock in self._selector.get_map()
        if not events:
            if watched:
                self._selector.unregister(sock)
        elif watched:
            self._selector.modify(sock, events, on_ready)
        else:
            self._selector.register(sock, events, on_ready)

    def _run(self) -> None:
        self._inbox.reader = threading.get_ident()
        try:
            while not self._ended:
                self._turn()
        except Exception as error:  # noqa: BLE001
            logger.exception("the transport's thread failed")
            self._on_crash(error)
        finally:
            self._ended = True
            self._on_end()
            self._release()

    def _turn(self) -> None:
        for key, events in self._selector.select(self._time_to_next()):
            # An earlier callback of this turn may have closed this socket or changed its watch.
            sock = key.fileobj
            assert not isinstance(sock, int)
            current = None if sock.fileno() < 0 else self._selector.get_map().get(sock)
            if current is not None and events & current.events:
                current.data(events & current.events)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heapq.heappop(self._timers)[2].action
            if action is not None:
                action()
        self._inbox.run()

    def _time_to_next(self) -> float | None:
        if self._inbox:
            return 0.0
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _release(self) -> None:
        self._selector.close()
        self._inbox.close()
