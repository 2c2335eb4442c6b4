"""Ports over connections, one end for each thread: values, and what may come over a connection."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.collectives.transport.harness import secure_pair

from dmesh import native
from dmesh.collectives.backends.tcp.dedicated import _HeldSockets
from dmesh.security.secure_socket import SecureSocket

core = native.core()
pytestmark = pytest.mark.skipif(core is None, reason=f"no native core: {native.reason()}")

LIMIT = 60.0


def endpoints(
    size: int, room: int = 0, flat: int = 65536, streams: int = 1, *, tls: bool = False
) -> list[Any]:
    """The ends of a group's connections."""
    ends: list[list[list[Any]]] = [[[] for _ in range(size)] for _ in range(size)]
    for one in range(size):
        for other in range(one + 1, size):
            pairs = connected(streams, tls=tls)
            ends[one][other], ends[other][one] = map(list, zip(*pairs, strict=True))
    return [opened([end or [None] * streams for end in ends[me]], me, None, room, flat) for me in range(size)]


def connected(count: int, *, tls: bool) -> list[tuple[Any, Any]]:
    """The two ends of some connections."""
    return [secure_pair() if tls else socket.socketpair() for _ in range(count)]


def opened(
    ends: list[list[Any]], me: int, receipts: Any, room: int = 0, flat: int = 0, *, owns: bool = True
) -> Any:
    """An endpoint over connections with each member: None with itself."""
    sockets = [end for end in (*chain(*ends), receipts) if end is not None]
    secure = {end.fileno(): end for end in sockets if isinstance(end, SecureSocket)}
    detached = owns and not secure
    number = {None: -1, **{end: end.detach() if detached else end.fileno() for end in sockets}}
    descriptors = [number[end] for end in chain(*ends)]
    made = core.Endpoint.over_sockets(
        descriptors, me, number[receipts], room, detached, flat, len(ends[0]), secure
    )
    if owns and secure:
        made.keep_alive = _HeldSockets({0: sockets})
    return made


def pipe(near: list[Any], far: list[Any], *, owns: bool = True) -> list[Any]:
    """A sender and a receiver; the last connection is for receipts."""
    none = [None] * (len(near) - 1)
    return [
        opened([none, near[:-1]], 0, near[-1], owns=owns),
        opened([far[:-1], none], 1, far[-1], owns=owns),
    ]


def finish(endpoint: Any, result: Any) -> Any:
    """Goes on with a call until it is over."""
    while result is endpoint:
        if endpoint.mismatched or endpoint.corrupt or endpoint.disconnected:
            raise OSError(
                f"mismatched: {endpoint.mismatched}, corrupt: {endpoint.corrupt}, "
                f"disconnected: {endpoint.disconnected}"
            )
        result = endpoint.progress(1.0)
    return result


def together(ends: list[Any], call: Callable[[Any, int], Any]) -> list[Any]:
    """Makes a call on all ends at once; returns the results, or what they raised."""
    results: list[Any] = [None] * len(ends)

    def work(me: int) -> None:
        try:
            results[me] = finish(ends[me], call(ends[me], me))
        except BaseException as error:  # noqa: BLE001 - told to the test
            results[me] = error

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), f"a rank hangs; done: {results}"
    return results


