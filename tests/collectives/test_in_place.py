"""Results in memory that overlaps the input, in any way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.ranks import Cluster
from tests.collectives.test_values import clusters, values  # noqa: F401 - a fixture

from dmesh.collectives.counts import CountsRequestBuilder

KINDS = [
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "permute",
]  # fmt: skip


def expected(
    kind: str, inputs: list[np.ndarray], rank: int, root: int, counts: list[int]
) -> np.ndarray | None:
    ends = np.cumsum(counts)[:-1]
    return {
        "all_reduce": lambda: sum(inputs),
        "reduce": lambda: sum(inputs) if rank == root else None,
        "reduce_scatter": lambda: np.split(sum(inputs), ends)[rank],
        "broadcast": lambda: inputs[root],
        "all_gather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs) if rank == root else None,
        "scatter": lambda: np.split(inputs[root], ends)[rank],
        "all_to_all": lambda: np.concatenate([np.split(x, ends)[rank] for x in inputs]),
        "permute": lambda: inputs[rank - 1],
    }[kind]()


@values
@given(
    kind=st.sampled_from(KINDS), size=st.integers(1, 5), root=st.integers(0, 4), uneven=st.booleans(),
    lengths=st.lists(st.integers(0, 40), min_size=5, max_size=5), own=st.booleans(), wide=st.booleans(),
    starts=st.lists(st.integers(0, 60), min_size=10, max_size=10),
)  # fmt: skip
def test_any_overlap(
    clusters: dict[int, Cluster],  # noqa: F811
    kind, size, lengths, root, uneven, own, starts, wide,
):  # fmt: skip
    """Each rank's input and `out` begin anywhere in one array, or `own`: at this rank's own block."""
    root %= size
    counts = lengths[:size] if uneven else lengths[:1] * size
    total, joins = sum(counts), kind in ("all_gather", "gather")
    has_counts = kind in ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter") and uneven
    columns = (3,) if wide else ()
    generator = np.random.default_rng(sum(lengths))
    inputs = [generator.integers(0, 99, (counts[rank] if joins else total, *columns)) for rank in range(size)]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        wanted = expected(kind, inputs, rank, root, counts)
        begin, at = starts[rank], starts[rank + 5]
        before = sum(counts[:rank])
        if own:
            begin, at = (before, 0) if joins else (0, before if kind in ("scatter", "reduce_scatter") else 0)
        memory = np.full((60 + 40 * 5, *columns), -1)
        x = memory[begin : begin + len(inputs[rank])]
        x[...] = inputs[rank]
        out = None if wanted is None else memory[at : at + len(wanted)]
        options = {"counts": counts} if has_counts else {}
        if kind in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = root
        if kind in ("all_gather", "gather", "scatter", "reduce_scatter") and not has_counts:
            options["axis"] = 0
        if kind == "permute":
            options["pairs"] = [(source, (source + 1) % size) for source in range(size)]
        if kind == "scatter" and rank != root:
            x = np.zeros_like(wanted)
        result = getattr(group, kind)(x, out=out, **options)
        assert result is out
        return result, wanted

    for result, wanted in clusters[size].all(body):
        assert (result is None) == (wanted is None)
        if wanted is not None:
            assert result.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("rank", range(3))
def test_the_own_block_is_not_copied(rank):
    make = CountsRequestBuilder(3, rank).make
    out, x, long = np.zeros((3, 4)), np.ones((3, 4)), np.zeros((6, 4))
    own = long[[0, 1, 3][rank] : [1, 3, 6][rank]]
    for request in [
        make("all_gather", out[rank], out),
        make("gather", out[rank], out, root=rank),
        make("reduce_scatter", x, x[rank], op="sum"),
        make("scatter", x, x[rank], root=rank),
        make("all_gather", own, long, counts=[1, 2, 3]),
        make("reduce_scatter", long, own, op="sum", counts=[1, 2, 3]),
    ]:
        assert np.may_share_memory(request.allocate().source, request.source)
    copied = make("all_gather", out[rank - 1], out)
    assert not np.may_share_memory(copied.allocate().source, copied.source)
