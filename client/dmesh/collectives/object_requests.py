"""Requests of object collectives: bytes whose lengths only their senders know.

Every message begins with a head of fixed size, which has the length of the payload and, if it is short, all
of it. What does not fit there follows in a second request of the same call, between those ranks that know
from the heads that something follows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dmesh.collectives.request import Array, Request
from dmesh.collectives.schedules.blocks import Blocks, Span
from dmesh.errors import CollectiveValueError

HEAD = 512
"""Bytes of a head."""
_LENGTH = struct.Struct("<Q")
_ROOM = HEAD - _LENGTH.size
"""Bytes of a payload that fit into its head."""
_MOST = 2**48
"""Largest payload that another rank may announce, in bytes."""
_NOTHING: Span = (0, 0)
_ROWS = ("scatter", "all_to_all")
"""Kinds in which a rank sends each other rank something of its own."""


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call that moves payloads between ranks of a group."""

    kind: str
    """Kind of the collective that moves arrays in the same way."""
    text: str
    """Wire descriptor."""
    size: int
    rank: int
    root: int
    """Position of the root."""
    payloads: Mapping[int, bytes]
    """Objects that this rank sends, by target."""
    sources: tuple[int, ...]
    """Ranks that send something to this one."""

    def request(self) -> Request:
        """Return the request of the call; its result are the payloads that came, by source."""
        described = Request(self.kind, self.text, root=self.root, contributes=bool(self.payloads))
        rows = self.size if self.kind in _ROWS else 1
        heads = None
        if self.payloads:
            heads = np.zeros((rows, HEAD), np.uint8)
            for row, payload in zip(heads, self.payloads.values(), strict=False):
                start = _LENGTH.pack(len(payload)) + payload[:_ROOM]
                row[: len(start)] = np.frombuffer(start, np.uint8)
        exchange = replace(
            described,
            nbytes_per_rank=rows * HEAD,
            count=HEAD,
            source=heads,
            shape=(len(self.sources), HEAD) if self.sources else None,
            precedes=True,
        )
        return replace(described, source=heads, exchange=exchange, resolve=self.resolve)

    def resolve(self, heads: Array | None) -> Request:
        """Return the second request, which moves what did not fit into the heads: perhaps nothing."""
        received = [] if heads is None else [row.tobytes() for row in heads]
        lengths = [_LENGTH.unpack_from(head)[0] for head in received]
        for source, length in zip(self.sources, lengths, strict=True):
            if length > _MOST:
                raise CollectiveValueError(f"position {source} announced an object of {length} bytes")
        inputs, sends = self._remainders()
        receives, end = [_NOTHING] * self.size, 0
        for source, length in zip(self.sources, lengths, strict=True):
            start, end = end, end + max(length - _ROOM, 0)
            receives[source] = (start, end)

        def arrange(flat: Array) -> dict[int, bytes]:
            found = {}
            for source, head, length in zip(self.sources, received, lengths, strict=True):
                begin = head[_LENGTH.size : _LENGTH.size + min(length, _ROOM)]
                found[source] = b"".join((begin, flat[slice(*receives[source])].data))
            return found

        longest = max(0, *(length - _ROOM for length in lengths), len(inputs))
        # In a broadcast or an all-gather all ranks know the sizes that follow; otherwise only sender and
        # receiver.
        follows = longest > 0 and self.kind in ("broadcast", "all_gather")
        is_plain = longest > 0 and self.kind == "broadcast"
        limit = longest if follows else 0
        blocks = Blocks(tuple(sends), tuple(receives), (0,) * self.size, limit, limit, closes=False)
        return Request(
            self.kind if is_plain else "all_gather",
            self.text,
            nbytes_per_rank=longest,
            count=max(longest, 1),
            root=self.root,
            contributes=bool(self.payloads),
            source=inputs if self.payloads else None,
            shape=(end,),
            arrange=arrange,
            blocks=None if is_plain else blocks,
            messages_only=not follows,
        )

    def _remainders(self) -> tuple[Array, list[Span]]:
        """Return the bytes that do not fit into the heads, and where those for each rank are."""
        sends, parts, end = [_NOTHING] * self.size, [], 0
        before: bytes | None = None
        for target, payload in self.payloads.items():
            if before is None or self.kind in _ROWS:  # else the same for all targets
                parts.append(np.frombuffer(payload, np.uint8)[_ROOM:])
                start, end, before = end, end + len(parts[-1]), payload
            sends[target] = (start, end)
        return (np.concatenate(parts) if parts else np.empty(0, np.uint8)), sends
