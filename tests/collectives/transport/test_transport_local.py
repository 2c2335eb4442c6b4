"""Local network: orders of events that only a test can choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.transport.harness import LIMIT, finish, local_cluster, pattern

from dmesh.collectives.backends.tcp.frames import EAGER_LIMIT
from dmesh.errors import CollectiveError

SIZES = st.sampled_from([0, 1, 100, EAGER_LIMIT, EAGER_LIMIT + 1, 3 * EAGER_LIMIT])


def test_held_frames_do_not_arrive_until_they_are_released(make_local):
    cluster = make_local(3)
    network = cluster.network
    network.hold(0, 1)
    sender, receiver = cluster.open(0), cluster.open(1)
    completion = receiver.receive(0, 0, memoryview(bytearray(3)))
    sender.send(1, 0, memoryview(b"abc"))
    cluster.transports[0].control(1, b"held, too")
    cluster.fence(2, 1)
    cluster.fence(1, 0)
    assert network.held(0, 1) == 2
    assert not receiver.wait([completion], 0.0)
    assert not cluster.listeners[1].of("control")[1:]
    network.release(0, 1)
    finish(receiver, [completion])
    cluster.listeners[1].wait_for("control", 0, b"held, too")
    assert network.held(0, 1) == 0


def test_a_killed_ranks_held_frames_are_dropped(make_local):
    cluster = make_local(2)
    cluster.network.hold(0, 1)
    victim = cluster.open(0)
    cluster.transports[0].control(1, b"never heard")
    cluster.kill(0)
    cluster.listeners[1].wait_for("lost", 0)
    assert not cluster.listeners[1].of("control")
    with pytest.raises(CollectiveError, match=r"rank 0 was killed by LocalNetwork.kill"):
        victim.flush(LIMIT)


def test_a_transport_starts_once(make_local):
    cluster = make_local(2)
    with pytest.raises(CollectiveError, match="rank 0 is started already"):
        cluster.transports[0].start(cluster.listeners[0], ())


@given(st.lists(SIZES, min_size=1, max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_any_order_of_posting_sending_and_arriving_gives_the_same_bytes(sizes, generator, close_early):
    cluster = local_cluster(2, unexpected_limit=4 * EAGER_LIMIT)
    try:
        channels = [cluster.open(0), cluster.open(1)]
        into = [[bytearray(size) for size in sizes] for _ in range(2)]
        completions = [[], []]
        actions = [
            (act, rank, step) for step in range(len(sizes)) for rank in (0, 1) for act in ("send", "receive")
        ]
        actions += [("hold", 0, 0), ("release", 0, 0), ("hold", 1, 0), ("release", 1, 0)]
        generator.shuffle(actions)
        for act, rank, step in actions:
            if act == "send":
                channels[rank].send(1 - rank, step, memoryview(pattern(sizes[step], step + rank)))
            elif act == "receive":
                view = memoryview(into[rank][step])
                completions[rank].append(channels[rank].receive(1 - rank, step, view))
            else:
                getattr(cluster.network, act)(rank, 1 - rank)
        for rank in (0, 1):
            cluster.network.release(rank, 1 - rank)
        if close_early:
            channels[0].close()
            before = bytes(b"".join(into[0]))
            channels[1].close()
            assert bytes(b"".join(into[0])) == before
            return
        for rank in (0, 1):
            assert channels[rank].wait(completions[rank], LIMIT)
            assert channels[rank].flush(LIMIT)
        for rank in (0, 1):
            assert into[rank] == [pattern(size, step + 1 - rank) for step, size in enumerate(sizes)]
            channels[rank].close()
            assert cluster.buffered(rank, 1 - rank) == 0
    finally:
        cluster.close()
