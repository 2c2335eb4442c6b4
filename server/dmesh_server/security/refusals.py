"""Rate-limited log lines about refused callers."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from dmesh_server.telemetry import logs

_INTERVAL = 10.0
_MOST_PEERS = 1024


class RefusalLog:
    """Log of refusals: at most one line per peer and kind in an interval, with the number left out since."""

    def __init__(
        self,
        interval: float = _INTERVAL,
        most_peers: int = _MOST_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty log.

        Args:
            interval: Seconds between two lines about the same peer.
            most_peers: Peers that are remembered. Beyond them, all peers together get one line.
            clock: Monotonic seconds.
        """
        self._interval = interval
        self._most_peers = most_peers
        self._clock = clock
        self._logged: OrderedDict[tuple[str, ...], list[float]] = OrderedDict()
        self.on_line: Callable[[str, str, dict[str, object]], None] | None = None
        """Called with event, peer and fields of each line, if set."""
        self.counts: Counter[str] = Counter()
        """Number of refusals of each kind, including those without a log line."""

    def note(self, event: str, peer: str, *keys: str, **fields: object) -> None:
        """Note a refusal.

        Args:
            event: The event of the log line.
            peer: Host that was refused, without the port, which changes with each attempt.
            keys: Further parts of the refusal's identity, such as the token's fingerprint and the method.
            fields: Further fields of the line. Never a token.
        """
        self.counts[event] += 1
        now = self._clock()
        while self._logged and now - next(iter(self._logged.values()))[0] >= self._interval:
            (earlier, *_), (_, left_out) = self._logged.popitem(last=False)
            if left_out:
                logs.warning(f"{earlier}_summary", left_out=int(left_out))
        key = (event, peer, *keys)
        if key not in self._logged and len(self._logged) >= self._most_peers:
            key, peer = (event, "many"), "many"
        entry = self._logged.get(key)
        if entry is not None:
            entry[1] += 1
            return
        self._logged[key] = [now, 0]
        logs.warning(event, peer=peer, **fields)
        if self.on_line is not None:
            self.on_line(event, peer, fields)


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    family, _, address = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return peer
    return address.rpartition(":")[0].replace("%5B", "").replace("%5D", "")
