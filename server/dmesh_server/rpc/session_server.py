"""Sessions over TCP connections of their own, with frames of messages: a part of gRPC's processor time.

`KeepSessionRequest` in `protos/dmesh/v1/coordination.proto` describes them. A connecting client shows nothing
but a ticket, which it was given by a call of gRPC that it keeps open: without one, it gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from google.protobuf.message import DecodeError

from dmesh.security.tokens import Token
from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.effects import SessionEnd
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller
from dmesh_server.listening import Acceptor
from dmesh_server.rpc import convert
from dmesh_server.rpc.session_input import SessionInput, SessionOpener
from dmesh_server.security.access import CALL_RATE, CALLER
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.pace import Pace
from dmesh_server.security.tls import ServerTls
from dmesh_server.sessions import MAX_SESSION_BYTES, OutgoingMessage, Session, describe_caller
from dmesh_server.telemetry import logs

_TICKET_BYTES = 32
_MOST_STRANGERS = 256
"""Connections that have not shown their ticket yet, beyond those that clients with tickets may have."""
_FRAMES_AT_ONCE = 64
"""Frames of one client that are acted on before the others have their turn."""
_UNREAD = 1 << 20
"""Bytes of unread answers from which on no more is read from a client."""

_PARTING = 1.0
"""Seconds that a client may take to read the last messages of its session."""


class Offer:
    """A session that a client may open, and opens: it lasts as long as the call that asked for it."""

    def __init__(self, caller: Caller, remote: str) -> None:
        """Make an offer that is not taken up yet.

        Args:
            caller: Whose session it will be.
            remote: Address from which the call came.
        """
        self.ticket = secrets.token_bytes(_TICKET_BYTES)
        self.caller = caller
        self.remote = remote
        self.token: Token | None = CALLER.get()
        self.call_rate: Pace | None = CALL_RATE.get()
        self.over = asyncio.Event()
        """Set when the session is over, or was not opened in time."""
        self.connection: _Connection | None = None


class SessionServer:
    """Listens for connections of sessions, and keeps the offers made to clients."""

    def __init__(self, opener: SessionOpener, limits: PeerLimits, tls: ServerTls | None = None) -> None:
        """Make a server that does not listen yet.

        Args:
            opener: Opens sessions.
            limits: Bounds on the use by peers.
            tls: Encryption of connections; None for plaintext.
        """
        self.opener = opener
        self.limits = limits
        self.context = None if tls is None else tls.context()
        self.port = 0
        """Port on which it listens; 0 if it does not."""
        self._offers: dict[bytes, Offer] = {}
        self._connections: set[_Connection] = set()
        self._strangers: set[_Connection] = set()
        self._sockets: Sequence[socket.socket] = ()
        self._acceptor: Acceptor | None = None
        self._empty: asyncio.Future[None] | None = None
        self._stopping = False

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets of one port, which are the server's from now on."""
        self.port = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._acceptor = Acceptor(sockets, self._accepted)

    def _accepted(self, sock: socket.socket, address: object) -> None:
        """Take a connection, or close it, before anything is read."""
        del address
        connection = _Connection(self)
        if self._admit(connection):
            connection.begin(self._open(sock, connection))
        else:
            sock.close()

    async def _open(self, sock: socket.socket, connection: _Connection) -> None:
        """Let a connection be read, encrypted if it is to be."""
        loop = asyncio.get_running_loop()
        try:
            if self.context is None:
                await loop.connect_accepted_socket(lambda: connection, sock)
            else:
                await loop.connect_accepted_socket(
                    lambda: connection,
                    sock,
                    ssl=self.context,
                    ssl_handshake_timeout=self.limits.handshake_seconds,
                    ssl_shutdown_timeout=_PARTING,
                )
        except (OSError, asyncio.CancelledError):  # not TLS, a certificate that is not accepted, too slow
            self.forget(connection)

    def withdraw(self) -> None:
        """Stop making offers, and withdraw the open ones."""
        self._stopping = True
        for offer in self._offers.values():
            offer.over.set()

    async def stop(self) -> None:
        """Listen no more and end every connection; the sessions are over."""
        self.withdraw()
        if self._acceptor is not None:
            self._acceptor.close()
        for listener in self._sockets:
            listener.close()
        for stranger in tuple(self._strangers):
            stranger.abort()
        if self._connections:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=_PARTING)
            for connection in tuple(self._connections):
                connection.abort()
            await self._empty

    @property
    def crowded(self) -> bool:
        """True if there is no room for another session."""
        promised = len(self._connections) + len(self._offers)
        return self._stopping or promised >= self.limits.session_connections

    @contextmanager
    def offer(self, caller: Caller, remote: str) -> Iterator[Offer]:
        """Offer a session for as long as the context lasts; its end is the session's."""
        offer = Offer(caller, remote)
        self._offers[offer.ticket] = offer
        patience = asyncio.get_running_loop().call_later(
            self.limits.handshake_seconds, self._expire, offer.ticket
        )
        try:
            yield offer
        finally:
            patience.cancel()
            self._offers.pop(offer.ticket, None)
            if offer.connection is not None:
                offer.connection.lose_call()

    def take(self, ticket: bytes) -> Offer | None:
        """Return the offer of a ticket, once; None for an unknown ticket."""
        return self._offers.pop(ticket, None)

    def _expire(self, ticket: bytes) -> None:
        if (offer := self.take(ticket)) is not None:
            offer.over.set()

    def _admit(self, connection: _Connection) -> bool:
        """Note a new connection; return whether it may stay."""
        crowded = len(self._connections) >= self.limits.session_connections
        if self._stopping or crowded or len(self._strangers) >= _MOST_STRANGERS + len(self._offers):
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


