"""Nonblocking transfers: their order, overlap, waits, failures, and their progress if nobody waits."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh.collectives import futures, matching
from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

MEDIA = {
    "shared memory": ("native",),
    "dedicated": ("dedicated",),
    "encrypted": ("encrypted",),
    "messages": (),
}
NATIVE = {name: MEDIA[name] for name in ("shared memory", "dedicated", "encrypted")}
LARGE = 10 * SEND_BUFFER


@pytest.fixture(params=MEDIA)
def medium(request):
    return MEDIA[request.param]


@pytest.fixture(params=NATIVE)
def native_medium(request):
    return NATIVE[request.param]


def connected(size, shm, **options):
    made = cluster(size, shm=shm, **options)
    ranks = made.__enter__()
    ranks.all(lambda c: c.world.barrier())  # the group's first call sets its media up
    return made, ranks


@pytest.fixture
def pair(medium):
    made, ranks = connected(2, medium)
    yield ranks
    made.__exit__(None, None, None)


@pytest.fixture
def native_pair(native_medium):
    made, ranks = connected(2, native_medium)
    yield ranks
    made.__exit__(None, None, None)


def array(rank, nbytes, number=0):
    return np.full(nbytes, 10 * rank + number, "u1")


@pytest.mark.parametrize("nbytes", [8, SEND_BUFFER, SEND_BUFFER + 1, 3_000_000])
@pytest.mark.parametrize("receives_first", [False, True])
@pytest.mark.parametrize("waits_for_send_first", [False, True])
def test_both_ranks_start_both_and_wait(pair, nbytes, receives_first, waits_for_send_first):
    def body(communicator):
        group, other = communicator.world, 1 - communicator.rank
        for number in range(4):
            got = sent = None
            for receives in (receives_first, not receives_first):
                if receives:
                    got = group.recv(np.empty(nbytes, "u1"), other, async_op=True)
                else:
                    sent = group.send(array(communicator.rank, nbytes, number), other, async_op=True)
            if waits_for_send_first:
                assert sent.result() is None
            assert (got.result() == array(other, nbytes, number)).all()
            assert sent.result() is None
            assert (sent.done(), got.done()) == (True, True)
        return True

    assert pair.all(body) == [True, True]


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_a_ring_of_four_with_several_outstanding(medium, nbytes):
    made, ranks = connected(4, medium)

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        neighbours = [(rank - 1) % 4, (rank + 1) % 4]
        got = {
            (other, number): group.recv(np.empty(nbytes, "u1"), other, async_op=True)
            for number in range(3)
            for other in neighbours
        }
        sent = [
            group.send(array(rank, nbytes, number), other, async_op=True)
            for number in range(3)
            for other in neighbours
        ]
        for other, number in sorted(got, reverse=True):
            assert (got[other, number].result() == array(other, nbytes, number)).all()
        return [future.result() for future in reversed(sent)]

    try:
        assert ranks.all(body) == [[None] * 6] * 4
    finally:
        made.__exit__(None, None, None)


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_transfers_overlap_with_an_asynchronous_collective(pair, nbytes):
    def body(communicator):
        group, other = communicator.world, 1 - communicator.rank
        got = group.recv(np.empty(nbytes, "u1"), other, async_op=True)
        total = group.all_reduce(np.ones(100), async_op=True)
        sent = group.send(array(communicator.rank, nbytes), other, async_op=True)
        assert (got.result() == array(other, nbytes)).all()
        assert total.result().sum() == 200
        sent.result()
        return True

    assert pair.all(body) == [True, True]


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_blocking_and_nonblocking_calls_keep_their_order(pair, nbytes):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            first = group.send(array(0, nbytes, 1), 1, async_op=True)
            group.send(array(0, nbytes, 2), 1)
            third = group.send(array(0, nbytes, 3), 1, async_op=True)
            return [first.result(), third.result()]
        like = np.empty(nbytes, "u1")
        first = group.recv(like, 0, async_op=True)
        second = group.recv(like, 0)
        third = group.recv(like, 0, async_op=True)
        return [int(found[-1]) for found in (first.result(), second, third.result())]

    assert pair.all(body) == [[None, None], [1, 2, 3]]


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_nobody_has_to_wait(native_pair, nbytes):
    """Transfers progress without a call, also if the future is dropped; callbacks and `wait` see it."""
    heard = threading.Event()

    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            for number in range(5):
                group.send(array(0, nbytes, number), 1, async_op=True)
            assert heard.wait(30)
            return True
        got = [group.recv(np.empty(nbytes, "u1"), 0, async_op=True) for _ in range(5)]
        got[0].add_done_callback(lambda future: heard.set())
        done, pending = concurrent.futures.wait(got, 30)
        assert (len(done), len(pending)) == (5, 0)
        assert {future.result()[0] for future in concurrent.futures.as_completed(got)} == set(range(5))
        return True

    assert native_pair.all(body) == [True, True]


def test_result_with_a_timeout_leaves_the_call_pending(native_pair):
    may_send = threading.Event()

    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            assert may_send.wait(30)
            group.send(np.ones(1), 1)
            return True
        got = group.recv(np.empty(1), 0, async_op=True)
        assert (got.done(), got.running(), got.cancel()) == (False, True, False)
        for seconds in (0.0, 0.001, 0.05):
            with pytest.raises(concurrent.futures.TimeoutError):
                got.result(seconds)
            with pytest.raises(concurrent.futures.TimeoutError):
                got.exception(seconds)
        may_send.set()
        return bool(got.result(30) == 1)

    assert native_pair.all(body) == [True, True]


def test_polling_completes_a_transfer(native_pair):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            time.sleep(0.001)
            group.send(np.ones(1), 1)
            return True
        got = group.recv(np.empty(1), 0, async_op=True)
        while not got.done():
            time.sleep(0)
        return bool(got.result() == 1)

    for _ in range(5):
        assert native_pair.all(body) == [True, True]


def test_two_threads_share_a_stream(native_pair):
    """One waits for a transfer while the other one starts the next: they are carried out in their order."""

    def body(communicator):
        group, results = communicator.world, {}
        if communicator.rank == 0:
            time.sleep(0.005)
            for number in range(2):
                group.send(array(0, LARGE, number), 1)
            return True
        first = group.recv(np.empty(LARGE, "u1"), 0, async_op=True)
        thread = threading.Thread(target=lambda: results.update(first=first.result(30)[0]))
        thread.start()
        second = group.recv(np.empty(LARGE, "u1"), 0, async_op=True)
        results["second"] = second.result(30)[0]
        thread.join(30)
        return results == {"first": 0, "second": 1}

    for _ in range(10):
        assert native_pair.all(body) == [True, True]


def test_a_callback_may_call_the_same_stream(pair):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            for number in range(2):
                group.send(array(0, LARGE, number), 1)
            return True
        found, ended = [], threading.Event()

        def again(future):
            found.append(future.result()[0])
            found.append(group.recv(np.empty(LARGE, "u1"), 0)[0])
            ended.set()

        group.recv(np.empty(LARGE, "u1"), 0, async_op=True).add_done_callback(again)
        return ended.wait(30) and found == [0, 1]

    assert pair.all(body) == [True, True]


def test_a_transfer_that_nobody_waits_for_times_out(native_medium):
    made, ranks = connected(2, native_medium, timeout=0.3)
    try:
        got = ranks.run(lambda c: c.world.recv(np.empty(1), 0, async_op=True), (1,))[0]
        concurrent.futures.wait([got], 30)
        assert isinstance(got.exception(), CollectiveTimeoutError)
        assert ranks.wait_until(lambda: ranks.communicators[0].world.failure is not None)
        [error] = ranks.run(lambda c: c.world.send(np.ones(1), 1), (0,))
        assert isinstance(error, CollectiveTimeoutError)
    finally:
        made.__exit__(None, None, None)


def test_a_lost_peer_fails_pending_transfers(medium):
    made, ranks = connected(3, medium)
    try:
        [got] = ranks.run(lambda c: c.world.recv(np.empty(1), 0, async_op=True), (1,))
        ranks.network.kill(0)
        with pytest.raises(PeerLostError):
            got.result(30)
    finally:
        made.__exit__(None, None, None)


def test_a_group_that_ends_fails_pending_transfers(native_medium):
    made, ranks = connected(2, native_medium)
    [got] = ranks.run(lambda c: c.world.recv(np.empty(1), 0, async_op=True), (1,))
    made.__exit__(None, None, None)
    with pytest.raises(CollectiveError):
        got.result(30)


def test_a_mismatch_fails_both(pair):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            group.send(np.zeros(3, "f4"), 1, async_op=True).result()
            group.recv(np.zeros(1), 1)
        else:
            group.recv(np.zeros(3, "f8"), 0, async_op=True).result()

    for error in pair.run(body):
        assert isinstance(error, CollectiveMismatchError)
        for said in ("send(float32, shape (3,))", "recv(float64, shape (3,))"):
            assert said in str(error)


def test_a_mismatch_of_a_send_before_the_last_names_it(pair):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            group.send(np.zeros(3, "f4"), 1)
            group.send(np.zeros(3, "f8"), 1)
            group.recv(np.zeros(1), 1)
        else:
            time.sleep(0.02)
            group.recv(np.zeros(3, "f8"), 0)

    for error in pair.run(body):
        assert isinstance(error, CollectiveMismatchError)
        for said in ("send(float32, shape (3,))", "recv(float64, shape (3,))"):
            assert said in str(error)


@pytest.mark.parametrize("nbytes", [8, SEND_BUFFER])
def test_what_a_rank_has_sent_before_it_leaves_is_received(pair, nbytes, monkeypatch):
    monkeypatch.setattr(matching, "_ARRIVES_WITHIN", 0.2)

    def body(communicator):
        if communicator.rank == 0:
            communicator.world.send(array(7, nbytes), 1)
            communicator.close(linger=1.0)
            return True
        pair.wait_until(lambda: communicator.world._generation.departed)
        return bool((communicator.world.recv(np.empty(nbytes, "u1"), 0) == array(7, nbytes)).all())

    assert pair.all(body) == [True, True]
    [error] = pair.run(lambda c: c.world.recv(np.empty(1), 0), (1,))  # no more has been sent
    assert isinstance(error, PeerLostError)


def test_records_count_nonblocking_transfers(native_pair):
    def body(communicator):
        group, other = communicator.world, 1 - communicator.rank
        for _ in range(3):
            got = group.recv(np.empty(1), other, async_op=True)
            group.send(np.ones(1), other, async_op=True).result()
            got.result()
        group.barrier()
        records = [r for r in communicator.events.records() if r.call.startswith(("send", "recv"))]
        assert all(record.ended is not None and record.error is None for record in records)
        return sorted((record.call[:4], record.sequence) for record in records)

    expected = [(kind, number) for kind in ("recv", "send") for number in (1, 2, 3)]
    assert native_pair.all(body) == [expected, expected]


def test_no_thread_is_woken_for_what_completes_at_once(native_pair):
    def body(communicator):
        group, other = communicator.world, 1 - communicator.rank
        group.send(np.ones(1), other)  # the first ones open the streams
        group.recv(np.empty(1), other)
        sent = group.send(np.ones(1), other, async_op=True)
        group.barrier()
        got = group.recv(np.empty(1), other, async_op=True)
        return [type(future) for future in (sent, got)], list(group._workers)

    assert native_pair.all(body) == [([futures.Completed] * 2, [])] * 2


def test_nothing_is_left_of_a_forgotten_group(native_pair):
    def body(communicator):
        group, other = communicator.new_group([0, 1], "forgotten"), 1 - communicator.rank
        group.barrier()
        for _ in range(3):
            group.recv(np.empty(1), other, async_op=True)
            group.send(np.ones(1), other)
        group.barrier()
        return weakref.ref(group)

    groups = native_pair.all(body)
    assert native_pair.wait_until(lambda: not futures._pending.transfers)
    assert native_pair.wait_until(lambda: gc.collect() >= 0 and not any(group() for group in groups))
    assert native_pair.wait_until(lambda: not futures._pending.runs)

    def left():
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith(("dmesh-group-forgotten", "dmesh-transfers"))]

    assert native_pair.wait_until(lambda: not left()), left()


def test_a_call_that_has_asked_the_others_leaves_no_cycle(native_pair):
    """A large array in a cycle would stay until the garbage collector happens to look."""

    def body(communicator):
        group = communicator.new_group([0, 1], "late")
        group.barrier()
        asked = communicator.rank == 0
        if not asked:
            assert native_pair.wait_until(lambda: first.is_set())
        future = group.all_gather(np.ones(1000), async_op=True)
        if asked:
            assert native_pair.wait_until(lambda: future._query is not None)
            first.set()
        found = [weakref.ref(future.result(60)), weakref.ref(future), weakref.ref(group.current)]
        group.barrier()
        return found

    first = threading.Event()
    gc.collect()
    gc.disable()
    try:
        found = [reference for references in native_pair.all(body) for reference in references]
        assert native_pair.wait_until(lambda: not any(reference() for reference in found))
    finally:
        gc.enable()


def test_two_large_blocking_sends_say_what_to_do(pair):
    def body(communicator):
        communicator.world.send(array(0, LARGE), 1 - communicator.rank, timeout=0.3)

    texts = [str(error) for error in pair.run(body)]
    assert any("Both ranks are in send" in text and "async_op=True" in text for text in texts), texts
