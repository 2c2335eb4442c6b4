"""What goes wrong with GPU arrays goes wrong on all ranks, with the errors of NumPy arrays; nothing hangs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster
from tests.waiting import eventually

from dmesh.collectives.backends.nccl import backend as nccl_backend
from dmesh.collectives.services import WaitPolicy
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

X = np.ones((3, 4), np.float32)
QUICK = WaitPolicy(ask_after=(0.02, 0.1), ask_every=0.2, answers_within=LIMIT, announce=lambda message: None)
WAYS = {"messages": (), "native": ("native",), "dedicated": ("dedicated",)}


class Bench:
    """Ranks with a GPU each, some of which are held between the agreement and NCCL."""

    def __init__(self, cupy, nccl, ranks):
        self.cupy, self.nccl, self.ranks = cupy, nccl, ranks
        self.gates = {}
        self.held = {}

    def array(self, communicator, like=X):
        """An array, of a rank that may be held: it is not ready before `release`."""
        x = self.cupy.asarray(like)
        gate = self.gates.get(communicator.rank)
        if gate is not None:
            reached = self.held[communicator.rank]
            self.cupy.cuda.get_current_stream().submit(lambda: (reached.set(), gate.wait(LIMIT)))
        return x

    def hold(self, *ranks):
        for rank in ranks:
            self.gates[rank], self.held[rank] = threading.Event(), threading.Event()

    def release(self):
        for gate in self.gates.values():
            gate.set()
        self.gates.clear()

    def run(self, call, ranks=None, like=X):
        """`call(group, array)` on all ranks (or some); returns results or exceptions."""

        def body(communicator):
            with self.cupy.cuda.Device(communicator.rank):
                result = call(communicator.world, self.array(communicator, like))
                return result.get() if isinstance(result, self.cupy.ndarray) else result

        return self.ranks.run(body, ranks)

    def begin(self, call, ranks=None):
        """The same, in a thread; returns what waits for the end of it, and hands out the results."""
        results = []
        thread = threading.Thread(target=lambda: results.extend(self.run(call, ranks)))
        thread.start()

        def end():
            thread.join(LIMIT)
            assert not thread.is_alive()
            return results

        return end

    def until_inside(self, *ranks):
        """Waits until ranks are at their call, and all that they wait for is in NCCL."""
        deadline = time.monotonic() + LIMIT
        for rank in ranks:
            term = self.ranks.communicators[rank].world._generation
            while not any(in_nccl(call) for call in list(term.streams[None].calls.values())):
                assert time.monotonic() < deadline
                time.sleep(0.001)

    def events(self, kind):
        return sorted(rank for event, rank in self.nccl.log if event == kind)


def in_nccl(call):
    """Returns whether a call has agreed with the other ranks, and is in NCCL."""
    return type(getattr(call._operation, "_current", None)) is nccl_backend.NcclOperation


@pytest.fixture
def bench(cupy, nccl):
    """Makes a bench of some ranks; releases who is held in the end."""
    made = []

    def make(size, **options):
        context = cluster(size, **{"wait_policy": QUICK, **options})
        made.append((context, Bench(cupy, nccl, context.__enter__())))
        return made[-1][1]

    yield make
    for context, bench in made:
        context.__exit__(None, None, None)
        bench.release()


def all_reduce(group, x):
    return group.all_reduce(x)


def warm_up(bench):
    """Makes the communicators."""
    assert [result.sum() for result in bench.run(all_reduce)] == [
        X.size * bench.ranks.size
    ] * bench.ranks.size


# -- before NCCL is entered ----------------------------------------------------------------------------------

MISMATCHES = {
    "another operation": lambda g, x: g.all_reduce(x) if g.rank else g.all_gather(x),
    "another reduction": lambda g, x: g.all_reduce(x, "max" if g.rank else "sum"),
    "another dtype": lambda g, x: g.all_reduce(x.astype("f8", order="C") if g.rank else x),
    "another shape": lambda g, x: g.all_reduce(x.T if g.rank else x),
    "another root": lambda g, x: g.broadcast(x, min(g.rank, 1)),
    "a NumPy array": lambda g, x: g.all_reduce(X if g.rank else x),
    "empty": lambda g, x: g.all_reduce(x[:0] if g.rank else x),
    "a barrier": lambda g, x: g.barrier() if g.rank else g.all_reduce(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_an_error_on_all_ranks(bench, case, warm, way):
    bench = bench(3, shm=WAYS[way])
    if warm:
        warm_up(bench)
    for error in bench.run(MISMATCHES[case]):
        assert type(error) is CollectiveMismatchError, error
        assert str(error).startswith(f"collective #{1 + warm} of group world: rank ")
    assert bench.events("init") == ([0, 1, 2] if warm else [])


def test_a_mixed_group_is_told_so(bench):
    for error in bench(2).run(lambda g, x: g.all_reduce(X if g.rank else x)):
        assert str(error) == (
            "collective #1 of group world: rank 0 called all_reduce(sum, float32, shape (3, 4), on GPUs), "
            "rank 1 called all_reduce(sum, float32, shape (3, 4)). "
            "All ranks must make the same calls in the same order."
        )


TRANSFERS = {
    "another shape": lambda g, x: g.recv(x.T, 0) if g.rank else g.send(x, 1),
    "into a NumPy array": lambda g, x: g.recv(X, 0) if g.rank else g.send(x, 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", TRANSFERS)
def test_a_transfer_mismatch_is_an_error_at_both_ends(bench, case, way):
    bench = bench(2, shm=WAYS[way])
    bench.ranks.all(lambda communicator: communicator.world.barrier())
    for error in bench.run(TRANSFERS[case]):
        assert type(error) is CollectiveMismatchError, error
        assert str(error).startswith(
            "transfer #1 from rank 0 to rank 1 of group world: "
            "rank 0 called send(float32, shape (3, 4), on GPUs), rank 1 called recv(float32, shape "
        )
    assert not bench.nccl.log


@pytest.mark.parametrize("way", WAYS)
def test_a_numpy_array_sent_to_a_gpu_is_a_mismatch_there(bench, way):
    """The sender may be done before the receiver has called, as with every transfer."""
    bench = bench(2, shm=WAYS[way])
    bench.ranks.all(lambda communicator: communicator.world.barrier())
    _, error = bench.run(lambda g, x: g.recv(x, 0) if g.rank else g.send(X, 1))
    assert type(error) is CollectiveMismatchError, error
    assert "rank 0 called send(float32, shape (3, 4)), rank 1 called recv(" in str(error)
    assert not bench.nccl.log


@pytest.mark.parametrize("way", WAYS)
def test_who_does_not_call_is_waited_for_as_with_numpy(bench, way):
    texts = []
    for make in (
        lambda group, x: group.all_reduce(x, timeout=0.3),
        lambda group, x: group.all_reduce(X, timeout=0.3),
    ):
        one = bench(3, shm=WAYS[way])
        one.ranks.all(lambda communicator: communicator.world.barrier())
        errors = one.run(make, (0, 1))
        assert {type(error) for error in errors} == {CollectiveTimeoutError}, errors
        assert {error.missing for error in errors} == {(2,)} if hasattr(errors[0], "missing") else True
        texts.append(min(str(error) for error in errors).replace(", on GPUs", ""))
    assert "has finished #1 (barrier()) and has not called #2" in texts[0]
    assert texts[0].replace("rank 1 waited", "rank 0 waited") == texts[1].replace(
        "rank 1 waited", "rank 0 waited"
    )


def test_a_receiver_that_does_not_call(bench):
    bench = bench(2)
    [error] = bench.run(lambda g, x: g.send(x, 1, timeout=0.3), (0,))
    assert type(error) is CollectiveTimeoutError, error
    assert "in send(float32, shape (3, 4), on GPUs) for rank 1" in str(error)
    assert not bench.nccl.log


def test_a_peer_that_died_before(bench):
    bench = bench(3)
    bench.ranks.network.kill(2)
    for error in bench.run(all_reduce, (0, 1)):
        assert type(error) is PeerLostError, error
        assert error.rank == 2
    assert not bench.nccl.log


def test_the_first_member_cannot_make_an_id(bench, monkeypatch):
    bench = bench(2)

    def fails():
        raise bench.nccl.NcclError(2)

    monkeypatch.setattr(bench.nccl, "get_unique_id", fails)
    for error in bench.run(all_reduce):
        assert type(error) is CollectiveError
        assert "NCCL cannot make an id for a communicator: NCCL_ERROR_SYSTEM_ERROR" in str(error)


def test_an_older_cupy_is_refused(bench, monkeypatch):
    bench = bench(2)
    monkeypatch.setattr(bench.nccl, "get_unique_id", lambda: tuple(range(128)))
    for error in bench.run(all_reduce):
        assert type(error) is CollectiveError
        assert "collectives of GPU arrays need CuPy 14 or later" in str(error)


# -- in NCCL -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_dies_while_others_are_in_nccl(bench, way, warm):
    bench = bench(3, shm=WAYS[way])
    if warm:
        warm_up(bench)
    bench.hold(2)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    bench.ranks.network.kill(2, "killed by the test")
    bench.ranks.communicators[2].close(linger=0.0)
    errors = end()
    for error in errors[:2]:
        assert type(error) is PeerLostError, error
        assert error.rank == 2
        assert "killed by the test (during all_reduce(sum, float32, shape (3, 4), on GPUs)" in str(error)
    assert isinstance(errors[2], CollectiveError)
    bench.release()
    bench.ranks.settle(0, 1)
    for error in bench.run(all_reduce, (0, 1)):
        assert "has failed and cannot be used any more" in str(error)


def test_communicators_are_aborted_when_the_group_fails(bench):
    bench = bench(3)
    warm_up(bench)
    bench.hold(2)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    bench.ranks.communicators[0].lose(2, "it was given up", hearsay=True)
    end()
    bench.release()
    eventually(lambda: bench.events("abort") == [0, 1, 2])
    assert not bench.events("destroy")


def test_an_idle_communicator_is_aborted_with_its_group(bench):
    """What fails the group is not a call of GPU arrays."""
    bench = bench(2)
    warm_up(bench)
    bench.run(lambda g, x: g.all_reduce(X) if g.rank else g.all_gather(X))
    eventually(lambda: bench.events("abort") == [0, 1])


@pytest.mark.parametrize("call", [
    lambda g, x: g.all_reduce(x, timeout=0.3), lambda g, x: g.all_to_all(x, timeout=0.3),
])  # fmt: skip
def test_time_runs_in_nccl(bench, call):
    bench = bench(3)
    bench.hold(1)
    errors = bench.run(call, like=np.ones(6, "f4"))
    for error in errors:
        assert type(error) is CollectiveTimeoutError, error
    assert "is at #1, too" in str(errors[0])
    bench.release()


def test_a_transfer_in_nccl_fails_with_its_group(bench):
    bench = bench(3)
    bench.hold(1)
    end = bench.begin(lambda g, x: g.send(x, 1) if g.rank == 0 else g.recv(x, 0), (0, 1))
    eventually(lambda: bench.held[1].is_set())
    bench.ranks.communicators[0].world._generation.lose(2, "killed by the test")
    for error in end():
        assert type(error) is PeerLostError, error
        assert error.rank == 2


def test_an_asynchronous_error_fails_the_group(bench, monkeypatch):
    monkeypatch.setattr(nccl_backend, "_EXPLAINED_WITHIN", 0.2)
    bench = bench(2)
    warm_up(bench)
    bench.hold(1)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    next(comm for comm in bench.nccl.communicators if comm.rank_id() == 0).disturb(6)
    found, told = end()
    assert type(found) is CollectiveError
    assert "NCCL has failed: NcclError: NCCL_ERROR_REMOTE_ERROR: remote process exited" in str(found)
    assert type(found.__cause__) is bench.nccl.NcclError
    assert type(told) is CollectiveError
    assert "rank 0 gave up all_reduce(sum, float32, shape (3, 4), on GPUs), collective #2" in str(told)
    bench.release()


def test_who_is_gone_is_a_better_explanation_than_an_asynchronous_error(bench):
    bench = bench(2)
    warm_up(bench)
    bench.hold(1)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    next(comm for comm in bench.nccl.communicators if comm.rank_id() == 0).disturb(6)
    later = threading.Timer(0.5, bench.ranks.network.kill, (1, "killed by the test"))
    later.start()
    eventually(lambda: not later.is_alive())
    bench.ranks.communicators[1].close(linger=0.0)
    assert type(end()[0]) is PeerLostError
    bench.release()


def test_a_gpu_that_is_used_twice(bench, cupy):
    bench = bench(2)

    def body(communicator):
        return communicator.world.all_reduce(cupy.asarray(X))  # all on device 0

    errors = bench.ranks.run(body)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert any("NCCL_ERROR_INVALID_USAGE" in str(error) for error in errors)


def test_a_communicator_whose_making_never_ends(bench):
    """NCCL cannot be interrupted there: its thread is left to itself, and nobody waits for it."""
    bench = bench(3)
    entered, stuck = set(), threading.Event()

    def before_init(rank):
        entered.add(rank)
        if rank == 2:
            stuck.wait(LIMIT)

    bench.nccl.before_init = before_init
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    eventually(lambda: entered == {0, 1, 2})
    bench.ranks.network.kill(2, "killed by the test")
    bench.ranks.communicators[2].close(linger=0.0)
    for error in end()[:2]:
        assert type(error) is PeerLostError, error
    assert not bench.nccl.log
    stuck.set()  # now they are made after all, and aborted at once
    eventually(lambda: bench.events("abort") == [0, 1, 2])


def test_connecting_that_never_ends(bench):
    """The first operation blocks its thread; aborting from another one ends that."""
    bench = bench(2)
    bench.nccl.lazy_connect = True
    bench.hold(1)
    end = bench.begin(all_reduce)
    eventually(lambda: bench.held[1].is_set())
    bench.until_inside(0)
    bench.ranks.network.kill(1, "killed by the test")
    bench.ranks.communicators[1].close(linger=0.0)
    assert type(end()[0]) is PeerLostError
    bench.release()


def test_nobody_waits_for_an_abort(bench):
    bench = bench(2)
    warm_up(bench)
    bench.nccl.abort_takes = threading.Event()
    bench.hold(1)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    bench.ranks.network.kill(1, "killed by the test")
    bench.ranks.communicators[1].close(linger=0.0)
    assert type(end()[0]) is PeerLostError
    bench.nccl.abort_takes.set()
    bench.release()


def test_a_ctrl_c_ends_the_wait_on_all_ranks(bench, monkeypatch):
    bench = bench(2)
    warm_up(bench)
    bench.hold(1)
    wait = nccl_backend.NcclOperation.progress

    def interrupted(self, seconds):
        if self.missing() == (1,):
            raise KeyboardInterrupt
        return wait(self, seconds)

    monkeypatch.setattr(nccl_backend.NcclOperation, "progress", interrupted)
    mine, other = bench.run(all_reduce)
    assert type(mine) is KeyboardInterrupt
    assert "rank 0 gave up all_reduce(" in str(other)
    bench.release()
    eventually(lambda: bench.events("abort") == [0, 1])


def test_who_says_goodbye_in_the_middle_is_lost(bench, monkeypatch):
    monkeypatch.setattr(nccl_backend, "_COMES_WITHIN", 0.2)
    bench = bench(2)
    warm_up(bench)
    bench.hold(1)
    end = bench.begin(all_reduce)
    bench.until_inside(0, 1)
    bench.ranks.communicators[1].close(linger=1.0)
    error = end()[0]
    assert type(error) is PeerLostError, error
    assert "it has left the cluster" in str(error)
    bench.release()


def test_a_wait_keeps_no_core_busy(bench):
    bench = bench(2)
    bench.hold(1)
    used = {}

    def call(group, x):
        began = time.thread_time()
        try:
            return group.all_reduce(x, timeout=1.0)
        finally:
            used[group.rank] = time.thread_time() - began

    for error in bench.run(call):
        assert type(error) is CollectiveTimeoutError, error
    assert max(used.values()) < 0.3
    bench.release()


# -- afterwards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_new_generation_makes_new_communicators(bench, way):
    bench = bench(3, shm=WAYS[way])
    warm_up(bench)
    bench.ranks.replace(1)
    for error in bench.run(all_reduce, (0, 2)):
        assert type(error) is PeerLostError, error
    bench.ranks.renew()
    warm_up(bench)
    assert bench.events("init") == [0, 0, 1, 1, 2, 2]
    eventually(lambda: {0, 2} <= set(bench.events("abort")))


def test_asynchronous_calls_fail_with_their_group(bench, cupy):
    bench = bench(2)
    warm_up(bench)
    bench.hold(1)
    futures = {}

    def call(group, x):
        futures[group.rank] = [group.all_reduce(x, async_op=True) for _ in range(3)]

    bench.run(call)
    bench.until_inside(0, 1)
    bench.ranks.network.kill(1, "killed by the test")
    for future in futures[0]:
        error = future.exception(LIMIT)
        assert type(error) is PeerLostError, error
    bench.release()


def test_ranks_that_share_a_gpu_are_refused_by_nccl(cupy):
    def body(communicator):
        with cupy.cuda.Device(0):
            return communicator.world.all_reduce(cupy.asarray(X))

    with cluster(2) as ranks:
        errors = ranks.run(body)
    assert all(type(error) is CollectiveError for error in errors)
    assert all("NCCL has failed: NcclError: NCCL_ERROR_INVALID_USAGE" in str(error) for error in errors)
    assert all("NCCL_MULTI_RANK_GPU_ENABLE=1" in str(error) for error in errors)