class _Connection(asyncio.Protocol):
    """One connection: a stranger until it has shown a ticket, then a session's."""

    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._offer: Offer | None = None
        self._session: Session | None = None
        self._input: SessionInput | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._resumption: asyncio.TimerHandle | None = None
        self._full = False
        self._waits = False
        """True while the client is not listened to because it is being attached."""
        self._over = False

    # What the transport calls -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._patience = asyncio.get_running_loop().call_later(
            self._server.limits.handshake_seconds, self.abort
        )
        self._transport.set_write_buffer_limits(high=_UNREAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._server.forget(self)
        for timer in (self._patience, self._resumption):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._close_session()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._buffer += data
        if self._offer is None and not self._show_ticket():
            return
        if self._resumption is None:
            self._read_frames()

    def pause_writing(self) -> None:
        self._full = True
        self._pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._resumption is None:
            self._go_on()

    # Life ---------------------------------------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, at most until the connection is lost."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _show_ticket(self) -> bool:
        if len(self._buffer) < _TICKET_BYTES:
            return False
        ticket = bytes(self._buffer[:_TICKET_BYTES])
        del self._buffer[:_TICKET_BYTES]
        self._offer = self._server.take(ticket)
        if self._offer is None:
            self.abort()
            return False
        self._offer.connection = self
        self._server.welcome(self)
        return True

    async def _attach(self, attach: pb.Attach, offer: Offer) -> None:
        """Attach the session, and begin to speak."""
        try:
            caller = convert.caller(attach.caller, attach.HasField("caller"))
            if caller != offer.caller:
                raise convert.invalid("the ticket was given to another caller than the one who attaches")
            opened = await self._server.opener.open(attach, caller, offer.remote)
        except Exception as error:  # noqa: BLE001 -- the wall to clients
            self._refuse(error)
            return
        self._input, self._session, session = opened, opened.session, opened.session
        session.token, session.call_rate = offer.token, offer.call_rate
        if self._over:  # it went meanwhile
            self._close_session()
            return
        self._send(opened.attached)
        session.carry(self._send, self._finish)
        self._waits = False
        logs.debug("session_connected", **describe_caller(caller))
        if self._resumption is None:
            self._go_on()

    def lose_call(self) -> None:
        """End the session: the client's call has ended, and with it perhaps the client."""
        if self._session is not None:
            self._session.fail()
        else:
            self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        else:  # in a handshake
            for task in self._tasks:
                task.cancel()

    def _refuse(self, error: Exception) -> None:
        """End the session with an error."""
        if isinstance(error, DecodeError):
            error = convert.invalid("a frame is no SessionRequest")
        if not isinstance(error, CoreError):  # a bug, which must end this session only
            logs.error("request_failed", exc_info=True, request="dmesh.v1.SessionRequest")
            error = CoreError(
                ErrorKind.INTERNAL, "the coordination server failed to handle a message; see its log"
            )
        self._server.opener.measures.refused[error.kind.name] += 1
        if self._session is not None:
            self._session.fail(error)
        else:
            self._say_end(error)
            self._finish()

    def _say_end(self, error: CoreError) -> None:
        self._send(OutgoingMessage(SessionEnd(error)))

    def _finish(self) -> None:
        """End the session and its connection after the sent messages; further frames are ignored.

        To close it with something unread would make the system drop what is still on its way to the client.
        """
        assert self._transport is not None
        if self._over:
            return
        if self._session is not None and self._session.fault is not None:
            self._say_end(self._session.fault)
        self._over = True
        self._buffer.clear()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._close_session)  # not from within a message of the core
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > 2 * _UNREAD:
            self._transport.abort()
            return
        if self._patience is not None:
            self._patience.cancel()
        self._patience = loop.call_later(_PARTING, self.abort)
        with contextlib.suppress(OSError):
            if not self._transport.can_write_eof():  # TLS: tells the client, and waits for its answer
                self._transport.close()
                return
            self._transport.write_eof()
            self._transport.resume_reading()  # until the client closes it
            return
        self._transport.abort()  # the client has reset it

    def _close_session(self) -> None:
        opened, self._input = self._input, None
        if opened is not None:
            opened.close()
        if self._offer is not None:
            self._offer.over.set()

    # Messages -----------------------------------------------------------------------------------------------

    def _send(self, item: OutgoingMessage | bytes) -> None:
        """Send a message, or drop the session of a client that does not read."""
        assert self._transport is not None
        if self._over or self._transport.is_closing():
            return  # the session is about to end; lost messages are sent again in the next one
        message = convert.encode_outgoing(item, self._server.opener.now())
        unread = self._transport.get_write_buffer_size()
        if unread > 0 and unread + len(message) > MAX_SESSION_BYTES:
            self._over = True
            if self._session is not None:
                self._session.drop()
            self.abort()
            return
        self._transport.write(len(message).to_bytes(4, "big") + message)

    def _read_frames(self) -> None:
        assert self._transport is not None
        buffer, begin, limit = self._buffer, 0, self._server.limits.request_bytes
        left = _FRAMES_AT_ONCE
        while len(buffer) - begin >= 4 and self._readable():
            size = int.from_bytes(buffer[begin : begin + 4], "big")
            if size > limit:
                message = f"a message of {size} bytes was announced; it may have {limit}"
                self._refuse(CoreError(ErrorKind.LIMIT_EXCEEDED, message))
                break
            end = begin + 4 + size
            if end > len(buffer):
                break
            pause = self._take(bytes(buffer[begin + 4 : end]))
            begin = end
            left -= 1
            if pause or left == 0:
                self._resumption = asyncio.get_running_loop().call_later(pause, self._go_on)
                self._pause()
                break
        del buffer[:begin]

    def _take(self, frame: bytes) -> float:
        """Act on one frame; return for how many seconds not to listen to the next one."""
        try:
            request = pb.SessionRequest.FromString(frame)
            if self._input is not None:
                return self._input.take(request)
            if not request.HasField("attach"):
                raise convert.invalid("the first message of a session must be `attach`")
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return 0.0
        assert self._offer is not None
        if self._patience is not None:
            self._patience.cancel()
        self._waits = True
        self._pause()
        self.begin(self._attach(request.attach, self._offer))
        return 0.0

    def _go_on(self) -> None:
        assert self._transport is not None
        self._resumption = None
        self._read_frames()
        if self._resumption is None and self._readable():
            self._transport.resume_reading()

    def _readable(self) -> bool:
        assert self._transport is not None
        return not (self._over or self._waits or self._full or self._transport.is_closing())

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
