"""Messages between the notebook's process and a client, over a socket pair that the client inherits."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

from dmesh.collectives.object_encoding import decode, encode
from dmesh.errors import CollectiveValueError

MOST_BYTES = 1 << 28
"""Maximum size of a message, bytes."""
_HEADER = struct.Struct("<Q")


class Channel:
    """One end of the connection between the notebook's process and a client.

    A message is a dict of plain values and arrays, in the encoding of the object collectives. Only one
    message is in transit at a time: a request, then its reply.

    Args:
        end: One end of a socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            CollectiveError: A value is not plain, or the message is too large; nothing was sent.
            OSError: The other end is closed.
        """
        self.send_encoded(encoded(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that `encoded` made.

        Raises:
            OSError: The other end is closed.
        """
        self._socket.sendall(_HEADER.pack(len(data)))
        self._socket.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; return None if the other end is closed.

        Raises:
            CollectiveValueError: The received data is not a message.
        """
        header = self._read(_HEADER.size)
        if header is None:
            return None
        (length,) = _HEADER.unpack(header)
        if length > MOST_BYTES:
            raise CollectiveValueError(f"received a message of {length} bytes; the limit is {MOST_BYTES}")
        data = self._read(length)
        if data is None:
            return None
        message = decode(data)
        if not isinstance(message, dict):
            raise CollectiveValueError(f"received a message that is not a dict, but {type(message).__name__}")
        return message

    def close(self) -> None:
        """Close this end; the other end then receives None."""
        self._socket.close()

    def _read(self, length: int) -> bytes | None:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError:
                return None
            if not count:
                return None
            view = view[count:]
        return bytes(data)


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        CollectiveError: A value is not plain, or the message is too large.
    """
    data = encode(dict(message))
    if len(data) > MOST_BYTES:
        raise CollectiveValueError(
            f"a message of {len(data)} bytes cannot be sent; the limit is {MOST_BYTES}"
        )
    return data
