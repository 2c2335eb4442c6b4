"""Bad arguments are refused before anything is sent: the group goes on as if nothing had been called."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh.collectives import ANY_SOURCE, ANY_TAG
from dmesh.collectives.request import OPS
from dmesh.errors import CollectiveTypeError, CollectiveValueError

X = np.zeros((3, 4), np.float32)
READ_ONLY = np.zeros((3, 4), np.float32)
READ_ONLY.flags.writeable = False
STRUCTURE = np.zeros(2, [("a", "i4")])
STRINGS = np.array(["a", "b"])


BAD_VALUES = {
    "unknown op": (
        lambda g: g.all_reduce(X, "average"),
        "unknown reduction 'average'; it must be one of sum, prod",
    ),
    "op of another type": (lambda g: g.all_reduce(X, 7), "unknown reduction 7"),
    "root too large": (
        lambda g: g.broadcast(X, 3),
        "root=3 of broadcast is not in the group: its 3 ranks have the pos",
    ),
    "negative root": (lambda g: g.reduce(X, root=-1), "root=-1 of reduce is not in the group"),
    "fractional root": (lambda g: g.gather(X, 1.0), "root of gather must be an integer, got 1.0"),
    "boolean root": (lambda g: g.gather(X, True), "root of gather must be an integer, got True"),
    "dst out of range": (lambda g: g.send(X, 7), "dst=7 of send is not in the group"),
    "recv into another shape": (
        lambda g: g.recv(X, (g.rank + 1) % 3, tag=1, out=np.zeros(99, X.dtype)),
        "out= of recv has shape (99,)",
    ),
    "negative tag": (lambda g: g.send(X, (g.rank + 1) % 3, tag=-1), "tag=-1 of send is not within 0 to"),
    "any tag of a send": (lambda g: g.send(X, 0, tag=ANY_TAG), "tag of send must be an integer, got ANY_TAG"),
    "any source of a send": (
        lambda g: g.send(X, ANY_SOURCE),
        "dst of send must be an integer, got ANY_SOURCE",
    ),
    "scatter of what": (
        lambda g: g.scatter(None, (g.rank + 1) % 3),
        "scatter needs to know what to receive",
    ),
    "scatter of nothing": (lambda g: g.scatter(None, g.rank), "the root of scatter must pass the array"),
    "scatter of too many rows": (
        lambda g: g.scatter(np.zeros((4, 2)), g.rank),
        "scatter needs an array with one row for each of the group's 3 ranks along axis 0, got shape (4, 2)",
    ),
    "reduce_scatter of too few": (
        lambda g: g.reduce_scatter(np.zeros(2)),
        "one row for each of the group's 3 ranks",
    ),
    "reduce_scatter of a scalar": (lambda g: g.reduce_scatter(1.0), "got shape ()"),
    "indivisible": (
        lambda g: g.reduce_scatter(X, axis=1),
        "reduce_scatter divides axis 1 among the group's 3 ranks, but its length 4 (shape (3, 4))",
    ),
    "all_to_all indivisible": (lambda g: g.all_to_all(np.zeros(4)), "all_to_all divides axis 0"),
    "all_to_all of a scalar": (lambda g: g.all_to_all(1.0), "axis=0 of all_to_all is out of range"),
    "axis out of range": (
        lambda g: g.all_gather(X, axis=2),
        "axis=2 of all_gather is out of range for an array of 2",
    ),
    "axis of a scalar": (lambda g: g.all_gather(1, axis=0), "axis=0 of all_gather is out of range"),
    "fractional axis": (lambda g: g.all_gather(X, axis=0.5), "axis of all_gather must be an integer or None"),
    "no pairs": (lambda g: g.permute(X, [0, 1]), "permute needs a list of (source, target) pairs"),
    "pairs out of range": (lambda g: g.permute(X, [(0, 3)]), "target=3 of permute is not in the group"),
    "source twice": (
        lambda g: g.permute(X, [(0, 1), (0, 2)]),
        "permute got position 0 more than once as a source",
    ),
    "target twice": (
        lambda g: g.permute(X, [(0, 1), (2, 1)]),
        "permute got position 1 more than once as a target",
    ),
    "ragged list": (lambda g: g.all_reduce([[1, 2], [3]]), "all_reduce needs an array, got list: "),
    "masked array": (
        lambda g: g.all_reduce(np.ma.masked_array([1, 2], [0, 1])),
        "all_reduce cannot take a masked array",
    ),
    "out of another shape": (
        lambda g: g.all_reduce(X, out=X.T.copy()),
        "shape (4, 3), but the result's is (3, 4)",
    ),
    "out of the input's shape": (lambda g: g.all_gather(X, out=X.copy()), "but the result's is (3, 3, 4)"),
    "out read-only": (lambda g: g.all_reduce(X, out=READ_ONLY), "out= of all_reduce is read-only"),
    "out where there is no result": (
        lambda g: g.gather(X, (g.rank + 1) % 3, out=np.zeros((3, 3, 4), "f4")),
        "out= of gather is for the root (position",
    ),
    "no time": (lambda g: g.barrier(timeout=0), "timeout must be more than 0 seconds, got 0"),
    "negative time": (lambda g: g.barrier(timeout=-1.5), "timeout must be more than 0 seconds, got -1.5"),
    "not a time": (lambda g: g.barrier(timeout="1"), "timeout must be a number of seconds, got '1'"),
    "not a number": (
        lambda g: g.barrier(timeout=float("nan")),
        "timeout must be more than 0 seconds, got nan",
    ),
    "group of strangers": (
        lambda g: g.communicator.new_group([0, 5]),
        "rank=5 of new_group is not in the group",
    ),
    "group of others": (
        lambda g: g.communicator.new_group([(g.rank + 1) % 3]),
        "new_group can only be called by its members: this client, rank",
    ),
    "group with twins": (
        lambda g: g.communicator.new_group([0, 1, 2, 1]),
        "a rank more than once: [0, 1, 2, 1]",
    ),
    "group of a number": (lambda g: g.communicator.new_group(3), "new_group needs a list of ranks, got 3"),
    "group with a strange name": (
        lambda g: g.communicator.new_group([0, 1, 2], 7),
        "must be a string, got 7",
    ),
}

BAD_TYPES = {
    "recv into a list": (lambda g: g.recv(None, 0, out=[1]), "out= of recv must be a NumPy array"),
    "recv into references": (
        lambda g: g.recv(None, 0, out=np.zeros(2, object)),
        "recv cannot receive into an array of dtype object",
    ),
    "objects": (lambda g: g.broadcast(np.array([1, None])), "broadcast cannot move arrays of dtype object"),
    "objects in a structure": (
        lambda g: g.send(np.zeros(2, [("a", "O")]), 0 if g.rank else 1),
        "never pickles",
    ),
    "text of any length": (lambda g: g.all_gather(np.array(["a"], np.dtypes.StringDType())), "StringDType"),
    "out of another dtype": (
        lambda g: g.all_reduce(X, out=np.zeros((3, 4))),
        "out= of all_reduce has dtype float64, but the result is float32",
    ),
    "out of another byte order": (lambda g: g.all_reduce(X, out=np.zeros((3, 4), ">f4")), "has dtype >f4"),
    "out for a sum of booleans": (
        lambda g: g.all_reduce(np.zeros(2, bool), out=np.zeros(2, bool)),
        "has dtype bool, but the result is int64",
    ),
    "out that is no array": (
        lambda g: g.all_reduce(X, out=[0]),
        "out= of all_reduce must be a NumPy array, not list",
    ),
    "bits of floats": (
        lambda g: g.all_reduce(X, "bitwise_or"),
        "'bitwise_or' has no meaning for arrays of dtype float32",
    ),
    "bits of short floats": (
        lambda g: g.all_reduce(X.astype(ml_dtypes.bfloat16), "bxor"),
        "'bitwise_xor' has no meaning",
    ),
    "sum of text": (lambda g: g.all_reduce(STRINGS), "'sum' has no meaning for arrays of dtype <U1"),
    "minimum of structures": (lambda g: g.reduce(STRUCTURE, "min"), "'min' has no meaning"),
    "sum of dates": (
        lambda g: g.all_reduce(np.zeros(2, "M8[D]")),
        "'sum' has no meaning for arrays of dtype datetime64[D]",
    ),
    "product of durations": (lambda g: g.all_reduce(np.zeros(2, "m8[s]"), "prod"), "'prod' has no meaning"),
}


@pytest.mark.parametrize(("case", "kind"), [(c, CollectiveValueError) for c in BAD_VALUES.values()]
                         + [(c, CollectiveTypeError) for c in BAD_TYPES.values()],
                         ids=[*BAD_VALUES, *BAD_TYPES])  # fmt: skip
def test_refused_before_anything_is_sent(case, kind):
    call, message = case
    with cluster(3) as ranks:
        sent = []
        for communicator in ranks.communicators:
            control = communicator.transport.control
            communicator.transport.control = lambda *a, control=control: (sent.append(a), control(*a))
        errors = ranks.run(lambda communicator: call(communicator.world))
        for error in errors:
            assert type(error) is kind, error
            assert message in str(error)
        assert not sent
        assert all(not communicator.events.records() for communicator in ranks.communicators)
        assert [total.item() for total in ranks.all(lambda c: c.world.all_reduce(1))] == [3, 3, 3]


def test_what_out_may_be():
    """Any memory of the same shape and dtype."""
    with cluster(2) as ranks:

        def body(communicator):
            group, memory = communicator.world, np.zeros((4, 6))
            memory[:, ::2] = communicator.rank + 1
            interleaved = group.all_reduce(memory[:, ::2], out=memory[:, 1::2])
            fortran = np.zeros((4, 3), order="F")
            assert group.all_reduce(memory[:, ::2], out=fortran) is fortran
            flipped = np.ones(4)
            group.all_reduce(flipped[::-1], out=flipped[::-1])
            return interleaved.tolist(), fortran.tolist(), flipped.tolist()

        for result in ranks.all(body):
            assert result == ([[3.0] * 3] * 4, [[3.0] * 3] * 4, [2.0] * 4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "i1",
        "u8",
        "f2",
        "f8",
        "c16",
        "m8[s]",
        "M8[s]",
        "U3",
        "S3",
        "V3",
        ml_dtypes.bfloat16,
        ml_dtypes.int4,
    ],
)
def test_every_combination_has_a_result_or_a_reason(op, dtype):
    with cluster(1) as ranks:
        world = ranks.communicators[0].world
        x = np.ones(2, dtype) if dtype not in ("U3", "S3", "V3", "M8[s]") else np.zeros(2, dtype)
        try:
            assert world.all_reduce(x, op).shape == (2,)
        except CollectiveTypeError:
            with pytest.raises(CollectiveTypeError, match=f"'{op}' has no meaning for arrays of dtype"):
                world.all_reduce(x, op)
