"""Frames between the launcher and its agents, and the queue that they wait in."""

from __future__ import annotations

import os
import selectors

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.errors import HostError
from dmesh.launcher.frames import MAGIC, Decoder, Frame, frame
from dmesh.launcher.outbox import Outbox

frames = st.lists(
    st.builds(Frame, st.sampled_from(["out", "err", "ping"]), st.integers(0, 10**6), st.binary(max_size=300)),
    max_size=6,
)


@given(frames, st.data())
def test_frames_arrive_however_the_bytes_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    noise = data.draw(st.sampled_from([b"", b"Last login: today\nmotd\n", MAGIC[:5]]))
    stream = noise + MAGIC + b"".join(message.encode() for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = Decoder(expects_magic=True), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == sent
    assert decoder.noise == b""


@pytest.mark.parametrize(
    "data",
    [
        b"hello\n", b"out 1\n", b"out 1 -2\n", b"out x 2\nab\n", b"out 1 2 3\n", b"1 2 3\n",
        b"out 1 2\nabc", b"x" * 100, b"out 1 99999999999\n",
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HostError):
        list(Decoder().feed(data))


def test_a_shell_that_never_stops_is_refused() -> None:
    decoder = Decoder(expects_magic=True)
    assert list(decoder.feed(b"x" * 1000)) == []
    assert decoder.noise == b"x" * 1000
    with pytest.raises(HostError, match="its output does not begin"):
        list(decoder.feed(b"x" * 100_000))


def test_the_content_is_an_object_or_refused() -> None:
    assert frame("started", {"pid": 7}, 3) == Frame("started", 3, b'{"pid": 7}')
    assert frame("started", {"pid": 7}).fields() == {"pid": 7}
    for payload in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(HostError, match="is not a JSON object"):
            Frame("setup", 0, payload).fields()


def test_what_a_pipe_has_no_room_for_waits() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    outbox, selector, sent = Outbox(writer), selectors.DefaultSelector(), b"x" * 200_000
    outbox.send_raw(sent)
    outbox.send_raw(b"end")
    outbox.watch(selector)
    assert not outbox.idle
    received = b""
    while len(received) < len(sent) + 3:
        received += os.read(reader, 1 << 16)
        outbox.watch(selector)
    assert received == sent + b"end"
    assert outbox.idle
    assert outbox.unsent == 0
    assert not selector.get_map()  # nothing to wait for
    os.close(reader)
    outbox.send_raw(b"nobody is there")
    assert outbox.closed
    os.close(writer)
    selector.close()
