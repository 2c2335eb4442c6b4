"""Tags, any source, unknown shapes, probes, sends to this rank, and the null peer, over all media."""

from __future__ import annotations

import queue
import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.ranks import cluster

from dmesh.collectives import ANY_SOURCE, ANY_TAG, NULL_PEER, Status, matching, plan, recv
from dmesh.collectives.envelope import parse
from dmesh.collectives.matching import Matcher
from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CollectiveTypeError,
    CollectiveValueError,
    PeerLostError,
)

MEDIA = {
    "first": {},
    "messages": {},
    "shm": {"shm": ("native",)},
    "dedicated": {"shm": ("dedicated",)},
    "encrypted": {"shm": ("encrypted",)},
    "mpi": {"shm": ("no",), "mpi": True},
}
LARGE = 3 * SEND_BUFFER


def made(medium, size):
    return cluster(size, **MEDIA[medium])


@pytest.fixture(params=MEDIA)
def ranks(request):
    with made(request.param, 3) as found:
        if request.param != "first":
            found.all(lambda c: c.world.barrier())  # the group's first call sets its media up
        yield found


@pytest.mark.parametrize("length", [0, 3, LARGE])
def test_dtype_and_shape_travel_with_the_array(ranks, length):
    sent = [np.arange(length, dtype="i2"), np.ones((2, length), "c16"), np.zeros(length, "M8[s]")]
    sent += [np.zeros((length, 1), [("a", "f4"), ("b", "S3")]), np.full((), 7.0)]

    def body(c):
        if c.rank == 0:
            for x in sent:
                c.world.send(x, 1)
        elif c.rank == 1:
            return [c.world.recv(None, 0) for _ in sent]
        return []

    for x, y in zip(sent, ranks.all(body)[1], strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.mark.parametrize("length", [1, LARGE])
def test_a_receive_picks_a_tag(ranks, length):
    def body(c):
        if c.rank == 0:
            futures = [c.world.send(np.full(length, tag), 1, tag=tag, async_op=True) for tag in (1, 2, 1, 3)]
            c.world.send(np.full(length, 0), 1)
            for future in futures:
                future.result()
        elif c.rank == 1:
            order = (3, 1, 0, 2, 1)
            return [c.world.recv(None, 0, tag=tag)[0] for tag in order]
        return []

    assert ranks.all(body)[1] == [3, 1, 0, 2, 1]


@pytest.mark.parametrize("length", [1, LARGE])
def test_any_tag_takes_arrays_in_the_order_in_which_they_were_sent(ranks, length):
    tags = [0, 5, 0, 0, 7, 5, 0]

    def body(c):
        if c.rank == 0:
            for number, tag in enumerate(tags):
                c.world.send(np.full(length, number), 1, tag=tag)
        elif c.rank == 1:
            status, found = Status(), []
            for _ in tags:
                x = c.world.recv(None, 0, tag=ANY_TAG, status=status)
                found.append((int(x[0]), status.tag))
            return found
        return []

    assert ranks.all(body)[1] == list(enumerate(tags))


def test_many_receives_wait_on_one_thread(ranks):
    """In the order of their calls, and as long as callbacks wait for other receives."""
    pending, held, waited = 64, threading.Barrier(3), queue.SimpleQueue()

    def waiting():
        return sum(thread.name.startswith("dmesh-group") for thread in threading.enumerate())

    def body(c):
        if c.rank == 0:
            held.wait(60)
            for number in range(pending):
                c.world.send(np.full(1 if number % 9 else LARGE, number), 1, tag=5 + number % 2)
        elif c.rank == 1:
            before = waiting()
            futures = [c.world.recv(None, 0, tag=5 + at % 2, async_op=True) for at in range(pending)]
            futures[0].add_done_callback(lambda _: waited.put(futures[-1].result(60)[0]))
            threads = waiting() - before
            held.wait(60)
            return threads, [int(future.result(60)[-1]) for future in futures]
        else:
            held.wait(60)
        return None

    threads, found = ranks.all(body)[1]
    assert found == list(range(pending))
    assert threads == 1
    assert waited.get(timeout=60) == pending - 1


@pytest.mark.parametrize(
    "text", ["object, shape (1,)", "[('a', '|O')], shape ()", "int8, shape (), tag=2147483648"]
)
def test_descriptors_that_no_send_makes_are_refused(text):
    with pytest.raises(CollectiveTypeError, match="recv cannot allocate an array"):
        parse(f"transfer({text})")


def test_an_array_waits_for_its_receive_however_many_later_ones_are_received(ranks, monkeypatch):
    monkeypatch.setattr(matching, "_MOST_CLAIMED", 32)

    def body(c):
        if c.rank == 0:
            c.world.send(np.full(1, 7), 1, tag=9)
        for number in range(50 if c.rank < 2 else 0):
            for tag in (0, 1):
                if c.rank == 0:
                    c.world.send(np.full(1, number), 1, tag=tag)
                else:
                    c.world.recv(None, 0, tag=tag)
        return c.world.recv(None, 0, tag=9)[0] if c.rank == 1 else None

    assert ranks.all(body)[1] == 7


@pytest.mark.parametrize("source", [0, 1])
def test_what_one_thread_has_claimed_no_other_one_gets(ranks, monkeypatch, source):
    """The second receive looks after the first one has claimed an array, before it begins to receive it."""
    claim, claims = Matcher.claim, threading.Barrier(2)

    def claim_both(self, generation, matching):
        found = claim(self, generation, matching)
        if found is not None and matching.pattern.tag == 5:
            claims.wait(60)
        return found

    monkeypatch.setattr(Matcher, "claim", claim_both)

    def body(c):
        if c.rank == source:
            for number in range(2):
                c.world.send(np.full(1, number), 1, tag=5)
        if c.rank != 1:
            return []
        first = c.world.recv(None, source, tag=5, async_op=True)
        second = c.world.recv(None, source, tag=5)[0]
        return [first.result(60)[0], second]

    assert ranks.all(body)[1] == [0, 1]


@pytest.mark.parametrize("tag", [0, 4, ANY_TAG], ids=str)
def test_any_source(ranks, tag):
    def body(c):
        if c.rank:
            for number in range(5):
                c.world.send(np.array([c.rank, number]), 0, tag=0 if tag is ANY_TAG else tag)
            return []
        found = []
        for _ in range(10):
            status = Status()
            x = c.world.recv(None, ANY_SOURCE, tag=tag, status=status)
            assert x[0] == status.source
            found.append(tuple(x.tolist()))
        return found

    found = ranks.all(body)[0]
    for rank in (1, 2):
        assert [number for source, number in found if source == rank] == list(range(5))


def test_a_buffer_may_be_larger_than_what_comes(ranks):
    def body(c):
        if c.rank == 0:
            for tag in (0, 6):
                c.world.send(np.arange(3.0), 1, tag=tag)
                c.world.send(np.ones((2, 2)), 1, tag=tag)
        elif c.rank == 1:
            for tag in (0, 6):
                out = np.full(10, 9.0)
                got = c.world.recv(None, 0, out=out, tag=tag)
                assert got.tolist() == [0, 1, 2]
                assert out.tolist() == [0, 1, 2] + [9] * 7
                assert c.world.recv(None, 0, out=out.reshape(2, 5), tag=tag).shape == (2, 2)
                assert out.tolist() == [1] * 4 + [9] * 6

    ranks.all(body)


@pytest.mark.parametrize("tag", [0, 6])
@pytest.mark.parametrize("like", [{"out": np.zeros(2)}, {"out": np.zeros(5, "f4")}, {"x": np.zeros(2)}])
def test_what_does_not_fit_is_an_error_on_both_ranks(ranks, tag, like):
    def body(c):
        if c.rank == 0:
            c.world.send(np.arange(3.0), 1, tag=tag)
            c.world.barrier()
        elif c.rank == 1:
            c.world.recv(like.get("x"), 0, out=like.get("out"), tag=tag)
        else:
            c.world.barrier()

    errors = ranks.run(body)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 3
    for error in errors:
        assert "rank 0 called send(float64, shape (3,)" in str(error)
        assert "rank 1 called recv(" in str(error)


def test_probe_describes_and_leaves_the_array(ranks):
    def body(c):
        if c.rank == 0:
            c.world.send(np.ones((2, 3), "f4"), 1, tag=8)
            c.world.send(np.ones(4, "i8"), 1)
        elif c.rank == 1:
            assert c.world.iprobe(2) is None
            for tag, shape, nbytes in ((8, (2, 3), 24), (0, (4,), 32)):
                for source in (0, ANY_SOURCE):
                    status = c.world.probe(source, tag=tag)
                    assert (status.source, status.tag, status.shape, status.nbytes) == (0, tag, shape, nbytes)
                assert c.world.iprobe(ANY_SOURCE, tag=ANY_TAG) == status
                assert c.world.recv(None, status.source, tag=status.tag).shape == shape
            assert c.world.iprobe(ANY_SOURCE, tag=ANY_TAG) is None

    ranks.all(body)


@pytest.mark.parametrize("tags", [{}, {"sendtag": 3, "recvtag": 3}], ids=["untagged", "tagged"])
@pytest.mark.parametrize("async_op", [False, True])
def test_sendrecv_in_a_ring_does_not_deadlock(ranks, tags, async_op):
    def body(c):
        x = np.full(1 << 16, float(c.rank))
        got = c.world.sendrecv(
            x, (c.rank + 1) % 3, x, (c.rank - 1) % 3, out=np.empty_like(x), async_op=async_op, **tags
        )
        return (got.result() if async_op else got)[-1]

    assert ranks.all(body) == [2, 0, 1]


@pytest.mark.parametrize("tag", [0, 3])
@pytest.mark.parametrize("length", [3, LARGE])
def test_isend_and_irecv_store_what_comes_until_one_waits(ranks, tag, length):
    def body(c):
        right, left, out = (c.rank + 1) % 3, (c.rank - 1) % 3, np.empty(length)
        futures = [c.world.irecv(out, left, tag=tag), c.world.isend(np.full(length, c.rank), right, tag=7)]
        futures += [c.world.irecv(None, left, tag=7), c.world.isend(np.full(length, 0.5), right, tag=tag)]
        got, sent, unknown, _ = [future.wait() for future in futures]
        assert got is out
        assert sent is None
        assert set(out) == {0.5}
        assert unknown.tolist() == [left] * length
        assert c.world.irecv(out, NULL_PEER).wait() is out
        assert c.world.isend(out, NULL_PEER).wait() is None
        return c.world.sendrecv(out, right, out, left, async_op=True).wait(60)[-1]

    assert ranks.all(body) == [0.5] * 3


def test_an_irecv_of_another_shape_is_a_mismatch(ranks):
    def body(c):
        if c.rank == 0:
            with pytest.raises(CollectiveError):
                c.world.isend(np.ones(3), 1, timeout=30).wait()
                c.world.barrier()
        elif c.rank == 1:
            with pytest.raises(CollectiveMismatchError, match="shape"):
                c.world.irecv(np.ones(4), 0, timeout=30).wait()

    ranks.all(body)


def test_a_wait_with_a_time_out_leaves_the_call_under_way(ranks):
    def body(c):
        if c.rank == 0:
            later = [c.world.all_reduce(np.ones(3), async_op=True), c.world.irecv(np.ones(3), 1)]
            for future in later:
                with pytest.raises(TimeoutError):
                    future.wait(0.01)
            c.world.send(np.ones(3), 1, tag=1)
            c.world.send(np.ones(3), 2, tag=1)
            return [future.wait().tolist() for future in later]
        c.world.recv(None, 0, tag=1)
        total = c.world.all_reduce(np.ones(3), async_op=True)
        if c.rank == 1:
            c.world.isend(np.full(3, 2.0), 0).wait()
        return [total.wait().tolist(), [2.0] * 3]

    assert ranks.all(body) == [[[3.0] * 3, [2.0] * 3]] * 3


@pytest.mark.parametrize("wrong", [{"src": 3}, {"src": 0, "recvtag": -1}], ids=str)
def test_sendrecv_sends_nothing_if_its_receive_is_refused(ranks, wrong):
    def body(c):
        if c.rank == 0:
            with pytest.raises(CollectiveValueError):
                c.world.sendrecv(np.ones(LARGE), 1, None, **wrong)
        c.world.barrier()
        return c.rank == 1 and c.world.iprobe(0) is not None

    assert not any(ranks.all(body))


@pytest.mark.parametrize("tag", [0, 2])
def test_a_rank_sends_to_itself(ranks, tag):
    def body(c):
        me = c.rank
        x = np.arange(1 << 16)
        c.world.send(x, me, tag=tag)
        c.world.send(x[:3], me, tag=tag)
        x[:] = -1
        assert c.world.probe(me, tag=tag).shape == (1 << 16,)
        assert c.world.recv(None, me, tag=tag)[-1] == (1 << 16) - 1
        assert c.world.recv(np.empty(3, int), me, tag=tag).tolist() == [0, 1, 2]
        future = c.world.recv(None, ANY_SOURCE, tag=ANY_TAG, async_op=True)
        c.world.send(np.ones(2), me, tag=tag)
        return future.result().tolist()

    assert ranks.all(body) == [[1, 1]] * 3


def test_the_null_peer_gets_and_gives_nothing(ranks):
    def body(c):
        x, status = np.ones(3), Status(1, 2)
        assert c.world.send(x, NULL_PEER) is None
        assert c.world.recv(None, NULL_PEER) is None
        assert c.world.recv(x, NULL_PEER, out=x, status=status) is x
        assert status == Status()
        assert c.world.send(x, NULL_PEER, async_op=True).result() is None
        assert c.world.sendrecv(x, NULL_PEER, x, NULL_PEER) is None
        assert c.world.probe(NULL_PEER).source is None

    ranks.all(body)


@pytest.mark.parametrize("tag", [0, 3])
def test_receives_take_arrays_in_the_order_in_which_they_were_made(ranks, tag):
    def body(c):
        if c.rank == 0:
            c.world.recv(None, 1, tag=9)
            for number in range(4):
                c.world.send(np.array([number]), 1, tag=tag)
        elif c.rank == 1:
            futures = [
                c.world.recv(None, source, tag=tag, async_op=True)
                for source in (ANY_SOURCE, 0, ANY_SOURCE, 0)
            ]
            c.world.send(np.zeros(1), 0, tag=9)
            return [int(future.result()[0]) for future in futures]
        return []

    assert sorted(ranks.all(body)[1]) == [0, 1, 2, 3]


@pytest.mark.parametrize("source", [0, ANY_SOURCE], ids=str)
@pytest.mark.parametrize("tag", [0, 3])
def test_a_time_out_names_who_is_missing(ranks, source, tag):
    def body(c):
        if c.rank == 1:
            c.world.recv(None, source, tag=tag, timeout=0.05)

    error = ranks.run(body)[1]
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == ((0,) if source == 0 else (0, 2))
    assert "in recv(" in str(error)


def test_a_receive_from_this_rank_itself_says_so_when_its_time_runs_out(ranks):
    with pytest.raises(CollectiveTimeoutError, match="for itself: it has not made the call that matches"):
        ranks.communicators[0].world.recv(None, 0, timeout=0.2)


def test_a_tag_that_nobody_sends_is_an_error_on_all_ranks(ranks):
    def body(c):
        if c.rank == 0:
            c.world.send(np.ones(LARGE), 1, tag=5)
        elif c.rank == 1:
            c.world.recv(None, 0, tag=6, timeout=0.1)
        c.world.barrier()

    errors = ranks.run(body)
    assert isinstance(errors[1], CollectiveTimeoutError)
    for error in errors:
        assert isinstance(error, CollectiveError)
        assert "tag=6) for rank 0" in str(error)


def look(group, source, tag):
    while group.iprobe(source, tag=tag) is None:
        time.sleep(0.0001)


WAITS = {
    "recv": lambda group, source, tag: group.recv(None, source, tag=tag),
    "recv later": lambda group, source, tag: group.recv(None, source, tag=tag, async_op=True).result(60),
    "sendrecv": lambda group, source, tag: group.sendrecv(np.ones(3), 2, None, source, recvtag=tag),
    "probe": lambda group, source, tag: group.probe(source, tag=tag),
    "iprobe": look,
}


@pytest.mark.parametrize("source", [0, ANY_SOURCE], ids=str)
@pytest.mark.parametrize("tag", [0, 3])
@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_peer_ends_a_receive(ranks, wait, source, tag):
    def body(c):
        if c.rank == 1:
            WAITS[wait](c.world, source, tag)
        elif c.rank == 0:
            ranks.network.kill(0, "killed by the test")
        else:
            c.world.barrier()

    for error in ranks.run(body)[1:]:
        assert isinstance(error, PeerLostError)
        assert error.rank == 0


@pytest.mark.parametrize("tag", [0, 3])
def test_any_source_goes_on_while_somebody_is_left(ranks, tag, monkeypatch):
    monkeypatch.setattr(matching, "_ARRIVES_WITHIN", 0.2)
    group = ranks.communicators[1].world
    ranks.communicators[0].close(linger=0.0)
    assert ranks.wait_until(lambda: group.current.departed)
    future = group.recv(None, ANY_SOURCE, tag=tag, async_op=True)
    ranks.communicators[2].world.send(np.ones(2), 1, tag=tag)
    assert future.result().tolist() == [1, 1]
    future = group.recv(None, ANY_SOURCE, tag=tag, async_op=True)
    ranks.communicators[2].close(linger=0.0)
    with pytest.raises(PeerLostError):
        future.result()


@pytest.mark.parametrize("length", [0, 3, LARGE])
@pytest.mark.parametrize("target", [0, 1])
def test_a_synchronous_send_is_complete_when_it_is_received(ranks, length, target):
    def body(c):
        futures = []
        if c.rank == 0:
            send = partial(c.world.send, synchronous=True, async_op=True)
            futures = [send(np.full(length, tag), target, tag=tag) for tag in (1, 2)]
        c.world.barrier()
        undone = not any(future.done() for future in futures)
        c.world.barrier()
        found = []
        for tag in (2, 1):
            if c.rank == target:
                status = Status()
                found.append(c.world.recv(np.empty(length, int), 0, tag=tag, status=status).tolist())
                assert (status.source, status.tag, status.shape) == (0, tag, (length,))
            if futures:
                futures[tag - 1].result()
            undone &= not futures or tag == 1 or not futures[0].done()
            c.world.barrier()
        return undone, found

    results = ranks.all(body)
    assert [undone for undone, _ in results] == [True] * 3
    assert results[target][1] == [[2] * length, [1] * length]


def test_a_synchronous_send_without_a_tag_is_refused(ranks):
    world = ranks.communicators[0].world
    for send in (world.send, world.send_object):
        with pytest.raises(CollectiveValueError, match="tag of at least 1"):
            send(np.ones(1), 1, synchronous=True)
        assert send(np.ones(1), NULL_PEER, synchronous=True) is None


@pytest.mark.parametrize("target", [0, 1])
def test_a_synchronous_send_that_nobody_receives_runs_out_of_time(ranks, target):
    def body(c):
        if c.rank == 0:
            c.world.send(np.ones(1), target, tag=1, synchronous=True, timeout=0.2)

    error = ranks.run(body)[0]
    assert isinstance(error, CollectiveTimeoutError)
    whom = "rank 1: rank 1" if target else "itself: it has not made the call that matches"
    assert f"send(float64, shape (1,), tag=1, synchronous) for {whom}" in str(error)


def test_a_killed_peer_ends_a_synchronous_send(ranks):
    def body(c):
        if c.rank == 0:
            c.world.send(np.ones(1), 1, tag=1, synchronous=True)
        elif c.rank == 1:
            ranks.network.kill(1, "killed by the test")

    assert isinstance(ranks.run(body)[0], PeerLostError)


@pytest.mark.parametrize("tag", [-1, 1 << 31, 1.0, True, "a", None])
def test_bad_tags_are_refused(tag):
    with cluster(2) as found:
        group = found.communicators[0].world
        for call in (
            lambda: group.send(np.ones(1), 1, tag=tag),
            lambda: group.recv(None, 1, tag=tag),
            lambda: group.probe(1, tag=tag),
        ):
            with pytest.raises(CollectiveValueError, match="tag"):
                call()


LENGTHS = st.sampled_from([0, 1, 100, LARGE])
SENDS = st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([0, 0, 1, 2]), LENGTHS), max_size=12)


