"""Conformance tests that every transport must pass."""

from __future__ import annotations

import random
import threading

import pytest
from tests.collectives.transport.harness import LIMIT, finish, pattern, together
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.frames import CHUNK_LIMIT, CONTROL_LIMIT, EAGER_LIMIT, SIGNATURE_LIMIT
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveValueError, PeerLostError

LARGE = 3 * CHUNK_LIMIT + 7


@pytest.mark.parametrize("size", [0, 1, 8, EAGER_LIMIT, EAGER_LIMIT + 1, CHUNK_LIMIT, LARGE])
def test_payloads_of_every_size_arrive_unchanged_in_both_directions(make_cluster, size):
    cluster = make_cluster(3)
    results = {}

    def exchange(rank):
        channel = cluster.open(rank)
        into = {peer: bytearray(size) for peer in range(3) if peer != rank}
        completions = [channel.receive(peer, 4, memoryview(into[peer])) for peer in into]
        for peer in into:
            channel.send(peer, 4, memoryview(pattern(size, rank)))
        assert channel.wait(completions, LIMIT)
        assert channel.flush(LIMIT)
        assert channel.waiting_for() == ()
        channel.close()
        results[rank] = into

    together(*(lambda rank=rank: exchange(rank) for rank in range(3)))
    for rank, into in results.items():
        assert into == {peer: pattern(size, peer) for peer in range(3) if peer != rank}


def test_steps_are_matched_by_number_and_not_by_order(make_cluster):
    cluster = make_cluster(2)
    sender, receiver = cluster.open(0), cluster.open(1)
    sizes = [0, 5, EAGER_LIMIT + 9, 17, 2 * CHUNK_LIMIT]
    into = [bytearray(size) for size in sizes]
    for step in (3, 0, 4, 2, 1):
        sender.send(1, step, memoryview(pattern(sizes[step], step)))
    completions = [receiver.receive(0, step, memoryview(into[step])) for step in (1, 4, 0, 2, 3)]
    finish(receiver, completions)
    finish(sender)
    assert into == [pattern(size, step) for step, size in enumerate(sizes)]


def test_unexpected_small_frames_are_buffered(make_cluster):
    cluster = make_cluster(2)
    sender = cluster.open(0)
    for step in range(5):
        sender.send(1, step, memoryview(pattern(100, step)))
    finish(sender)
    cluster.fence(0, 1)
    assert cluster.buffered(1, 0) > 500
    receiver = cluster.open(1)
    into = [bytearray(100) for _ in range(5)]
    completions = [receiver.receive(0, step, memoryview(into[step])) for step in range(5)]
    assert all(completion.done for completion in completions)
    finish(receiver, completions)
    assert into == [pattern(100, step) for step in range(5)]
    assert cluster.buffered(1, 0) == 0


def test_large_payloads_wait_for_their_receiver_without_memory(make_cluster):
    cluster = make_cluster(2)
    sender = cluster.open(0)
    sender.send(1, 0, memoryview(pattern(LARGE)))
    cluster.fence(0, 1)
    assert not sender.flush(0.0)
    assert sender.waiting_for() == (1,)
    assert cluster.buffered(1, 0) < 1000
    receiver = cluster.open(1)
    into = bytearray(LARGE)
    finish(receiver, [receiver.receive(0, 0, memoryview(into))])
    finish(sender)
    assert into == pattern(LARGE)


def test_a_receiver_of_a_large_payload_may_be_early(make_cluster):
    cluster = make_cluster(2)
    receiver = cluster.open(1)
    into = bytearray(LARGE)
    completion = receiver.receive(0, 0, memoryview(into))
    cluster.fence(1, 0)
    assert not receiver.wait([completion], 0.0)
    assert receiver.waiting_for() == (0,)
    sender = cluster.open(0)
    sender.send(1, 0, memoryview(pattern(LARGE)))
    finish(receiver, [completion])
    finish(sender)
    assert into == pattern(LARGE)