def same(actual: Any, expected: NDArray[Any]) -> bool:
    return isinstance(actual, np.ndarray) and actual.tobytes() == np.ascontiguousarray(expected).tobytes()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(2, 5),
    count=st.integers(1, 400),
    room=st.sampled_from([0, 64, 128, 1024]),
    flat=st.sampled_from([0, 1000, 2**48]),
    dtype=st.sampled_from(["u1", "f2", "f4", "f8", "c16"]),
    seed=st.integers(0, 2**32 - 1),
    in_place=st.booleans(),
    streams=st.integers(1, 4),
    tls=st.integers(0, 7).map(lambda number: number == 7),  # each pair takes some milliseconds
)
def test_calls_follow_each_other_with_the_right_bits(
    size, count, room, flat, dtype, seed, in_place, streams, tls
):
    """All kinds, one after the other on the same connections, in pieces of all sizes, in one or two steps."""
    chance = np.random.default_rng(seed)
    rows = [chance.integers(0, 100, (size, count)).astype(dtype) for _ in range(size)]
    whole = [row.reshape(-1) for row in rows]
    total = whole[0].copy()
    for array in whole[1:]:
        total = total + array
    root = int(chance.integers(size))
    ends = endpoints(size, room, flat, streams, tls=tls)
    outs = [array.copy() for array in whole]
    for me, result in enumerate(
        together(
            ends,
            lambda p, m: p.all_reduce(
                outs[m] if in_place else whole[m], "sum", outs[m] if in_place else None
            ),
        )
    ):
        assert same(result, total), me
    for me, result in enumerate(together(ends, lambda p, m: p.reduce(whole[m], "sum", root, None))):
        assert result is None if me != root else same(result, total)
    for me, result in enumerate(together(ends, lambda p, m: p.reduce_scatter(rows[m], "sum", None, None))):
        assert same(result, total.reshape(size, count)[me])
    for result in together(ends, lambda p, m: p.broadcast(whole[m], root, None)):
        assert same(result, whole[root])
    for result in together(ends, lambda p, m: p.all_gather(whole[m], None, None)):
        assert same(result, np.stack(whole))
    for me, result in enumerate(together(ends, lambda p, m: p.gather(whole[m], root, None))):
        assert result is None if me != root else same(result, np.stack(whole))
    for me, result in enumerate(together(ends, lambda p, m: p.all_to_all(rows[m], None))):
        assert same(result, np.stack([rows[other][me] for other in range(size)]))
    assert together(ends, lambda p, m: p.barrier()) == [None] * size


@pytest.mark.parametrize("count", [1, 100, 5000, 1_000_000])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@pytest.mark.parametrize("tls", [False, True])
def test_transfers_follow_each_other(count, streams, tls):
    ends = pipe(*map(list, zip(*connected(streams + 1, tls=tls), strict=True)))
    for number in range(3):
        x = np.arange(count) + number
        sent, got = together(ends, lambda p, m, x=x: p.recv(x, None) if m else p.send(x))
        assert sent is None
        assert same(got, x)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("tls", [False, True])
