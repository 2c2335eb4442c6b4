"""TLS connection with those of a socket's methods that the transport uses.

OpenSSL works on two buffers in memory here, and this module moves their bytes to and from the socket. That
takes fewer system calls than letting it read and write records one by one, bounds the bytes read from an
unproven connection, and lets a write that the kernel took in part be continued.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Final

_RECORD: Final = 16 * 1024
"""Most bytes of a TLS record; smaller pieces are joined."""
_ENCRYPT_AT_ONCE: Final = 128 * 1024
_DECRYPT_AT_ONCE: Final = 128 * 1024
_SMALL_READ: Final = 4 * 1024
_HANDSHAKE_LIMIT: Final = 64 * 1024
"""Most bytes before the TLS handshake is over; long chains of certificates have 10,000."""
_HANDSHAKE, _ALERT = 0x16, 0x15


class Unencrypted(ConnectionError):
    """The other side answered, but not in TLS."""


def speaks_tls(start: bytes) -> bool:
    """Return whether the first bytes of a connection are TLS. No other message begins like that."""
    return start[0] in (_HANDSHAKE, _ALERT)


class SecureSocket:
    """A non-blocking connection in TLS.

    Reads and writes may come from two threads. An OpenSSL object must not be used by two at once: a lock is
    held around it, only ever for as long as it takes to encrypt or decrypt a few hundred kilobytes.

    TLS's own close_notify is not used: the transport's goodbye comes through the encryption, so a connection
    that an attacker cuts is not mistaken for one that its owner ended.

    Args:
        sock: The connection, non-blocking; belongs to this object from now on.
        context: The certificates.
        server_side: True on the side that accepted the connection.
        server_name: Name of this client, sent unencrypted; see `peer_tls`.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_name: str | None = None,
    ) -> None:
        self.established = False
        """True once the TLS handshake is over."""
        self.hidden = False
        """True if there may be more to read than the selector can see, because it is here already."""
        self.binding = b""
        """Identity of the established connection. Both ends know it, and an attacker between two connections
        cannot make them the same: it is the dialer's Finished message, a MAC over the whole handshake with a
        key of this connection alone."""
        self._socket = sock
        self._lock = threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_name
        )
        self._received = 0
        self._ended = False
        self._failure: OSError | None = None
        self._unsent = memoryview(b"")  # encrypted, and not yet taken by the kernel
        self._owed = 0  # plaintext bytes covered by the records that are not flushed yet

    # -- the handshake ---------------------------------------------------------------------------------

    def handshake(self) -> None:
        """Continue the TLS handshake until it is over.

        Raises:
            BlockingIOError: More must come first; call again then.
            Unencrypted: The first bytes are not TLS.
            ssl.SSLError: One side does not accept the other. The other has been told, if possible.
            OSError: The connection ended.
        """
        with self._lock:
            while not self.established:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._flush()
                    if not self._take(_SMALL_READ):
                        raise ConnectionAbortedError(
                            "the connection was closed during the handshake"
                        ) from None
                except ssl.SSLError:
                    self._send_alert()
                    raise
                else:
                    self._flush()
                    # OpenSSL uses this name with TLS 1.3, too, for which no standard has it; Python offers no
                    # exporter. Its weak points in TLS 1.2, resumed and renegotiated sessions, do not occur.
                    self.binding = self._tls.get_channel_binding("tls-unique") or b""
                    if not self.binding:
                        raise ssl.SSLError("OpenSSL does not tell what identifies the connection")
                    self.established = True
                    self.hidden = True  # the other side's next message may have come with its last one

    # -- reading; one thread ---------------------------------------------------------------------------

    def recv(self, size: int) -> bytes:
        """Read up to `size` bytes; none if the connection has ended."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, view: memoryview) -> int:
        """Read the available bytes, up to the view's size; 0 if the connection has ended."""
        return self.recvmsg_into([view])[0]

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int, ...]:
        """Read the available bytes into one view after the other; return their number as a tuple's first.

        Raises:
            BlockingIOError: There is nothing yet.
            OSError: The connection broke, or was tampered with.
        """
        total = 0
        self.hidden = True
        with self._lock:
            if self._failure is not None:
                raise self._failure
            # An unproven connection, of which a few bytes are expected, is not read far ahead.
            ahead = _DECRYPT_AT_ONCE if sum(map(len, views)) > _SMALL_READ else _SMALL_READ
            try:
                for view in views:
                    rest = view
                    while len(rest):
                        count = self._decrypt(rest, ahead)
                        if count == 0:
                            return (total,)
                        total += count
                        rest = rest[count:]
            except BlockingIOError:
                self.hidden = False
                if not total:
                    raise
            except OSError as error:
                self._send_alert()
                if not total:
                    raise
                self._failure = error  # the bytes before it still count, a goodbye above all
        return (total,)

    def _decrypt(self, into: memoryview, ahead: int) -> int:
        while True:
            try:
                return int(self._tls.read(len(into), into))
            except ssl.SSLWantReadError:
                if not self._take(ahead):
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def _take(self, size: int) -> bool:
        """Pass received bytes to OpenSSL; return False if the connection has ended."""
        if self._ended:
            return False
        data = self._socket.recv(size)
        if not data:
            self._ended = True
            return False
        if not self.established:
            if not self._received and not speaks_tls(data):
                raise Unencrypted("it answered without TLS")
            self._received += len(data)
            if self._received > _HANDSHAKE_LIMIT:
                raise ConnectionAbortedError(f"more than {_HANDSHAKE_LIMIT} bytes came during the handshake")
        self._incoming.write(data)
        return True

    # -- writing; one thread at a time -----------------------------------------------------------------

    def send(self, data: bytes) -> int:
        """Write; see `sendmsg`."""
        return self.sendmsg([data])

    def sendmsg(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write pieces, one after the other; return the number of their bytes that are written.

        Encrypted bytes cannot be taken back. So after a BlockingIOError the next call must begin with the
        same bytes: it does not encrypt them again, and counts them once the kernel has taken them all.

        Raises:
            BlockingIOError: The kernel does not take all of it now.
            OSError: The connection is broken.
        """
        with self._lock:
            if not self._owed:
                self._owed = self._encrypt(pieces)
            self._flush()
            written, self._owed = self._owed, 0
            return written

    def _encrypt(self, pieces: Sequence[bytes | memoryview]) -> int:
        budget = _ENCRYPT_AT_ONCE
        small = bytearray()  # a record for each header would cost more than the header
        for piece in pieces:
            view = memoryview(piece)[:budget]
            budget -= len(view)
            if len(small) + len(view) <= _RECORD:
                small += view
                continue
            self._write(small)
            small = bytearray()
            self._write(view)
            if not budget:
                break
        self._write(small)
        return _ENCRYPT_AT_ONCE - budget

    def _write(self, data: bytearray | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._tls.write(rest) :]

    def _flush(self) -> None:
        while True:
            if not self._unsent:
                if not self._outgoing.pending:
                    return
                self._unsent = memoryview(self._outgoing.read())
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _send_alert(self) -> None:
        """Send the alert that OpenSSL has prepared, if it has and the connection takes it."""
        with contextlib.suppress(OSError):
            self._flush()

    # -- the socket ------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket's descriptor; negative if it is closed."""
        return self._socket.fileno()

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return an option of the socket."""
        return self._socket.getsockopt(level, option, size)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """End one direction of the TCP connection, or both."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket, without an alert."""
        self._socket.close()


Stream = socket.socket | SecureSocket
"""A connection with a peer, encrypted or not."""