def test_many_channels_and_threads_at_once(make_cluster):
    cluster = make_cluster(3)
    generator = random.Random(5)
    sizes = [generator.choice([3, 900, EAGER_LIMIT, EAGER_LIMIT + 1, 300_000]) for _ in range(24)]

    def collective(rank, group, sequence):
        size = sizes[(group * 6 + sequence) % len(sizes)]
        channel = cluster.open(rank, sequence, b"s%d" % size, group)
        into = {peer: bytearray(size) for peer in range(3) if peer != rank}
        completions = [channel.receive(peer, 0, memoryview(into[peer])) for peer in into]
        data = pattern(size, rank + group)
        for peer in into:
            channel.send(peer, 0, memoryview(data))
        finish(channel, completions)
        for peer, got in into.items():
            assert got == pattern(size, peer + group)

    def work(rank, group):
        for sequence in range(6):
            collective(rank, group, sequence)

    together(*(lambda r=rank, g=group: work(r, g) for rank in range(3) for group in range(4)))


def test_control_messages_keep_their_order_and_overtake_large_payloads(make_cluster):
    cluster = make_cluster(2)
    messages = [b"", b"one", bytes(CONTROL_LIMIT), *(b"%d" % index for index in range(50))]
    sender, receiver = cluster.open(0), cluster.open(1)
    into = bytearray(LARGE)
    completion = receiver.receive(0, 0, memoryview(into))
    sender.send(1, 0, memoryview(pattern(LARGE)))
    for message in messages:
        cluster.transports[0].control(1, message)
    cluster.listeners[1].wait_for("control", 0, messages[-1])
    assert [event[2] for event in cluster.listeners[1].of("control")] == messages
    finish(receiver, [completion])
    finish(sender)
    with pytest.raises(CollectiveValueError, match=f"{CONTROL_LIMIT + 1} bytes, at most {CONTROL_LIMIT}"):
        cluster.transports[0].control(1, bytes(CONTROL_LIMIT + 1))


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("early", [False, True])
def test_a_different_signature_is_reported_and_nothing_is_stored(make_cluster, size, early):
    cluster = make_cluster(2)
    into = bytearray(10)

    def send():
        sender = cluster.open(0, signature=b"sum float32")
        sender.send(1, 0, memoryview(pattern(size)))
        cluster.fence(0, 1)
        return sender

    if early:
        sender = send()
        receiver = cluster.open(1, signature=b"max int64")
    else:
        receiver = cluster.open(1, signature=b"max int64")
        receiver.receive(0, 0, memoryview(into))
        sender = send()
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 = .*'sum float32', this rank .* 'max int64'"):
        receiver.flush(LIMIT)
    assert cluster.listeners[1].of("mismatch") == [("mismatch", 7, 1, 0, b"sum float32")]
    assert into == bytes(10)
    receiver.close()
    sender.close()
    assert cluster.buffered(1, 0) == 0


def test_both_sides_see_a_mismatch_of_an_exchange(make_cluster):
    cluster = make_cluster(2)
    channels = [cluster.open(0, signature=b"a"), cluster.open(1, signature=b"b")]
    for rank, channel in enumerate(channels):
        channel.send(1 - rank, 0, memoryview(b"x"))
    for rank, channel in enumerate(channels):
        cluster.listeners[rank].wait_for("mismatch", 7, 1, 1 - rank)
        with pytest.raises(CollectiveMismatchError):
            channel.wait([channel_completion(channel, 1 - rank)], LIMIT)


def channel_completion(channel, peer):
    return channel.receive(peer, 9, memoryview(bytearray(1)))


