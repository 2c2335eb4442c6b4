"""Express connections on the wire: who is let in, what comes in which order, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.conftest import Served
from tests.server.raw_client import PATIENCE, RawClient, Stream, error_of

from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import key_value_pb2 as kv
from dmesh_server import event_loop
from dmesh_server.core.model import Caller
from dmesh_server.listening import Address
from dmesh_server.rpc import express as express_module
from dmesh_server.rpc.server import RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.limits import PeerLimits
from dmesh_server.sessions import Session
from dmesh_server.store.memory import MemoryStore

MARK = pb.SessionRequest(express_begins=pb.ExpressBegins())


def get(call_id: int, key: str = "none") -> pb.SessionRequest:
    return pb.SessionRequest(key_value_call=pb.KeyValueCall(id=call_id, get=kv.GetRequest(key=key)))


class Express:
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

    async def closed(self) -> None:
        """Waits until the server has closed it."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read() == b""


Connect = Callable[[int, bytes], "asyncio.Future[Express]"]


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., object]]:
    made: list[Express] = []

    async def connect(port: int, ticket: bytes) -> Express:
        made.append(Express(*await asyncio.open_connection("127.0.0.1", port)))
        made[-1].writer.write(ticket)
        return made[-1]

    yield connect
    for each in made:
        each.writer.close()
        with contextlib.suppress(ConnectionError):
            await each.writer.wait_closed()


async def attach(served: Served, client: RawClient) -> tuple[Stream, pb.Express]:
    await client.register()
    stream = Stream(client)
    port = int(served.address.rpartition(":")[2])
    await stream.send(attach=pb.Attach(caller=client.caller, port=port))
    return stream, (await stream.read()).attached.express


@pytest.fixture
async def riding(served, make_client, connect) -> tuple[Stream, Express]:
    """A session whose messages go through its express connection."""
    stream, offer = await attach(served, make_client())
    express = await connect(offer.port, offer.ticket)
    assert (await stream.read()).WhichOneof("kind") == "express_begins"
    await stream.call.write(MARK)
    return stream, express


@pytest.mark.parametrize("port", [0, 9])
async def test_who_came_by_another_port_gets_no_offer(make_client, port):
    client = make_client()
    await client.register()
    stream = Stream(client)
    await stream.send(attach=pb.Attach(caller=client.caller, port=port))
    assert not (await stream.read()).attached.HasField("express")


async def test_calls_and_barriers_are_answered_where_they_were_said(riding):
    stream, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=b"v")
    await express.send(pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put)), get(2, "k"))
    assert (await express.read()).key_value_reply.set.revision == 1
    assert (await express.read()).key_value_reply.get.kv.value == b"v"
    barrier = pb.EnterBarrier(name="b", participants=[common_pb2.Task(job="worker", index=0)])
    await express.send(pb.SessionRequest(enter_barrier=barrier))
    assert (await express.read()).barrier_result.name == "b"
    await stream.send(heartbeat=pb.Heartbeat(sequence=7))
    assert (await stream.read()).heartbeat_ack.sequence == 7


async def test_what_was_said_on_the_stream_comes_first(served, make_client, connect):
    """The express connection is faster: it must not overtake."""
    stream, offer = await attach(served, make_client())
    express = await connect(offer.port, offer.ticket)
    await express.send(get(2))  # although it should wait for what it tells the server on the stream
    await stream.read_kind("express_begins")
    await stream.call.write(get(1))
    await stream.call.write(MARK)
    assert [(await express.read()).key_value_reply.id for _ in range(2)] == [1, 2]


async def test_a_large_answer_arrives_whole(riding):
    _, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=bytes(range(256)) * 4096)
    await express.send(pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put)))
    await express.read()
    await express.send(*(get(call_id, "k") for call_id in range(2, 42)))
    for call_id in range(2, 42):
        reply = (await express.read()).key_value_reply
        assert (reply.id, reply.get.kv.value) == (call_id, put.value)


@pytest.mark.parametrize("ticket", [bytes(32), b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
async def test_who_has_no_ticket_is_shown_out(served, make_client, connect, ticket):
    _, offer = await attach(served, make_client())
    await (await connect(offer.port, ticket)).closed()


async def test_a_ticket_is_good_for_one_connection(riding, served, make_client, connect):
    stream, express = riding
    other, offer = await attach(served, make_client(1))
    first = await connect(offer.port, offer.ticket)
    await other.read_kind("express_begins")
    await (await connect(offer.port, offer.ticket)).closed()
    await other.call.write(MARK)
    await first.send(get(1))
    assert (await first.read()).key_value_reply.id == 1
    await express.send(get(1))
    assert (await express.read()).key_value_reply.id == 1
    stream.hang_up()


async def test_a_ticket_ends_with_its_session(served, make_client, connect):
    stream, offer = await attach(served, make_client())
    await stream.call.done_writing()
    await stream.ended()
    await (await connect(offer.port, offer.ticket)).closed()


async def test_the_end_of_the_stream_ends_it(riding):
    stream, express = riding
    stream.hang_up()
    await express.closed()


async def test_what_was_answered_before_the_end_arrives(riding, served):
    """Also if the client has said more meanwhile, which nobody reads any more."""
    stream, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=bytes(1 << 16))
    await express.send(pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put)))
    await express.read()
    await express.send(*(get(call_id, "k") for call_id in range(2, 2000)))
    (connection,) = served.rpc._express._connections
    async with asyncio.timeout(PATIENCE):
        while not connection._full:
            await asyncio.sleep(0.001)
    stream.hang_up()
    await asyncio.sleep(0.05)
    with pytest.raises(asyncio.IncompleteReadError) as end:
        for call_id in itertools.count(2):
            assert (await express.read()).key_value_reply.id == call_id
    assert end.value.partial == b""


