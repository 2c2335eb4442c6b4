"""Collectives of objects: their encoding, and that each object ends where it should, as it was."""

from __future__ import annotations

import contextlib
import datetime
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.arrays import ALL_DTYPES, random_array
from tests.collectives.ranks import Cluster, cluster
from tests.collectives.test_values import SHAPES, values

from dmesh import collectives
from dmesh.errors import CollectiveMismatchError, CollectiveTypeError, CollectiveValueError, PeerLostError
from dmesh.testing import FakeCluster

pytest.importorskip("msgpack")

from dmesh.collectives.object_encoding import decode, encode
from dmesh.collectives.object_requests import HEAD

WAYS = {
    "messages": {},
    "native": {"shm": ("native",)},
    "mpi": {"shm": ("no",), "mpi": True},
    "dedicated": {"shm": ("dedicated",)},
}
KINDS = ["broadcast", "all_gather", "gather", "scatter", "all_to_all"]

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates() | st.times() | st.timedeltas()
    | st.datetimes(timezones=st.just(datetime.timezone(datetime.timedelta(hours=-3.5)))),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
arrays = st.builds(
    random_array,
    st.sampled_from([dtype for dtype in ALL_DTYPES if dtype != np.longdouble]),
    SHAPES,
    st.integers(0, 99),
)
objects = st.recursive(
    hashable | arrays | arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.sets(hashable, max_size=3)
    | st.dictionaries(hashable, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def equal(actual, expected) -> None:
    """Equal, and of the same types, all through."""
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            equal(*pair)
    elif isinstance(expected, dict):
        equal(list(actual.items()), list(expected.items()))
    else:
        assert actual == expected


@values
@given(objects)
def test_what_is_decoded_is_what_was_encoded(value):
    equal(decode(encode(value)), value)


def test_special_values():
    record = np.zeros(2, [("a", ml_dtypes.bfloat16), ("b", "f8", (2, 3))])
    aligned = np.zeros((), np.dtype([("a", "u1"), ("b", "f8")], align=True))
    swapped = np.arange(3, dtype=">i4")
    for value in (record, aligned, swapped, np.float64(1), np.str_("x"), 1 << 64, -(1 << 63) - 1, "\ud800"):
        equal(decode(encode(value)), value)
    assert np.isnan(decode(encode(float("nan"))))
    assert decode(encode(bytearray(b"ab"))) == b"ab"
    assert decode(encode(np.zeros((2, 3)).T[::2])).flags.c_contiguous
    deep = None
    for _ in range(400):
        deep = [deep]
    assert decode(encode(deep)) == deep


@values
@given(data=st.data(), value=objects)
def test_bytes_that_are_no_encoding_are_refused(data, value):
    """With one error, whatever they are, and without memory for what they only announce."""
    damaged = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    with contextlib.suppress(CollectiveValueError):
        decode(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000 + b"\xc0", b"\xc0\xc0", b"\x81\x90\x01", b"\xc7\x00\x63",
     b"\xc7\x0f\x05\x0b\0\0\0\x92\xa3<f8\x91\xce\x7f\xff\xff\xff",
     b"\xc7\x0a\x05\x06\0\0\0\x92\xa2|O\x91\x00",
     b"\xd6\xff\x00\x00\x00\x00"[:3],
     b"\xc7\x13\x05\x0f\0\0\0\x92\xa3|S0\x91\xcf\x40\0\0\0\0\0\0\0",
     b"\xc7\x0d\x05\x09\0\0\0\x92\xa5(2,i4\x91\0"],
    ids=range(11),
)  # fmt: skip
def test_announced_but_missing(data):
    with pytest.raises(CollectiveValueError, match="a received object cannot be decoded"):
        decode(data)


def test_what_cannot_be_encoded_is_refused():
    class Other(dict):
        pass

    deep: object = ()
    for _ in range(40):
        deep = (deep,)
    endless: list[object] = []
    endless.append(endless)
    zone = datetime.datetime.now(datetime.UTC).astimezone()
    for value in (object(), Other(), {1: Other()}, [np.array([None])], np.ma.array([1]), print, int):
        with pytest.raises(CollectiveTypeError, match="cannot be sent"):
            encode(value)
    for value in (deep, endless):
        with pytest.raises(CollectiveValueError, match="cannot be sent"):
            encode(value)
    assert decode(encode(zone)) == zone


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def clusters(request):
    with contextlib.ExitStack() as stack:
        made = {size: stack.enter_context(cluster(size, **request.param)) for size in range(1, 6)}
        for ranks in made.values():
            ranks.all(lambda communicator: communicator.world.barrier())
        yield made


# Of every length around that of a head, and of very different ones.
near = st.integers(HEAD - 16, HEAD + 2).map(bytes)
sized = objects | near | st.integers(0, 40_000).map(lambda n: {"n": n, "x": np.arange(n)})


@values
@given(size=st.integers(1, 5), root=st.integers(0, 4), later=st.booleans(), data=st.data())
def test_objects_arrive(clusters: dict[int, Cluster], size, root, later, data):
    root %= size
    one = data.draw(st.lists(sized, min_size=size, max_size=size))
    many = [[(source, target, one[source]) for target in range(size)] for source in range(size)]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        done = [
            group.broadcast_object(one[rank] if rank == root else None, root, async_op=later),
            group.all_gather_object(one[rank], async_op=later),
            group.gather_object(one[rank], root, async_op=later),
            group.scatter_object(many[rank] if rank == root else None, root, async_op=later),
            group.all_to_all_object(many[rank], async_op=later),
            group.all_reduce(1.0, async_op=later),
        ]
        if size > 1:
            sent = group.send_object(one[rank], (rank + 1) % size, async_op=True)
            done.append(group.recv_object((rank - 1) % size, async_op=later))
            array = group.send(np.arange(3), (rank + 1) % size, async_op=True)
            assert group.recv(np.arange(3), (rank - 1) % size).tolist() == [0, 1, 2]
            assert sent.result(60) is None
            array.result(60)
        return [future.result(60) for future in done] if later else done

    for rank, found in enumerate(clusters[size].all(body)):
        equal(found[0], one[root])
        equal(found[1], one)
        equal(found[2], one if rank == root else None)
        equal(found[3], many[root][rank])
        equal(found[4], [row[rank] for row in many])
        assert found[5] == size
        if size > 1:
            equal(found[6], one[rank - 1])


def test_the_root_keeps_its_object_and_the_others_get_copies():
    with cluster(2) as ranks:
        given_objects = [["a"], ["b"]]
        got = ranks.all(lambda c: c.world.broadcast_object(given_objects[c.rank]))
        assert got[0] is given_objects[0]
        assert got[1] == ["a"]
        assert got[1] is not given_objects[0]
        gathered = ranks.all(lambda c: c.world.all_gather_object(given_objects[c.rank]))
        assert gathered[0][0] is not given_objects[0]


def test_another_serializer():
    class Text:
        dumps, loads = staticmethod(str), staticmethod(lambda data: int(data) + 1)

    with cluster(3) as ranks:
        found = ranks.all(lambda c: c.world.all_gather_object({"a": c.rank}, serializer=json))
        assert found == [[{"a": 0}, {"a": 1}, {"a": 2}]] * 3
        assert ranks.all(lambda c: c.world.gather_object(c.rank, serializer=Text())) == [
            [1, 2, 3],
            None,
            None,
        ]
        pair = (lambda value: bytes([value]), lambda data: data[0] * 10)
        assert ranks.all(lambda c: c.world.broadcast_object(7, 1, serializer=pair)) == [70, 7, 70]

        def body(communicator):
            world = communicator.world
            for wrong in (object(), (len,), "json"):
                with pytest.raises(CollectiveTypeError, match="needs the functions dumps and loads"):
                    world.all_gather_object(1, serializer=wrong)
            with pytest.raises(CollectiveTypeError, match="must return bytes, not int"):
                world.all_gather_object(1, serializer=(lambda value: value, bytes))
            with pytest.raises(CollectiveTypeError, match="list or tuple of one object for each"):
                world.all_to_all_object({1, 2, 3})
            with pytest.raises(CollectiveValueError, match="of the group's 3 ranks, got 2"):
                world.all_to_all_object([1, 2])
            with pytest.raises(CollectiveValueError, match="root=3 of broadcast_object is not in the group"):
                world.broadcast_object(1, 3)
            with pytest.raises(CollectiveTypeError, match="of type object cannot be sent"):
                world.send_object(object(), (world.rank + 1) % 3)
            return world.all_reduce(1).item()

        assert ranks.all(body) == [3] * 3


def test_an_object_that_cannot_be_decoded_does_not_fail_the_group():
    with cluster(2) as ranks:

        def body(communicator):
            world = communicator.world
            with pytest.raises(ZeroDivisionError):
                world.all_gather_object(0, serializer=(lambda value: b"x", lambda data: 1 / 0))
            broken = world.all_gather_object(b"", serializer=(lambda value: value, decode), async_op=True)
            with pytest.raises(CollectiveValueError, match="cannot be decoded"):
                broken.result(60)
            return world.all_gather_object(world.rank)

        assert ranks.all(body) == [[0, 1]] * 2


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_call_something_else(way):
    calls = {
        "broadcast_object(root=1)": lambda g: g.broadcast_object(1, 1),
        "all_gather_object(serializer=json)": lambda g: g.all_gather_object(1, serializer=json),
        "all_gather(uint8, shape (512,))": lambda g: g.all_gather(np.zeros(512, np.uint8)),
    }
    for text, call in calls.items():
        with cluster(3, **WAYS[way]) as ranks:

            def body(communicator, call=call):
                communicator.world.barrier()
                if communicator.rank == 1:
                    return call(communicator.world)
                return communicator.world.all_gather_object(1)

            for error in ranks.run(body):
                assert isinstance(error, CollectiveMismatchError)
                assert text in str(error)
                assert "all_gather_object()" in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_of_an_array_and_an_object(way):
    with cluster(2, **WAYS[way]) as ranks:

        def body(communicator):
            communicator.world.barrier()
            if communicator.rank:
                return communicator.world.recv(np.zeros(HEAD, np.uint8), 0)
            communicator.world.send_object("x", 1)
            return communicator.world.barrier()

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError)
            assert "send([('object', 'u1')], shape (2,))" in str(error)
            assert "recv(uint8, shape (512,))" in str(error)