@pytest.mark.parametrize("tags", [(1,), (0, 1)])
def test_numbers_of_what_was_received_long_ago_are_dropped(monkeypatch, tags):
    monkeypatch.setattr(matching, "_MOST_CLAIMED", 32)
    rounds, pending = 80, 5

    def body(c):
        if c.rank == 0:
            c.world.send(np.zeros(1), 1, tag=pending)
            for at in range(rounds):
                for tag in tags:
                    c.world.send(np.full(1, at), 1, tag=tag)
            c.world.barrier()
            c.world.send(np.ones(1), 1)
            c.world.send(np.ones(1), 1, tag=2)
            return 0
        group, most = c.world, 0
        assert group.recv(None, 0, tag=pending) == [0]
        for at in range(rounds):
            for tag in tags:
                assert group.recv(None, 0, tag=tag) == [at]
            most = max(most, len(group.current.matcher._claimed[0]))
        group.barrier()
        for tag in (0, 2):
            status = Status()
            group.recv(None, ANY_SOURCE, tag=ANY_TAG, status=status)
            assert status.tag == tag
        return most

    with cluster(2, timeout=120) as found:
        assert 0 < found.all(body)[1] <= matching._MOST_CLAIMED + 1


@pytest.fixture(scope="module", params=["messages", "shm", "dedicated", "encrypted"])
def lasting(request):
    with made(request.param, 3) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_MOST_CLAIMED", 2)
        found.all(lambda c: c.world.barrier())
        yield found


