"""Calls that real processes make over and over until one of them is killed, and calls that do not match."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from dmesh.collectives import ANY_SOURCE, ANY_TAG, Op, plan_all_reduce
from dmesh.collectives.group import Group
from dmesh.errors import CollectiveMismatchError

WEIGHTED = Op(lambda first, second: 2 * first + second, name="weighted", elementwise=True)


def lengths(world: Group, count: int) -> list[int]:
    """Another length for each rank."""
    return [count + at for at in range(world.size)]


def rows(world: Group, count: int) -> np.ndarray:
    """Blocks of these lengths, one after the other."""
    return np.ones(sum(lengths(world, count)))


def ring(world: Group, count: int, receive: Callable[[int], Any], tag: int = 0) -> list[Any]:
    """Send to the next rank, and receive from the one before."""
    sent = world.send(np.ones(count), (world.rank + 1) % world.size, tag=tag, async_op=True)
    return [sent, receive((world.rank - 1) % world.size)]


def exchange(world: Group, count: int, later: bool, **tags: int) -> Any:
    """Send to the next rank and receive from the one before in one call."""
    x, size = np.ones(count), world.size
    return world.sendrecv(x, (world.rank + 1) % size, None, (world.rank - 1) % size, async_op=later, **tags)


def probed(world: Group, count: int, later: bool) -> list[Any]:
    """Receive what a probe has found."""

    def receive(before: int) -> Any:
        found = world.probe(before, tag=ANY_TAG)
        return world.recv(None, before, tag=found.tag or 0, async_op=later)

    return ring(world, count, receive, tag=3)


def polled(world: Group, count: int, later: bool) -> list[Any]:
    """Look again and again for what can be received."""

    def receive(before: int) -> Any:
        while world.iprobe(ANY_SOURCE, tag=3) is None:
            time.sleep(0.0001)
        return world.recv(None, before, tag=3, async_op=later)

    return ring(world, count, receive, tag=3)


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """An operation that depends on the order of ranks."""
    return first - second


@functools.cache
def plan(world: Group, count: int) -> Any:
    """Return a plan, made once."""
    return plan_all_reduce(np.ones(count), group=world)


def reset(world: Group, count: int, later: bool) -> None:
    """Make a call that does not match, and begin anew; again, if others were faster and made the next one."""
    call = functools.partial(world.all_reduce, np.ones(count + world.rank), async_op=later)
    while True:
        try:
            wait_for(call())
        except CollectiveMismatchError:
            call = functools.partial(world.reset)
        else:
            return


def gathered_in_place(world: Group, count: int, later: bool) -> Any:
    """Gather into an array that has this rank's contribution at its place."""
    out = np.ones((world.size, count))
    return world.all_gather(out[world.rank], out=out, async_op=later)


Call = Callable[[Group, int, bool], Any]
"""A call, of arrays of a length, asynchronous or not; returns a result, a future, or a list of such."""

CALLS: dict[str, Call] = {
    "all_gather": lambda g, n, later: g.all_gather(np.ones(n + g.rank), counts="exchange", async_op=later),
    "gather": lambda g, n, later: g.gather(np.ones(n + g.rank), 1, counts=lengths(g, n), async_op=later),
    "scatter": lambda g, n, later: g.scatter(rows(g, n), 1, counts=lengths(g, n), async_op=later),
    "all_to_all": lambda g, n, later: g.all_to_all(rows(g, n), counts=lengths(g, n), async_op=later),
    "reduce_scatter": lambda g, n, later: g.reduce_scatter(rows(g, n), counts=lengths(g, n), async_op=later),
    "in place": gathered_in_place,
    "scan": lambda g, n, later: g.scan(np.ones(n), async_op=later),
    "exscan": lambda g, n, later: g.exscan(np.ones(n), async_op=later),
    "min_location": lambda g, n, later: g.scan(np.ones(n), "min_location", async_op=later),
    "max_location": lambda g, n, later: g.all_reduce(np.ones(n), "max_location", async_op=later),
    "ufunc": lambda g, n, later: g.all_reduce(np.ones(n), np.hypot, async_op=later),
    "function": lambda g, n, later: g.reduce(np.ones(n), difference, async_op=later),
    "Op": lambda g, n, later: g.reduce_scatter(np.ones((g.size, n)), WEIGHTED, async_op=later),
    "plan": lambda g, n, later: plan(g, n)(async_op=later),
    "split": lambda g, n, later: g.split(g.rank % 2, -g.rank),
    "reset": reset,
    "recv": lambda g, n, later: ring(g, n, lambda at: g.recv(None, at, async_op=later)),
    "recv of a tag": lambda g, n, later: ring(g, n, lambda at: g.recv(None, at, tag=3, async_op=later), 3),
    "recv from any source": lambda g, n, later: ring(
        g, n, lambda at: g.recv(None, ANY_SOURCE, async_op=later)
    ),
    "recv of anything": lambda g, n, later: ring(
        g, n, lambda at: g.recv(None, ANY_SOURCE, tag=ANY_TAG, async_op=later), 3
    ),
    "probe": probed,
    "iprobe": polled,
    "sendrecv": exchange,
    "sendrecv of tags": lambda g, n, later: exchange(g, n, later, sendtag=3, recvtag=3),
}
OBJECTS: dict[str, Call] = {
    "broadcast_object": lambda g, n, later: g.broadcast_object([1, "x" * n], 1, async_op=later),
    "all_gather_object": lambda g, n, later: g.all_gather_object({g.rank: bytes(n)}, async_op=later),
    "gather_object": lambda g, n, later: g.gather_object((g.rank, bytes(n)), 1, async_op=later),
    "scatter_object": lambda g, n, later: g.scatter_object([bytes(n)] * g.size, 1, async_op=later),
    "all_to_all_object": lambda g, n, later: g.all_to_all_object([bytes(n)] * g.size, async_op=later),
    "recv_object": lambda g, n, later: [
        g.send_object(bytes(n), (g.rank + 1) % g.size, async_op=True),
        g.recv_object((g.rank - 1) % g.size, async_op=later),
    ],
}
if find_spec("msgpack") is not None:
    CALLS |= OBJECTS