def test_the_listener_may_fail_a_mismatched_channel_with_a_better_error(make_cluster):
    cluster = make_cluster(2)
    receiver = cluster.open(1, signature=b"b")
    cluster.listeners[1].react = lambda event: receiver.fail(CollectiveMismatchError("said better"))
    completion = receiver.receive(0, 0, memoryview(bytearray(1)))
    cluster.open(0, signature=b"a").send(1, 0, memoryview(b"x"))
    with pytest.raises(CollectiveMismatchError, match=r"^said better$"):
        receiver.wait([completion], LIMIT)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("sent", "expected"), [(10, 11), (LARGE, 10), (10, LARGE), (LARGE, LARGE + 1), (0, 1), (1, 0)]
)
def test_a_different_length_fails_the_channel_and_names_both(make_cluster, sent, expected, early):
    cluster = make_cluster(2)
    into = bytearray(expected)
    receiver = None if early else cluster.open(1)
    if receiver is not None:
        receiver.receive(0, 3, memoryview(into))
        cluster.fence(1, 0)
    sender = cluster.open(0)
    sender.send(1, 3, memoryview(pattern(sent)))
    if receiver is None:
        cluster.fence(0, 1)
        receiver = cluster.open(1)
        receiver.receive(0, 3, memoryview(into))
    with pytest.raises(
        CollectiveError, match=rf"rank 0 = .*sends {sent} bytes in step 3 .* expects {expected}$"
    ):
        while receiver.wait([receiver.receives[0, 3]], LIMIT):
            raise AssertionError("it took a payload of the wrong length")
    assert into == bytes(expected)


def test_failing_a_channel_wakes_its_waiter_and_only_the_first_failure_counts(make_cluster):
    cluster = make_cluster(2)
    channel = cluster.open(0)
    waiting = [channel.receive(1, 0, memoryview(bytearray(1)))]
    failed = threading.Event()

    def wait():
        with pytest.raises(CollectiveError, match=r"^first$"):
            channel.wait(waiting, LIMIT)
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    channel.fail(CollectiveError("first"))
    channel.fail(CollectiveError("second"))
    thread.join(LIMIT)
    assert failed.is_set()
    for action in (
        lambda: channel.wait([], 0),
        lambda: channel.flush(0),
        lambda: channel.send(1, 5, memoryview(b"x")),
        lambda: channel.receive(1, 5, memoryview(bytearray(1))),
    ):
        with pytest.raises(CollectiveError, match=r"^first$"):
            action()
    channel.close()


@pytest.mark.parametrize("size", [100, LARGE])
def test_closed_channels_memory_is_not_touched_and_late_frames_are_dropped(make_cluster, size):
    cluster = make_cluster(2)
    into = bytearray(size)
    receiver = cluster.open(1)
    receiver.receive(0, 0, memoryview(into))
    cluster.fence(1, 0)
    receiver.close()
    receiver.close()
    sender = cluster.open(0)
    sender.send(1, 0, memoryview(pattern(size)))
    finish(sender)
    cluster.fence(0, 1)
    assert into == bytes(size)
    assert cluster.buffered(1, 0) == 0
    with pytest.raises(CollectiveError, match="collective 1 of group 7 is closed"):
        receiver.wait([], 0)
    with pytest.raises(CollectiveError, match="channel 1 of group 7 is already over"):
        cluster.open(1)


def test_closing_in_the_middle_of_a_transfer_keeps_the_connection_usable(make_cluster):
    """The memory on both sides is released at once, at any moment."""
    cluster = make_cluster(2)
    size = 4 * LARGE
    for sequence in range(8):
        sender, receiver = cluster.open(0, sequence), cluster.open(1, sequence)
        into, data = bytearray(size), bytearray(b"\1") * size
        receiver.receive(0, 0, memoryview(into))
        sender.send(1, 0, memoryview(data))
        closers = [sender.close, receiver.close]
        closers[sequence % 2]()
        seen = bytes(into) if sequence % 2 else None
        data[:] = b"\2" * size
        closers[1 - sequence % 2]()
        cluster.fence(0, 1)
        assert seen is None or seen == into
        assert b"\2" not in into
    sender, receiver = cluster.open(0, 99), cluster.open(1, 99)
    into = bytearray(LARGE)
    sender.send(1, 0, memoryview(pattern(LARGE)))
    finish(receiver, [receiver.receive(0, 0, memoryview(into))])
    finish(sender)
    assert into == pattern(LARGE)


