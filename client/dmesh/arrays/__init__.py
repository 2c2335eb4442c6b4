"""Sharded NumPy arrays: `DTensor` and its operations (docs/arrays.md).

- `dtensor`: the array. `spec`: its placement. `grid`: a client's view of a mesh.
- `creation`, `indexing`, `assignment`, `random`: creating, reading and writing arrays; random arrays.
- `dispatch`, `ops`: NumPy's functions, through `__array_ufunc__` and `__array_function__`.
- `transfer`: moving an array from one placement to another.
- `policy`, `explain`, `ledger`, `debug`, `display`: implicit gathers, and the bytes that operations move.
- `shard_map`, `axes`: NumPy functions on the blocks, and collectives in them. `operation`: operations of
users.
- `variable`: named variables.
- `checkpoint`: sharded arrays in files.
"""

from __future__ import annotations

from dmesh.arrays import assignment, axes, checkpoint, debug, random
from dmesh.arrays.creation import arange, eye, from_function, from_local, full, linspace, ones, zeros
from dmesh.arrays.debug import visualize_sharding
from dmesh.arrays.dtensor import DTensor, is_dtensor
from dmesh.arrays.explain import explain
from dmesh.arrays.operation import ArraySpec, register_op
from dmesh.arrays.ops import (
    accumulations,
    along,
    composed,
    convolution,
    counting,
    diagonals,
    einsum,
    fourier,
    linalg,
    order_statistics,
    queries,
    rearranging,
    reductions,
    selection,
    sets,
)
from dmesh.arrays.policy import ImplicitGatherWarning, implicit_gather
from dmesh.arrays.shard_map import shard_map
from dmesh.arrays.transfer.functions import (
    call_with_layout,
    check_layout,
    copy_to_mesh,
    fetch_layout,
    pack,
    relayout,
    relayout_like,
    run_on,
    unpack,
)
from dmesh.arrays.variable import DVariable

_OPERATIONS = (
    accumulations, along, assignment, composed, convolution, counting, diagonals, einsum, fourier, linalg,
    order_statistics, queries, rearranging, reductions, selection, sets,
)  # fmt: skip
"""Modules that register handlers of NumPy's functions."""

__all__ = [
    "arange",
    "ArraySpec",
    "axes",
    "call_with_layout",
    "check_layout",
    "checkpoint",
    "copy_to_mesh",
    "debug",
    "DTensor",
    "DVariable",
    "explain",
    "eye",
    "fetch_layout",
    "from_function",
    "from_local",
    "full",
    "implicit_gather",
    "ImplicitGatherWarning",
    "is_dtensor",
    "linspace",
    "ones",
    "pack",
    "random",
    "register_op",
    "relayout",
    "relayout_like",
    "run_on",
    "shard_map",
    "unpack",
    "visualize_sharding",
    "zeros",
]
