"""Sessions with connections of their own on the wire: who is let in, what is answered, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from unittest.mock import Mock

import grpc
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.security import authority
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import key_value_pb2 as kv
from dmesh_server import event_loop
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller, Limits
from dmesh_server.listening import Address
from dmesh_server.rpc import session_server
from dmesh_server.rpc.server import RpcServer
from dmesh_server.rpc.session_input import SessionOpener
from dmesh_server.runtime import Runtime
from dmesh_server.security.limits import PeerLimits
from dmesh_server.sessions import Session
from dmesh_server.store.memory import MemoryStore


def get(call_id: int, key: str = "none") -> pb.SessionRequest:
    return pb.SessionRequest(key_value_call=pb.KeyValueCall(id=call_id, get=kv.GetRequest(key=key)))


def put(call_id: int, value: bytes) -> pb.SessionRequest:
    request = kv.SetRequest(request_id=f"r{call_id}", key="k", value=value)
    return pb.SessionRequest(key_value_call=pb.KeyValueCall(id=call_id, set=request))


class Framed:
    """A connection, as a client makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *messages: pb.SessionRequest) -> None:
        frames = [message.SerializeToString() for message in messages]
        self.writer.write(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))
        await self.writer.drain()

    async def read(self) -> pb.SessionResponse:
        async with asyncio.timeout(PATIENCE):
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return pb.SessionResponse.FromString(await self.reader.readexactly(size))

    async def end(self) -> common_pb2.Error:
        """Returns why the server ended the session: the last message before it closes."""
        while (response := await self.read()).WhichOneof("kind") != "session_end":
            pass
        await self.closed()
        return response.session_end.error

    async def closed(self) -> None:
        """Waits until the server has closed it."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read() == b""


class Kept:
    """The call of gRPC that keeps a session."""

    def __init__(self, client: RawClient) -> None:
        self.call = client.coordination.KeepSession(pb.KeepSessionRequest(caller=client.caller))
        client.kept.append(self)

    async def offer(self) -> pb.KeepSessionResponse:
        async with asyncio.timeout(PATIENCE):
            return await self.call.read()

    async def ended(self) -> None:
        """Waits until the server has ended it."""
        async with asyncio.timeout(PATIENCE):
            assert await self.call.read() is grpc.aio.EOF


Connect = Callable[[int, bytes], Awaitable[Framed]]
Attach = Callable[[RawClient], Awaitable[tuple[Kept, Framed]]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Framed] = []

    async def connect(port: int, sent: bytes) -> Framed:
        made.append(Framed(*await asyncio.open_connection("127.0.0.1", port)))
        made[-1].writer.write(sent)
        return made[-1]

    yield connect
    for each in made:
        each.writer.close()
        with contextlib.suppress(ConnectionError):
            await each.writer.wait_closed()


@pytest.fixture
def attach(connect: Connect) -> Attach:
    """Opens sessions for clients that have registered."""

    async def attach(client: RawClient) -> tuple[Kept, Framed]:
        kept = Kept(client)
        offer = await kept.offer()
        framed = await connect(offer.session_port, offer.ticket)
        await framed.send(pb.SessionRequest(attach=pb.Attach(caller=client.caller)))
        assert (await framed.read()).WhichOneof("kind") == "attached"
        return kept, framed

    return attach


@pytest.fixture
async def session(make_client, attach) -> tuple[Kept, Framed]:
    client = make_client()
    await client.register()
    return await attach(client)


async def test_calls_heartbeats_and_barriers_are_answered_in_order(session):
    _, framed = session
    barrier = pb.EnterBarrier(name="b", participants=[common_pb2.Task(job="worker", index=0)])
    beat = pb.SessionRequest(heartbeat=pb.Heartbeat(sequence=7))
    await framed.send(put(1, b"v"), get(2, "k"), pb.SessionRequest(enter_barrier=barrier), beat)
    assert (await framed.read()).key_value_reply.set.revision == 1
    assert (await framed.read()).key_value_reply.get.kv.value == b"v"
    assert (await framed.read()).barrier_result.name == "b"
    assert (await framed.read()).heartbeat_ack.sequence == 7


async def test_what_follows_the_attach_at_once_is_acted_on(make_client, connect):
    client = make_client()
    await client.register()
    offer = await Kept(client).offer()
    attach = pb.SessionRequest(attach=pb.Attach(caller=client.caller)).SerializeToString()
    framed = await connect(offer.session_port, offer.ticket + len(attach).to_bytes(4, "big") + attach)
    await framed.send(get(1), get(2))
    assert (await framed.read()).WhichOneof("kind") == "attached"
    assert [(await framed.read()).key_value_reply.id for _ in range(2)] == [1, 2]


async def test_the_offer_names_both_ports(served, make_client):
    offer = await Kept(make_client()).offer()
    assert offer.grpc_port == int(served.address.rpartition(":")[2])
    assert offer.session_port not in (0, offer.grpc_port)
    assert len(offer.ticket) == 32


async def test_a_large_answer_arrives_whole(session):
    _, framed = session
    value = bytes(range(256)) * 4096
    await framed.send(put(1, value))
    await framed.read()
    await framed.send(*(get(call_id, "k") for call_id in range(2, 42)))
    for call_id in range(2, 42):
        reply = (await framed.read()).key_value_reply
        assert (reply.id, reply.get.kv.value) == (call_id, value)


@pytest.mark.parametrize("ticket", [bytes(32), b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
async def test_who_has_no_ticket_is_shown_out(make_client, connect, ticket):
    offer = await Kept(make_client()).offer()
    await (await connect(offer.session_port, ticket)).closed()


async def test_a_ticket_is_good_for_one_connection(make_client, connect):
    client = make_client()
    await client.register()
    offer = await Kept(client).offer()
    first = await connect(offer.session_port, offer.ticket)
    await first.send(pb.SessionRequest(attach=pb.Attach(caller=client.caller)))
    await first.read()
    await (await connect(offer.session_port, offer.ticket)).closed()
    await first.send(get(1))
    assert (await first.read()).key_value_reply.id == 1


async def test_a_ticket_is_good_for_its_caller_only(make_client, connect):
    owner, thief = make_client(0), make_client(1)
    await owner.register()
    await thief.register()
    kept = Kept(owner)
    offer = await kept.offer()
    framed = await connect(offer.session_port, offer.ticket)
    await framed.send(pb.SessionRequest(attach=pb.Attach(caller=thief.caller)))
    assert "another caller" in (await framed.end()).message
    await kept.ended()


async def test_a_ticket_ends_with_its_call(served, make_client, connect):
    kept = Kept(make_client())
    offer = await kept.offer()
    kept.call.cancel()
    async with asyncio.timeout(PATIENCE):
        while served.rpc._sessions._offers:  # the server hears of it a moment later
            await asyncio.sleep(0.001)
    await (await connect(offer.session_port, offer.ticket)).closed()


@pytest.mark.parametrize("peer_limits", [PeerLimits(handshake_seconds=0.05)])
async def test_a_ticket_that_nobody_uses_runs_out(make_client, connect):
    kept = Kept(make_client())
    offer = await kept.offer()
    await kept.ended()
    await (await connect(offer.session_port, offer.ticket)).closed()


async def test_who_is_not_registered_is_told(make_client, connect):
    client = make_client()
    kept = Kept(client)
    offer = await kept.offer()
    framed = await connect(offer.session_port, offer.ticket)
    await framed.send(pb.SessionRequest(attach=pb.Attach(caller=client.caller)))
    assert (await framed.end()).kind == common_pb2.ERROR_KIND_NOT_REGISTERED
    await kept.ended()


async def test_the_end_of_the_call_ends_the_session(session, served):
    kept, framed = session
    kept.call.cancel()
    await framed.closed()
    async with asyncio.timeout(PATIENCE):
        while served.runtime._sessions:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("limits", [Limits(lease=600.0, suspicion=PATIENCE)])
async def test_the_end_of_the_connection_ends_the_call_and_the_member_may_come_back(
    limits, make_client, attach
):
    client = make_client()
    await client.register()
    for _ in range(3):
        kept, framed = await attach(client)
        framed.writer.transport.abort()
        await kept.ended()


async def test_a_second_session_of_a_member_ends_the_first(make_client, attach):
    client = make_client()
    await client.register()
    first, second = [await attach(client) for _ in range(2)]
    await first[1].end()
    await first[0].ended()
    await second[1].send(get(1))
    assert (await second[1].read()).key_value_reply.id == 1


async def test_what_was_answered_before_the_end_arrives(session, served):
    """Also if the client has said more meanwhile, which nobody reads any more."""
    kept, framed = session
    await framed.send(put(1, bytes(1 << 16)))
    await framed.read()
    await framed.send(*(get(call_id, "k") for call_id in range(2, 2000)))
    (connection,) = served.rpc._sessions._connections
    async with asyncio.timeout(PATIENCE):
        while not connection._full:
            await asyncio.sleep(0.001)
    kept.call.cancel()
    async with asyncio.timeout(PATIENCE):
        while not connection._over:
            await asyncio.sleep(0.001)
    with pytest.raises(asyncio.IncompleteReadError) as end:
        for call_id in itertools.count(2):
            assert (await framed.read()).key_value_reply.id == call_id
    assert end.value.partial == b""


async def test_a_server_that_stops_says_so_last(session, served):
    kept, framed = session
    await framed.send(get(1))
    await framed.read()
    await served.runtime.shutdown()
    assert (await framed.end()).kind == common_pb2.ERROR_KIND_SHUTTING_DOWN
    await kept.ended()


async def test_a_reset_ends_the_session(session, served):
    kept, framed = session
    sock = framed.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    framed.writer.transport.abort()
    await kept.ended()
    async with asyncio.timeout(PATIENCE):
        while served.runtime._sessions or served.rpc._sessions._connections:
            await asyncio.sleep(0.001)


async def test_a_stranger_that_says_nothing_does_not_stay(connect):
    runtime = Runtime(MemoryStore())
    await runtime.start()
    rpc = RpcServer(runtime, peer_limits=PeerLimits(handshake_seconds=0.05))
    await rpc.start(Address("127.0.0.1", 0))
    assert rpc._sessions is not None
    await (await connect(rpc._sessions.port, b"half a ticket")).closed()
    await runtime.shutdown()
    await rpc.stop(0.0)
    await runtime.close()


@pytest.mark.parametrize("peer_limits", [PeerLimits(messages_per_second=20)])
async def test_who_says_too_much_is_read_more_slowly(session):
    """30 messages at 20 in a second, of which the first second's worth is free; and all are answered."""
    _, framed = session
    began = asyncio.get_running_loop().time()
    await framed.send(*(get(call_id) for call_id in range(1, 31)))
    for call_id in range(1, 31):
        assert (await framed.read()).key_value_reply.id == call_id
    assert asyncio.get_running_loop().time() - began >= 0.4


