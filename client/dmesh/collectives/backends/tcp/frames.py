"""Frames that peers exchange: kinds, format and limits.

```
 0        1        2                 4                        8
 +--------+--------+-----------------+------------------------+
 | version|  kind  | signature length|          step          |
 +--------+--------+-----------------+------------------------+
 |                         generation                         |
 +------------------------------------------------------------+
 |                           group                            |
 +------------------------------------------------------------+
 |                          sequence                          |
 +------------------------------------------------------------+
 |                           length                           |
 +------------------------------------------------------------+   40 bytes, big-endian
 | signature ...                                              |
 | payload ...       (DATA, CHUNK, CONTROL: `length` bytes)   |
```

Paths of a payload:

* At most `EAGER_LIMIT` bytes: one DATA frame, sent at once. If it comes before its receive is posted, it is
  buffered.
* More: the receiver says READY as soon as its receive is posted (both sides know the size), and the sender
  answers with CHUNKs that go straight into the posted memory. Chunks of several sends and small frames take
  turns on a connection. By the OFFER before, a receiver that expects another length fails at once.
* A sender that gives up says CANCEL, so that half a payload is never taken for a whole one.

Every frame of a channel carries the channel's signature, but for CHUNK, which only follows a READY. All
limits are checked on the header alone, before anything is allocated or read for the frame.

The *generation* of the channels grows whenever lost clients have been replaced and all groups begin anew
(`Transport.renew`). A frame of an earlier generation than the receiver's is dropped; one of a later
generation is buffered until the receiver has reached it.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from dmesh.errors import CollectiveError

VERSION: Final = 5
"""Version of the format, and of the schedules, which number the messages of a channel; a frame of another
version breaks the protocol."""
EAGER_LIMIT: Final = 64 * 1024
"""Largest payload that is sent without waiting for the receiver. Both sides must use the same number."""
CHUNK_LIMIT: Final = 1024 * 1024
"""Largest piece of a large payload in one frame."""
CONTROL_LIMIT: Final = 64 * 1024
"""Largest control message."""
SIGNATURE_LIMIT: Final = 4 * 1024
"""Longest signature of a channel."""
_PLACE: Final = b" @ "
"""What stands before the place in the program, in the signature of a call that has one."""

HEADER: Final = struct.Struct("!BBHIQQQQ")
"""A frame's fixed header; `connection.encode` writes it."""
HEADER_SIZE: Final = HEADER.size


class Kind(enum.IntEnum):
    """Kind of a frame."""

    DATA = 1  # a whole small payload
    OFFER = 2  # a large payload of `length` bytes waits for the receiver's READY
    READY = 3  # the receive of a large payload of `length` bytes is posted
    CHUNK = 4  # the next piece of a large payload
    CANCEL = 5  # the sender gave up: this payload will not come, or not all of it
    CONTROL = 6  # a message outside of any channel
    GOODBYE = 7  # the last; `sequence` is 1 if the sender's other connection says its own goodbye


class Frame(NamedTuple):
    """A frame without its payload."""

    kind: Kind
    group: int = 0
    sequence: int = 0
    step: int = 0
    length: int = 0
    signature: bytes = b""
    generation: int = 0

    @property
    def payload_length(self) -> int:
        """Bytes that follow the header and the signature."""
        return self.length if self.kind in _WITH_PAYLOAD else 0


_WITH_PAYLOAD: Final = frozenset({Kind.DATA, Kind.CHUNK, Kind.CONTROL})
_SIGNED: Final = frozenset({Kind.DATA, Kind.OFFER, Kind.READY, Kind.CANCEL})
_KINDS: Final = {int(kind): kind for kind in Kind}
# Lowest and highest `length`.
_LENGTHS: Final = {
    Kind.DATA: (0, EAGER_LIMIT),
    Kind.OFFER: (EAGER_LIMIT + 1, 2**63 - 1),
    Kind.READY: (EAGER_LIMIT + 1, 2**63 - 1),
    Kind.CHUNK: (1, CHUNK_LIMIT),
    Kind.CANCEL: (0, 0),
    Kind.CONTROL: (0, CONTROL_LIMIT),
    Kind.GOODBYE: (0, 0),
}


def agree(mine: bytes, theirs: bytes) -> bool:
    """Return whether two signatures are those of the same call, wherever in the program it was made."""
    return mine == theirs or mine.partition(_PLACE)[0] == theirs.partition(_PLACE)[0]


def parse_header(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[Frame, int]:
    """Parse a fixed header; return the frame, still without its signature, and the signature's length.

    Raises CollectiveError if it breaks a rule of the protocol: nothing after it can be trusted.
    """
    version, number, signature_length, step, generation, group, sequence, length = HEADER.unpack_from(
        data, offset
    )
    if version != VERSION:
        raise CollectiveError(
            f"received a frame of version {version}; this process supports version {VERSION}"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise CollectiveError(f"received a frame of unknown kind {number}")
    if signature_length > (SIGNATURE_LIMIT if kind in _SIGNED else 0):
        raise CollectiveError(f"a {kind.name} frame came with a signature of {signature_length} bytes")
    lowest, highest = _LENGTHS[kind]
    if not lowest <= length <= highest:
        raise CollectiveError(
            f"a {kind.name} frame came with length {length}, which must be {lowest} to {highest}"
        )
    if kind is Kind.CONTROL and (group or sequence or step or generation):
        raise CollectiveError("a CONTROL frame came that names a channel")
    if kind is Kind.GOODBYE and (group or step or generation or sequence > 1):
        raise CollectiveError("a GOODBYE frame came that names a channel")
    return Frame(kind, group, sequence, step, length, b"", generation), signature_length


def where(frame: Frame) -> str:
    """Return the place of a frame for messages."""
    return f"(group {frame.group}, sequence {frame.sequence}, step {frame.step})"
