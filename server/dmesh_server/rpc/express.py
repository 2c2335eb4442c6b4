"""Express connections: sessions' messages as frames of TCP, for a part of gRPC's processor time.

`Express` in `protos/dmesh/v1/coordination.proto` describes them. A connecting client shows nothing but a
ticket, which it was given on a session's stream: without a session, it gets nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Protocol, cast

from google.protobuf.message import DecodeError

from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.rpc import convert
from dmesh_server.runtime import Runtime
from dmesh_server.security.limits import PeerLimits
from dmesh_server.sessions import MAX_SESSION_BYTES, OutgoingMessage, Session, describe_caller
from dmesh_server.telemetry import logs

_TICKET_BYTES = 32
_MOST_STRANGERS = 256
"""Connections that have not shown their ticket yet."""
_FRAMES_AT_ONCE = 64
"""Frames of one client that are acted on before the others have their turn."""
_UNREAD = 1 << 20
"""Bytes of unread answers from which on no more is read from a client."""

_PARTING = 1.0
"""Seconds that a client may take to read the last messages of its session."""

_BEGINS = pb.SessionResponse(express_begins=pb.ExpressBegins()).SerializeToString()


class Input(Protocol):
    """Takes a client's messages."""

    def take(self, request: pb.SessionRequest) -> float:
        """Act on one message; return for how many seconds not to listen; raise `CoreError` at the end."""


class ExpressServer:
    """Listens for express connections, and keeps the offers made to sessions."""

    def __init__(self, runtime: Runtime, limits: PeerLimits) -> None:
        """Make a server that does not listen yet.

        Args:
            runtime: Knows the time.
            limits: Bounds on the use by peers.
        """
        self.now = runtime.now
        self.limits = limits
        self._offers: dict[bytes, Express] = {}
        self._connections: set[_Connection] = set()
        self._strangers: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._empty: asyncio.Future[None] | None = None
        self._stopping = False
        self._port = 0
        self._beside = 0

    async def start(self, sockets: Sequence[socket.socket], beside: int) -> None:
        """Listen.

        Args:
            sockets: Listening sockets of one port.
            beside: The port of the streams: clients of another one get no offer.
        """
        loop = asyncio.get_running_loop()
        for listener in sockets:
            self._port = listener.getsockname()[1]
            self._servers.append(await loop.create_server(lambda: _Connection(self), sock=listener))
        self._beside = beside

    async def stop(self) -> None:
        """Listen no more and end every connection; the sessions are over."""
        self._stopping = True
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)  # connections that were accepted already are announced now
        for stranger in tuple(self._strangers):
            stranger.abort()
        if self._connections:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=_PARTING)
            for connection in tuple(self._connections):
                connection.abort()
            await self._empty
        for server in self._servers:
            await server.wait_closed()

    def offer(self, session: Session, said: Input, port: int) -> Express | None:
        """Offer a session an express connection if there is room. Close the result.

        Args:
            session: The session.
            said: Takes the client's messages.
            port: The port that the client has connected to.
        """
        if port == 0 or port != self._beside or len(self._connections) >= self.limits.express_connections:
            return None
        offer = pb.Express(port=self._port, ticket=secrets.token_bytes(_TICKET_BYTES))
        express = self._offers[offer.ticket] = Express(self, session, said, offer)
        return express

    def take(self, ticket: bytes) -> Express | None:
        """Return the offer of a ticket, once; None for an unknown ticket."""
        return self._offers.pop(ticket, None)

    def admit(self, connection: _Connection) -> bool:
        """Note a new connection; return whether it may stay."""
        # There may be more offers than room: not every client takes its offer up.
        crowded = len(self._connections) >= self.limits.express_connections
        if self._stopping or crowded or len(self._strangers) >= _MOST_STRANGERS:
            return False
        self._connections.add(connection)
        self._strangers.add(connection)
        return True

    def welcome(self, connection: _Connection) -> None:
        """Note that a connection has shown its ticket."""
        self._strangers.discard(connection)

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is gone."""
        self._connections.discard(connection)
        self._strangers.discard(connection)
        if self._empty is not None and not self._connections and not self._empty.done():
            self._empty.set_result(None)


class Express:
    """One session's express connection, from the offer on."""

    def __init__(self, server: ExpressServer, session: Session, said: Input, offer: pb.Express) -> None:
        """Make an offer that is not taken up yet."""
        self.offer = offer
        self._server = server
        self._session = session
        self._said = said
        self._connection: _Connection | None = None
        self._begun = False

    def board(self, connection: _Connection) -> None:
        """Take the connection that showed the ticket: the session's messages go this way from now on."""
        self._connection = connection
        self._session.answer(_BEGINS)
        self._session.express = self._send
        logs.debug("express_connected", **describe_caller(self._session.caller))

    def begin(self) -> None:
        """Begin to read the client's messages from the connection.

        Raises:
            CoreError: It has no connection, or has begun before.
        """
        if self._connection is None:
            raise convert.invalid("`express_begins` without an express connection")
        if self._begun:
            raise convert.invalid("`express_begins` comes only once")
        self._begun = True
        self._connection.listen()

    def take(self, frame: bytes) -> float:
        """Act on one frame of the client; return for how many seconds not to listen to the next one."""
        try:
            return self._said.take(pb.SessionRequest.FromString(frame))
        except CoreError as refusal:
            self._end(refusal)
        except DecodeError:
            self._end(convert.invalid("a frame of the express connection is no SessionRequest"))
        except Exception:  # noqa: BLE001 -- a bug, which must end this session only
            logs.error("request_failed", exc_info=True, request="dmesh.v1.SessionRequest")
            self._end(
                CoreError(
                    ErrorKind.INTERNAL, "the coordination server failed to handle a message; see its log"
                )
            )
        return 0.0

    def refuse(self, size: int) -> None:
        """End the session of a client that announced too large a frame."""
        limit = self._server.limits.request_bytes
        self._session.fail(
            CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"a message of {size} bytes was announced on the express connection; it may have {limit}",
            )
        )

    def lost(self) -> None:
        """End the session: messages lost with the connection are sent again in the next one."""
        self._session.fail()

    def close(self) -> None:
        """The session is over."""
        self._server.take(self.offer.ticket)
        if self._connection is not None:
            self._connection.finish()

    def _end(self, fault: CoreError) -> None:
        self._session.fail(fault)
        if self._connection is not None:
            self._connection.ignore()

    def _send(self, item: OutgoingMessage | bytes) -> None:
        assert self._connection is not None
        if not self._connection.send(convert.encode_outgoing(item, self._server.now())):
            self._session.drop()
            self._connection.abort()


