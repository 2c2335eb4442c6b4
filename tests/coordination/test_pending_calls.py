"""Reply slots of the calls in flight: which call has which, and until when."""

from __future__ import annotations

from dmesh.coordination.pending_calls import REPLY_SLOTS, PendingCall, PendingCalls
from dmesh.v1 import common_pb2, key_value_pb2
from dmesh.v1 import coordination_pb2 as pb

LIMIT = 1 << 20


class Wire:
    """A session, and the calls made in it."""

    def __init__(self) -> None:
        self.calls = PendingCalls()
        self.sent: list[pb.SessionRequest] = []
        self.calls.attach(self.take)

    def take(self, encoded: bytes) -> None:
        self.sent.append(pb.SessionRequest.FromString(encoded))

    def ask(self, pending: PendingCall | None = None) -> PendingCall:
        pending = pending or PendingCall("set", lambda: key_value_pb2.SetRequest(key="k"))
        self.calls.ask(pending, LIMIT)
        return pending

    def answer(self, pending: PendingCall, error: common_pb2.Error | None = None) -> None:
        reply = pb.KeyValueReply(id=pending.id, error=error)
        if error is None:
            reply.set.SetInParent()
        self.calls.resolve(reply)

    def slots(self) -> list[int]:
        """Reply slots of the calls sent so far."""
        return [sent.key_value_call.reply_slot for sent in self.sent if sent.HasField("key_value_call")]


def test_the_lowest_free_slot_is_used() -> None:
    wire = Wire()
    calls = [wire.ask() for _ in range(3)]
    wire.answer(calls[1])
    wire.answer(calls[0])
    wire.ask()
    wire.ask()
    assert wire.slots() == [1, 2, 3, 1, 2]


def test_calls_beyond_the_last_slot_wait_for_one_in_order() -> None:
    wire = Wire()
    calls = [wire.ask() for _ in range(REPLY_SLOTS + 2)]
    assert wire.slots() == list(range(1, REPLY_SLOTS + 1))
    wire.answer(calls[9])
    wire.calls.withdraw(calls[4])
    assert wire.slots()[REPLY_SLOTS:] == [10, 5]
    assert [call.id for call in calls[-2:]] == [
        sent.key_value_call.id for sent in wire.sent[-3:] if sent.key_value_call.id
    ]
    for call in calls:
        wire.answer(call)
    assert wire.ask().reply_slot == 1


def test_a_refused_call_keeps_its_slot_for_the_next_attempt() -> None:
    wire = Wire()
    call = wire.ask()
    wire.answer(call, common_pb2.Error(kind=common_pb2.ERROR_KIND_STORE_UNAVAILABLE))
    other = wire.ask()
    wire.ask(call)
    assert wire.slots() == [1, 2, 1]
    assert other.id != call.id
    wire.calls.withdraw(call)
    assert wire.sent[-1].abandon_call.id == call.id
    assert wire.ask().reply_slot == 1


def test_all_calls_are_sent_again_in_their_slots() -> None:
    wire = Wire()
    for _ in range(3):
        wire.ask()
    wire.calls.detach()
    wire.ask()
    wire.calls.attach(wire.take)
    assert wire.slots() == [1, 2, 3, 1, 2, 3, 4]
