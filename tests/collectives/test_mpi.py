"""The MPI backend, with a fake MPI: agreement before data moves, memory after failures, and fallbacks."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.cases import some_cases
from tests.collectives.fake_mpi import Comm, FakeMpi
from tests.collectives.process_worker import check
from tests.collectives.properties import run
from tests.collectives.ranks import LIMIT, Cluster, cluster
from tests.collectives.test_values import clusters_of_all_sizes, values
from tests.mpi.mpi_worker import OPERATIONS

from dmesh.collectives.backends import mpi, mpi_world
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.collectives.validation import RequestBuilder
from dmesh.collectives.work import Stream
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError

LARGE = mpi.SMALL // 8 + 1
QUICK = WaitPolicy(ask_after=(0.02, 0.1), ask_every=0.2, answers_within=1.0, announce=lambda message: None)


@pytest.fixture
def ranks():
    with cluster(3, shm=("no",), mpi=True, wait_policy=QUICK) as made:
        meet(made)
        yield made


def meet(made: Cluster) -> None:
    made.all(lambda communicator: communicator.world.barrier())


def backends(communicator) -> list[str]:
    return [backend.name for backend in communicator.world._generation.backends]


@pytest.mark.parametrize("small", [mpi.SMALL, 8], ids=["copied", "in place"])
def test_every_operation(monkeypatch, ranks, small):
    monkeypatch.setattr(mpi, "SMALL", small)
    for operation in OPERATIONS:
        ranks.all(lambda communicator, operation=operation: check(communicator.world, operation))
    assert {*map(tuple, ranks.all(backends))} == {("mpi", *backends(ranks.communicators[0])[1:])}
    for world, communicator in zip(ranks.worlds, ranks.communicators, strict=True):
        world.sweep()
        awaited = communicator.world.backend("mpi")._headers  # where receives from any source have looked
        assert set(world._held) <= set(awaited.values())


@pytest.fixture(scope="module")
def clusters():
    with clusters_of_all_sizes({"shm": ("no",), "mpi": True}) as made:
        yield made


@values
@given(size=st.integers(1, 5), drawn=some_cases(6))
def test_any_calls_give_what_numpy_gives(clusters, size, drawn):
    clusters[size].all(lambda communicator: run(communicator.world, drawn))


def test_floats_are_added_in_the_order_of_ranks(ranks):
    """The fake MPI adds in another order, as MPI may: 1 and -1 would cancel each other first."""
    x = [np.full(LARGE, value) for value in (1e-17, 1.0, -1.0)]
    for result in ranks.all(lambda communicator: communicator.world.all_reduce(x[communicator.rank])):
        assert (result == (1e-17 + 1.0) - 1.0).all()


@pytest.mark.parametrize("count", [3, LARGE])
def test_no_data_moves_before_all_have_called_the_same(ranks, count):
    """The fake MPI fails if ranks call different things, and rank 1 does."""

    def body(communicator):
        group = communicator.world
        return (
            group.all_gather(np.ones(count)) if communicator.rank == 1 else group.all_reduce(np.ones(count))
        )

    for error in ranks.run(body):
        assert type(error) is CollectiveMismatchError
        assert f"rank 1 called all_gather(float64, shape ({count},))" in str(error)
        assert f"called all_reduce(sum, float64, shape ({count},))" in str(error)


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_mismatch_of_a_transfer(ranks, count):
    def body(communicator):
        if communicator.rank == 1:
            return communicator.world.send(np.ones(count), 0)
        return communicator.world.recv(np.ones(count + 1), 1)

    sent, received = ranks.run(body, (1, 0))
    assert type(received) is CollectiveMismatchError
    assert f"rank 1 called send(float64, shape ({count},))" in str(received)
    assert count == 3 or type(sent) is CollectiveMismatchError


# Memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def goes_on(monkeypatch):
    """Data stops on its way until this event is set; comparisons of calls do not."""
    event = threading.Event()
    together = Comm._together

    def begin(self, kind, mine, finish):
        request = together(self, kind, mine, finish)
        attempt = request._attempt
        request._attempt = lambda: (kind == "Iallreduce" or event.is_set()) and attempt()
        return request

    monkeypatch.setattr(Comm, "_together", begin)
    yield event
    event.set()


def test_mpi_does_not_write_to_the_callers_memory_after_a_failure(ranks, goes_on):
    outs = [np.full(LARGE, -1.0) for _ in range(3)]

    def body(communicator):
        return communicator.world.all_reduce(np.ones(LARGE), out=outs[communicator.rank], timeout=0.3)

    for error in ranks.run(body):
        assert isinstance(error, CollectiveTimeoutError)
    assert all(world._held for world in ranks.worlds)
    goes_on.set()
    for world in ranks.worlds:
        assert ranks.wait_until(lambda world=world: not world._held), "memory is not let go"
    for out in outs:
        assert (out == -1.0).all()


def test_memory_that_mpi_uses_after_a_failure_outlives_the_call(ranks, goes_on):
    def body(communicator):
        return communicator.world.all_gather(np.full(LARGE, 7.0), timeout=0.3)

    for error in ranks.run(body):
        assert isinstance(error, CollectiveTimeoutError)
    gc.collect()
    for world in ranks.worlds:
        [operation] = world._held
        assert sum(array.nbytes for array in operation._memory) >= 4 * 8 * LARGE


def test_memory_outlives_a_call_that_ctrl_c_ends_when_mpi_has_just_begun(ranks, monkeypatch):
    """Nobody has the request then, and cannot ask when MPI lets go."""
    gather = Comm.Iallgather

    def begin(self, *args):
        request = gather(self, *args)
        if self.me == 2:  # the MPI rank of client 0
            raise KeyboardInterrupt
        return request

    monkeypatch.setattr(Comm, "Iallgather", begin)
    interrupted, *others = ranks.run(lambda communicator: communicator.world.all_reduce(np.ones(3)))
    assert isinstance(interrupted, KeyboardInterrupt)
    assert all(error is None or isinstance(error, (CollectiveError, np.ndarray)) for error in others)
    world = ranks.worlds[0]
    world.sweep()
    [operation] = world._held
    assert len(operation._memory) == 4  # hash, input, result, and all contributions


def test_a_large_call_is_complete_only_when_all_are_done_with_their_arrays(ranks, monkeypatch):
    confirm = Comm.Ibarrier

    def begin(self):
        request = confirm(self)
        if self.me == 2:  # the MPI rank of client 0, which gives up before it is done
            raise FakeMpi.Exception("MPI_ERR_OTHER: given up")
        return request

    monkeypatch.setattr(Comm, "Ibarrier", begin)
    monkeypatch.setattr(mpi, "_EXPLAINED_WITHIN", 0.1)
    monkeypatch.setattr(Comm, "_together", _late(Comm._together))
    errors = ranks.run(lambda communicator: communicator.world.all_reduce(np.ones(LARGE), timeout=LIMIT))
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert "MPI has failed: MPI_ERR_OTHER: given up" in str(errors[0])


def _late(together):
    """Never complete a barrier."""

    def begin(self, kind, mine, finish):
        request = together(self, kind, mine, finish)
        if kind == "Ibarrier":
            request._attempt = lambda: False
        return request

    return begin


# Sends ------------------------------------------------------------------------------------------------------


def test_small_sends_are_buffered_up_to_a_limit(ranks, monkeypatch):
    array = np.arange(SEND_BUFFER // 8)
    fits = mpi.MOST_BUFFERED // SEND_BUFFER
    sender, receiver = ranks.communicators[:2]
    for _ in range(fits):
        sender.world.send(array, 1)
    more = sender.world.send(array, 1, async_op=True)
    with pytest.raises(TimeoutError):
        more.result(0.1)
    for _ in range(fits + 1):
        assert (receiver.world.recv(np.empty_like(array), 0) == array).all()
    more.result(LIMIT)
    assert ranks.wait_until(lambda: not ranks.worlds[0]._held)
    for _ in range(fits):  # there is room again
        sender.world.send(array, 1, timeout=LIMIT)


def test_a_large_send_waits_for_its_receiver(ranks):
    array = np.arange(SEND_BUFFER // 8 + 1)
    sender, receiver = ranks.communicators[:2]
    sent = sender.world.send(array, 1, async_op=True)
    with pytest.raises(TimeoutError):
        sent.result(0.1)
    assert (receiver.world.recv(np.empty_like(array), 0) == array).all()
    sent.result(LIMIT)


# Groups without MPI -----------------------------------------------------------------------------------------


def use(made: Cluster) -> set[str]:
    """Make a call; return the backends that the group has then."""
    for result in made.all(lambda communicator: communicator.world.all_reduce(np.ones(3))):
        assert (result == made.size).all()
    names = {*map(tuple, made.all(backends))}
    assert len(names) == 1
    return set(names.pop())


@pytest.mark.parametrize("outside", [0, 1])
def test_a_client_outside_of_the_launch(outside):
    with cluster(3, shm=("no",), mpi=True) as made:
        made.communicators[outside].mpi = None
        assert "mpi" not in use(made)
        assert "mpi" not in use(made)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_communicator_that_mpi_cannot_make(monkeypatch, failing):
    create = Comm.Create_group

    def fail(self, group, tag):
        if self.me == failing:
            raise FakeMpi.Exception("MPI_ERR_INTERN: no more communicators")
        return create(self, group, tag)

    monkeypatch.setattr(Comm, "Create_group", fail)
    with cluster(3, shm=("no",), mpi=True) as made:
        assert "mpi" not in use(made)


def test_a_communicator_that_does_not_come(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(mpi_world, "_CREATED_WITHIN", 0.1)
    create = Comm.Create_group
    monkeypatch.setattr(Comm, "Create_group", lambda *args: never.wait(LIMIT) and create(*args))
    with cluster(3, shm=("no",), mpi=True) as made:
        assert "mpi" not in use(made)
    never.set()


def test_calls_that_mpi_cannot_count_go_another_way(ranks, monkeypatch):
    monkeypatch.setattr(mpi, "_MAX_COUNT", 10)
    backend = ranks.communicators[0].world._generation.backends[0]
    stream = Stream(1, None)
    stream.settle(1, None)
    requests = RequestBuilder(3, 0)
    for count, expected in ((2, True), (100, False)):
        assert backend.supports(requests.make("all_reduce", np.ones(count), op="sum"), stream, 2) == expected
        assert backend.supports(requests.make("broadcast", np.ones(count), root=0), stream, 2) == expected
    assert not backend.supports(requests.make("barrier"), Stream(1, None), 2)  # not settled
    meet(ranks)
    ranks.all(lambda communicator: check(communicator.world, "all_reduce"))
