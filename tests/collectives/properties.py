"""A property of each public function: with any arguments, it gives what NumPy alone gives.

A case is drawn by a test, and given to all ranks of a group, threads or processes, each of which makes its
part of the call and checks its own result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.collectives.arrays import ALL_DTYPES, in_form, random_array, reduced, same

import dmesh.collectives as dc
from dmesh.collectives import ANY_SOURCE, ANY_TAG, NULL_PEER, Op, Status
from dmesh.collectives.group import Group
from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.errors import CollectiveError

LIMIT = 60
DTYPES = {dtype.name if dtype.names is None else "record": dtype for dtype in ALL_DTYPES}
WEIGHTED = Op(lambda first, second: 2 * first + second, name="weighted", elementwise=True)
OWN_OPS: dict[str, Any] = {"ufunc": np.hypot, "function": WEIGHTED}
OPS_WITHOUT_IDENTITY = ("min", "max", "mean", "function", "min_location", "max_location")
FOREIGN = ("dlpack", "memoryview")


class Tensor:
    """Exports its memory by DLPack alone."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@dataclass(frozen=True)
class Case:
    """Arguments of a call, those of all ranks."""

    call: str
    dtype: str
    lengths: tuple[int, ...]
    """Of each rank's block, where lengths may differ."""
    wide: bool
    """Whether arrays have two dimensions."""
    op: str
    root: int
    form: str
    """Of the input in memory: one of `FORMS` or `FOREIGN`."""
    place: str
    """Of the result: `new`, `out` or `in place`."""
    later: bool
    """Whether the call is asynchronous."""
    known: bool
    """Whether a rank names lengths, sources and tags that it could also leave open."""
    edge: bool
    """Whether the root sends to nobody."""
    tag: int
    seed: int


