"""The express connection of a session: its messages as frames of TCP, for a part of gRPC's processor time.

The session's stream stays what tells the server that this process lives; once there is much to say, what is
said goes this way. `Express` in `protos/dmesh/v1/coordination.proto` describes it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable

from dmesh._log import logger
from dmesh.coordination.waiting import Worker, take
from dmesh.v1 import coordination_pb2 as pb

_CONNECT = 5.0
"""Seconds that connecting may take."""
_LAST_WORDS = 0.2
"""Seconds that the two ends, of the connection and of the stream, may be apart: less than the time that a
member has to come back after its session broke."""
_LARGEST = (64 << 20) + (64 << 10)
"""Bytes of a message that is believed in: the server answers with no more values at a time."""
_CHUNK = 256 << 10

_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds after which a silent connection is tried, seconds between the attempts, and their number. Firewalls
and the like forget connections that are silent for minutes, which the stream's pings would not notice."""

_AT_ONCE: int | None = getattr(socket, "MSG_DONTWAIT", None)
AVAILABLE = _AT_ONCE is not None
"""True if this system supports express connections."""


class Express:
    """One express connection, read and written by whom it takes to never make a user's thread wait.

    Args:
        host: Of the server.
        offer: What the server offered.
        receive: Takes each message, on the thread of the connection.
        broken: Called when the connection broke after it had begun to carry messages, on any thread.
    """

    def __init__(
        self,
        host: str,
        offer: pb.Express,
        receive: Callable[[pb.SessionResponse], object],
        broken: Callable[[], object],
    ) -> None:
        self._address = (host, offer.port)
        self._ticket = offer.ticket
        self._receive = receive
        self._broken = broken
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._worker = Worker(self._run, "dmesh-express")
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.carrying = False
        """True once it has begun to carry messages; stays True when it ends."""
        self._closed = False
        self._broke = False
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._late_count = 0
        self._late_worker: Worker | None = None

    def start(self) -> None:
        """Connect, on a thread of its own. If that fails, the session stays with its stream."""
        try:
            self._worker.start()
        except RuntimeError as error:  # too many threads: not the business of who happens to send
            logger.debug("no express connection to %s: %s", self._address, error)

    def begin(self) -> None:
        """Begin to carry messages: the server has said that it does."""
        with self._lock:
            self.carrying = True
            broke = self._broke
        self._begun.put(None)
        if broke:  # after the server had begun: what it has said since is lost
            self._broken()

    def hear_out(self) -> None:
        """Wait, not for long, until what the server said before it ended the session was received."""
        self._over.put(None)
        self.join()

    def join(self) -> None:
        """Wait, not for long, until no message is received any more."""
        if self.carrying:
            self._worker.join(_LAST_WORDS)

    def close(self) -> None:
        """End it. Idempotent."""
        with self._lock:
            self._closed = True
            self._hang_up()
        self._over.put(None)
        self._begun.put(None)
        self._late.put(None)

    def send(self, message: bytes) -> None:
        """Send an encoded message after those before it; never waits.

        What cannot be sent because the connection breaks is said again in the next session.
        """
        assert _AT_ONCE is not None
        frame = len(message).to_bytes(4, "big") + message
        try:
            with self._lock:
                if self._closed or self._socket is None or os.getpid() != self._owner:
                    return  # what a forked child says would be taken for its parent's word
                if self._late_count == 0:
                    with contextlib.suppress(BlockingIOError):
                        frame = frame[self._socket.send(frame, _AT_ONCE) :]
                    if not frame:
                        return
                self._send_late(frame)
        except (OSError, RuntimeError) as error:  # of the connection; no thread for what is left
            logger.debug("nothing can be said to %s any more: %s", self._address, error)
            with self._lock:
                self._hang_up()  # the thread learns of it, and perhaps why
        except BaseException as interrupt:
            # Perhaps in the middle of a frame; nobody could make sense of what would follow.
            self._break(interrupt)
            raise

    def _hang_up(self) -> None:
        """Wake the thread, which closes the socket. With the lock: the socket's number stays its own."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_late(self, frame: bytes) -> None:
        """Leave to a thread what the network has no room for now."""
        if self._late_worker is None:
            self._late_worker = Worker(self._send_rest, "dmesh-express-send")
            self._late_worker.start()
        self._late_count += 1
        self._late.put(frame)

    def _send_rest(self) -> None:
        sock = self._socket
        assert sock is not None
        while (frame := self._late.get()) is not None:
            try:
                sock.sendall(frame)
            except OSError as error:
                self._break(error)
                return
            with self._lock:
                self._late_count -= 1

    def _run(self) -> None:
        try:
            sock = self._connect()
        except (OSError, ValueError, OverflowError) as error:  # names and ports that are none are the latter
            logger.debug("no express connection to %s: %s", self._address, error)
            return
        try:
            self._read(sock)
        except OSError as error:
            # If it is the session that ended, the stream says so, and why: not to be broken off before.
            try:
                take(self._over, _LAST_WORDS)
            except queue.Empty:
                self._break(error)
        except Exception as error:  # noqa: BLE001 -- a bug, which a new session may get over
            logger.exception("a message of the coordinator could not be dealt with")
            self._break(error)
        finally:
            self._release(sock)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=_CONNECT)
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("the session is over")
                self._socket = sock  # before the server learns that it can begin
            sock.sendall(self._ticket)
        except BaseException as error:
            self._break(error)
            self._release(sock)
            raise
        return sock

    def _read(self, sock: socket.socket) -> None:
        buffer = bytearray()
        while data := sock.recv(_CHUNK):
            if not self.carrying:
                # The server has begun; that it has said so comes by the stream, after what was said before.
                self._begun.get()
            if self._closed:
                return
            buffer += data
            begin = 0
            while len(buffer) - begin >= 4:
                end = begin + 4 + int.from_bytes(buffer[begin : begin + 4], "big")
                if end - begin > _LARGEST:
                    raise ConnectionError(f"a message of {end - begin} bytes was announced")
                if end > len(buffer):
                    break
                self._receive(pb.SessionResponse.FromString(bytes(buffer[begin + 4 : end])))
                begin = end
            del buffer[:begin]
        raise ConnectionResetError("the server closed it")

    def _release(self, sock: socket.socket) -> None:
        """Close the socket when nobody uses it any more: its number may be another one's at once."""
        self.close()
        with self._lock:
            self._socket = None
        if self._late_worker is not None:
            self._late_worker.join(_CONNECT)
        sock.close()

    def _break(self, reason: BaseException) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = self._broke = True
            carrying = self.carrying
        self.close()
        logger.debug("the express connection to %s broke: %r", self._address, reason)
        if carrying:
            self._broken()