async def test_a_reset_that_was_not_noticed_yet_keeps_no_session_open(served, make_client, connect):
    stream, offer = await attach(served, make_client())
    express = await connect(offer.port, offer.ticket)
    await stream.read_kind("express_begins")  # until it is answered, nothing is read
    sock = express.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    express.writer.transport.abort()
    await asyncio.sleep(0.05)
    stream.hang_up()
    async with asyncio.timeout(5.0):
        while served.runtime._sessions or served.rpc._express._connections:
            await asyncio.sleep(0.01)


async def test_its_end_ends_the_stream_and_the_member_may_come_back(served, make_client, connect):
    client = make_client()
    for _ in range(2):
        stream, offer = await attach(served, client)
        express = await connect(offer.port, offer.ticket)
        await stream.read_kind("express_begins")
        await stream.call.write(MARK)
        express.writer.transport.abort()
        await stream.ended()


async def test_a_stranger_that_says_nothing_does_not_stay(connect):
    runtime = Runtime(MemoryStore())
    await runtime.start()
    rpc = RpcServer(runtime, peer_limits=PeerLimits(handshake_seconds=0.05))
    await rpc.start(Address("127.0.0.1", 0))
    assert rpc._express is not None
    await (await connect(rpc._express._port, b"half a ticket")).closed()
    await runtime.shutdown()
    await rpc.stop(0.0)
    await runtime.close()


@pytest.mark.parametrize("peer_limits", [PeerLimits(messages_per_second=20)])
async def test_who_says_too_much_is_read_more_slowly(riding):
    """30 messages at 20 in a second, of which the first second's worth is free; and all are answered."""
    stream, express = riding
    began = asyncio.get_running_loop().time()
    await express.send(*(get(call_id) for call_id in range(1, 31)))
    for call_id in range(1, 31):
        assert (await express.read()).key_value_reply.id == call_id
    assert asyncio.get_running_loop().time() - began >= 0.4
    for sequence in range(10):
        await stream.send(heartbeat=pb.Heartbeat(sequence=sequence))
    for sequence in range(10):
        assert (await stream.read_kind("heartbeat_ack")).heartbeat_ack.sequence == sequence
    assert asyncio.get_running_loop().time() - began >= 0.9


async def test_strangers_are_few(served, make_client, connect, monkeypatch):
    monkeypatch.setattr(express_module, "_MOST_STRANGERS", 2)
    stream, offer = await attach(served, make_client())
    strangers = [await connect(offer.port, b"") for _ in range(2)]
    await (await connect(offer.port, b"")).closed()
    strangers[0].writer.write(offer.ticket)
    await stream.read_kind("express_begins")
    await connect(offer.port, b"")  # there is room for another one


async def test_connections_are_no_more_than_there_is_room_for(served, make_client, connect):
    """Whoever is attached before the others are busy has an offer: all may come at once."""
    streams = [await attach(served, make_client(index)) for index in range(2)]
    served.rpc._express.limits = PeerLimits(connections=1)
    await connect(streams[0][1].port, streams[0][1].ticket)
    await streams[0][0].read_kind("express_begins")
    await (await connect(streams[1][1].port, streams[1][1].ticket)).closed()
    await streams[1][0].send(key_value_call=get(1).key_value_call)
    assert (await streams[1][0].read()).key_value_reply.id == 1


@pytest.mark.parametrize(
    ("bytes_sent", "kind"),
    [
        (b"\xff\xff\xff\xff", common_pb2.ERROR_KIND_LIMIT_EXCEEDED),
        (b"\x00\x00\x00\x02\xff\xff", common_pb2.ERROR_KIND_INVALID_ARGUMENT),
        (b"\x00\x00\x00\x00", common_pb2.ERROR_KIND_INVALID_ARGUMENT),
    ],
)
async def test_nonsense_ends_the_session_with_words(riding, bytes_sent, kind):
    stream, express = riding
    express.writer.write(bytes_sent)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.read()
    assert error_of(ended.value).kind == kind
    await express.closed()


async def test_the_mark_without_a_connection_is_refused(served, make_client):
    stream, offer = await attach(served, make_client())
    assert offer.ticket
    await stream.call.write(MARK)
    with pytest.raises(grpc.aio.AioRpcError, match="without an express connection"):
        await stream.read()


