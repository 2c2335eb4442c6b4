"""Format of frames: encoded frames are parsed back, and nothing else gets through."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmesh.collectives.backends.tcp.channel import ClosedSequences
from dmesh.collectives.backends.tcp.connection import encode
from dmesh.collectives.backends.tcp.frames import (
    CHUNK_LIMIT,
    CONTROL_LIMIT,
    EAGER_LIMIT,
    HEADER_SIZE,
    SIGNATURE_LIMIT,
    Frame,
    Kind,
    parse_header,
)
from dmesh.errors import CollectiveError

U64 = st.integers(0, 2**64 - 1)
SIGNATURES = st.binary(max_size=60) | st.just(bytes(SIGNATURE_LIMIT))
LENGTHS = {
    Kind.DATA: st.integers(0, EAGER_LIMIT),
    Kind.OFFER: st.integers(EAGER_LIMIT + 1, 2**63 - 1),
    Kind.READY: st.integers(EAGER_LIMIT + 1, 2**63 - 1),
    Kind.CANCEL: st.just(0),
}


@st.composite
def frames(draw):
    kind = draw(st.sampled_from(list(Kind)))
    if kind is Kind.CONTROL:
        return Frame(kind, length=draw(st.integers(0, CONTROL_LIMIT)))
    if kind is Kind.GOODBYE:
        return Frame(kind, sequence=draw(st.integers(0, 1)))
    step = draw(st.integers(0, 2**32 - 1))
    if kind is Kind.CHUNK:
        return Frame(kind, draw(U64), draw(U64), step, draw(st.integers(1, CHUNK_LIMIT)))
    return Frame(kind, draw(U64), draw(U64), step, draw(LENGTHS[kind]), draw(SIGNATURES))


@given(frames(), st.integers(0, 50))
def test_a_frame_is_read_back(frame, offset):
    data = bytes(offset) + encode(frame)
    parsed, signature_length = parse_header(data, offset)
    assert len(data) == offset + HEADER_SIZE + signature_length
    signature = data[offset + HEADER_SIZE :]
    assert parsed._replace(signature=signature) == frame
    assert frame.payload_length == (
        frame.length if frame.kind in (Kind.DATA, Kind.CHUNK, Kind.CONTROL) else 0
    )


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
@example(bytes([3, 1, 0xFF, 0xFF]) + bytes(36))
@example(bytes([3, 6]) + bytes(30) + (2**40).to_bytes(8, "big"))
def test_arbitrary_bytes_are_refused_or_within_all_limits(data):
    try:
        frame, signature_length = parse_header(data)
    except CollectiveError:
        return
    assert signature_length <= SIGNATURE_LIMIT
    assert frame.payload_length <= max(EAGER_LIMIT, CHUNK_LIMIT, CONTROL_LIMIT)
    assert encode(frame)[4:] == data[4:HEADER_SIZE]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            Frame(Kind.DATA, length=EAGER_LIMIT + 1),
            "DATA frame came with length 65537, which must be 0 to 65536",
        ),
        (Frame(Kind.CHUNK, length=CHUNK_LIMIT + 1), "CHUNK frame came with length"),
        (Frame(Kind.CHUNK, length=0), "CHUNK frame came with length 0"),
        (Frame(Kind.CHUNK, length=1, signature=b"x"), "CHUNK frame came with a signature of 1 bytes"),
        (Frame(Kind.CONTROL, length=CONTROL_LIMIT + 1), "CONTROL frame came with length"),
        (Frame(Kind.CONTROL, group=1), "CONTROL frame came that names a channel"),
        (Frame(Kind.CONTROL, generation=1), "CONTROL frame came that names a channel"),
        (Frame(Kind.GOODBYE, generation=1), "GOODBYE frame came that names a channel"),
        (Frame(Kind.GOODBYE, length=1), "GOODBYE frame came with length 1"),
        (Frame(Kind.GOODBYE, step=1), "GOODBYE frame came that names a channel"),
        (Frame(Kind.READY, length=EAGER_LIMIT), "READY frame came with length"),
        (Frame(Kind.DATA, signature=bytes(SIGNATURE_LIMIT + 1)), "a signature of 4097 bytes"),
    ],
)
def test_frames_that_break_a_rule_are_refused(frame, message):
    with pytest.raises(CollectiveError, match=message):
        parse_header(encode(frame))


def test_other_versions_and_kinds_are_refused():
    good = bytearray(encode(Frame(Kind.DATA)))
    with pytest.raises(CollectiveError, match="version 9; this process supports version 5"):
        parse_header(bytes([9]) + bytes(good[1:]))
    with pytest.raises(CollectiveError, match="unknown kind 77"):
        parse_header(bytes([good[0], 77]) + bytes(good[2:]))


@given(st.lists(st.integers(0, 80)))
def test_closed_sequences_are_a_set(numbers):
    closed = ClosedSequences()
    for number in numbers:
        assert not closed.add(number)
    assert {number for number in range(-1, 90) if number in closed} == set(numbers)
    assert "1" not in closed


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=60), st.integers(1, 5))
def test_closed_sequences_stay_small_and_forget_nothing(numbers, limit):
    closed = ClosedSequences(limit)
    merged = False
    for number in numbers:
        merged |= closed.add(number)
        assert len(closed._bounds) <= 2 * limit
    assert all(number in closed for number in numbers)
    if not merged:
        assert {number for number in range(10_001) if number in closed} == set(numbers)


def test_distant_numbers_do_not_close_each_other():
    closed = ClosedSequences(limit=8)
    for number in range(1000):
        closed.add(number)
        closed.add(2**63 + number)
    assert 1000 not in closed
    assert 2**63 + 1000 not in closed
    assert 2**62 not in closed


def test_closed_sequences_never_hold_what_is_awaited():
    closed = ClosedSequences(limit=2)
    for number in range(1, 40, 2):
        closed.add(number, lambda: {4})
    assert 4 not in closed
    assert [number for number in range(40) if number not in closed] == [0, 4]
