"""Cases for the properties of the public functions, as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from tests.collectives.arrays import FORMS, meaningful
from tests.collectives.properties import DTYPES, FOREIGN, MOVEMENTS, OWN_OPS, REDUCTIONS

from dmesh.collectives.request import OPS

_ARGUMENTS: dict[str, Any] = {
    "lengths": st.lists(st.sampled_from([0, 1, 3, 17, 400, 20_003]), min_size=5, max_size=5),
    "wide": st.booleans(),
    "root": st.integers(0, 4),
    "form": st.sampled_from([*FORMS, *FOREIGN]),
    "place": st.sampled_from(["new", "out", "in place"]),
    "later": st.booleans(),
    "known": st.booleans(),
    "edge": st.booleans(),
    "tag": st.sampled_from([0, 3]),
    "seed": st.integers(0, 99),
}
_FOLDED = [
    (name, op)
    for name, dtype in DTYPES.items()
    for op in [*OPS, *OWN_OPS, "min_location", "max_location"]
    if (meaningful(op, dtype) if op in OPS else name in ("float64", "float32"))
]


_BUILT_IN = ("all_reduce_many", "plan_all_reduce_many", "plan_shared_all_reduce")
"""Functions that take no operations of the user's own, and none with a location."""
_MOVED = [(name, "sum") for name in DTYPES]
CALLS = sorted({*REDUCTIONS, *MOVEMENTS} - {"reset"})
"""All functions but one: a group fails on a rank that has not left the call before, so all must have left."""


def case(call: str) -> st.SearchStrategy[dict[str, Any]]:
    """Returns cases of a function, as plain data."""
    folded = [pair for pair in _FOLDED if pair[1] in OPS] if call in _BUILT_IN else _FOLDED
    chosen = st.sampled_from(folded if call in REDUCTIONS else _MOVED)
    return st.tuples(chosen, st.fixed_dictionaries(_ARGUMENTS)).map(
        lambda drawn: {"call": call, "dtype": drawn[0][0], "op": drawn[0][1], **drawn[1]}
    )


def some_cases(share: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Returns a case of each `share`-th function."""
    return (
        st.integers(0, share - 1).flatmap(lambda first: st.tuples(*map(case, CALLS[first::share]))).map(list)
    )
