"""The core's methods of groups: the arguments of the method that they take the place of, and its errors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh import collectives, native
from dmesh.collectives.api import World, method
from dmesh.collectives.group import Group
from dmesh.errors import CollectiveTypeError, NotInitializedError
from dmesh.runtime.context import process

NATIVE = [name for name in collectives.__all__ if hasattr(getattr(collectives, name), "method")]

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


@pytest.fixture(scope="module", params=["native", "dedicated"])
def ranks(request):
    with cluster(2, shm=(request.param,)) as made:
        made.all(lambda c: c.world.barrier())
        yield made


@pytest.mark.parametrize("name", NATIVE)
def test_functions_and_methods_look_like_the_function_that_they_wrap(name):
    function, method = getattr(collectives, name), getattr(Group, name)
    assert function is not method
    for found in (function, method):
        assert found.__name__ == name
        assert found.__doc__ == function.__wrapped__.__doc__
        assert inspect.signature(found) == inspect.signature(function.__wrapped__)
        with pytest.raises(AttributeError):
            _ = found.no_such_thing


CALLS: dict[str, Any] = {
    "by position": lambda g, x: g.all_reduce(x, "max"),
    "by name": lambda g, x: g.all_reduce(op="max", x=x),
    "with defaults that are given": lambda g, x: g.all_reduce(
        x, "max", out=None, timeout=None, async_op=False
    ),
    "compressed": lambda g, x: g.all_reduce(x, "max", compress="float16"),
    "not compressed": lambda g, x: g.all_reduce(x, "max", compress=None),
    "with a time": lambda g, x: g.all_reduce(x, "max", timeout=30.0),
    "later": lambda g, x: g.all_reduce(x, "max", async_op=True).result(30),
    "with out": lambda g, x: g.all_reduce(x, "max", out=np.empty_like(x)),
    "with a name that was made": lambda g, x: g.all_reduce(x, **{"".join(["o", "p"]): "max"}),
    "unbound": lambda g, x: type(g).all_reduce(g, x, "max"),
    "bound before": lambda g, x: (lambda method: method(x, "max"))(g.all_reduce),
    "as a function": lambda g, x: collectives.all_reduce(x, "max", group=g),
    "as a function with all arguments": lambda g, x: collectives.all_reduce(
        x, op="max", group=g, out=None, compress=None, timeout=None, async_op=False
    ),
    "as a function with a time": lambda g, x: collectives.all_reduce(x, "max", group=g, timeout=30.0),
    "of a list": lambda g, x: g.all_reduce(x.tolist(), "max"),
}


@pytest.mark.parametrize("way", CALLS)
def test_arguments_in_all_ways(ranks, way):
    for result in ranks.all(lambda c: CALLS[way](c.world, np.array([1.0 + c.rank, 5.0 - c.rank]))):
        assert result.tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.all_reduce(),
        lambda g: g.all_reduce(np.zeros(2), "sum", None),
        lambda g: g.all_reduce(np.zeros(2), x=np.zeros(2)),
        lambda g: g.all_reduce(np.zeros(2), "sum", op="sum"),
        lambda g: g.all_reduce(np.zeros(2), axis=0),
        lambda g: g.reduce(np.zeros(2), compress=None),
        lambda g: g.barrier(1),
        lambda g: g.send(np.zeros(2)),
        lambda g: g.recv(src=1),
    ],
)
def test_wrong_arguments_are_the_errors_of_python(ranks, call):
    group = ranks.communicators[0].world

    class Slow(Group):
        pass

    for name in NATIVE:
        setattr(Slow, name, method(getattr(collectives, name).__wrapped__))
    slow = Slow.__new__(Slow)
    slow.__dict__.update(group.__dict__)
    with pytest.raises(TypeError) as expected:
        call(slow)
    with pytest.raises(TypeError) as caught:
        call(group)
    assert str(caught.value) == str(expected.value)


def test_results_that_the_contribution_is_part_of_take_the_fast_path(ranks):
    def left_to_python(*arguments, **named):
        raise AssertionError("the native core left the call to Python")

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        out = np.full((2, 3), rank)
        all_gather, reduce_scatter = (
            native.core().FastPath(name, left_to_python, process, World)
            for name in ("all_gather", "reduce_scatter")
        )
        all_gather(out[rank], out=out, group=group)
        reduce_scatter(out, out=out[rank], group=group)
        return out[rank].tolist()

    assert ranks.all(body) == [[0] * 3, [2] * 3]


def test_transfers_find_their_pipe(ranks):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        for number in range(5):
            if rank == 0:
                group.send(np.array([number]), 1)
                group.send(x=np.array([number]), dst=np.int64(1))
            else:
                assert group.recv(np.zeros(1, int), 0).tolist() == [number]
                assert group.recv(None, src=0, out=np.zeros(1, int)).tolist() == [number]
        return (group._generation.outgoing if rank == 0 else group._generation.incoming)[1 - rank] is not None

    assert ranks.all(body) == [True, True]


def test_only_some_functions_have_one():
    assert len(NATIVE) == 10
    with pytest.raises(ValueError, match="no fast path for scatter"):
        native.core().FastPath("scatter", collectives.scatter, process, World)
    with pytest.raises(ValueError, match="no fast path"):
        native.core().FastPath("barrier", None, process, World)
    assert Group.barrier.__wrapped__ is collectives.barrier.__wrapped__


def test_a_method_needs_a_group():
    with pytest.raises(TypeError):
        Group.barrier()


def test_a_function_needs_a_group_or_the_world():
    with pytest.raises(NotInitializedError):
        collectives.barrier()
    with pytest.raises(CollectiveTypeError, match=r"must be a dmesh\.collectives\.Group, got int"):
        collectives.barrier(group=3)