class Rank:
    """One rank's part in a case."""

    def __init__(self, group: Group, case: Case) -> None:
        self.group, self.case = group, case
        self.size, self.rank = group.size, group.rank
        self.root = case.root % self.size
        self.dtype = DTYPES[case.dtype]
        self.op = OWN_OPS.get(case.op, case.op)
        self.counts = list(case.lengths[: self.size])
        self.columns = (2,) if case.wide else ()

    def arrays(self, lengths: Iterable[int] | None = None) -> list[np.ndarray]:
        """Returns an array for each rank, of these lengths, or of the first rank's."""
        lengths = self.counts[:1] * self.size if lengths is None else lengths
        seed = self.case.seed * 10
        return [
            random_array(self.dtype, (length, *self.columns), seed + number)
            for number, length in enumerate(lengths)
        ]

    def given(self, x: np.ndarray) -> Any:
        """Returns the array in the form of the case, if it can have it."""
        if self.case.form in FOREIGN and x.dtype.kind in "iuf" and x.dtype.char in np.typecodes["All"]:
            own = x.copy()
            return memoryview(own) if self.case.form == "memoryview" or x.dtype.char == "g" else Tensor(own)
        return in_form(x, self.case.form)

    def wait(self, found: Any) -> Any:
        """Returns the result of a call."""
        return found.wait(LIMIT) if self.case.later else found

    def check(
        self, name: str, x: np.ndarray, *arguments: Any, expected: np.ndarray | None,
        own: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        """Makes a call, in place if `own` returns input and result for that, and looks at its result."""
        out, given = None, self.given(x)
        if expected is not None and self.case.place == "out":
            out = np.zeros(expected.shape, expected.dtype)
        elif expected is not None and own and self.case.place == "in place" and x.dtype == expected.dtype:
            given, out = own(x)
        function = getattr(dc, name)
        result = self.wait(
            function(given, *arguments, out=out, group=self.group, async_op=self.case.later, **named)
        )
        assert out is None or result is out
        if expected is None:
            assert result is None, result
        else:
            same(result, expected)

    def folded(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns what the operation makes of arrays."""
        if not self.case.op.endswith("_location"):
            if self.case.op in OWN_OPS:
                return functools.reduce(getattr(self.op, "function", self.op), arrays)
            return reduced(arrays, self.case.op)
        stacked = np.stack(arrays)
        best = getattr(np, f"arg{self.case.op[:3]}")(stacked, axis=0)
        found = np.zeros(best.shape, [("value", self.dtype), ("rank", "i8")])
        found["value"] = np.take_along_axis(stacked, best[np.newaxis], 0)[0]
        found["rank"] = best
        return found


def copied(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns one array as input and result."""
    own = x.copy()
    return own, own


# -- reductions ----------------------------------------------------------------------------------------------


def all_reduce(r: Rank) -> None:
    arrays = r.arrays()
    r.check("all_reduce", arrays[r.rank], r.op, expected=r.folded(arrays), own=copied)


def reduce(r: Rank) -> None:
    arrays = r.arrays()
    expected = r.folded(arrays) if r.rank == r.root else None
    r.check("reduce", arrays[r.rank], r.op, r.root, expected=expected, own=copied)


def scan(r: Rank) -> None:
    arrays = r.arrays()
    r.check("scan", arrays[r.rank], r.op, expected=r.folded(arrays[: r.rank + 1]), own=copied)


def exscan(r: Rank) -> None:
    arrays = r.arrays()
    expected = r.folded(arrays[: r.rank]) if r.rank else None
    if not r.rank and r.case.op not in OPS_WITHOUT_IDENTITY:
        identity = {"prod": 1, "all": 1, "bitwise_and": -1}.get(r.case.op, 0)
        total = r.folded(arrays[:1])
        expected = np.full(total.shape, identity).astype(total.dtype)
    r.check("exscan", arrays[r.rank], r.op, expected=expected, own=copied)


def reduce_scatter(r: Rank) -> None:
    begin, end = sum(r.counts[: r.rank]), sum(r.counts[: r.rank + 1])

    def own(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        memory = x.copy()
        return memory, memory[begin:end]

    arrays = r.arrays([sum(r.counts)] * r.size)
    r.check(
        "reduce_scatter", arrays[r.rank], r.op, counts=r.counts, expected=r.folded(arrays)[begin:end], own=own
    )


def all_reduce_many(r: Rank) -> None:
    many = [r.arrays([length] * r.size) for length in r.counts]
    found = dc.all_reduce_many(
        [arrays[r.rank] for arrays in many], r.op, group=r.group, bucket_bytes=64, async_op=r.case.later
    )
    for result, arrays in zip(r.wait(found), many, strict=True):
        same(result, r.folded(arrays))


# -- movements -----------------------------------------------------------------------------------------------


def broadcast(r: Rank) -> None:
    arrays = r.arrays()
    r.check("broadcast", arrays[r.rank], r.root, expected=arrays[r.root], own=copied)


def gathers(r: Rank, name: str, *root: int) -> None:
    arrays, joined = r.arrays(r.counts), np.concatenate(r.arrays(r.counts))

    def own(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        memory = np.zeros_like(joined)
        begin = sum(r.counts[: r.rank])
        memory[begin : begin + len(x)] = x
        return memory[begin : begin + len(x)], memory

    expected = None if root and r.rank != r.root else joined
    counts = r.counts if r.case.known else "exchange"
    r.check(name, arrays[r.rank], *root, counts=counts, expected=expected, own=own)


def all_gather(r: Rank) -> None:
    gathers(r, "all_gather")


def gather(r: Rank) -> None:
    gathers(r, "gather", r.root)


def scatter(r: Rank) -> None:
    (whole,) = r.arrays([sum(r.counts)])
    begin, end = sum(r.counts[: r.rank]), sum(r.counts[: r.rank + 1])

    def own(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        memory = x.copy()
        return memory, memory[begin:end] if r.rank == r.root else memory

    counts = r.counts if r.case.known or r.rank == r.root else "exchange"
    x = whole if r.rank == r.root else np.zeros_like(whole[begin:end])
    r.check("scatter", x, r.root, counts=counts, expected=whole[begin:end], own=own)


def all_to_all(r: Rank) -> None:
    table = [
        [r.counts[(source + 2 * target) % r.size] for target in range(r.size)] for source in range(r.size)
    ]
    arrays = r.arrays(map(sum, table))
    blocks = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(arrays, table, strict=True)]
    taken = [row[r.rank] for row in table]
    expected = np.concatenate([row[r.rank] for row in blocks])
    counts = {"counts": table[r.rank], "recv_counts": taken if r.case.known else None}
    equal = table[r.rank] == taken
    r.check("all_to_all", arrays[r.rank], expected=expected, own=copied if equal else None, **counts)


def permute(r: Rank) -> None:
    arrays, shift = r.arrays(), r.case.seed
    pairs = [(at, (at + shift) % r.size) for at in range(r.size) if not (r.case.edge and at == r.root)]
    source = (r.rank - shift) % r.size
    nothing = np.zeros_like(arrays[r.rank])
    expected = nothing if r.case.edge and source == r.root else arrays[source]
    r.check("permute", arrays[r.rank], pairs, expected=expected, own=copied)


def barrier(r: Rank) -> None:
    r.wait(dc.barrier(group=r.group, async_op=r.case.later))


# -- objects -------------------------------------------------------------------------------------------------


def values(r: Rank) -> list[Any]:
    """Returns an object for each rank."""
    return [
        {
            "of": at,
            "list": [None, 1.5, b"\0" * length, "\u00fc" * length],
            "array": np.arange(length, dtype="i4"),
        }
        for at, length in enumerate(r.counts)
    ]


def alike(r: Rank, found: Any, expected: Any) -> None:
    assert repr(r.wait(found)) == repr(expected)


def broadcast_object(r: Rank) -> None:
    mine = values(r)[r.rank] if r.rank == r.root else None
    alike(r, r.group.broadcast_object(mine, r.root, async_op=r.case.later), values(r)[r.root])


def all_gather_object(r: Rank) -> None:
    alike(r, r.group.all_gather_object(values(r)[r.rank], async_op=r.case.later), values(r))


def gather_object(r: Rank) -> None:
    expected = values(r) if r.rank == r.root else None
    alike(r, r.group.gather_object(values(r)[r.rank], r.root, async_op=r.case.later), expected)


def scatter_object(r: Rank) -> None:
    mine = values(r) if r.rank == r.root else None
    alike(r, r.group.scatter_object(mine, r.root, async_op=r.case.later), values(r)[r.rank])


def all_to_all_object(r: Rank) -> None:
    mine = [(r.rank, value) for value in values(r)]
    expected = [(source, values(r)[r.rank]) for source in range(r.size)]
    alike(r, r.group.all_to_all_object(mine, async_op=r.case.later), expected)


def objects_in_a_ring(r: Rank) -> None:
    dst, src = (r.rank + r.case.seed) % r.size, (r.rank - r.case.seed) % r.size
    sent = r.group.send_object(values(r)[r.rank], dst, tag=r.case.tag, async_op=True)
    place = src if r.case.known else ANY_SOURCE
    alike(r, r.group.recv_object(place, tag=r.case.tag, async_op=r.case.later), values(r)[src])
    sent.wait(LIMIT)
    r.group.barrier()


# -- transfers -----------------------------------------------------------------------------------------------


class Ring:
    """Each rank sends to one, perhaps itself, and receives from one; or the root to nobody."""

    def __init__(self, r: Rank) -> None:
        self.r, case = r, r.case
        arrays, shift = r.arrays(r.counts), case.seed
        source = (r.rank - shift) % r.size
        self.x, self.wanted = arrays[r.rank], arrays[source]
        self.dst: Any = NULL_PEER if case.edge and r.rank == r.root else (r.rank + shift) % r.size
        self.src: Any = NULL_PEER if case.edge and source == r.root else source
        self.place = self.src if case.known or self.src is NULL_PEER else ANY_SOURCE
        self.tag: Any = case.tag if case.known else ANY_TAG
        self.status = Status()

    def send(self) -> Any:
        """Sends: so that it does not wait for the receiver, or asynchronously."""
        r = self.r
        waits = self.x.nbytes > SEND_BUFFER and self.dst != r.rank
        later = r.case.later or waits
        sent = r.group.send(r.given(self.x), self.dst, tag=r.case.tag, async_op=later)
        return sent if later else None

    def room(self) -> tuple[Any, Any]:
        """Returns template and `out` for a receive."""
        if self.src is NULL_PEER or self.r.case.place == "new":
            return None, None
        if self.r.case.place == "out":  # larger than what comes
            return None, np.zeros(self.wanted.size + 3, self.wanted.dtype)
        return np.empty_like(self.wanted), None

    def came(self, got: Any, sent: Any = None) -> None:
        """Looks at what has come, and lets nobody send more before all have it."""
        if self.src is NULL_PEER:
            assert got is None
        else:
            same(got, self.wanted)
        if sent is not None:
            sent.wait(LIMIT)
        self.r.group.barrier()

    def is_described(self, status: Status) -> None:
        """Looks at what a probe or a receive says of it."""
        if self.src is NULL_PEER:
            assert status == Status()
        else:
            assert (status.source, status.tag) == (self.src, self.r.case.tag)
            assert (status.dtype, status.shape) == (self.wanted.dtype, self.wanted.shape)


def transfers(r: Rank) -> None:
    ring = Ring(r)
    sent, (like, out) = ring.send(), ring.room()
    got = r.wait(
        r.group.recv(like, ring.place, tag=ring.tag, status=ring.status, out=out, async_op=r.case.later)
    )
    ring.is_described(ring.status)
    ring.came(got, sent)


def isends(r: Rank) -> None:
    ring = Ring(r)
    out = np.empty_like(ring.wanted) if r.case.place == "out" and ring.src is not NULL_PEER else None
    coming = r.group.irecv(out, ring.place, tag=ring.tag)
    sent = r.group.isend(r.given(ring.x), ring.dst, tag=r.case.tag)
    got = coming.wait(LIMIT)
    assert out is None or got is out
    ring.came(got, sent)


def sendrecv(r: Rank) -> None:
    ring = Ring(r)
    like, out = ring.room()
    got = r.group.sendrecv(
        r.given(ring.x), ring.dst, like, ring.place, sendtag=r.case.tag, recvtag=ring.tag, out=out,
        async_op=r.case.later,
    )  # fmt: skip
    ring.came(r.wait(got))


def probes(r: Rank, look: Callable[..., Status | None]) -> None:
    ring = Ring(r)
    sent = ring.send()
    while (found := look(ring.place, tag=ring.tag)) is None:
        pass
    ring.is_described(found)
    got = None
    if ring.src is not NULL_PEER:
        assert found.source is not None
        got = r.group.recv(None, found.source, tag=found.tag or 0)
    ring.came(got, sent)


# -- groups and plans ----------------------------------------------------------------------------------------


def split(r: Rank) -> None:
    colors = [None if count == 0 else count % 2 for count in r.counts]
    keys = [(r.case.seed * (at + 1)) % 3 for at in range(r.size)]
    group = r.group.split(colors[r.rank], keys[r.rank])
    if colors[r.rank] is None:
        assert group is None
        return
    alike_ranks = [at for at in range(r.size) if colors[at] == colors[r.rank]]
    expected = sorted(alike_ranks, key=lambda at: (keys[at], at))
    assert group is not None
    assert group.all_gather(np.array(r.rank)).tolist() == expected


def reset(r: Rank) -> None:
    if r.size > 1:
        try:
            r.wait(r.group.all_reduce(np.ones(1 + r.rank + r.counts[0]), async_op=r.case.later))
        except CollectiveError:
            pass
        else:
            raise AssertionError("a mismatch was not found")
    r.group.reset(LIMIT)
    all_reduce(r)


def agree(r: Rank) -> None:
    flags: list[Any] = (
        [count > 0 for count in r.counts] if r.case.wide else [count - 400 for count in r.counts]
    )
    found = r.group.agree(flags[r.rank], LIMIT)
    assert found == functools.reduce(lambda first, second: first & second, flags)
    assert (type(found), r.group.missing) == (type(flags[0]), ())


def shrink(r: Rank) -> None:
    whole = r.group.split(0)
    assert whole is not None
    left = whole.shrink(LIMIT)
    assert left.ranks == r.group.ranks
    all_gather(Rank(left, r.case))


def plan(r: Rank) -> None:
    name = ("all_reduce", "scan", "broadcast", "all_gather", "all_to_all", "permute")[r.case.seed % 6]
    arrays = r.arrays([r.size * r.counts[0]] * r.size)
    named: dict[str, Any] = {"permute": {"pairs": [(at, (at + 1) % r.size) for at in range(r.size)]}}.get(
        name, {}
    )
    expected = {
        "all_reduce": lambda: r.folded(arrays),
        "scan": lambda: r.folded(arrays[: r.rank + 1]),
        "broadcast": lambda: arrays[0],
        "all_gather": lambda: np.stack(arrays),
        "all_to_all": lambda: np.concatenate([np.split(x, r.size)[r.rank] for x in arrays]),
        "permute": lambda: arrays[r.rank - 1],
    }[name]()
    if name in ("all_reduce", "scan"):
        named["op"] = r.op
    memory = r.arrays([r.size * r.counts[0]])[0]
    made = dc.plan(getattr(dc, name), memory, group=r.group, **named)
    memory[...] = arrays[r.rank]
    for _ in range(3):
        same(r.wait(made(async_op=r.case.later)), expected)
    same(made(arrays[r.rank].copy()), expected)


def plan_all_reduce(r: Rank) -> None:
    arrays = r.arrays()
    made = dc.plan_all_reduce(arrays[0], r.op, group=r.group)
    for _ in range(3):
        same(r.wait(made(arrays[r.rank], async_op=r.case.later)), r.folded(arrays))


def plan_all_reduce_many(r: Rank) -> None:
    many = [r.arrays([length] * r.size) for length in r.counts]
    mine = [arrays[r.rank] for arrays in many]
    made = dc.plan_all_reduce_many(mine, r.op, group=r.group, bucket_bytes=64)
    for result, arrays in zip(r.wait(made(mine, async_op=r.case.later)), many, strict=True):
        same(result, r.folded(arrays))


def plan_shared_all_reduce(r: Rank) -> None:
    arrays = r.arrays()
    made = dc.plan_shared_all_reduce(arrays[0], r.op, group=r.group)
    for _ in range(3):
        same(made(arrays[r.rank]), r.folded(arrays))


def plan_all_gather(r: Rank) -> None:
    arrays, counts = r.arrays(r.counts), r.counts if r.case.known else "exchange"
    made = dc.plan_all_gather(arrays[r.rank], counts=counts, group=r.group)
    for _ in range(3):
        same(made(arrays[r.rank]), np.concatenate(arrays))


def plan_broadcast(r: Rank) -> None:
    arrays = r.arrays()
    made = dc.plan_broadcast(arrays[r.rank], r.root, group=r.group)
    for _ in range(3):
        same(made(arrays[r.rank] if r.rank == r.root else None), arrays[r.root])


REDUCTIONS: dict[str, Callable[[Rank], None]] = {
    "all_reduce": all_reduce, "reduce": reduce, "scan": scan, "exscan": exscan,
    "reduce_scatter": reduce_scatter, "all_reduce_many": all_reduce_many, "reset": reset, "plan": plan,
    "plan_all_reduce": plan_all_reduce, "plan_all_reduce_many": plan_all_reduce_many,
    "plan_shared_all_reduce": plan_shared_all_reduce,
}  # fmt: skip
"""Properties of functions that take an operation."""
MOVEMENTS: dict[str, Callable[[Rank], None]] = {
    "broadcast": broadcast, "all_gather": all_gather, "gather": gather, "scatter": scatter,
    "all_to_all": all_to_all, "permute": permute, "barrier": barrier, "split": split,
    "plan_all_gather": plan_all_gather, "plan_broadcast": plan_broadcast,
    "send": transfers, "recv": transfers, "isend": isends, "irecv": isends, "sendrecv": sendrecv,
    "probe": lambda r: probes(r, r.group.probe), "iprobe": lambda r: probes(r, r.group.iprobe),
    "broadcast_object": broadcast_object, "all_gather_object": all_gather_object,
    "gather_object": gather_object, "scatter_object": scatter_object, "all_to_all_object": all_to_all_object,
    "send_object": objects_in_a_ring, "recv_object": objects_in_a_ring,
}  # fmt: skip
"""Properties of the other functions."""
WITH_SERVICE: dict[str, Callable[[Rank], None]] = {"agree": agree, "shrink": shrink}
"""Properties of functions that need a coordination service."""
OF_A_PROCESS = {"new_group", "world"}
"""Functions that have no group, but the process-wide one: `dmesh.testing` and tests/e2e use them."""


def run(group: Group, cases: Iterable[Mapping[str, Any]]) -> None:
    """Checks cases, one after the other; an error says which one failed."""
    for given in cases:
        case = Case(**{**given, "lengths": tuple(given["lengths"])})
        try:
            {**REDUCTIONS, **MOVEMENTS, **WITH_SERVICE}[case.call](Rank(group, case))
        except BaseException as error:
            error.add_note(f"on rank {group.rank} of {group.size}: {case}")
            raise