async def test_strangers_are_few(make_client, connect, monkeypatch):
    monkeypatch.setattr(session_server, "_MOST_STRANGERS", 1)  # and one for whom there is a ticket
    offer = await Kept(make_client()).offer()
    strangers = [await connect(offer.session_port, b"") for _ in range(2)]
    await (await connect(offer.session_port, b"")).closed()
    strangers[0].writer.close()
    async with asyncio.timeout(PATIENCE):
        while True:  # there is room for another one
            framed = await connect(offer.session_port, b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await framed.closed()
                    continue
            break


@pytest.mark.parametrize("peer_limits", [PeerLimits(connections=2)])
async def test_sessions_are_no_more_than_there_is_room_for(make_client, attach):
    """Those for whom there is no room have their sessions over gRPC."""
    client = make_client()
    await client.register()
    kept = [await attach(client), Kept(client)]
    assert (await kept[1].offer()).session_port
    late = Kept(client)
    assert (await late.offer()).session_port == 0
    await late.ended()


@pytest.mark.parametrize(
    ("bytes_sent", "kind"),
    [
        (b"\xff\xff\xff\xff", common_pb2.ERROR_KIND_LIMIT_EXCEEDED),
        (b"\x00\x00\x00\x02\xff\xff", common_pb2.ERROR_KIND_INVALID_ARGUMENT),
        (b"\x00\x00\x00\x00", common_pb2.ERROR_KIND_INVALID_ARGUMENT),
    ],
)
@pytest.mark.parametrize("attached", [True, False])
async def test_nonsense_ends_the_session_with_words(
    make_client, connect, session, attached, bytes_sent, kind
):
    kept, framed = session
    if not attached:
        kept = Kept(make_client(1))
        offer = await kept.offer()
        framed = await connect(offer.session_port, offer.ticket)
    framed.writer.write(bytes_sent)
    assert (await framed.end()).kind == kind
    await kept.ended()


async def test_a_fault_of_the_server_ends_one_session_with_words(
    session, make_client, served, monkeypatch, caplog
):
    _, framed = session

    def fail(event: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(served.runtime, "send", fail)
    await framed.send(pb.SessionRequest(heartbeat=pb.Heartbeat(sequence=1)))
    assert (await framed.end()).kind == common_pb2.ERROR_KIND_INTERNAL
    assert "request_failed" in caplog.text


async def test_nothing_is_taken_after_what_ended_the_session(session, make_client):
    _, framed = session
    await framed.send(pb.SessionRequest(), put(1, b"v"))
    assert "of a kind that this server does not know" in (await framed.end()).message
    other = make_client(1)
    await other.register()
    found = await other.key_value.List(kv.ListRequest(caller=other.caller, prefix="k"))
    assert not found.kvs


async def test_who_says_much_lets_others_have_their_turn(session, served):
    """Thousands of small frames may come at once; the loop does other things in between."""
    _, framed = session
    (connection,) = served.rpc._sessions._connections
    pacer: list[int] = []
    take = connection._take

    def noting(frame: bytes) -> float:
        if len(pacer) % 16 == 0:
            asyncio.get_running_loop().call_soon(lambda: passed.append(len(pacer)))
        pacer.append(len(frame))
        return take(frame)

    passed: list[int] = []
    connection._take = noting
    unknown = pb.SessionRequest(abandon_call=pb.AbandonCall(id=9))
    await framed.send(*[unknown] * 5000, get(1))
    assert (await framed.read()).key_value_reply.id == 1
    assert len(pacer) == 5001
    assert max(after - before for before, after in itertools.pairwise([0, *passed])) <= 64 + 16


async def test_who_does_not_read_is_not_listened_to(session, served, make_client):
    """Answers pile up at the server to a bound; then they wait at the client's end, as questions."""
    _, framed = session
    await framed.send(put(1, bytes(1 << 20)))
    await framed.read()
    await framed.send(*(get(call_id, "k") for call_id in range(2, 202)))
    (connection,) = served.rpc._sessions._connections
    async with asyncio.timeout(PATIENCE):
        while not connection._full:
            await asyncio.sleep(0.001)
    other = make_client(1)
    await other.register()  # the server has other things to do meanwhile
    assert connection._transport.get_write_buffer_size() < 4 << 20
    for call_id in range(2, 202):
        assert (await framed.read()).key_value_reply.id == call_id


async def test_who_reads_nothing_for_too_long_is_dropped(session, served, monkeypatch):
    monkeypatch.setattr(session_server, "MAX_SESSION_BYTES", 8 << 20)
    kept, framed = session
    # Blocked reads are all answered at once, by somebody else's write.
    reads = [kv.GetRequest(key="k", timeout_ms=-1) for _ in range(200)]
    calls = [pb.KeyValueCall(id=call_id, get=read) for call_id, read in enumerate(reads, 2)]
    await framed.send(*(pb.SessionRequest(key_value_call=call) for call in calls))
    await framed.send(put(1, bytes(1 << 20)))
    await kept.ended()
    assert served.runtime.measures.sessions_dropped == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, event_loop._factory()])
