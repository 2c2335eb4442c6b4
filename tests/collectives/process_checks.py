"""More operations that `process_worker` does in a process of its own, each in several ways."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import Any

import numpy as np

from dmesh.collectives import ANY_SOURCE, ANY_TAG, NULL_PEER, Op, Status, plan_all_reduce
from dmesh.collectives.group import Group


def equal(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def split(world: Group) -> None:
    """Splits into two groups, in the reverse order of ranks, and leaves one rank out."""
    rank, size = world.rank, world.size
    group = world.split(rank % 2 if rank < 4 else None, -rank)
    assert (group is None) == (rank == 4)
    if group is not None:
        expected = [at for at in reversed(range(min(size, 4))) if at % 2 == rank % 2]
        assert group.all_gather(np.full(3, rank))[:, 0].tolist() == expected


def prefixes(world: Group) -> None:
    """Scans short and long arrays, and folds by a function, a ufunc and with location."""
    rank, size = world.rank, world.size
    for count in (3, 100_003):
        arrays = [np.random.default_rng(at).integers(0, 9, count) for at in range(size)]
        sums = np.cumsum(arrays, axis=0)
        x = arrays[rank]
        assert (world.scan(x) == sums[rank]).all()
        later = [world.scan(x, async_op=True), world.exscan(x, out=np.empty_like(x), async_op=True)]
        equal(later[0].result(60), sums[rank])
        equal(later[1].result(60), sums[rank] - x)
        in_place = x.copy()
        assert world.exscan(in_place, out=in_place) is in_place
        equal(in_place, sums[rank] - x)
        assert (world.all_reduce(x, np.gcd, async_op=True).result(60) == np.gcd.reduce(arrays)).all()
        weighted = Op(lambda a, b: 2 * a + b, name="weighted")
        folded = arrays[0]
        for other in arrays[1:]:
            folded = 2 * folded + other
        assert (world.all_reduce(x, weighted) == folded).all()
        blocks = world.reduce_scatter(np.array([x + at for at in range(size)]), np.maximum)
        equal(blocks, np.max(arrays, axis=0) + rank)
        least = world.reduce(x, "min_location", size - 1)
        if rank == size - 1:
            assert (least["value"] == np.min(arrays, axis=0)).all()
            assert (least["rank"] == np.argmin(arrays, axis=0)).all()
        best = world.all_reduce(x, "max_location")
        assert (best["value"] == np.max(arrays, axis=0)).all()
        assert (best["rank"] == np.argmax(arrays, axis=0)).all()


def transfers(world: Group) -> None:
    """Sends to all ranks, with tags and without, then receives from any, also into a larger buffer."""
    rank, size = world.rank, world.size
    sent = [(tag, count) for tag in (0, 5, 0, 7) for count in (1, 30_000)]
    futures = [
        world.send(np.full(count, 10 * rank + at), target, tag=tag, async_op=True)
        for at, (tag, count) in enumerate(sent)
        for target in range(size)
    ]
    places, out = dict.fromkeys(range(size), 0), np.empty(40_000, int)
    for step in range(size * len(sent)):
        found = world.probe(ANY_SOURCE, tag=ANY_TAG)
        assert found.source is not None
        status = Status()
        into = out if step % 2 else None
        x = world.recv(None, found.source, tag=found.tag or 0, out=into, status=status)
        assert status == found
        at = places[found.source]
        places[found.source] += 1
        assert (found.tag, x.shape) == (sent[at][0], (sent[at][1],))
        assert (x == 10 * found.source + at).all()
    assert set(places.values()) == {len(sent)}
    assert world.iprobe(ANY_SOURCE, tag=ANY_TAG) is None
    world.barrier()  # before that, nobody sends more
    for future in futures:
        future.result(60)
    for tag in (0, 3):
        around = np.full(100_000, rank)
        got = world.sendrecv(around, (rank + 1) % size, None, (rank - 1) % size, sendtag=tag, recvtag=tag)
        equal(got, np.full(100_000, (rank - 1) % size))


def edges(world: Group) -> None:
    """Sends along a line, whose ends have a null peer, and to this rank itself."""
    rank, size = world.rank, world.size
    before = rank - 1 if rank else NULL_PEER
    after = rank + 1 if rank < size - 1 else NULL_PEER
    for count in (3, 30_000):
        out = np.full(count, -1)
        got = world.sendrecv(np.full(count, rank), after, None, before, out=out)
        assert got is out
        equal(out, np.full(count, rank - 1))
        for tag in (0, 4):
            world.send(out, rank, tag=tag)
            status = Status()
            equal(world.recv(None, ANY_SOURCE if tag else rank, tag=tag, status=status), out)
            assert status.source == rank


def others(world: Group) -> None:
    """Takes buffers as inputs and results, also of calls that are prepared."""
    rank, size = world.rank, world.size
    for count in (4, 40_000):
        x, total = np.arange(count, dtype="f8"), np.arange(count) * float(size)
        into = array("d", bytes(8 * count))
        assert world.all_reduce(memoryview(x), out=into) is into
        equal(np.asarray(into), total)
        everything = world.all_gather(array("d", x[: rank + 1]), counts="exchange", async_op=True).result(60)
        equal(everything, np.concatenate([x[: at + 1] for at in range(size)]))
        plan = plan_all_reduce(x, group=world)
        plan.input[...] = x
        for _ in range(3):
            equal(plan(x), total)
            plan.result[...] = 0
            equal(plan(async_op=True).result(60), total)


def counts(world: Group) -> None:
    """Moves and reduces blocks of different lengths along axis 0, of which some are empty."""
    rank, size, last = world.rank, world.size, world.size - 1
    for shape in ((2, 0), (3,), (3, 20_003)):
        for dtype in ("f4", "i8", "S3"):
            arrays = [np.random.default_rng(at).integers(0, 9, shape).astype(dtype) for at in range(size)]
            parts = [x[: at % 3] for at, x in enumerate(arrays)]
            lengths = [len(part) for part in parts]
            joined = np.concatenate(parts)
            equal(world.all_gather(parts[rank], counts="exchange"), joined)
            equal(world.all_gather(parts[rank], counts=lengths), joined)
            result = world.gather(parts[rank], last, counts=lengths, async_op=True).result(60)
            equal(result if rank == last else joined, joined)
            known = lengths if rank == last else "exchange"
            equal(world.scatter(joined, last, counts=known), parts[rank])
            table = [[source * target % 3 for target in range(size)] for source in range(size)]
            cuts = [[x[:n] for n in row] for x, row in zip(arrays, table, strict=True)]
            expected = np.concatenate([row[rank] for row in cuts])
            equal(world.all_to_all(np.concatenate(cuts[rank]), counts=table[rank]), expected)
            if dtype != "S3":
                total = joined * np.array(size, dtype)
                expected = np.split(total, np.cumsum(lengths)[:-1])[rank]
                equal(world.reduce_scatter(joined, counts=lengths), expected)
                later = world.reduce_scatter(joined, counts=lengths, async_op=True)
                equal(later.result(60), expected)
            out = np.zeros_like(joined)
            begin = sum(lengths[:rank])
            own = out[begin : begin + lengths[rank]]
            own[...] = parts[rank]
            equal(world.all_gather(own, counts=lengths, out=out), joined)
            rows = np.zeros((size, *shape), dtype)
            rows[rank] = arrays[rank]
            equal(world.all_gather(rows[rank], out=rows), np.stack(arrays))
            if dtype != "S3":
                equal(world.reduce_scatter(rows, out=rows[rank]), arrays[rank] * np.array(size, dtype))


def objects(world: Group) -> None:
    """Moves short objects and long ones, of other types and lengths on each rank."""
    rank, size, last = world.rank, world.size, world.size - 1
    for scale in (1, 10_000):
        values = [{"rank": at, "data": (np.arange(at * scale), "x" * at * scale)} for at in range(size)]
        found = [
            [world.broadcast_object(values[rank] if rank == last else None, last)],
            world.all_gather_object(values[rank], async_op=True).result(60),
            world.gather_object(values[rank], last) or values,
            [world.scatter_object(values if rank == last else None, last)],
            world.all_to_all_object([values[rank]] * size),
        ]
        expected = [[values[last]], values, values, [values[rank]], values]
        if size > 1:
            sent = world.send_object(values[rank], (rank + 1) % size, async_op=True)
            found.append([world.recv_object((rank - 1) % size)])
            expected.append([values[rank - 1]])
            sent.result(60)
            sent = world.send_object(values[rank], (rank + 1) % size, tag=5, async_op=True)
            assert world.probe(rank - 1 if rank else last, tag=5).source == (rank - 1) % size
            found.append([world.recv_object(ANY_SOURCE, tag=5, async_op=True).result(60)])
            expected.append([values[rank - 1]])
            sent.result(60)
        world.send_object(values[rank], rank)
        found.append([world.recv_object(rank)])
        expected.append([values[rank]])
        assert repr(found) == repr(expected)


CHECKS: dict[str, Any] = {
    "counts": counts, "edges": edges, "others": others, "prefixes": prefixes, "split": split,
    "transfers": transfers,
}  # fmt: skip
if find_spec("msgpack") is not None:
    CHECKS["objects"] = objects
