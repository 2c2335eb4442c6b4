"""Stream of one connection: cut into any pieces, with senders and receivers that give up at any moment."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.transport.harness import Recorder, pattern

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connection import SendQueue, WriteResult, encode
from dmesh.collectives.backends.tcp.frames import CHUNK_LIMIT, EAGER_LIMIT, Frame, Kind
from dmesh.collectives.backends.tcp.message_queue import FrameReader, MessageQueue, ReadResult
from dmesh.errors import CollectiveError


class Pipe:
    """Socket whose reads and writes are as short as a generator says."""

    def __init__(self, generator, data=b""):
        self.generator = generator
        self.data = bytearray(data)
        self.ended = False
        self.most = 2**40

    def sendmsg(self, pieces):
        if self.generator.random() < 0.2:
            raise BlockingIOError
        joined = b"".join(pieces)
        count = self._some(len(joined))
        self.data += joined[:count]
        return count

    def recv_into(self, view):
        return self.recvmsg_into([view])[0]

    def recvmsg_into(self, views):
        if not self.data:
            if self.ended:
                return (0,)
            raise BlockingIOError
        left = total = self._some(min(len(self.data), sum(map(len, views))))
        for view in views:
            count = min(left, len(view))
            view[:count] = self.data[:count]
            del self.data[:count]
            left -= count
        return (total,)

    def _some(self, most):
        most = min(most, self.most)
        return self.generator.choice([1, self.generator.randint(1, most), most])


class QueueSender:
    """Sender that puts a message queue's frames into a `SendQueue`."""

    def __init__(self):
        self.queue = SendQueue()

    def transmit(self, peer, frame, send):
        self.queue.put(frame, send)

    def withdraw(self, send):
        return self.queue.withdraw(send)

    def resume(self, peer):
        pass


class Line:
    """Rank 0 and rank 1, with pipes for both directions."""

    def __init__(self, generator):
        self.senders = [QueueSender(), QueueSender()]
        self.queues = [MessageQueue(rank, self.senders[rank]) for rank in range(2)]
        self.listeners = [Recorder(), Recorder()]
        self.goodbyes = []
        self.readers = []
        self.pipes = pipes = [Pipe(generator), Pipe(generator)]
        for rank in range(2):
            self.queues[rank].attach(self.listeners[rank], [Peer(1 - rank, (), 0, f"task {1 - rank}")])
            self.senders[rank].queue.attach(pipes[rank])
            self.readers.append(
                FrameReader(pipes[1 - rank], 1 - rank, self.queues[rank], self.goodbyes.append)
            )

    def turn(self):
        for rank in range(2):
            _, finished = self.senders[rank].queue.write()
            for send in finished:
                send.channel.sent(send)
            assert self.readers[1 - rank].read() is ReadResult.MORE

    def until(self, condition):
        for _ in range(200_000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never ended")


SIZES = st.sampled_from([0, 1, 300, EAGER_LIMIT, EAGER_LIMIT + 1, CHUNK_LIMIT + 5, 2 * CHUNK_LIMIT])


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(0, 2**32), st.booleans())
def test_frames_survive_any_cutting(sizes, seed, early):
    generator = random.Random(seed)
    line = Line(generator)
    sender = line.queues[0].open(1, 1, b"signature")
    for step, size in enumerate(sizes):
        sender.send(1, step, memoryview(pattern(size, step)))
        line.senders[0].transmit(1, Frame(Kind.CANCEL, 9, step), None)
    if early:
        for _ in range(generator.randint(1, 60)):
            line.turn()
    receiver = line.queues[1].open(1, 1, b"signature")
    into = [bytearray(size) for size in sizes]
    completions = [receiver.receive(0, step, memoryview(buffer)) for step, buffer in enumerate(into)]
    line.until(lambda: all(completion.done for completion in completions) and sender.flush(0))
    assert into == [pattern(size, step) for step, size in enumerate(sizes)]


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(0, 6), st.booleans())
def test_a_sender_or_receiver_may_give_up_at_any_moment(sizes, seed, turns, sender_first):
    generator = random.Random(seed)
    line = Line(generator)
    sender, receiver = line.queues[0].open(1, 1, b"s"), line.queues[1].open(1, 1, b"s")
    data = [bytearray(b"\1" * size) for size in sizes]
    into = [bytearray(size) for size in sizes]
    for step in range(len(sizes)):
        receiver.receive(0, step, memoryview(into[step]))
        sender.send(1, step, memoryview(data[step]))
    for _ in range(turns):
        line.turn()
    (sender if sender_first else receiver).close()
    if sender_first:
        for buffer in data:
            buffer[:] = b"\2" * len(buffer)
    seen = [bytes(buffer) for buffer in into]
    later, wanted = line.queues[0].open(1, 2, b"s"), line.queues[1].open(1, 2, b"s")
    buffer = bytearray(CHUNK_LIMIT + 1)
    completion = wanted.receive(0, 0, memoryview(buffer))
    later.send(1, 0, memoryview(pattern(CHUNK_LIMIT + 1)))
    line.until(lambda: completion.done and later.flush(0))
    assert buffer == pattern(CHUNK_LIMIT + 1)
    assert all(2 not in got for got in into)
    if not sender_first:
        assert [bytes(got) for got in into] == seen
        return
    done = [receive.done for receive in receiver.receives.values()]
    if all(done):
        receiver.flush(0)
    else:
        with pytest.raises(CollectiveError, match="gave up sending"):
            receiver.flush(0)
    assert all(got == b"\1" * len(got) for got, complete in zip(into, done, strict=True) if complete)