def wait_for(found: Any) -> None:
    """Wait for what a call of `CALLS` returns."""
    for one in found if isinstance(found, list) else [found]:
        if hasattr(one, "result"):
            one.result(60)


def repeat(world: Group, call: Call, running: Callable[[], object]) -> None:
    """Make a call in each of its forms, over and over, until it fails."""
    for step in itertools.count():
        wait_for(call(world, 30_000 if step & 1 else 3, bool(step & 2)))
        if step == 3:
            running()


def transfer(world: Group, send: Callable[[], object], receive: Callable[[], object]) -> None:
    """Send from rank 0, receive at rank 1, and let the others wait for both."""
    if world.rank == 0:
        send()
    elif world.rank == 1:
        receive()
    world.barrier()


X = np.zeros(3)
MISMATCHES: dict[str, tuple[Callable[[Group], object], tuple[str, ...]]] = {
    "shapes": (
        lambda g: g.all_reduce(X if g.rank == 1 else X[1:]),
        ("rank 1 called all_reduce(sum, float64, shape (3,))",),
    ),
    "counts": (
        lambda g: g.all_gather(X, counts=[3, 3, 3 + (g.rank == 0)]),
        ("all_gather(counts=[3, 3, 4]", "all_gather(counts=[3, 3, 3]"),
    ),
    "counts of all_to_all": (
        lambda g: g.all_to_all(X, counts=[1, 1, 1], recv_counts=[1, 1, 1 + (g.rank == 1)]),
        ("that send 1 to position 1, which expects 2",),
    ),
    "scans": (
        lambda g: g.scan(X) if g.rank == 1 else g.exscan(X),
        ("rank 1 called scan(sum", "called exscan(sum"),
    ),
    "locations": (
        lambda g: g.all_reduce(X, "min_location" if g.rank == 1 else "max_location"),
        ("rank 1 called all_reduce(min_location", "called all_reduce(max_location"),
    ),
    "ufuncs": (
        lambda g: g.all_reduce(X, np.hypot if g.rank == 1 else np.fmax),
        ("rank 1 called all_reduce(ufunc hypot", "called all_reduce(ufunc fmax"),
    ),
    "operations": (
        lambda g: g.scan(X, WEIGHTED if g.rank == 1 else Op(WEIGHTED.function, name="other")),
        ("rank 1 called scan(op 'weighted'", "called scan(op 'other'"),
    ),
    "splits": (
        lambda g: g.split(0) if g.rank == 1 else g.all_gather(np.zeros(4, int)),
        ("rank 1 called split()", "called all_gather(int64, shape (4,))"),
    ),
    "dtypes of a transfer": (
        lambda g: transfer(g, lambda: g.send(X, 1), lambda: g.recv(X.astype("f4"), 0)),
        ("rank 0 called send(float64, shape (3,))", "rank 1 called recv(float32, shape (3,))"),
    ),
    "shapes of a tag": (
        lambda g: transfer(g, lambda: g.send(X, 1, tag=3), lambda: g.recv(X[1:], 0, tag=3)),
        ("rank 0 called send(float64, shape (3,), tag=3)", "rank 1 called recv(float64, shape (2,), tag=3)"),
    ),
    "what came from any source": (
        lambda g: transfer(g, lambda: g.send(X, 1), lambda: g.recv(None, ANY_SOURCE, out=np.zeros(2))),
        ("rank 0 called send(float64, shape (3,))", "rank 1 called recv("),
    ),
    "tags": (
        lambda g: transfer(g, lambda: g.send(X, 1, tag=3), lambda: g.recv(None, 0, tag=4, timeout=0.2)),
        ("rank 1 waited 0.2 s in recv(any dtype and shape, tag=4) for rank 0",),
    ),
    "sendrecv": (
        lambda g: transfer(
            g, lambda: g.sendrecv(X, 1, X, 1), lambda: g.sendrecv(X, 0, np.zeros((3, 1)), 0, timeout=30)
        ),
        ("rank 0 called send(float64, shape (3,))", "rank 1 called recv(float64, shape (3, 1))"),
    ),
}
if find_spec("msgpack") is not None:
    MISMATCHES |= {
        "objects": (
            lambda g: g.broadcast_object(1) if g.rank == 1 else g.all_gather_object(1),
            ("rank 1 called broadcast_object(root=0)", "called all_gather_object()"),
        ),
        "an array for an object": (
            lambda g: g.all_gather(np.zeros(512, "u1")) if g.rank == 1 else g.all_gather_object(1),
            ("rank 1 called all_gather(uint8, shape (512,))", "called all_gather_object()"),
        ),
    }
