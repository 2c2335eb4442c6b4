"""Arrays of failed calls: kept until no peer can write to them any more."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dmesh import native
from dmesh.collectives.backends.shm.arrays import Pool
from dmesh.collectives.backends.shm.setup import Region, SharedMemoryRegistry, Sizes, share_memory
from dmesh.collectives.connect import Exchange

core = native.core()
pytestmark = pytest.mark.skipif(core is None, reason=f"no native core: {native.reason()}")

SIZES = Sizes(slot=128, staging=1024, p2p_slot=128, p2p_staging=512)
ALL_REDUCE, SUM, FLOAT64 = 1, 0, 12
COUNT = 4096


class Mail:
    """Channel of one rank, through a dictionary that all ranks have."""

    def __init__(self, rank: int, messages: dict[tuple[int, int, int], bytes]) -> None:
        self._rank = rank
        self._messages = messages

    def receive(self, rank: int, step: int, into: memoryview) -> Any:
        return (rank, self._rank, step), into

    def send(self, rank: int, step: int, data: memoryview) -> None:
        self._messages[self._rank, rank, step] = bytes(data)

    def wait(self, completions: list[Any], seconds: float) -> bool:
        del seconds
        if not all(key in self._messages for key, _ in completions):
            return False
        for key, into in completions:
            into[:] = self._messages[key]
        return True

    def flush(self, seconds: float) -> bool:
        del seconds
        return True


class Ranks:
    """Two ranks that share memory, whose calls are driven by hand."""

    def __init__(self) -> None:
        self.registries = [SharedMemoryRegistry(1 << 24, core, sizes=SIZES) for _ in range(2)]
        self.pool = Pool(self.registries[0])
        messages: dict[tuple[int, int, int], bytes] = {}
        setups = [
            share_memory(Exchange(Mail(rank, messages), (0, 1), rank), registry, 1)
            for rank, registry in enumerate(self.registries)
        ]
        self.groups: list[Any] = [None, None]
        attempts: list[Any] = [next(setup) for setup in setups]
        while None in self.groups:
            for rank, setup in enumerate(setups):
                try:
                    if self.groups[rank] is None and attempts[rank](0.0):
                        attempts[rank] = next(setup)
                except StopIteration as done:
                    self.groups[rank] = done.value
        self.endpoints: list[Any] = [group.open_collectives() for group in self.groups]

    def start(self, rank: int, x: Any, out: Any) -> None:
        data = (x.view(np.uint8), out.view(np.uint8))
        self.endpoints[rank].start(ALL_REDUCE, SUM, FLOAT64, 0, 7, x.nbytes, 0, *data)

    def leave(self, rank: int) -> None:
        """Forget a rank's group, as when it is renewed, or its user drops it."""
        self.endpoints[rank] = self.groups[rank] = None
        gc.collect()

    def stop_late_writer(self) -> int:
        """Let rank 0 abort an all-reduce that rank 1 may still write; return the address of the result."""
        out = self.pool.empty(COUNT, float)
        address = int(out.ctypes.data)
        self.start(0, np.ones(COUNT), out)
        self.start(1, np.ones(COUNT), np.empty(COUNT))
        for rank in (0, 1, 0, 1):  # they exchange locations; then rank 1 stops
            assert self.endpoints[rank].progress(0.0) is self.endpoints[rank]
        self.endpoints[0].abort()
        return address

    def addresses(self) -> list[int]:
        """Addresses of new arrays in rank 0's shared memory, as many as fit into what was free before."""
        arrays = [self.pool.empty(COUNT, float) for _ in range(4)]
        return [int(array.ctypes.data) for array in arrays]


def test_memory_that_a_peer_may_still_write_is_not_used_again_before_it_has_left():
    ranks = Ranks()
    address = ranks.stop_late_writer()
    ranks.leave(0)
    assert address not in ranks.addresses()
    assert isinstance(ranks.registries[0].region((0, 1), 0), Region)
    assert address not in ranks.addresses()
    ranks.registries[0].excuse(1)  # the cluster has given it up, but its process is alive
    assert address not in ranks.addresses()
    ranks.endpoints[1].abort()
    ranks.leave(1)
    assert address in ranks.addresses()


def test_memory_that_a_peer_may_still_write_is_used_again_once_its_process_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    ranks = Ranks()
    for group in ranks.groups:
        member = group.members[1]
        group.members[1] = replace(member, ticket=replace(member.ticket, pid=process.pid))
    ranks.endpoints[0] = ranks.groups[0].open_collectives()
    address = ranks.stop_late_writer()
    ranks.leave(0)
    assert address not in ranks.addresses()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie writes no more
    assert address in ranks.addresses()
    process.communicate()


def test_a_completed_call_retires_nothing():
    ranks = Ranks()
    out = ranks.pool.empty(COUNT, float)
    address = int(out.ctypes.data)
    ranks.start(0, np.ones(COUNT), out)
    ranks.start(1, np.full(COUNT, 2.0), np.empty(COUNT))
    done: set[int] = set()
    for rank in itertools.cycle((0, 1)):
        if rank not in done and ranks.endpoints[rank].progress(0.001) is None:
            done.add(rank)
        if len(done) == 2:
            break
    assert (out == 3).all()
    ranks.leave(0)
    del out
    assert address in ranks.addresses()


def test_a_setup_that_fails_leaks_no_region():
    """Its first message goes to a rank that never comes; the region is free for the next group at once."""
    registry = SharedMemoryRegistry(1 << 24, core, sizes=SIZES)
    for _ in range(3):
        waits = share_memory(Exchange(Mail(0, {}), (0, 1), 0), registry, 1)
        assert not next(waits)(0.0)
        with pytest.raises(ConnectionError):
            waits.throw(ConnectionError("rank 1 is gone"))
        del waits
        gc.collect()
    assert len(registry._regions) == 1


def test_registered_memory_stays_mapped_until_it_is_dropped():
    assert core is not None
    table, nonce = core.RegisteredMemory(), bytes(16)
    segments = [Memory(1 << 12) for _ in range(2)]
    for segment in segments:
        table.add(segment.data, nonce, 0, False)
        del segment.data
    with pytest.raises(BufferError):
        segments[0].resize()
    table.drop(nonce)
    segments[0].resize()
    with pytest.raises(BufferError):
        segments[1].resize()


class Memory:
    """Bytes whose memory cannot be released while something uses them."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)
        self.data: Any = memoryview(self._bytes)

    def resize(self) -> None:
        self._bytes.append(0)