@settings(deadline=None, max_examples=30)
@given(sends=SENDS, data=st.data())
def test_random_programs_against_a_reference(lasting, sends, data):
    """Rank 1 receives what all have sent, in any order that its patterns allow."""
    ways = st.sampled_from(["like", "out", "unknown", "planned", "probed"])
    choices = [data.draw(st.tuples(st.integers(0, 11), st.booleans(), st.booleans(), ways)) for _ in sends]

    def body(c):
        group = c.world
        mine = [(at, tag, length) for at, (source, tag, length) in enumerate(sends) if source == c.rank]
        futures = [group.send(np.full(n, at), 1, tag=tag, async_op=True) for at, tag, n in mine]
        if c.rank != 1:
            for future in futures:
                future.result()
            return
        left = list(enumerate(sends))
        for index, any_source, any_tag, way in choices:
            source, tag, _ = left[index % len(left)][1]
            wanted = None if any_source else source, None if any_tag else tag
            status = Status()
            arguments = {"tag": ANY_TAG if any_tag else tag, "status": status}
            first = {
                other: next(
                    ((at, n) for at, (s, t, n) in left if s == other and wanted[1] in (None, t)), None
                )
                for other in range(3)
            }
            place, like = ANY_SOURCE if any_source else source, None
            if way == "like" and not any_source:
                like = np.empty(first[source][1], int)
            elif way == "out":
                arguments["out"] = np.empty(LARGE + 1, int)
            elif way == "probed":
                seen = group.probe(place, tag=arguments["tag"])
                at, length = first[seen.source]
                assert (seen.tag, seen.dtype, seen.shape) == (sends[at][1], np.dtype(int), (length,))
                if source == seen.source or any_source:
                    place, arguments["tag"] = seen.source, seen.tag
            if way == "planned":
                got = plan(recv, like, place, group=group, **arguments)()
            else:
                got = group.recv(like, place, **arguments)
            at, length = first[status.source]
            assert wanted[0] in (None, status.source)
            assert status.tag == sends[at][1]
            assert got.tolist() == [at] * length
            left.remove((at, sends[at]))
        for future in futures:
            future.result()
        assert group.iprobe(ANY_SOURCE, tag=ANY_TAG) is None

    lasting.all(body)