class _Connection(asyncio.Protocol):
    """One connection: a stranger until it has shown a ticket."""

    def __init__(self, server: ExpressServer) -> None:
        self._server = server
        self._express: Express | None = None
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._listening = False
        self._full = False
        self._resumption: asyncio.TimerHandle | None = None
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        if not self._server.admit(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_UNREAD)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._server.limits.handshake_seconds, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        if self._patience is not None:
            self._patience.cancel()
        if self._resumption is not None:
            self._resumption.cancel()
        if self._express is not None:
            self._express.lost()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._buffer += data
        if self._express is None:
            self._show_ticket()
        elif self._resumption is None:
            self._read_frames()

    def pause_writing(self) -> None:
        self._full = True
        self._pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._resumption is None:
            self._go_on()

    def listen(self) -> None:
        """Begin to read frames."""
        self._listening = True
        self._go_on()

    def _go_on(self) -> None:
        assert self._transport is not None
        self._resumption = None
        self._read_frames()
        if self._resumption is None and self._readable():
            self._transport.resume_reading()

    def ignore(self) -> None:
        """Read nothing any more."""
        self._listening = False
        self._pause()

    def send(self, message: bytes) -> bool:
        """Send a message; return False if the client does not read."""
        assert self._transport is not None
        if self._over or self._transport.is_closing():
            return True  # the session is about to end; lost messages are sent again in the next one
        unread = self._transport.get_write_buffer_size()
        if unread > 0 and unread + len(message) > MAX_SESSION_BYTES:
            return False
        self._transport.write(len(message).to_bytes(4, "big") + message)
        return True

    def finish(self) -> None:
        """End the connection after the sent messages; further frames of the client are ignored.

        To close it with something unread would make the system drop what is still on its way to the client.
        """
        assert self._transport is not None
        if self._over or self._transport.is_closing():
            return
        self._over, self._listening = True, False
        self._buffer.clear()
        if self._transport.get_write_buffer_size() > 2 * _UNREAD:
            self._transport.abort()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset it
            self._transport.abort()
            return
        self._transport.resume_reading()  # until the client closes it
        self._patience = asyncio.get_running_loop().call_later(_PARTING, self._transport.abort)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _show_ticket(self) -> None:
        assert self._transport is not None
        if len(self._buffer) < _TICKET_BYTES:
            return
        ticket = bytes(self._buffer[:_TICKET_BYTES])
        del self._buffer[:_TICKET_BYTES]
        self._express = self._server.take(ticket)
        if self._express is None:
            self._transport.abort()
            return
        if self._patience is not None:
            self._patience.cancel()
        self._server.welcome(self)
        # The client's earlier messages on the stream come first.
        self._pause()
        self._express.board(self)

    def _read_frames(self) -> None:
        assert self._express is not None
        assert self._transport is not None
        buffer, begin, limit = self._buffer, 0, self._server.limits.request_bytes
        left = _FRAMES_AT_ONCE
        while len(buffer) - begin >= 4 and self._readable():
            size = int.from_bytes(buffer[begin : begin + 4], "big")
            if size > limit:
                self._express.refuse(size)
                self._transport.abort()
                break
            end = begin + 4 + size
            if end > len(buffer):
                break
            pause = self._express.take(bytes(buffer[begin + 4 : end]))
            begin = end
            left -= 1
            if pause or left == 0:
                self._resumption = asyncio.get_running_loop().call_later(pause, self._go_on)
                self._pause()
                break
        del buffer[:begin]

    def _readable(self) -> bool:
        assert self._transport is not None
        return self._listening and not self._full and not self._transport.is_closing()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
