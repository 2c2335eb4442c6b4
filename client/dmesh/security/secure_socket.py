"""A connection in TLS for a thread that reads and threads that write, none of which waits."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from dmesh._locks import Lock

_RECORD: Final = 16 * 1024  # most bytes of a TLS record; smaller pieces are joined
_ENCRYPT_AT_ONCE: Final = 128 * 1024
_DECRYPT_AT_ONCE: Final = 128 * 1024
_SMALL_READ: Final = 4 * 1024
_HANDSHAKE_LIMIT: Final = 64 * 1024  # bytes before it is over; long chains of certificates have 10,000
_HANDSHAKE, _ALERT = 0x16, 0x15
CLOSED: Final = "the connection was closed during the handshake"


class Unencrypted(ConnectionError):
    """The other side answered, but not in TLS."""


def speaks_tls(start: bytes) -> bool:
    """Return True if the first bytes of a connection are TLS. No other message begins like that."""
    return start[0] in (_HANDSHAKE, _ALERT)


class SecureSocket:
    """A non-blocking TLS connection, with the socket methods that the transport uses.

    OpenSSL works on two buffers in memory here, and this class moves their bytes to and from the socket. That
    takes fewer system calls than letting it read and write records one by one, bounds the bytes read from an
    unproven connection, and lets a write that the kernel took in part be continued.

    Reads and writes may come from two threads. An OpenSSL object must not be used by two at once: a lock is
    held around it, only ever for as long as it takes to encrypt or decrypt a few hundred kilobytes.

    TLS's own close_notify is not used: the transport's goodbye comes through the encryption, so a connection
    that an attacker cuts is not mistaken for one that its owner ended.
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
        self.hidden = False  # there may be more to read than the selector can see, because it is here already
        # Identity of the established connection. Both ends know it, and an attacker between two connections
        # cannot make them the same: it is the dialer's Finished message, a MAC over the whole handshake with
        # a key of this connection alone.
        self.binding = b""
        self._socket = sock
        # The rest is as with any socket; closing it sends no alert.
        self.fileno, self.shutdown, self.close = sock.fileno, sock.shutdown, sock.close
        self.setblocking = sock.setblocking
        self.getsockopt, self.setsockopt = sock.getsockopt, sock.setsockopt
        self._lock = Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_name
        )
        self._received = 0
        self._ahead = bytearray()  # decrypted for a look, and not yet read
        self._failure: OSError | None = None
        self._unsent = memoryview(b"")  # encrypted, and not yet taken by the kernel
        self._owed = 0  # plaintext bytes covered by the records that are not flushed yet

    def handshake(self) -> None:
        """Continue the TLS handshake until it is over; raises BlockingIOError if more must come first.

        Raises `Unencrypted` if the first bytes are not TLS, and ssl.SSLError if one side does not accept the
        other, which has been notified, if possible.
        """
        with self._lock:
            while not self.established:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._flush()
                    if not self._take(_SMALL_READ):
                        raise ConnectionAbortedError(CLOSED) from None
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

    def recv(self, size: int) -> bytes:
        """Read up to `size` bytes; none if the connection has ended."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, view: memoryview) -> int:
        """Read the available bytes, up to the view's size; 0 if the connection has ended."""
        return self.recvmsg_into([view])[0]

    def recvmsg_into(
        self, views: Sequence[memoryview], ancillary: int = 0, flags: int = 0
    ) -> tuple[int, ...]:
        """Read the available bytes into one view after the other; return their number as a tuple's first.

        With the flag MSG_PEEK, the next read returns the same bytes again.
        """
        del ancillary
        with self._lock:
            self.hidden = True
            if flags & socket.MSG_PEEK:
                self._look_ahead(sum(map(len, views)))
            if not self._ahead:
                return (self._read(views),)
            self.hidden = True
            total = 0
            for view in views:
                part = self._ahead[total : total + len(view)]
                view[: len(part)] = part
                total += len(part)
            if not flags & socket.MSG_PEEK:
                del self._ahead[:total]
            return (total,)

    def _look_ahead(self, size: int) -> None:
        missing = bytearray(max(0, size - len(self._ahead)))
        try:
            count = self._read([memoryview(missing)])
        except OSError as error:
            if not self._ahead:
                raise
            if not isinstance(error, BlockingIOError):
                self._failure = error
            return
        self._ahead += missing[:count]

    def _read(self, views: Sequence[memoryview]) -> int:
        total = 0
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
                        return total
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
        return total

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
        data = self._socket.recv(size)
        if not data:
            return False
        if not self.established:
            if not self._received and not speaks_tls(data):
                raise Unencrypted("it answered without TLS")
            self._received += len(data)
            if self._received > _HANDSHAKE_LIMIT:
                raise ConnectionAbortedError(f"more than {_HANDSHAKE_LIMIT} bytes came during the handshake")
        self._incoming.write(data)
        return True

    def send(self, data: bytes) -> int:
        """Write; see `sendmsg`."""
        return self.sendmsg([data])

    def sendmsg(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write pieces, one after the other; return the number of their bytes that are written.

        Encrypted bytes cannot be taken back. So after a BlockingIOError the next call must begin with the
        same bytes: it does not encrypt them again, and counts them once the kernel has taken them all.
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