@settings(deadline=None, max_examples=30)
@given(
    targets=st.permutations(range(3)), dropped=st.sets(st.integers(0, 2)), lengths=st.tuples(*[LENGTHS] * 3),
    tag=st.integers(0, 1), knows=st.booleans(), async_op=st.booleans(), dtype=st.sampled_from(["?", "c16"]),
)  # fmt: skip
def test_sendrecv_along_any_permutation(lasting, targets, dropped, lengths, tag, knows, async_op, dtype):
    """Each rank sends to one, perhaps itself, and receives from one; where a pair is dropped, to nobody."""

    def body(c):
        me, source = c.rank, targets.index(c.rank)
        dst = NULL_PEER if me in dropped else targets[me]
        src = NULL_PEER if source in dropped else source
        like = np.empty(lengths[source], dtype) if knows else None
        x = np.full(lengths[me], me + 1).astype(dtype)
        got = c.world.sendrecv(x, dst, like, src, sendtag=tag, recvtag=tag, async_op=async_op)
        got = got.result(60) if async_op else got
        if src is NULL_PEER:
            assert got is None
        else:
            wanted = np.full(lengths[source], source + 1).astype(dtype)
            assert (got.dtype, got.tolist()) == (wanted.dtype, wanted.tolist())

    lasting.all(body)
