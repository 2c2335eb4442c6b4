"""Sessions over a TCP connection of their own: frames of messages, for a part of gRPC's processor time.

`KeepSessionRequest` in `protos/dmesh/v1/coordination.proto` describes them. A call of gRPC that carries no
messages stays open beside the connection: gRPC answers the server's pings on threads of its own, also while
the interpreter does not run, and a process that is frozen or cut off does not.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination import faults
from dmesh.coordination.carrier import Carrier, Heartbeats, NoCarrier, Receive
from dmesh.coordination.faults import CHANNEL_CLOSED, Fault
from dmesh.coordination.link import Link
from dmesh.coordination.waiting import Inbox
from dmesh.errors import ConfigurationError
from dmesh.security.secure_socket import SecureSocket
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

_CONNECT = 2.0
"""Seconds that connecting may take: the session waits for it, and the system connects for a busy server."""
_HANDSHAKE = 10.0
"""Seconds that a TLS handshake may take, with a server that thousands of clients reach at the same time."""
_LAST_WORDS = 0.2
"""Seconds for which the connection is read after the call beside it has ended: what the server said before
the end may be on its way."""
_LARGEST = (64 << 20) + (64 << 10)
"""Bytes of a message that is believed in: the server answers with no more values at a time."""
_CHUNK = 64 << 10

_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds after which a silent connection is tried, seconds between the attempts, and their number. Firewalls
and the like forget connections that are silent for minutes, which gRPC's pings would not notice."""
_UNACKNOWLEDGED = 30.0
"""Seconds for which the server's system may leave what was sent unacknowledged. A connection with bytes under
way is not silent: by default the system goes on sending them for 15 minutes, while gRPC's way is open."""

AVAILABLE = hasattr(select, "poll")
"""True if this system supports such connections."""

_BROKE = Fault(0, "the connection of the session broke", code=grpc.StatusCode.UNAVAILABLE)


