"""Frames between the launcher and its agents on other hosts: a line of text, then bytes. No IO.

```
KIND NUMBER LENGTH  (line break)
LENGTH bytes        (line break)
```

NUMBER is a rank where a frame is about one. A frame ends in a line break because what lies between (srun) may
pass on whole lines only. A receiver trusts no length that it has not checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dmesh.errors import HostError

MAGIC = b"dmesh-agent 1\n"
"""First line of an agent: all before it is what a shell says when it starts."""
_LONGEST_HEAD = 64
_MOST_BYTES = 1 << 24
_MOST_NOISE = 1 << 16


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: str
    """Its kind."""
    number: int
    """The rank that it is about, or 0."""
    payload: bytes = b""
    """Its content."""

    def encode(self) -> bytes:
        """Return the frame as it is sent."""
        return b"%s %d %d\n%s\n" % (self.kind.encode(), self.number, len(self.payload), self.payload)

    def text(self) -> str:
        """Return the content as text."""
        return self.payload.decode("utf-8", "replace")

    def fields(self) -> dict[str, Any]:
        """Return the content as a JSON object.

        Raises:
            HostError: It is none.
        """
        try:
            content = json.loads(self.payload)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise HostError(f"a message {self.kind!r} between dmesh run and an agent is not a JSON object")
        return content


def frame(kind: str, fields: Mapping[str, object], number: int = 0) -> Frame:
    """Return a frame with a JSON object as its content."""
    return Frame(kind, number, json.dumps(fields).encode())


class Decoder:
    """Makes frames of bytes as they come.

    Args:
        expects_magic: Skip what comes before `MAGIC`.
    """

    def __init__(self, expects_magic: bool = False) -> None:
        self._data = b""
        self._expects_magic = expects_magic

    @property
    def noise(self) -> bytes:
        """Bytes received before `MAGIC`; empty after it."""
        return self._data if self._expects_magic else b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take the next bytes; return the frames that are complete.

        Raises:
            HostError: These are no frames.
        """
        self._data += data
        if self._expects_magic:
            before, magic, after = self._data.partition(MAGIC)
            if not magic:
                if len(before) > _MOST_NOISE:
                    raise HostError("its output does not begin like that of a dmesh agent")
                return
            self._data, self._expects_magic = after, False
        position = 0
        while True:
            end = self._data.find(b"\n", position, position + _LONGEST_HEAD)
            if end < 0:
                if len(self._data) - position >= _LONGEST_HEAD:
                    raise _broken(self._data[position:])
                break
            kind, number, length = _head(self._data[position:end])
            stop = end + 1 + length
            if len(self._data) <= stop:
                break
            if self._data[stop : stop + 1] != b"\n":
                raise _broken(self._data[position:])
            yield Frame(kind, number, self._data[end + 1 : stop])
            position = stop + 1
        self._data = self._data[position:]


def _head(line: bytes) -> tuple[str, int, int]:
    words = line.split(b" ")
    if len(words) != 3 or not words[0].isalpha() or not all(word.isdigit() for word in words[1:]):
        raise _broken(line)
    if int(words[2]) > _MOST_BYTES:
        raise HostError(f"a message of {int(words[2])} bytes; dmesh run and its agents send {_MOST_BYTES}")
    return words[0].decode("ascii", "replace"), int(words[1]), int(words[2])


def _broken(data: bytes) -> HostError:
    return HostError(
        f"something other than dmesh run and its agent wrote between them: {data[:_LONGEST_HEAD]!r}"
    )
