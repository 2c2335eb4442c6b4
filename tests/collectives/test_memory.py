"""dmesh.empty, zeros and array: like NumPy's, and shared if asked for."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
from tests.e2e.clients import run_clients

import dmesh
from dmesh import native
from dmesh.collectives.backends.shm.arrays import Pool
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry
from dmesh.errors import NotInitializedError, SharedMemoryError

MIB = 1 << 20

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


def test_like_numpy_without_being_shared():
    assert dmesh.empty(3).shape == (3,)
    assert dmesh.empty((2, 3), "i2").dtype == np.int16
    assert dmesh.zeros([2, 2]).tolist() == [[0, 0], [0, 0]]
    x = np.asfortranarray(np.arange(6).reshape(2, 3))
    made = dmesh.array(x)
    assert made.flags.c_contiguous
    assert (made == x).all()
    assert made is not x


def test_shared_before_there_is_a_system():
    with pytest.raises(NotInitializedError):
        dmesh.empty(3, shared=True)


def test_where_nothing_may_be_shared_arrays_are_ordinary_ones():
    script = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system()
x = dmesh.zeros(100_000, shared=True)
x += dmesh.client_id()
assert (dmesh.collectives.all_reduce(x) == 1).all()
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script, environ={"DMESH_SHARED_MEMORY": "0"}) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err


def test_shared_in_a_cluster():
    script = """
import numpy as np, dmesh
from dmesh.collectives.communicator import Communicator
from dmesh.runtime import context
dmesh.initialize_accelerator_system()
rank, size = dmesh.client_id(), dmesh.num_clients()
registered = context.current().get(Communicator).shared_memory.registered
x = dmesh.zeros((1000, 100), "f4", shared=True)
assert not x.any()
y = dmesh.array(np.arange(100_000.0).reshape(1000, 100), "f4", shared=True)
for one in (x, y, y[10:20], y[5]):
    assert registered.contains(one)
assert not registered.contains(np.zeros(3))
for _ in range(3):
    x[:] = y + rank
    total = dmesh.collectives.all_reduce(x, out=x)
    assert (total == size * y + size * (size - 1) / 2).all()
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err


@pytest.fixture
def pool() -> Pool:
    core = native.core()
    assert core is not None
    return Pool(SharedMemoryRegistry(200 * MIB, core))


def test_memory_is_used_again_when_all_views_are_gone(pool):
    first = pool.empty(MIB, "u1")
    address = first.__array_interface__["data"][0]
    view = first[100:][::2].reshape(-1, 2)
    del first
    gc.collect()
    assert pool.empty(MIB, "u1").__array_interface__["data"][0] != address
    del view
    gc.collect()
    assert pool.empty(MIB, "u1").__array_interface__["data"][0] == address


def test_pieces_grow_together_again(pool):
    parts = [pool.empty(10 * MIB, "u1") for _ in range(6)]
    for order in ((0, 2, 4), (1, 3, 5)):
        for number in order:
            parts[number] = np.empty(0)
    gc.collect()
    whole = pool.empty(60 * MIB, "u1")
    whole[:] = 1
    assert len(pool._chunks) == 1


def test_there_is_a_limit(pool):
    kept = [pool.empty(60 * MIB, "u1") for _ in range(3)]
    with pytest.raises(SharedMemoryError, match="DMESH_SHARED_MEMORY"):
        pool.empty(60 * MIB, "u1")
    with pytest.raises(MemoryError):
        pool.empty((1 << 40,), "f8")
    kept.pop()
    gc.collect()
    assert pool.empty(60 * MIB, "u1").nbytes == 60 * MIB


def test_arrays_without_bytes_and_of_objects(pool):
    assert pool.empty((0, 3), "f8").shape == (0, 3)
    assert pool.empty(2, "O").tolist() == [None, None]
    assert pool.empty((), "f8").shape == ()
    assert pool.empty(3, [("a", "i4"), ("b", "f8")]).dtype.names == ("a", "b")


def test_common_memory_is_kept_while_a_client_that_has_left_has_a_view_of_it(pool):
    memory, place = pool.lend(MIB, (0, 1), 0, lambda rank: rank == 1, 7)
    theirs = Pool(SharedMemoryRegistry(200 * MIB, native.core())).borrow(place, MIB, 2, 1)
    memory[:] = 7
    del memory
    gc.collect()
    pool.lend(MIB, (0, 1), 0, lambda rank: False, 7)[0][:] = 1
    assert (theirs == 7).all()
    del theirs
    gc.collect()
    assert pool.lend(MIB, (0, 1), 0, lambda rank: False, 7)[1] == place


def test_arrays_may_go_in_a_thread_while_another_asks_for_spare_memory(pool):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            first, second = ([pool.empty(1, "u1") for _ in range(1000)] for _ in range(2))
            first.clear()
            thread = threading.Thread(target=second.clear)
            thread.start()
            while thread.is_alive():
                assert pool.has_spare(1)
    finally:
        sys.setswitchinterval(interval)
