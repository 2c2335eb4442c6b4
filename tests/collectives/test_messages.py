"""What ranks tell each other survives the way, and nothing else is believed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.ranks import cluster

from dmesh.collectives.control_messages import (
    MAX_BYTES,
    Abort,
    BadMessage,
    Blocked,
    Farewell,
    Position,
    WhereAreYou,
    clean,
    decode,
    encode,
)
from dmesh.collectives.failure import Cause, Failure
from dmesh.errors import CollectiveMismatchError

IDS = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=6000)
PAIRS = st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99))
CAUSES = st.sampled_from([cause for cause in Cause if cause not in (Cause.CLOSED, Cause.JOINING)])
FAILURES = st.builds(Failure, CAUSES, TEXTS, st.lists(st.integers(0, 999), max_size=9).map(tuple), TEXTS)
MESSAGES = st.one_of(
    st.builds(Abort, IDS, IDS, FAILURES),
    st.builds(WhereAreYou, IDS, IDS, PAIRS, IDS, IDS, TEXTS),
    st.builds(Farewell, TEXTS, st.booleans()),
    st.builds(
        Position, IDS, IDS, PAIRS, IDS, IDS,
        st.sampled_from(["behind", "unknown", "absent", "queued", "running", "finished"]),
        IDS, TEXTS, TEXTS, st.lists(IDS, max_size=16).map(tuple),
        st.builds(Blocked, TEXTS, IDS, st.booleans()),
    ),
)  # fmt: skip


def cleaned(value):
    if isinstance(value, str):
        return clean(value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(*(cleaned(getattr(value, name)) for name in value.__dataclass_fields__))
    return value


@given(MESSAGES)
def test_round_trip(message):
    data = encode(message)
    assert len(data) <= MAX_BYTES
    assert decode(data) == cleaned(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(data):
    with pytest.raises(BadMessage):
        decode(data)


@given(MESSAGES, st.data())
def test_a_spoiled_field_is_refused_or_harmless(message, data):
    fields = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(JSON)
    try:
        decoded = decode(json.dumps(fields).encode())
    except BadMessage:
        return
    assert isinstance(decoded, (Abort, WhereAreYou, Position, Farewell))
    assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 50_000,
        b'{"kind":"Abort"}',
        b'{"kind":"Farewell"}',
        b'{"kind":"WhereAreYou","group":1e400}',
        b" " * (MAX_BYTES + 1),
        b"\xff\xfe",
        b"{}",
    ],
)
def test_hostile_messages_are_refused(data):
    with pytest.raises(BadMessage):
        decode(data)


def test_shown_text_cannot_forge_lines():
    assert clean("a\nb\x1b[31m\u202ec") == "a?b?[31m?c"
    assert len(clean("x" * 10_000)) == 4000


def test_strange_messages_change_nothing(caplog):
    """Nonsense, and failures reported by or about ranks that a group does not have."""
    with cluster(3) as ranks:
        groups = ranks.all(lambda c: c.new_group([0, 1]) if c.rank < 2 else None)
        receiver = ranks.communicators[0]
        stranger = Failure(Cause.MISMATCH, "says the stranger")
        about = Failure(Cause.TIMEOUT, "about a stranger", (2,))
        for peer, data in [
            (1, b"nonsense"),
            (2, encode(Abort(0, groups[0].id, stranger))),
            (1, encode(Abort(0, groups[0].id, about))),
            (2, encode(WhereAreYou(0, groups[0].id, None, 1, 1, "barrier()"))),
            (2, encode(Position(0, groups[0].id, None, 1, 1, "running", 0, "", ""))),
            (1, encode(WhereAreYou(0, groups[0].id, (5, 99), 1, 1, "barrier()"))),
            (1, encode(WhereAreYou(0, 12345, None, 1, 1, "barrier()"))),
        ]:
            receiver.on_control(peer, data)
        receiver.on_mismatch(groups[0].id, 77, 1, b"barrier()", 0)
        receiver.on_mismatch(999, 1, 1, b"barrier()", 0)
        assert "ignoring an invalid message from rank 1, /job:worker/task:1" in caplog.text
        assert [total.item() for total in ranks.run(lambda c: groups[c.rank].all_reduce(1), (0, 1))] == [2, 2]


def test_a_foreign_signature_is_shown_on_one_line():
    with cluster(2) as ranks:
        first = ranks.communicators[0].transport.message_queue.open(
            ranks.communicators[0].world.id, 1, b"all_\nreduce\xff()"
        )
        first.send(1, 0, memoryview(b"x"))
        (error,) = ranks.run(lambda communicator: communicator.world.all_reduce(1), (1,))
        assert type(error) is CollectiveMismatchError
        assert "rank 0 called all_?reduce\ufffd()" in str(error)
        first.close()


def test_early_failures_are_remembered_within_bounds():
    with cluster(2) as ranks:
        receiver = ranks.communicators[0]
        for number in range(1000):
            receiver.on_control(1, encode(Abort(0, number, Failure(Cause.BROKEN, "x", (1,)))))
        assert len(receiver.control._early) <= 256
