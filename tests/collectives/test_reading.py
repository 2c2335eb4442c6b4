"""Large arrays that are not shared are read in the processes that have them, where all may do that."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.collectives.backends.shm import setup
from dmesh.collectives.backends.shm.setup import SharedMemoryRegistry, Sizes

core = native.core()
pytestmark = pytest.mark.skipif(core is None, reason=f"no native core: {native.reason()}")

ROOM, STAGE = 128, 2048
SIZES = Sizes(slot=ROOM, staging=STAGE, p2p_slot=ROOM, p2p_staging=STAGE)


def may_read() -> bool:
    """Whether the kernel lets this process read its own memory in this way; some sandboxes do not."""
    word = np.frombuffer(b"expected", np.uint8)
    return core is not None and core.RegisteredMemory().can_read(
        os.getpid(), int(word.ctypes.data), b"expected"
    )


readable = pytest.mark.skipif(not may_read(), reason="process_vm_readv is not permitted here")


# -- groups --------------------------------------------------------------------------------------------------


@readable
@pytest.mark.parametrize("reads", [True, False])
def test_values_are_the_same_whether_all_may_read_or_one_may_not(monkeypatch, reads):
    if not reads:
        allowed = setup._reads
        monkeypatch.setattr(
            setup,
            "_reads",
            lambda shared_memory, member: shared_memory is not refusing and allowed(shared_memory, member),
        )
    with cluster(3, shm=("native",), sizes=SIZES, single_copy_from=1) as ranks:
        refusing = ranks.communicators[1].shared_memory

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            group.barrier()
            inputs = [np.arange(3 * 500) * (other + 1) for other in range(3)]
            mine = inputs[rank]
            for _ in range(3):
                assert (group.all_gather(mine) == np.stack(inputs)).all()
                assert (group.broadcast(mine, root=2) == inputs[2]).all()
                parts = np.concatenate([np.split(one, 3)[rank] for one in inputs])
                assert (group.all_to_all(mine) == parts).all()
                swapped = mine.copy()
                assert (group.all_to_all(swapped, out=swapped) == parts).all()
                gathered = group.gather(mine, root=0)
                assert rank != 0 or (gathered == np.stack(inputs)).all()
                dealt = (
                    group.scatter(mine.reshape(3, 500), root=1)
                    if rank == 1
                    else group.scatter(mine[:500], root=1)
                )
                assert (dealt == np.split(inputs[1], 3)[rank]).all()
                assert (group.all_reduce(mine) == sum(inputs)).all()
                sent = group.send(mine, (rank + 1) % 3, async_op=True)
                assert (group.recv(np.empty_like(mine), (rank - 1) % 3) == inputs[rank - 1]).all()
                sent.result(LIMIT)
            return [endpoint.can_read_peers for endpoint in group._generation.endpoints]

        told = ranks.all(body)
    assert {answer for endpoints in told for answer in endpoints} == {reads}


def test_who_is_not_who_it_says_is_not_read():
    """The bytes at the beginning of its segment prove that a process is the one that is meant."""
    registered = core.RegisteredMemory()
    word = np.frombuffer(b"expected", np.uint8)
    assert not registered.can_read(os.getpid(), int(word.ctypes.data), b"someelse")
    assert not registered.can_read(os.getpid(), 8, b"expected")
    assert not registered.can_read(2**31 - 1, int(word.ctypes.data), b"expected")
    with pytest.raises(ValueError, match="too many"):
        registered.can_read(os.getpid(), int(word.ctypes.data), bytes(1000))


# -- one channel of transfers, by hand -----------------------------------------------------------------------


def ends(sender: int, receiver: int):
    """Both ends of a channel whose owners are these processes, as far as they tell."""
    sizes = Sizes(slot=ROOM, staging=STAGE, p2p_slot=ROOM, p2p_staging=STAGE)
    memory = mmap.mmap(-1, 1 << 20)
    regions = [(memory, 0), (memory, 1 << 19)]
    made = []
    for position in range(2):
        endpoint = core.Endpoint(regions, [1, 2], position, ROOM, STAGE, False, pipe=True)
        endpoint.advertise(
            SharedMemoryRegistry(1 << 24, core, sizes=sizes).registered,
            lambda *segment: None,
            lambda objects: None,
            [sender, receiver],
        )
        endpoint.single_copy_from = 1
        made.append(endpoint)
    return made


@readable
def test_what_a_sender_has_given_up_is_not_taken_for_its_array():
    sender, receiver = ends(os.getpid(), os.getpid())
    into = np.zeros(1000)
    sender.start_send(7, memoryview(np.ones(1000)).cast("B"))
    assert sender.progress(0.01) is sender
    sender.abort()  # from here on the program may do with the array what it likes
    receiver.start_recv(7, memoryview(into).cast("B"))
    assert receiver.progress(1.0) is receiver
    assert receiver.disconnected
    assert receiver.culprit == 0


@readable
def test_the_memory_of_a_process_that_has_ended_is_told_from_a_result():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    sender, receiver = ends(process.pid, os.getpid())
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT)
    into = np.zeros(1000)
    sender.start_send(7, memoryview(np.ones(1000)).cast("B"))
    assert sender.progress(0.01) is sender
    receiver.start_recv(7, memoryview(into).cast("B"))
    assert receiver.progress(1.0) is receiver
    assert receiver.disconnected
    assert not into.any()


@readable
def test_a_member_that_tells_of_less_than_it_has_is_an_error():
    sender, receiver = ends(os.getpid(), os.getpid())
    sender.start_send(7, memoryview(np.ones(500)).cast("B"))
    assert sender.progress(0.01) is sender
    receiver.start_recv(7, memoryview(np.zeros(1000)).cast("B"))
    with pytest.raises(RuntimeError, match="4000 bytes of its process, and 8000 were to be read"):
        receiver.progress(1.0)


@pytest.mark.parametrize("processes", [[1], [1, 0], [1, 2**31], [1, -1]])
def test_what_is_no_process_is_refused_before_anything_is_changed(processes):
    endpoint, _ = ends(os.getpid(), os.getpid())
    with pytest.raises(ValueError, match="process"):
        endpoint.advertise(core.RegisteredMemory(), lambda *segment: None, lambda objects: None, processes)
    assert endpoint.can_read_peers