@pytest.mark.parametrize("kind", [*KINDS, "send"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_is_an_error_on_all_others(way, kind):
    with cluster(3, **WAYS[way]) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier())

        def body(communicator):
            world, value = communicator.world, bytes(100_000)
            if world.rank == 1:
                return ranks.network.kill(1)
            if kind == "send":
                return world.recv_object(1) if world.rank else world.send_object(value, 1)
            each = [value] * 3 if kind in ("scatter", "all_to_all") else value
            return getattr(world, f"{kind}_object")(each)

        for rank, error in enumerate(ranks.run(body)):
            assert rank == 1 or (isinstance(error, PeerLostError) and error.rank == 1), error


@pytest.mark.parametrize("way", WAYS)
def test_tags_and_sources(way):
    """As with arrays: any source, tags, this rank itself, the edge; and an array is no object."""
    with cluster(3, **WAYS[way]) as ranks:

        def body(communicator):
            world, rank = communicator.world, communicator.rank
            long = bytes(100_000)
            own = world.send_object({rank}, rank)
            assert own is None
            assert world.recv_object(rank) == {rank}
            assert world.send_object(1, collectives.NULL_PEER) is None
            assert world.recv_object(collectives.NULL_PEER) is None
            if rank:
                sent = world.send_object([rank, long], 0, tag=7, async_op=True)
                world.send_object(rank, 0, tag=8)
                world.send(np.arange(3), 0, tag=9)
                sent.result(60)
                return
            latest = [world.recv_object(source, tag=8) for source in (1, 2)]
            assert latest == [1, 2]
            found = {}
            for _ in range(2):
                status = collectives.Status()
                value = world.recv_object(collectives.ANY_SOURCE, tag=7, status=status)
                found[status.source] = value
                assert status.tag == 7
            assert found == {1: [1, long], 2: [2, long]}
            with pytest.raises(CollectiveTypeError, match=r"recv_object got an array of int64, shape \(3,\)"):
                world.recv_object(1, tag=9)
            assert world.recv(None, 2, tag=9).tolist() == [0, 1, 2]

        ranks.all(body)


def test_the_functions():
    def program():
        rank = collectives.world().rank
        if rank:
            collectives.send_object((rank, {"x"}), 0)
            return collectives.scatter_object()
        received = [collectives.recv_object(source) for source in (1, 2)]
        return received, collectives.scatter_object(["a", "b", "c"])

    with FakeCluster(3) as ranks:
        assert ranks.run(program) == [([(1, {"x"}), (2, {"x"})], "a"), "b", "c"]
