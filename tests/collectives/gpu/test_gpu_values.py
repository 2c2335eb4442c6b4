"""GPU arrays in, GPU arrays out: what NumPy arrays would give, whichever way the group agrees."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster
from tests.waiting import eventually

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WAYS = {
    "messages": (),
    "native": ("native",),
    "dedicated": ("dedicated",),
    "mixed": ("native", "no"),
}
NUMBERS = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", BFLOAT16]


def numbers(rank, shape, dtype="f4"):
    """Small whole numbers, so that every order of adding gives the same."""
    count = int(np.prod(shape))
    return ((np.arange(count) + rank) % 3 + 1).reshape(shape).astype(dtype)


def on_each(ranks, cupy, make, call):
    """Runs `call(group, array)` on every rank with its array on its own device; returns NumPy arrays."""

    def body(communicator):
        with cupy.cuda.Device(communicator.rank):
            result = call(communicator.world, cupy.asarray(make(communicator.rank)))
            if result is None:
                return None
            assert isinstance(result, cupy.ndarray)
            assert result.device.id == communicator.rank
            return result.get()

    return ranks.all(body)


def check(cupy, size, make, call, shm=()):
    """The same call with GPU arrays and with NumPy arrays gives the same."""
    with cluster(size, shm=shm) as ranks:
        expected = ranks.all(lambda c: call(c.world, make(c.rank)))
        for _ in range(2):  # the first one makes the communicator
            for found, wanted in zip(on_each(ranks, cupy, make, call), expected, strict=True):
                if wanted is None:
                    assert found is None
                    continue
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)


CALLS = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "reduce": lambda g, x: g.reduce(x, root=g.size - 1),
    "broadcast": lambda g, x: g.broadcast(x, g.size - 1),
    "all_gather": lambda g, x: g.all_gather(x),
    "all_gather axis 0": lambda g, x: g.all_gather(x, axis=0),
    "all_gather axis 1": lambda g, x: g.all_gather(x, axis=1),
    "all_gather axis -1": lambda g, x: g.all_gather(x, axis=-1),
    "reduce_scatter axis 0": lambda g, x: g.reduce_scatter(x, axis=0),
    "reduce_scatter axis 1": lambda g, x: g.reduce_scatter(x, axis=1),
    "all_to_all": lambda g, x: g.all_to_all(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_every_call(cupy, call, way):
    check(cupy, 3, lambda rank: numbers(rank, (6, 3, 2)), CALLS[call], WAYS[way])


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("call", CALLS)
def test_every_size(cupy, call, size):
    check(cupy, size, lambda rank: numbers(rank, (size * 2, size)), CALLS[call])


def test_reduce_scatter_by_rows(cupy):
    check(cupy, 3, lambda rank: numbers(rank, (3, 4)), lambda g, x: g.reduce_scatter(x, "max"))


@pytest.mark.parametrize("call", CALLS)
def test_empty_arrays_meet_without_nccl(cupy, nccl, call):
    check(cupy, 2, lambda rank: np.zeros((2, 4, 0), "f4"), CALLS[call])
    assert not nccl.log


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_reductions_of_numbers(cupy, op, dtype):
    check(cupy, 2, lambda rank: numbers(rank, (5,), dtype), lambda g, x: g.all_reduce(x, op))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", BFLOAT16, "c8", "c16"], ids=str)
def test_means(cupy, dtype):
    check(cupy, 2, lambda rank: numbers(rank, (5,), dtype) * 2, lambda g, x: g.all_reduce(x, "mean"))


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_numbers_are_added(cupy, dtype):
    def make(rank):
        return numbers(rank, (4, 3), dtype) + 1j * numbers(rank + 1, (4, 3))

    check(cupy, 2, lambda rank: make(rank).astype(dtype), lambda g, x: g.all_reduce(x))
    check(cupy, 2, lambda rank: make(rank).astype(dtype), lambda g, x: g.reduce_scatter(x, axis=0))


@pytest.mark.parametrize("dtype", ["?", "i4", "f4", "c8"])
@pytest.mark.parametrize("op", ["any", "all"])
def test_truth(cupy, op, dtype):
    check(cupy, 3, lambda rank: (np.arange(8) >> rank & 1).astype(dtype), lambda g, x: g.all_reduce(x, op))


@pytest.mark.parametrize("op", ["min", "max"])
def test_booleans(cupy, op):
    check(cupy, 3, lambda rank: (np.arange(8) >> rank & 1).astype("?"), lambda g, x: g.all_reduce(x, op))


@pytest.mark.parametrize("dtype", ["i2", "?", "c16", "f8", BFLOAT16], ids=str)
def test_movements_take_what_has_bytes(cupy, dtype):
    for call in ("broadcast", "all_gather", "all_to_all"):
        check(cupy, 2, lambda rank: numbers(rank, (4,), dtype), CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_arrays_that_are_not_contiguous(cupy, call):
    def strided(group, x):
        return CALLS[call](group, x.T)

    check(cupy, 2, lambda rank: numbers(rank, (2, 4)), strided)


def test_scalars(cupy):
    check(cupy, 3, lambda rank: np.array(rank, "f8"), lambda g, x: g.all_reduce(x))
    check(cupy, 3, lambda rank: np.array(rank, "f8"), lambda g, x: g.all_gather(x))


@pytest.mark.parametrize("way", WAYS)
def test_transfers(cupy, nccl, way):
    """Both directions, twice, with transfers of NumPy arrays in between."""
    with cluster(3, shm=WAYS[way]) as ranks:

        def body(communicator):
            group, me = communicator.world, communicator.rank
            with cupy.cuda.Device(me):
                mine = cupy.asarray(numbers(me, (2, 3)))
                for _ in range(2):
                    for sender, receiver in ((0, 2), (2, 0), (1, 2)):
                        if me == sender:
                            group.send(mine, receiver)
                            group.send(np.arange(3), receiver)
                        elif me == receiver:
                            found = group.recv(mine, sender).get()
                            assert (found == numbers(sender, (2, 3))).all()
                            assert (group.recv(np.zeros(3, int), sender) == [0, 1, 2]).all()
                    group.barrier()
                if me == 0:
                    group.send(mine, 1)
                elif me == 1:
                    out = cupy.empty((2, 3), "f4")
                    assert group.recv(None, 0, out=out) is out
                    assert (out.get() == numbers(0, (2, 3))).all()

        ranks.all(body)
    made = [rank for event, rank in nccl.log if event == "init"]
    assert sorted(made) == [0, 0, 0, 0, 1, 1, 1, 1], "one communicator for each direction of each pair"


@pytest.mark.parametrize("way", ["messages", "native"])
def test_numpy_and_gpu_arrays_take_turns(cupy, nccl, way):
    with cluster(3, shm=WAYS[way]) as ranks:

        def body(communicator):
            group, me = communicator.world, communicator.rank
            with cupy.cuda.Device(me):
                for step in range(5):
                    x = numbers(me + step, (3,))
                    assert (group.all_reduce(x) == group.all_reduce(cupy.asarray(x)).get()).all()
                    group.barrier()

        ranks.all(body)
    assert sorted(rank for event, rank in nccl.log if event == "init") == [0, 1, 2], "one communicator"


# -- out= ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_to_all"])
def test_in_place(cupy, call):
    with cluster(2) as ranks:
        expected = ranks.all(lambda c: CALLS[call](c.world, numbers(c.rank, (2, 3))))
        methods = {
            "all_reduce": lambda g, x: g.all_reduce(x, out=x),
            "broadcast": lambda g, x: g.broadcast(x, 1, out=x),
            "all_to_all": lambda g, x: g.all_to_all(x, out=x),
        }
        found = on_each(ranks, cupy, lambda rank: numbers(rank, (2, 3)), methods[call])
        np.testing.assert_array_equal(found, expected)


def test_out_of_a_gather_along_an_axis(cupy):
    with cluster(2) as ranks:

        def call(group, x):
            out = cupy.empty((2, 6), "f4")
            assert group.all_gather(x, axis=1, out=out) is out
            return out

        found = on_each(ranks, cupy, lambda rank: numbers(rank, (2, 3)), call)
        both = np.concatenate([numbers(0, (2, 3)), numbers(1, (2, 3))], axis=1)
        np.testing.assert_array_equal(found, [both, both])


# -- streams -------------------------------------------------------------------------------------------------


def test_the_input_is_what_the_current_stream_makes_of_it(cupy):
    """A collective waits for the work that the stream was given before, and not for the default stream."""
    with cluster(2) as ranks:
        gate = threading.Event()

        def body(communicator):
            with cupy.cuda.Device(communicator.rank), cupy.cuda.Stream(non_blocking=True) as stream:
                x = cupy.asarray(np.zeros(4, "f4"))
                stream.submit(lambda: gate.wait(LIMIT))
                x[...] = communicator.rank + 1.0
                future = communicator.world.all_reduce(x, async_op=True)
                assert not future.done()
                if communicator.rank == 1:
                    gate.set()
                # Complete for every stream: nothing need be waited for.
                return future.result(LIMIT)._host.copy()

        for found in ranks.all(body):
            np.testing.assert_array_equal(found, np.full(4, 3.0, "f4"))


def test_asynchronous_calls_are_carried_out_in_their_order(cupy):
    with cluster(3) as ranks:

        def body(communicator):
            group, me = communicator.world, communicator.rank
            with cupy.cuda.Device(me):
                futures = [
                    group.all_reduce(cupy.asarray(numbers(me + step, (4,))), async_op=True)
                    for step in range(5)
                ]
                last = group.all_reduce(cupy.asarray(numbers(me, (4,)))).get()  # waits for those before it
                assert all(future.done() for future in futures)
                return [*(future.result(0).get() for future in futures), last]

        for found in ranks.all(body):
            for step, values in enumerate([*range(5), 0]):
                np.testing.assert_array_equal(found[step], sum(numbers(r + values, (4,)) for r in range(3)))


def test_groups_go_on_by_themselves(cupy):
    """Two groups of the same ranks, whose calls are begun in different orders: neither blocks the other."""
    with cluster(2) as ranks:

        def body(communicator):
            one, two = communicator.new_group([0, 1], "one"), communicator.new_group([0, 1], "two")
            with cupy.cuda.Device(communicator.rank):
                x = cupy.asarray(numbers(communicator.rank, (4,)))
                order = (one, two) if communicator.rank == 0 else (two, one)
                futures = {group.name: group.all_reduce(x, async_op=True) for group in order}
                return [futures[name].result(LIMIT).get() for name in ("one", "two")]

        for found in ranks.all(body):
            np.testing.assert_array_equal(found, [numbers(0, (4,)) + numbers(1, (4,))] * 2)


def test_communicators_end_with_their_groups(cupy, nccl):
    with cluster(2) as ranks:

        def body(communicator):
            with cupy.cuda.Device(communicator.rank):
                group = communicator.new_group([0, 1])
                group.all_reduce(cupy.asarray(numbers(0, (4,))))

        ranks.all(body)
        eventually(lambda: [event for event, _ in nccl.log] == ["init", "init", "destroy", "destroy"], nccl)


def test_communicators_end_in_order_at_a_shutdown(cupy, nccl):
    with cluster(2) as ranks:
        on_each(ranks, cupy, lambda rank: numbers(rank, (4,)), CALLS["all_reduce"])
    eventually(lambda: sorted(nccl.log)[:2] == [("destroy", 0), ("destroy", 1)], "their end")
