"""Labels: whatever the pieces, whole lines come out and not a byte is lost."""

from __future__ import annotations

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from dmesh.launcher.labels import LineLabeler, Output


class Recorder(Output):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.colored = False
        self.closed = False
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"a\nb", b"\r\n"]), max_size=20))
def test_lines_do_not_depend_on_the_pieces(pieces) -> None:
    output, seen = Recorder(), []
    labeler = LineLabeler(7, output, seen.append)
    for piece in pieces:
        labeler.feed(piece)
        assert output.written == b"" or output.written.endswith(b"\n")
    labeler.finish()
    whole = b"".join(pieces)
    lines = whole.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    assert seen == lines
    assert output.written == b"".join(b"[7] " + line + b"\n" for line in lines)


def test_a_line_without_an_end_is_held_back_only_so_long() -> None:
    output = Recorder()
    labeler = LineLabeler(0, output)
    for _ in range(50):
        labeler.feed(b"x" * 10_000)
    assert len(output.written) > 400_000
    labeler.finish()
    assert output.written.replace(b"[0] ", b"").replace(b"\n", b"") == b"x" * 500_000


def test_a_closed_reader_is_noticed_and_the_rest_dropped() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = Output(writing, {})
    output.write(b"x")
    assert output.closed
    output.write(b"y")
    os.close(writing)


def test_a_non_blocking_descriptor_gets_everything() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = Output(writing, {})
    received = bytearray()

    def read() -> None:
        while len(received) < 1_000_000:
            received.extend(os.read(reading, 100_000))

    thread = threading.Thread(target=read)
    thread.start()
    output.write(b"x" * 1_000_000)
    thread.join(90)
    assert len(received) == 1_000_000
    os.close(reading)
    os.close(writing)