class FramedConnection(Carrier):
    """A session over a connection of its own, read by the thread that serves it and written by whom it takes.

    Args:
        link: To the coordinator.
        caller: This process.
        heartbeats: Its heartbeats.

    Raises:
        NoCarrier: This process can open no sockets.
    """

    def __init__(self, link: Link, caller: common_pb2.Caller, heartbeats: Heartbeats) -> None:
        super().__init__(heartbeats)
        self._link = link
        self._caller = caller
        self._owner = os.getpid()
        self._lock = Lock()
        self._call: Any = None
        self._socket: socket.socket | SecureSocket | None = None
        try:
            self._inbox = Inbox()
        except OSError as error:  # a stream of gRPC needs none
            raise NoCarrier(f"this process has no file descriptors left ({error})", certain=True) from None
        self._unsent = bytearray()
        self._begun = False
        self._closed = False
        self._end: Fault | None = None
        self._end_at = float("inf")

    def serve(self, attach: bytes, receive: Receive) -> Fault:
        """Open the session, and pass on what comes until it is over; see `Carrier`."""
        try:
            offer = self._ask()
            if isinstance(offer, Fault):
                return offer
            try:
                sock = self._connect(offer)
            except NoCarrier:
                if self._closed:
                    return _BROKE
                raise
            try:
                with self._lock:
                    self._socket = sock
                self._write(offer.ticket + _frame(attach))
                return self._serve(sock, receive)
            finally:
                with self._lock:
                    self._socket = None
                sock.close()
        finally:
            self.close()
            self._inbox.close()

    def send(self, request: bytes) -> None:
        """Send an encoded request after those before it; never waits."""
        try:
            self._write(_frame(request))
        except OSError as error:
            logger.debug("nothing can be said to %s any more: %s", self._link.address, error)
            self._hang_up()  # the thread learns of it, and perhaps why
        except BaseException:
            # The failure may be in the middle of a frame, so later data could not be parsed.
            self._hang_up()
            raise

    def close(self) -> None:
        """End the session without a word. Idempotent."""
        self._closed = True
        if self._call is not None:
            self._link.cancel(self._call)
        self._inbox.wake()

    # Opening ------------------------------------------------------------------------------------------------

    def _ask(self) -> pb.KeepSessionResponse | Fault:
        """Open the call that stays open, and return where to connect, or why not."""
        try:
            self._call = self._link.coordination.KeepSession(pb.KeepSessionRequest(caller=self._caller))
        except ValueError:
            return CHANNEL_CLOSED
        if self._closed:
            self._call.cancel()
        try:
            offer: pb.KeepSessionResponse = next(self._call)
        except grpc.RpcError as error:
            fault = faults.from_rpc(error)
            if fault.code is grpc.StatusCode.UNIMPLEMENTED:
                raise NoCarrier("the coordinator does not offer one", certain=True) from None
            return fault
        except StopIteration:
            return _BROKE
        if offer.session_port == 0:
            raise NoCarrier(
                "the coordinator offers none (--session-port off, or too many of them are open)", certain=True
            )
        if offer.grpc_port != self._link.port:
            raise NoCarrier(
                f"it listens on port {offer.grpc_port}, and this process has connected to "
                f"{self._link.address}: a port mapping, or a proxy, knows of one port only",
                certain=True,
            )
        self._call.add_done_callback(self._on_call_over)
        return offer

    def _on_call_over(self, call: Any) -> None:
        """Note why the call beside the connection has ended; on a thread of gRPC's."""
        if call.code() is not grpc.StatusCode.OK:
            self._end = faults.from_rpc(call)
        self._end_at = time.monotonic() + _LAST_WORDS
        self._inbox.wake()

    def _connect(self, offer: pb.KeepSessionResponse) -> socket.socket | SecureSocket:
        where = (self._link.host, offer.session_port)
        try:
            plain = socket.create_connection(where, timeout=_CONNECT)
        except (OSError, OverflowError, ValueError) as error:  # names and ports that are none are the latter
            raise NoCarrier(f"port {offer.session_port} of its host cannot be reached ({error})") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                if hasattr(socket, option):
                    plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_UNACKNOWLEDGED * 1000))
            plain.setblocking(False)
            return self._encrypt(plain)
        except (OSError, ConfigurationError) as error:
            plain.close()
            raise NoCarrier(
                f"port {offer.session_port} of its host does not answer as it should ({error})"
            ) from None
        except BaseException:
            plain.close()
            raise

    def _encrypt(self, plain: socket.socket) -> socket.socket | SecureSocket:
        tls = self._link.tls
        if tls is None:
            return plain
        name = tls.server_name or self._link.host
        secure = SecureSocket(plain, tls.context(), server_side=False, server_name=name)
        poller, deadline = select.poll(), time.monotonic() + _HANDSHAKE
        poller.register(plain, select.POLLIN)
        poller.register(self._inbox.wakee, select.POLLIN)  # `close` wakes it, and so does the end of the call
        while True:
            with contextlib.suppress(BlockingIOError):
                secure.handshake()
                return secure
            if self._closed or time.monotonic() >= self._end_at:
                raise ConnectionAbortedError("the session ended meanwhile")
            self._inbox.woken()
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("the TLS handshake took too long")

    # Carrying -----------------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket | SecureSocket, receive: Receive) -> Fault:
        poller, buffer, inbox = select.poll(), bytearray(), self._inbox
        chunk = memoryview(bytearray(_CHUNK))
        wakee, fd = inbox.wakee.fileno(), sock.fileno()
        poller.register(wakee, select.POLLIN)
        poller.register(fd, select.POLLIN)
        waits_to_send = False
        while not self._closed:
            if (beat := self.heartbeats.take()) is not None:
                self.send(beat)
            left = min(self.heartbeats.left, self._end_at - time.monotonic())
            hidden = isinstance(sock, SecureSocket) and sock.hidden
            ready = poller.poll(0 if hidden else max(0.0, left) * 1000)
            if not ready and not hidden:
                if time.monotonic() >= self._end_at:  # and what came before that is read
                    break
                continue
            try:
                if len(ready) > 1 or (ready and ready[0][0] == wakee):
                    inbox.woken()
                if self._unsent:
                    self._write_rest()
                if waits_to_send != bool(self._unsent):
                    waits_to_send = bool(self._unsent)
                    poller.modify(fd, select.POLLIN | (select.POLLOUT if waits_to_send else 0))
                count = sock.recv_into(chunk)
            except BlockingIOError:
                continue
            except OSError as error:
                return self._broken(error)
            if not count:
                return self._broken(None)
            buffer += chunk[:count]
            try:
                end = self._take_frames(buffer, receive)
            except (ConnectionError, DecodeError) as error:
                return self._broken(error)
            except Exception as error:  # noqa: BLE001 -- a bug, which a new session may get over
                logger.exception("a message of the coordinator could not be dealt with")
                return self._broken(error)
            if end is not None:
                return end
        return self._end or _BROKE

    def _take_frames(self, buffer: bytearray, receive: Receive) -> Fault | None:
        begin = 0
        while len(buffer) - begin >= 4:
            end = begin + 4 + int.from_bytes(buffer[begin : begin + 4], "big")
            if end - begin > _LARGEST:
                raise ConnectionError(f"a message of {end - begin} bytes was announced")
            if end > len(buffer):
                break
            response = pb.SessionResponse.FromString(bytes(buffer[begin + 4 : end]))
            begin, self._begun = end, True
            if self._closed or (fault := receive(response)) is not None:
                return _BROKE if self._closed else fault
        del buffer[:begin]
        return None

    def _broken(self, error: Exception | None) -> Fault:
        logger.debug("the connection of the session with %s broke: %r", self._link.address, error)
        if self._end is None and not self._begun and not self._closed:
            raise NoCarrier(f"the connection ended before the coordinator said anything ({error})")
        return self._end or _BROKE

    def _write(self, data: bytes) -> None:
        """Send as much as the socket accepts; the thread sends the rest."""
        if os.getpid() != self._owner:
            return  # what a forked child says would be taken for its parent's word
        with self._lock:
            sock = self._socket
            if self._closed or sock is None:
                return
            if self._unsent:
                self._unsent += data
                return
            with contextlib.suppress(BlockingIOError):
                while data:
                    data = data[sock.send(data) :]
            if data:
                self._unsent += data
                self._inbox.wake()

    def _write_rest(self) -> None:
        """Send data that the socket did not accept before."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._unsent and self._socket is not None:
                del self._unsent[: self._socket.send(bytes(self._unsent[:_CHUNK]))]

    def _hang_up(self) -> None:
        """Make the thread notice that the connection is of no use any more."""
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message
