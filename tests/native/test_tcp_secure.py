"""Encrypted connections: bytes that `poll` does not show, looks at what comes, and what ends a connection."""

from __future__ import annotations

import errno
import os
import ssl
import threading
from typing import Any

import numpy as np
import pytest
from tests.collectives.transport.harness import secure_pair
from tests.native.test_tcp import LIMIT, connected, core, endpoints, finish, opened, pipe, same, together

from dmesh import native

pytestmark = pytest.mark.skipif(core is None, reason=f"no native core: {native.reason()}")


def transfers(*, tls: bool = True) -> list[Any]:
    """A sender and a receiver."""
    return pipe(*map(list, zip(*connected(2, tls=tls), strict=True)))


def test_arrays_that_come_together_are_received_one_after_the_other():
    """The first read decrypts them all, and the socket has nothing more then."""
    sender, receiver = transfers()
    arrays = [np.full(number, number) for number in range(1, 6)]
    for x in arrays:
        assert sender.send(x) is None
    for x in arrays:
        assert same(finish(receiver, receiver.recv(x, None)), x)


@pytest.mark.parametrize("count", [3, 100_000])
def test_a_look_at_what_comes_takes_nothing(count):
    sender, receiver = transfers()
    for number in range(3):
        x = np.arange(count) + number
        assert receiver.arrival(0.0) is None
        sent = sender.send(x)
        for _ in range(2):
            order, _, shape, _ = receiver.arrival(LIMIT)
            assert (order, shape) == (number + 1, x.shape)
        _, got = together(
            [sender, receiver],
            lambda p, m, x=x, sent=sent: p.recv(None, np.empty_like(x)) if m else sent,
        )
        assert same(got, x)


@pytest.mark.parametrize("tls", [False, True])
def test_one_thread_looks_while_another_receives(tls):
    """It may see what is in the array, which is no envelope."""
    sender, receiver = transfers(tls=tls)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            receiver.arrival(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for count in (1, 50, 5_000, 200_000) * 8:
            x = np.random.default_rng(count).integers(-(2**62), 2**62, count)
            _, got = together([sender, receiver], lambda p, m, x=x: p.recv(x, None) if m else p.send(x))
            assert same(got, x)
    finally:
        over.set()
        thread.join(LIMIT)


def test_bytes_that_are_no_record_end_the_connection():
    near, far = secure_pair()
    endpoint = opened([[None], [near]], 0, None)
    begun = endpoint.all_reduce(np.zeros(3), "sum", None)
    os.write(far.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(OSError, match="disconnected: True"):
        finish(endpoint, begun)
    assert isinstance(endpoint.cause, ssl.SSLError)
    assert endpoint.cause.__traceback__ is None  # its frames would keep the arrays of the call
    assert endpoint.cause.__context__ is None
    far.close()


@pytest.mark.parametrize("tls", [False, True])
def test_the_end_of_a_connection_has_no_cause(tls):
    ends = endpoints(2, tls=tls)
    begun = ends[0].barrier()
    del ends[1]
    with pytest.raises(OSError, match="disconnected: True"):
        finish(ends[0], begun)
    assert ends[0].cause is None


class Interrupted:
    """A connection in which an error comes from outside, or from the system."""

    hidden = True

    def __init__(self, error: BaseException, method: str) -> None:
        self._error, self._method = error, method

    def sendmsg(self, pieces: list[memoryview]) -> int:
        return self._answer("sendmsg")

    def recvmsg_into(self, views: list[memoryview], *_: int) -> tuple[int]:
        return (self._answer("recvmsg_into"),)

    def _answer(self, method: str) -> int:
        raise self._error if method == self._method else BlockingIOError


@pytest.mark.parametrize("method", ["sendmsg", "recvmsg_into"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("of a signal handler")])
def test_an_error_from_outside_is_raised_and_ends_the_connection(error, method):
    """Nobody knows how much was read or written."""
    near, far = secure_pair()
    endpoint = core.Endpoint.over_sockets(
        [-1, near.fileno()], 0, -1, 0, False, 0, 1, {near.fileno(): Interrupted(error, method)}
    )
    with pytest.raises(type(error)):
        endpoint.barrier()
    assert endpoint.disconnected
    assert endpoint.pending
    assert endpoint.cause is None
    near.close()
    far.close()


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_from_outside_ends_a_look(waits):
    near, far = secure_pair()
    error = Interrupted(KeyboardInterrupt(), "recvmsg_into")
    receiver = core.Endpoint.over_sockets(
        [near.fileno(), -1], 1, near.fileno(), 0, False, 0, 1, {near.fileno(): error}
    )
    with pytest.raises(KeyboardInterrupt):
        receiver.arrival(LIMIT) if waits else receiver.recv(None, np.zeros(3))
    assert not receiver.pending
    near.close()
    far.close()


def test_an_error_of_the_system_is_the_cause():
    near, far = secure_pair()
    error = Interrupted(TimeoutError(errno.ETIMEDOUT, "timed out"), "recvmsg_into")
    endpoint = core.Endpoint.over_sockets([-1, near.fileno()], 0, -1, 0, False, 0, 1, {near.fileno(): error})
    assert endpoint.barrier() is endpoint
    assert endpoint.disconnected
    assert endpoint.cause.errno == errno.ETIMEDOUT
    near.close()
    far.close()