def test_a_receiver_learns_that_a_large_payload_will_not_come(make_cluster):
    cluster = make_cluster(2)
    receiver = cluster.open(1)
    sender = cluster.open(0)
    sender.send(1, 0, memoryview(pattern(LARGE)))
    sender.close()
    with pytest.raises(
        CollectiveError, match=r"rank 0 = .* gave up sending step 0 of collective 1 of group 7"
    ):
        receiver.wait([receiver.receive(0, 0, memoryview(bytearray(LARGE)))], LIMIT)


def test_waiting_ends_in_time_and_names_the_missing_ranks(make_cluster):
    cluster = make_cluster(4)
    channel = cluster.open(0)
    completions = [channel.receive(peer, 0, memoryview(bytearray(3))) for peer in (3, 1)]
    channel.send(2, 0, memoryview(pattern(LARGE)))
    assert not channel.wait(completions, 0.01)
    assert not channel.flush(0.0)
    assert channel.waiting_for() == (1, 2, 3)
    cluster.open(3).send(0, 0, memoryview(b"abc"))
    assert channel.wait(completions[:1], LIMIT)
    assert channel.waiting_for() == (1, 2)


def test_a_goodbye_comes_after_everything_else_and_is_no_loss(make_cluster):
    cluster = make_cluster(3)
    leaver = cluster.open(0)
    for step in range(20):
        leaver.send(1, step, memoryview(pattern(EAGER_LIMIT, step)))
    cluster.transports[0].control(1, b"last words")
    cluster.open(2).send(0, 0, memoryview(b"to see that it leaves"))
    cluster.fence(2, 0)
    cluster.transports[0].close(LIMIT)
    cluster.listeners[1].wait_for("left", 0)
    cluster.listeners[2].wait_for("left", 0)
    assert [event[0] for event in cluster.listeners[1].events] == ["control", "left"]
    receiver = cluster.open(1)
    into = [bytearray(EAGER_LIMIT) for _ in range(20)]
    finish(receiver, [receiver.receive(0, step, memoryview(into[step])) for step in range(20)])
    assert into == [pattern(EAGER_LIMIT, step) for step in range(20)]
    for action in (
        lambda channel: channel.receive(0, 99, memoryview(bytearray(1))),
        lambda channel: channel.send(0, 99, memoryview(b"x")),
    ):
        later = cluster.open(1, sequence=id(action))
        action(later)
        with pytest.raises(PeerLostError, match=r"rank 0 = .* is gone: it said goodbye") as caught:
            later.flush(LIMIT)
        assert caught.value.rank == 0
    assert not cluster.listeners[1].of("lost")


def test_a_death_is_reported_once_to_everybody_connected(make_cluster):
    cluster = make_cluster(4)
    for peer in (1, 2, 3):
        cluster.fence(0, peer)  # rank 0 has dialed all of them
        if peer != 3:
            cluster.fence(peer, 0)  # and two of them rank 0
    waiting = cluster.open(1)
    completion = waiting.receive(0, 0, memoryview(bytearray(1)))
    cluster.listeners[1].react = lambda event: waiting.fail(PeerLostError("gone", 0))
    cluster.kill(0)
    for peer in (1, 2, 3):
        _, _, reason = cluster.listeners[peer].wait_for("lost", 0)
        assert "without a goodbye" in str(reason) or "broke" in str(reason)
        assert not cluster.listeners[peer].of("left")
    with pytest.raises(PeerLostError):
        waiting.wait([completion], LIMIT)
    for rank, peer in ((1, 2), (2, 3), (3, 1)):
        cluster.fence(rank, peer)
    assert [len(cluster.listeners[peer].of("lost")) for peer in (1, 2, 3)] == [1, 1, 1]