def test_what_is_said_to_a_connection_that_is_gone_concerns_nobody(loop):
    """Between its end and that of its session, others' messages are on their way to it, too."""

    async def main() -> None:
        runtime = Runtime(MemoryStore())
        server = session_server.SessionServer(SessionOpener(runtime, PeerLimits()), PeerLimits())
        server.start([socket.create_server(("127.0.0.1", 0))])
        with server.offer(Caller("c", None, 1), "") as offer:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(offer.ticket)
            async with asyncio.timeout(PATIENCE):
                while offer.connection is None:
                    await asyncio.sleep(0.001)
                session = Session(1, offer.caller, 16)
                session.carry(offer.connection._send, offer.connection._finish)
                writer.transport.abort()
                while server._connections:
                    await asyncio.sleep(0.001)
            try:
                session.answer(b"x")
                session.fail(CoreError(ErrorKind.INTERNAL, "x"))
            finally:
                await server.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_frames_may_be_cut_anywhere(data, cuts):
    """What was sent arrives, however the network cuts it."""
    taken: list[bytes] = []

    class Transport:
        def is_closing(self) -> bool:
            return False

    class Server:
        limits = PeerLimits()

    class Connection(session_server._Connection):
        def _take(self, frame: bytes) -> float:
            taken.append(frame)
            return 0.0

    connection = Connection(Server())  # type: ignore[arg-type]
    connection._offer, connection._transport = object(), Transport()  # type: ignore[assignment]
    frames = [data[:begin] for begin in range(0, len(data), 37)]
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in itertools.pairwise(edges):
        connection.data_received(stream[begin:end])
    assert taken == frames


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_handshake_may_begin_before_the_connection_is_accepted(tmp_path, loop):
    """What has come by then is not taken for a ticket."""
    authority.create(tmp_path, 1)
    authority.issue(tmp_path, "server", ["127.0.0.1"], 1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve_one(sock: socket.socket) -> None:
        server = session_server.SessionServer(Mock(), PeerLimits(), Mock(context=lambda: context))
        server.start([listener])
        for _ in range(3):
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
            incoming.write(await asyncio.to_thread(sock.recv, 65536))
        await server.stop()

    with (
        socket.create_connection(listener.getsockname(), timeout=10) as sock,
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        sock.sendall(outgoing.read())
        runner.run(serve_one(sock))
    assert client.version() == "TLSv1.3"
    assert client.getpeercert()
