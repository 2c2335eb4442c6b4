"""Wires of several streams: what goes on each of them, byte for byte, and what happens if one ends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.test_tcp import core, endpoints, finish, same, together

from dmesh import native
from dmesh.collectives.tuning import MOST_STREAMS, SEND_BUFFER

pytestmark = pytest.mark.skipif(core is None, reason=f"no native core: {native.reason()}")

LONG = 10.0
ENVELOPE = 88
"""Bytes that describe an array of a dtype that the core knows."""


@contextmanager
def opened(
    streams: int, me: int = 0, room: int = 64, *, pipe: bool = False
) -> Iterator[tuple[Any, list[Any]]]:
    """A member's end of a wire between two, and the other ends of its streams; last a pipe's for receipts."""
    pairs = [socket.socketpair() for _ in range(streams + pipe)]
    own, theirs = [-1] * streams, [near.detach() for near, _ in pairs]
    receipts = theirs.pop() if pipe else -1
    descriptors = [*own, *theirs] if me == 0 else [*theirs, *own]
    with ExitStack() as stack:
        for _, far in pairs:
            stack.enter_context(far).settimeout(LONG)
        yield (
            core.Endpoint.over_sockets(descriptors, me, receipts, room, True, 0, streams),
            [far for _, far in pairs],
        )


def cut_up(data: bytes, pieces: int, room: int) -> list[bytes]:
    assert len(data) <= pieces * room
    return [data[room * piece : room * (piece + 1)] for piece in range(pieces)]


def dealt(header: bytes, items: Sequence[bytes], streams: int) -> list[bytes]:
    """What goes on each stream."""
    return [(b"" if index else header) + b"".join(items[index::streams]) for index in range(streams)]


def by_turns(contributions: list[bytes], results: list[bytes]) -> list[bytes]:
    """What goes on one stream after the other, in two phases."""
    turns = [
        contributed + folded for contributed, folded in zip(contributions[1:], results[:-1], strict=True)
    ]
    return [contributions[0], *turns, results[-1]]


def received(far: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = far.recv(nbytes - len(found))
        assert more, "it ends too early"
        found += more
    return found


def nothing_more(far: socket.socket) -> bool:
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    return True


class Reduction:
    """An all-reduce of rank 0 with a rank 1 that is played here."""

    def __init__(self, streams: int, count: int, room: int = 64) -> None:
        chance = np.random.default_rng([streams, count, room])
        self.mine, yours = (chance.integers(0, 256, count).astype("u1") for _ in range(2))
        self.total = np.maximum(self.mine, yours)
        share = ((count + 1) // 2 + 63) & ~63
        pieces = -(-min(share, count) // room)
        first, second = slice(0, share), slice(share, count)

        def items(array: np.ndarray, part: slice, folded: slice) -> list[bytes]:
            contributed = cut_up(array[part].tobytes(), pieces, room)
            return by_turns(contributed, cut_up(self.total[folded].tobytes(), pieces, room))

        self.out = items(self.mine, second, first)
        self.into = items(yours, first, second)
        self.streams = streams

    def begin(self, endpoint: Any, far: list[Any], out: Any = None) -> tuple[Any, list[bytes], list[bytes]]:
        """Begins; returns the call, what the streams of rank 0 are to carry, and those of rank 1."""
        begun = endpoint.all_reduce(self.mine, "max", out)
        assert begun is endpoint
        said = far[0].recv(24, socket.MSG_PEEK)
        assert struct.unpack("<QQQ", said)[2] == sum(map(len, self.out))
        answer = said[:16] + struct.pack("<Q", sum(map(len, self.into)))
        return begun, dealt(said, self.out, self.streams), dealt(answer, self.into, self.streams)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    streams=st.integers(1, MOST_STREAMS),
    count=st.integers(1, 3000),
    room=st.sampled_from([64, 128, 1024]),
    chance=st.randoms(use_true_random=False),
)
def test_each_byte_goes_once_on_its_stream_in_whatever_order_they_come(streams, count, room, chance):
    reduction = Reduction(streams, count, room)
    with opened(streams, room=room) as (endpoint, far):
        result, out, into = reduction.begin(endpoint, far)
        while any(into):
            index = chance.choice([index for index, left in enumerate(into) if left])
            left = len(into[index])
            portion = chance.randint(min(32, left), left)  # few enough for the buffers
            assert result is endpoint
            far[index].sendall(into[index][:portion])
            into[index] = into[index][portion:]
            result = endpoint.progress(0.0 if any(into) else LONG)
        assert same(result, reduction.total)
        for end, expected in zip(far, out, strict=True):
            assert received(end, len(expected)) == expected
            assert nothing_more(end)


@settings(deadline=None)
@given(
    streams=st.integers(1, MOST_STREAMS), count=st.integers(1, 3000), room=st.sampled_from([64, 128, 1024])
)
def test_transfers_are_dealt_out_too(streams, count, room):
    data = np.random.default_rng(count).integers(0, 256, count).astype("u1")
    with opened(streams, room=room, pipe=True) as (endpoint, far):
        assert finish(endpoint, endpoint.send(data)) is None
        said = far[0].recv(24 + ENVELOPE, socket.MSG_PEEK)
        items = [*dealt(said, cut_up(data.tobytes(), -(-count // room), room), streams), b""]
        for end, expected in zip(far, items, strict=True):
            assert received(end, len(expected)) == expected
            assert nothing_more(end)
    with opened(streams, 1, room, pipe=True) as (endpoint, far):
        result = endpoint.recv(data, None)
        for end, expected in reversed(list(zip(far, items, strict=True))):
            assert result is endpoint
            end.sendall(expected)
        assert same(finish(endpoint, result), data)


def test_large_arrays_are_answered_on_the_connection_for_receipts():
    data = np.zeros(SEND_BUFFER + 1, "u1")
    with opened(1, 1, data.nbytes + 63 & ~63, pipe=True) as (receiver, (arrays, receipts)):
        assert receiver.recv(data, None) is receiver
        answer = received(receipts, 24)
        assert nothing_more(arrays)
        assert struct.unpack("<QQQ", answer)[2] == 0
    with opened(1, 0, data.nbytes + 63 & ~63, pipe=True) as (sender, (arrays, receipts)):
        assert sender.send(data) is sender
        said = received(arrays, 24 + data.nbytes)
        assert said[:16] == answer[:16]
        assert nothing_more(receipts)
        assert sender.progress(0.0) is sender
        receipts.sendall(answer)
        assert finish(sender, sender) is None


def test_what_one_stream_carries_shows_nowhere_before_the_header_was_checked():
    reduction, out = Reduction(3, 2000), np.full(2000, 7, "u1")
    with opened(3) as (endpoint, far):
        begun, _, into = reduction.begin(endpoint, far, out)
        for end, data in zip(far[1:], into[1:], strict=True):
            end.sendall(data)
        assert endpoint.progress(0.01) is begun
        assert (out[1024:] == 7).all()  # the part that rank 1 folds
        far[0].sendall(bytes(24))
        with pytest.raises(OSError, match="mismatched: True"):
            finish(endpoint, begun)
        assert (out == 7).all()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stream_that_is_late_is_waited_for(index):
    reduction = Reduction(3, 2000)
    with opened(3) as (endpoint, far):
        begun, _, into = reduction.begin(endpoint, far)
        for other in {0, 1, 2} - {index}:
            far[other].sendall(into[other])
        assert endpoint.progress(0.01) is begun
        assert endpoint.missing() == [1]
        far[index].sendall(into[index])
        assert same(finish(endpoint, begun), reduction.total)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("count", [2000, 8_000_000])
def test_a_stream_that_is_cut_alone_is_told(index, count):
    """In the middle of a piece; with the large array also while this side cannot write any more."""
    reduction = Reduction(3, count, 64 if count == 2000 else 65536)
    with opened(3, room=64 if count == 2000 else 65536) as (endpoint, far):
        begun, _, into = reduction.begin(endpoint, far)
        for other, data in enumerate(into):
            portion = data[:124] if other == index else data[: 1 << 15]
            far[other].sendall(portion)
        assert endpoint.progress(0.01) is begun
        assert not endpoint.disconnected
        far[index].close()
        with pytest.raises(OSError, match="disconnected: True"):
            finish(endpoint, begun)
        assert endpoint.culprit == 1
        assert endpoint.progress(0.0) is begun  # what ended stays ended
        assert endpoint.disconnected


@pytest.mark.parametrize("streams", [2, 3, 8])
def test_calls_of_all_sizes_follow_each_other(streams):
    """Larger than what a connection buffers; small ones between them use the first stream alone."""
    ends = endpoints(3, 0, 65536, streams)
    assert [end.streams for end in ends] == [streams] * 3
    for count in (1, 3_000_001, 2, 700_000, 100_000, 1_000_000):
        arrays = [np.random.default_rng([me, count]).integers(0, 99, count).astype("i4") for me in range(3)]
        for result in together(ends, lambda p, m, a=arrays: p.all_reduce(a[m], "sum", None)):
            assert same(result, sum(arrays))
        for result in together(ends, lambda p, m, a=arrays: p.all_gather(a[m], None, None)):
            assert same(result, np.stack(arrays))


@pytest.mark.parametrize("streams", [0, -1, MOST_STREAMS + 1, 2])
def test_numbers_of_streams_that_cannot_be_are_refused(streams):
    with pytest.raises(ValueError, match="no connection"):
        core.Endpoint.over_sockets([-1, 5, 6], 0, -1, 0, True, 0, streams)


def test_a_member_of_one_stream_less_is_refused_and_its_others_stay_open():
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(ValueError, match="-1 is no connection with member 1"):
            core.Endpoint.over_sockets([-1, -1, near.fileno(), -1], 0, -1, 0, True, 0, 2)
        near.sendall(b"x")
        assert far.recv(1) == b"x"