@pytest.mark.parametrize("size", [EAGER_LIMIT, 3 * CHUNK_LIMIT])
def test_a_receiver_that_closes_within_a_frame_gets_not_one_byte_more(size):
    line = Line(random.Random(0))
    sender, receiver = line.queues[0].open(1, 1, b"s"), line.queues[1].open(1, 1, b"s")
    into = bytearray(size)
    receiver.receive(0, 0, memoryview(into))
    line.turn()
    line.turn()
    sender.send(1, 0, memoryview(b"\1" * size))
    line.pipes[0].most = 1000
    line.until(lambda: 1 in into)
    receiver.close()
    seen = bytes(into)
    assert 0 in seen
    line.pipes[0].most = 2**20
    line.until(lambda: sender.flush(0))
    line.turn()
    assert into == seen


@given(st.binary(max_size=400), st.integers(0, 2**32), st.booleans())
def test_arbitrary_bytes_are_a_broken_protocol_at_worst(data, seed, only_goodbye):
    line = Line(random.Random(seed))
    pipe = Pipe(random.Random(seed), data)
    pipe.ended = True
    reader = FrameReader(pipe, 0, line.queues[1], line.goodbyes.append, only_goodbye=only_goodbye)
    with contextlib.suppress(CollectiveError):
        assert reader.read() is ReadResult.ENDED
    assert line.queues[1].buffered_bytes(0) < 3 * EAGER_LIMIT
    assert not line.listeners[1].events or data


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(Kind.CHUNK, 1, 1, 0, 100), "nobody asked for"),
        (Frame(Kind.CHUNK, 1, 5, 0, 100), "nobody asked for"),
        (
            Frame(Kind.CHUNK, 1, 1, 7, CHUNK_LIMIT),
            f"{CHUNK_LIMIT} bytes came for a receive of {EAGER_LIMIT + 1}",
        ),
    ],
)
def test_unrequested_pieces_break_the_protocol(frame, message):
    line = Line(random.Random(0))
    channel = line.queues[1].open(1, 1, b"s")
    channel.receive(0, 7, memoryview(bytearray(EAGER_LIMIT + 1)))
    reader = FrameReader(Pipe(random.Random(0), encode(frame)), 0, line.queues[1], line.goodbyes.append)
    with pytest.raises(CollectiveError, match=message):
        reader.read()


def test_nothing_may_follow_a_goodbye_or_come_from_the_accepting_side():
    line = Line(random.Random(0))
    hello = encode(Frame(Kind.CONTROL))
    pipe = Pipe(random.Random(0), encode(Frame(Kind.GOODBYE)) + hello)
    with pytest.raises(CollectiveError, match="CONTROL frame came where none may come"):
        FrameReader(pipe, 0, line.queues[1], line.goodbyes.append).read()
    assert line.goodbyes == [Frame(Kind.GOODBYE)]
    against = FrameReader(
        Pipe(random.Random(0), hello), 0, line.queues[1], line.goodbyes.append, only_goodbye=True
    )
    with pytest.raises(CollectiveError, match="CONTROL frame came where none may come"):
        against.read()


def test_a_goodbye_is_the_last_frame_and_small_frames_overtake_large_ones():
    generator = random.Random(1)
    line = Line(generator)
    queue = line.senders[0].queue
    sender, receiver = line.queues[0].open(1, 1, b"s"), line.queues[1].open(1, 1, b"s")
    into = bytearray(6 * CHUNK_LIMIT)
    completion = receiver.receive(0, 0, memoryview(into))
    sender.send(1, 0, memoryview(pattern(len(into))))
    line.until(lambda: receiver.receives[0, 0].claimed > 0)
    assert queue.put(Frame(Kind.CONTROL, length=2), None, b"hi") in (True, False)
    line.until(lambda: line.listeners[1].of("control"))
    assert not completion.done
    queue.finish(Frame(Kind.GOODBYE))
    line.until(lambda: line.goodbyes)
    assert completion.done
    assert into == pattern(len(into))
    assert queue.write()[0] is WriteResult.ENDED
    assert not queue.put(Frame(Kind.CONTROL))