def test_a_closed_transport_fails_its_channels(make_cluster):
    cluster = make_cluster(2)
    transport = cluster.transports[0]
    channel = cluster.open(0)
    completion = channel.receive(1, 0, memoryview(bytearray(1)))
    together(lambda: transport.close(5.0), lambda: transport.close(5.0))
    with pytest.raises(CollectiveError, match="the transport of rank 0 is closed"):
        channel.wait([completion], LIMIT)
    with pytest.raises(CollectiveError, match="the transport of rank 0 is closed"):
        cluster.open(0, 2)
    channel.close()
    transport.control(1, b"nobody hears this")


def test_a_flood_of_unexpected_frames_is_bounded_and_not_lost(make_cluster):
    limit, count = 5 * EAGER_LIMIT, 40
    cluster = make_cluster(2, unexpected_limit=limit)
    sender = cluster.open(0)
    for step in range(count):
        sender.send(1, step, memoryview(pattern(EAGER_LIMIT, step)))
    eventually(lambda: cluster.buffered(1, 0) + EAGER_LIMIT + 300 > limit, "a full budget")
    assert cluster.buffered(1, 0) <= limit
    cluster.fence(1, 0)  # the other direction is not held up
    receiver = cluster.open(1)
    for step in range(count):
        into = bytearray(EAGER_LIMIT)
        assert receiver.wait([receiver.receive(0, step, memoryview(into))], LIMIT)
        assert into == pattern(EAGER_LIMIT, step)
        assert cluster.buffered(1, 0) <= limit
    finish(sender)
    finish(receiver)
    assert cluster.buffered(1, 0) == 0


def test_bad_arguments_are_refused_before_anything_is_sent(make_cluster):
    cluster = make_cluster(2)
    channel = cluster.open(0)
    writable = memoryview(bytearray(8))
    for action, message in (
        (lambda: channel.send(0, 0, writable), "rank 0 is this client itself"),
        (lambda: channel.receive(5, 0, writable), "rank 5 is no peer"),
        (lambda: cluster.transports[0].control(9, b""), "rank 9 is no peer"),
        (lambda: channel.send(1, -1, writable), "step -1"),
        (lambda: channel.send(1, 2**32, writable), "step 4294967296"),
        (lambda: channel.receive(1, 0, memoryview(b"12")), "read-only"),
        (lambda: channel.send(1, 0, writable[::2]), "not C-contiguous"),
        (lambda: cluster.open(0, 2**64), "sequence"),
        (lambda: cluster.open(0, 5, bytes(SIGNATURE_LIMIT + 1)), f"at most {SIGNATURE_LIMIT}"),
    ):
        with pytest.raises(CollectiveValueError, match=message):
            action()
    with pytest.raises(CollectiveError, match="channel 1 of group 7 is already open"):
        cluster.open(0)
    channel.send(1, 0, writable)
    channel.receive(1, 0, writable)
    with pytest.raises(CollectiveValueError, match="is sent already"):
        channel.send(1, 0, writable)
    with pytest.raises(CollectiveValueError, match="is posted already"):
        channel.receive(1, 0, writable)


def test_views_of_other_formats_are_sent_as_bytes(make_cluster):
    cluster = make_cluster(2)
    sender, receiver = cluster.open(0), cluster.open(1)
    into = memoryview(bytearray(24)).cast("d")
    sender.send(1, 0, memoryview(bytearray(range(24))).cast("B", (2, 3, 4)))
    finish(receiver, [receiver.receive(0, 0, into)])
    finish(sender)
    assert bytes(into) == bytes(range(24))


def test_a_listener_that_fails_does_not_stop_the_transport(make_cluster, caplog):
    cluster = make_cluster(2)

    def fail(event):
        if event[2] == b"bad":
            raise RuntimeError("a bug in the listener")

    cluster.listeners[1].react = fail
    cluster.transports[0].control(1, b"bad")
    cluster.fence(0, 1)
    assert "a listener of the transport failed" in caplog.text
