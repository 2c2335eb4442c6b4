"""Memory that processes share: who can get at it, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys

import pytest

from dmesh import native
from dmesh.collectives.backends.shm.setup import (
    Region,
    Segment,
    SharedMemoryRegistry,
    Sizes,
    Ticket,
    attach,
    is_oversubscribed,
    unsupported,
)

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

MIB = 1 << 20


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)}


def _open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_ticket_survives_its_journey():
    ticket = Segment(MIB).ticket
    assert Ticket.decode(ticket.encode()) == ticket
    assert len(ticket.encode()) == Ticket.SIZE


def test_another_process_sees_the_same_memory():
    segment = Segment(MIB)
    segment.memory[5000:5005] = b"hello"
    script = (
        "import sys; from dmesh.collectives.backends.shm.setup import *\n"
        "memory = attach(Ticket.decode(bytes.fromhex(sys.argv[1])))\n"
        "print(memory[5000:5005].decode()); memory[6000:6002] = b'ok'"
    )
    told = segment.ticket.encode().hex()
    done = subprocess.run([sys.executable, "-c", script, told], capture_output=True, text=True, check=True)
    assert done.stdout == "hello\n"
    assert segment.memory[6000:6002] == b"ok"


def test_nobody_can_cut_it_off():
    segment = Segment(MIB)
    descriptor = os.open(f"/proc/self/fd/{segment.ticket.descriptor}", os.O_RDWR)
    try:
        for size in (0, MIB - 1, MIB + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nonce": b"\0" * 16}, "is another segment"),
        ({"nbytes": 2 * MIB}, "has not 2097152 bytes"),
        ({"nbytes": 0}, "has not 0 bytes"),
        ({"boot": b"\0" * 16}, "on another host"),
        ({"namespace": 1}, "in another container"),
        ({"descriptor": 2**31 - 1}, "No such file"),
        ({"pid": 2**22 + 1}, "No such file"),
    ],
)
def test_a_wrong_ticket_opens_nothing(change, problem):
    segment = Segment(MIB)
    before = descriptors()
    with pytest.raises((OSError, ValueError), match=problem):
        attach(dataclasses.replace(segment.ticket, **change))
    assert descriptors() == before


def test_other_files_are_not_even_opened(tmp_path):
    """Opening a file can have effects, and a ticket comes from somebody else."""
    segment = Segment(MIB)
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file, pytest.raises(ValueError, match="is no segment"):
        attach(dataclasses.replace(segment.ticket, descriptor=file.fileno()))


def test_memory_that_its_owner_could_cut_off_is_refused():
    descriptor = os.memfd_create("dmesh", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MIB)
        ticket = dataclasses.replace(Segment(MIB).ticket, descriptor=descriptor)
        with pytest.raises(ValueError, match="is not sealed"):
            attach(ticket)
    finally:
        os.close(descriptor)


def test_it_stays_as_long_as_somebody_uses_it_and_no_longer():
    gc.collect()
    before = descriptors()
    segment = Segment(MIB)
    memory = attach(segment.ticket)
    memory[5000] = 7
    ticket = segment.ticket
    segment.close()
    with pytest.raises(OSError, match="No such file"):
        attach(ticket)
    del segment
    gc.collect()
    assert memory[5000] == 7
    memory.close()
    assert descriptors() == before


def test_nothing_is_left_of_a_process_that_was_killed():
    script = (
        "import sys; from dmesh.collectives.backends.shm.setup import *\n"
        "segment = Segment(1 << 20); print(segment.ticket.encode().hex(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        ticket = Ticket.decode(bytes.fromhex(child.stdout.readline().strip()))
        memory = attach(ticket)
        child.send_signal(signal.SIGKILL)
    memory[5000] = 1  # no error for who has mapped it
    with pytest.raises(OSError, match="No such file"):
        attach(ticket)


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_regions_are_bounded_and_come_back_empty():
    sizes = Sizes(slot=4096, staging=4096, p2p_slot=64, p2p_staging=64)
    limit = 4096 + 3 * sizes.region(2) + 100
    shared_memory = SharedMemoryRegistry(limit, native.core(), sizes=sizes)
    regions = [shared_memory.region((0, 1), 0) for _ in range(4)]
    assert [isinstance(region, Region) for region in regions] == [True, True, True, False]
    third = regions[2]
    assert isinstance(third, Region)
    third.may_be_used = third.given_back = True
    offset, memory = third.offset, third.segment.memory
    notes = [offset, offset + sizes.inbox(0), offset + sizes.outbox(2, 1)]
    for note in notes:
        memory[note : note + 8] = b"\xff" * 8
    assert isinstance(shared_memory.region((0, 1), 0), str), "the other member may still read it"
    memory[offset + sizes.left(1) : offset + sizes.left(1) + 8] = third.salt.to_bytes(8, sys.byteorder)
    again = shared_memory.region((0, 1), 0)
    assert isinstance(again, Region)
    assert again.offset == offset
    assert all(memory[note : note + 8] == bytes(8) for note in notes)


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_the_flags_of_a_region_have_memory_before_a_peer_looks_at_them():
    """A page is placed near the process that uses it first, even if it only reads it."""
    region = SharedMemoryRegistry(64 * MIB, native.core()).region((0, 1), 0)
    assert isinstance(region, Region)
    assert os.stat(region.segment.ticket.descriptor).st_blocks * 512 == 2 * 4096  # the header, and the flags


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_that_are_bound_to_cores_of_their_own_share_none():
    allowed = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
            for _ in range(2)
        ]
        first, second = (child.pid for child in children)
        for child in children:
            stack.callback(child.communicate, b"\n")
        own = [os.getpid(), first]
        assert not is_oversubscribed(own, len(allowed))
        assert is_oversubscribed(own, len(allowed) + 1), "all ranks of the host use the same cores"
        os.sched_setaffinity(first, allowed[:1])
        os.sched_setaffinity(second, allowed[1:2])
        assert not is_oversubscribed([first, second], 8), "others are bound elsewhere"
        os.sched_setaffinity(second, allowed[:1])
        assert is_oversubscribed([first, second], 2)