def test_transfers_in_both_directions_share_their_connections(streams, tls):
    """Four threads, one for each end of each direction: answers to large arrays come between other arrays."""
    with ExitStack() as stack:
        pairs = connected(streams + 1, tls=tls)
        for sock in chain(*pairs):
            stack.callback(sock.close)
        near, far = map(list, zip(*pairs, strict=True))
        ends = [*pipe(near, far, owns=False), *pipe(far, near, owns=False)]
        for count in (1, 3_000_000, 2000, 100_000, 3, 1_000_000):
            arrays = [np.random.default_rng([way, count]).integers(0, 99, count) for way in range(2)]
            _, there, _, back = together(
                ends, lambda p, m, a=arrays: p.recv(a[m // 2], None) if m % 2 else p.send(a[m // 2])
            )
            assert same(there, arrays[0])
            assert same(back, arrays[1])


@pytest.mark.parametrize("tls", [False, True])
def test_members_that_call_different_things_find_out_and_nothing_is_written(tls):
    ends = endpoints(2, tls=tls)
    out = np.full(3, 7.0)
    first, second = together(
        ends, lambda p, m: p.all_reduce(np.zeros(3), "max" if m else "sum", out if m else None)
    )
    assert "mismatched: True" in str(first)
    assert "mismatched: True" in str(second)
    assert out.tolist() == [7, 7, 7]
    assert [end.culprit for end in ends] == [1, 0]


@pytest.mark.parametrize("tls", [False, True])
def test_a_member_that_ends_is_told_from_one_that_is_late(tls):
    ends = endpoints(3, tls=tls)
    late = ends[0].barrier()
    assert late is ends[0]
    assert not ends[0].disconnected
    assert ends[0].missing() == [1, 2]
    del ends[2]  # closes its connections
    with pytest.raises(OSError, match="disconnected: True"):
        finish(ends[0], late)
    assert ends[0].culprit == 2


def test_what_ended_stays_ended():
    ends = endpoints(2)
    begun = ends[0].barrier()
    del ends[1]
    for _ in range(3):
        assert ends[0].progress(0.0) is begun
    assert ends[0].disconnected


@pytest.mark.parametrize(
    "garbage",
    [bytes(24), b"\xff" * 24, struct.pack("<QQQ", 1, 0, 2**63), os.urandom(100)],
    ids=["zeros", "ones", "a length", "noise"],
)
def test_a_header_that_cannot_be_is_refused(garbage):
    near, far = socket.socketpair()
    endpoint = core.Endpoint.over_sockets([-1, near.detach()], 0)
    with far:
        far.sendall(garbage)
        with pytest.raises(OSError, match="mismatched: True"):
            finish(endpoint, endpoint.all_reduce(np.zeros(3), "sum", None))


def test_a_length_that_does_not_fit_the_call_is_corrupt():
    """The right call, and another number of bytes: nobody who speaks the protocol says that."""
    near, far = socket.socketpair()
    endpoint = core.Endpoint.over_sockets([-1, near.detach()], 0)
    x = np.arange(3.0)
    begun = endpoint.all_reduce(x, "sum", None)
    with far:
        said = far.recv(24)
        far.sendall(said[:16] + struct.pack("<Q", 2**40))
        with pytest.raises(OSError, match="corrupt: True"):
            finish(endpoint, begun)


@pytest.mark.parametrize("step", [1, 7, 24, 100])
def test_bytes_come_in_any_portions(step):
    near, far = socket.socketpair()
    endpoint = core.Endpoint.over_sockets([-1, near.detach()], 0, -1, 0, True, 65536)
    x = np.arange(50.0)
    result = endpoint.all_reduce(x, "sum", None)
    with far:
        said = far.recv(10_000)
        for begin in range(0, len(said), step):
            assert result is endpoint
            far.sendall(said[begin : begin + step])
            result = endpoint.progress(0.0 if begin + step < len(said) else 10.0)
    assert same(result, 2 * x)


@pytest.mark.parametrize("tls", [False, True])
def test_a_stop_ends_a_wait_in_another_thread(tls):
    ends = endpoints(2, tls=tls)
    begun = ends[0].barrier()
    ended = threading.Event()

    def wait() -> None:
        ends[0].progress(30.0)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ends[0].abort()
    assert ended.wait(10.0)
    thread.join()
    assert begun is ends[0]
    assert ends[0].barrier() is NotImplemented


def test_descriptors_belong_to_the_port():
    near, far = socket.socketpair()
    descriptor = near.detach()
    endpoint = core.Endpoint.over_sockets([-1, descriptor], 0)
    os.fstat(descriptor)
    del endpoint
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    with far:
        assert far.recv(1) == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ([-1], 0),
        ([-1, -1], 0),
        ([5, 5], 0),
        ([-1, 5], 2),
        ([-1, 5], 0, -1, 100),
        ([-1, 5, 6], 0, 7),
        ([-1, 5], 0, -1, 0, True, -1),
    ],
)
def test_ends_that_cannot_be_are_refused(arguments):
    with pytest.raises(ValueError, match="no connection"):
        core.Endpoint.over_sockets(*arguments)


def test_an_aborted_call_does_not_succeed_even_if_all_bytes_seem_to_have_come():
    """The group that fails has dropped some of them, perhaps, and these are others."""
    sockets = connected(2, tls=False)
    sender, receiver = pipe(*map(list, zip(*sockets, strict=True)), owns=False)
    out = np.zeros(8)
    assert receiver.recv(out, out) is receiver
    receiver.abort()
    sender.send(np.ones(8))
    assert receiver.progress(0.0) is receiver
    for sock in chain(*sockets):
        sock.close()
