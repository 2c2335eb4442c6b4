"""The MPI launch: clients that find each other, launches that do not fit, and memory that MPI still uses."""

from __future__ import annotations

import gc
import weakref

import pytest
from tests.collectives.fake_mpi import Comm, FakeMpi, Network
from tests.collectives.ranks import LIMIT
from tests.collectives.transport.harness import together

from dmesh.collectives.backends import mpi_world
from dmesh.errors import (
    CollectiveError,
    ConfigurationError,
    InitializationTimeoutError,
    JobMismatchError,
    MissingExtraError,
)


def meet(cards: list[tuple[int, list[str]]], timeout: float = LIMIT) -> list[object]:
    """Let clients meet, each with its id and job list; return what each gets."""
    network = Network(len(cards))
    results: list[object] = [None] * len(cards)

    def body(rank: int) -> None:
        client, jobs = cards[rank]
        try:
            results[rank] = mpi_world.join(network.mpi(rank), client, jobs, timeout)
        except (ConfigurationError, InitializationTimeoutError) as error:
            results[rank] = error

    together(*(lambda rank=rank: body(rank) for rank in range(len(cards))))
    for result in results:
        if isinstance(result, mpi_world.MpiWorld):
            result.close()
    return results


def test_clients_find_each_other_in_any_order():
    jobs = ["a:1", "b:1", "c:1"]
    worlds = meet([(2, jobs), (0, jobs), (1, jobs)])
    for world in worlds:
        assert [world.group_of([client]) for client in range(3)] == [(1,), (2,), (0,)]
    assert len({world.token for world in worlds}) == 1
    assert worlds[0].token != meet([(2, jobs), (0, jobs), (1, jobs)])[0].token


@pytest.mark.parametrize(
    ("cards", "kind", "told"),
    [
        ([(0, ["a:1"]), (0, ["a:1"])], ConfigurationError, "has 1 entry in the client at MPI rank 0"),
        ([(0, ["a:1", "b:1"]), (1, ["a:1", "b:1", "c:1"])], ConfigurationError, "started 2 processes"),
        ([(0, ["a:1", "b:1"]), (1, ["a:1", "b:2"])], JobMismatchError, "MPI ranks 0 and 1 have different"),
        (
            [(1, ["a:1", "b:1"]), (1, ["a:1", "b:1"])],
            ConfigurationError,
            "DTENSOR_CLIENT_ID is 1 at the MPI ranks 0, 1",
        ),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_on_all(cards, kind, told):
    for error in meet(cards):
        assert type(error) is kind
        assert told in str(error)


def test_a_process_that_mpirun_did_not_start():
    [error] = meet([(0, ["a:1", "b:1"])])
    assert "MPI knows of this process alone: it was not started by mpirun" in str(error)


def test_a_client_that_waits_for_the_others_gives_up_in_time():
    network = Network(2)
    told = r"all 2 MPI ranks did not all arrive within 0.05 s.* chose another backend"
    with pytest.raises(InitializationTimeoutError, match=told):
        mpi_world.join(network.mpi(0), 0, ["a:1", "b:1"], 0.05)


@pytest.mark.parametrize("step", ["Idup", "Iallgather"])
def test_memory_that_mpi_may_still_write_to_outlives_a_meeting_that_failed(monkeypatch, step):
    """The others may come later, and MPI then completes what was begun, into memory of ours."""
    network = Network(2)
    if step == "Iallgather":
        network.mpi(1).COMM_WORLD.Idup()
    begun: list[weakref.ref] = []
    begin = Comm._together

    def remember(*args):
        request = begin(*args)
        begun.append(weakref.ref(request))
        return request

    monkeypatch.setattr(Comm, "_together", remember)
    with pytest.raises(InitializationTimeoutError):
        mpi_world.join(network.mpi(0), 0, ["a:1", "b:1"], 0.05)
    gc.collect()
    assert len(begun) == 1 + (step == "Iallgather")
    assert begun[-1]() is not None


@pytest.mark.parametrize("step", ["Idup", "Iallgather"])
def test_an_mpi_that_fails_in_the_meeting(monkeypatch, step):
    network = Network(1)

    def fail(*_):
        raise FakeMpi.Exception("MPI_ERR_INTERN: no more communicators")

    monkeypatch.setattr(Comm, step, fail)
    with pytest.raises(CollectiveError, match=r"MPI cannot .*: MPI_ERR_INTERN: no more communicators"):
        mpi_world.join(network.mpi(0), 0, ["a:1"], LIMIT)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"initialized": False}, "has not been started"),
        ({"finalized": True}, "has ended already"),
        ({"level": FakeMpi.THREAD_SERIALIZED}, "no more than MPI_THREAD_SERIALIZED"),
        ({"level": FakeMpi.THREAD_SINGLE}, "no more than MPI_THREAD_SINGLE"),
    ],
)
def test_an_mpi_that_cannot_be_used(changes, told):
    mpi = Network(1).mpi(0)
    for name, value in changes.items():
        setattr(mpi, name, value)
    with pytest.raises(ConfigurationError, match=told):
        mpi_world.check_threads(mpi)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'mpi4py'"), r"pip install 'dmesh\[mpi\]'"),
        (ImportError("libmpi.so.12: cannot open"), "finds no MPI library"),
        (RuntimeError("cannot load MPI library"), "finds no MPI library"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, error, told):
    def fail(name):
        assert name == "mpi4py.MPI"
        raise error

    monkeypatch.setattr(mpi_world.importlib, "import_module", fail)
    with pytest.raises(MissingExtraError, match=told):
        mpi_world.load()


class User:
    """Holder of memory that MPI lets go of when a test says so."""

    done: bool | Exception = False

    def is_done_with_memory(self) -> bool:
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


@pytest.fixture
def world():
    return mpi_world.MpiWorld(FakeMpi, Network(1).mpi(0).COMM_WORLD, (0,), b"token")  # without its thread


def held(world: mpi_world.MpiWorld, done: bool | Exception) -> weakref.ref[User]:
    user = User()
    user.done = done
    world.hold(user)
    world.retire(user)
    return weakref.ref(user)


@pytest.mark.parametrize(("done", "stays"), [(False, True), (True, False), (FakeMpi.Exception("x"), True)])
def test_retired_memory_is_kept_until_mpi_lets_go(world, done, stays):
    found = held(world, done)
    world.sweep()
    gc.collect()
    assert (found() is not None) == stays
    world.sweep()


def test_memory_of_a_complete_call_is_let_go_at_once(world):
    user = User()
    found = weakref.ref(user)
    world.hold(user)
    world.release(user)
    del user
    gc.collect()
    assert found() is None