async def test_the_mark_comes_once(riding, caplog):
    """Reading frames out of reading frames would take the same ones again, as deep as the stack is."""
    stream, express = riding
    await express.send(*[MARK] * 4)
    with pytest.raises(grpc.aio.AioRpcError, match="only once"):
        await stream.read()
    assert not caplog.records


async def test_nothing_is_taken_after_what_ended_the_session(riding, make_client):
    stream, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=b"v")
    late = pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put))
    await express.send(pb.SessionRequest(), late)
    with pytest.raises(grpc.aio.AioRpcError, match="understands"):
        await stream.read()
    other = make_client(1)
    await other.register()
    found = await other.key_value.List(kv.ListRequest(caller=other.caller, prefix="k"))
    assert not found.kvs


async def test_who_says_much_lets_others_have_their_turn(riding, served):
    """Thousands of small frames may come at once; the loop does other things in between."""
    _, express = riding
    (connection,) = served.rpc._express._connections
    pacer: list[int] = []
    take = connection._express.take

    def noting(frame: bytes) -> float:
        if len(pacer) % 16 == 0:
            asyncio.get_running_loop().call_soon(lambda: passed.append(len(pacer)))
        pacer.append(len(frame))
        return take(frame)

    passed: list[int] = []
    connection._express.take = noting
    unknown = pb.SessionRequest(abandon_call=pb.AbandonCall(id=9))
    await express.send(*[unknown] * 5000, get(1))
    assert (await express.read()).key_value_reply.id == 1
    assert len(pacer) == 5001
    assert max(after - before for before, after in itertools.pairwise([0, *passed])) <= 64 + 16


async def test_who_does_not_read_is_not_listened_to(riding, served):
    """Answers pile up at the server to a bound; then they wait at the client's end, as questions."""
    stream, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=bytes(1 << 20))
    await express.send(pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put)))
    await express.read()
    await express.send(*(get(call_id, "k") for call_id in range(2, 202)))
    await stream.send(heartbeat=pb.Heartbeat(sequence=1))
    await stream.read_kind("heartbeat_ack")
    (connection,) = served.rpc._express._connections
    assert connection._transport.get_write_buffer_size() < 4 << 20
    for call_id in range(2, 202):
        assert (await express.read()).key_value_reply.id == call_id


async def test_who_reads_nothing_for_too_long_is_dropped(riding, monkeypatch):
    monkeypatch.setattr(express_module, "MAX_SESSION_BYTES", 8 << 20)
    stream, express = riding
    put = kv.SetRequest(request_id="r", key="k", value=bytes(1 << 20))
    # Blocked reads are all answered at once, by somebody else's write.
    reads = [kv.GetRequest(key="k", timeout_ms=-1) for _ in range(200)]
    calls = [pb.KeyValueCall(id=call_id, get=read) for call_id, read in enumerate(reads, 2)]
    await express.send(*(pb.SessionRequest(key_value_call=call) for call in calls))
    await express.send(pb.SessionRequest(key_value_call=pb.KeyValueCall(id=1, set=put)))
    with pytest.raises(grpc.aio.AioRpcError, match="did not read"):
        await stream.read()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, event_loop._factory()])
def test_what_is_said_to_a_connection_that_is_gone_concerns_nobody(loop):
    """Between its end and that of its stream, others' messages are on their way to it, too."""

    async def main() -> None:
        server = express_module.ExpressServer(Runtime(MemoryStore()), PeerLimits())
        await server.start([socket.create_server(("127.0.0.1", 0))], 1)
        session = Session(1, Caller("c", None, 1), 16)
        express = server.offer(session, None, 1)  # type: ignore[arg-type]
        assert express is not None
        _, writer = await asyncio.open_connection("127.0.0.1", express.offer.port)
        writer.write(express.offer.ticket)
        async with asyncio.timeout(PATIENCE):
            while session.express is None:
                await asyncio.sleep(0.001)
            express.begin()
            writer.transport.abort()
            while server._connections:
                await asyncio.sleep(0.001)
        try:
            session.answer(b"x")
        finally:
            await server.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_frames_may_be_cut_anywhere(data, cuts):
    """What was sent arrives, however the network cuts it."""
    taken: list[bytes] = []

    class Taker:
        def take(self, frame: bytes) -> float:
            taken.append(frame)
            return 0.0

        def refuse(self, size: int) -> None:
            raise AssertionError(size)

    class Transport:
        def is_closing(self) -> bool:
            return False

    class Server:
        limits = PeerLimits()

    connection = express_module._Connection(Server())  # type: ignore[arg-type]
    connection._express, connection._transport = Taker(), Transport()  # type: ignore[assignment]
    connection._listening = True
    frames = [data[:begin] for begin in range(0, len(data), 37)]
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in itertools.pairwise(edges):
        connection.data_received(stream[begin:end])
    assert taken == frames
