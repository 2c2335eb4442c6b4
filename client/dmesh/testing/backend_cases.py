"""Calls that a backend is tested with, and their results, computed by NumPy in the order of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dmesh.collectives import Group
from dmesh.collectives.backends import Request
from dmesh.collectives.work import Stream
from dmesh.errors import CollectiveTypeError

Array = NDArray[Any]
Convert = Callable[[Any], Any]

LARGE = (1 << 18) + 3
"""Elements of large arrays: more than what any backend stages at once."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "any": np.logical_or, "all": np.logical_and, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}  # fmt: skip
_REDUCED = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "m8[s]"]
_RECORD = np.dtype([("a", "u1"), ("b", "f8")], align=True)


@dataclass(frozen=True)
class Case:
    """A collective with its arguments, for groups of one size."""

    kind: str
    """Name of the operation."""
    size: int
    """Number of ranks."""
    shape: tuple[int, ...] = ()
    """Shape of each rank's array."""
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype("f4"))
    """Dtype of the arrays."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the call."""

    def __str__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"{self.kind}({self.dtype} {self.shape}{more}) of {self.size} ranks"

    def input(self, rank: int, *, exact: bool = True) -> Array:
        """Return a rank's array.

        Args:
            rank: Position of the rank.
            exact: Whether rounding may depend on the order in which contributions are folded; if False, the
                numbers are small and whole.
        """
        shape = (self.size, *self.shape) if self.kind == "scatter" else self.shape
        random, dtype = np.random.default_rng([rank, *shape]), self.dtype
        if dtype.names is not None:
            found = np.zeros(shape, dtype)
            found["a"], found["b"] = random.integers(0, 255, shape), random.normal(size=shape)
            return found
        if dtype.kind in "biuSmM":
            if not exact and dtype.kind in "iu":
                return np.asarray(random.integers(1, 4, shape)).astype(dtype)
            octets = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
            return octets[..., 0] > 127 if dtype.kind == "b" else octets.view(dtype)[..., 0]
        if not exact:
            scale = self.size if self.arguments.get("op") == "mean" else 1  # so that the mean is whole, too
            return np.asarray(random.integers(1, 4, shape) * scale).astype(dtype)
        values = np.asarray(random.normal(size=shape))
        if dtype.kind == "c":
            values = values + 1j * np.asarray(random.normal(size=shape))
        return np.asarray(values).astype(dtype)

    def expected(self, rank: int, inputs: Sequence[Array]) -> Array | None:
        """Return a rank's result; None if it gets none."""
        root, axis = int(self.arguments.get("root", 0)), self.arguments.get("axis")
        match self.kind:
            case "all_reduce":
                return fold(self.arguments["op"], inputs)
            case "reduce":
                return fold(self.arguments["op"], inputs) if rank == root else None
            case "reduce_scatter":
                whole = fold(self.arguments["op"], inputs)
                blocks = whole if axis is None else np.split(whole, self.size, axis)
                return np.asarray(blocks[rank])
            case "broadcast":
                return inputs[root]
            case "scatter":
                return np.asarray(inputs[root][rank, ...])
            case "gather":
                return np.stack(inputs) if rank == root else None
            case "all_gather":
                return np.stack(inputs) if axis is None else np.concatenate(inputs, axis)
            case "all_to_all":
                return np.concatenate([np.split(x, self.size)[rank] for x in inputs])
            case "permute":
                sources = [a for a, b in self.arguments["pairs"] if b == rank]
                return inputs[sources[0]] if sources else np.zeros(self.shape, self.dtype)
        return None

    def operands(self, rank: int, x: Any) -> tuple[Any, ...]:
        """Return what the rank passes by position."""
        if self.kind == "barrier":
            return ()
        if self.kind == "scatter" and rank != self.arguments["root"]:
            return (x[0, ...],)
        return (x,)

    def request(self, group: Group, x: Any, out: Any = None) -> Request | None:
        """Return the rank's request; None if there is no such call for the array."""
        mine = self.operands(group.rank, x)
        try:
            return group.requests.make(self.kind, mine[0] if mine else None, out, **self.arguments)
        except CollectiveTypeError:
            return None

    def call(self, group: Group, x: Any, **options: Any) -> Any:
        """Make the call on a group."""
        return getattr(group, self.kind)(*self.operands(group.rank, x), **self.arguments, **options)

    def is_supported(self, group: Group, name: str, x: Any) -> bool:
        """Return whether the group's backend of a name carries the call out."""
        backend, stream = group.backend(name), collectives(group)
        assert backend is not None, f"{group.label} has no backend {name!r}"
        request = self.request(group, x)
        return request is not None and backend.supports(request, stream, stream.issued + 1)


def collectives(group: Group) -> Stream:
    """Return the stream in which a group's collectives are counted."""
    return next(stream for stream in group.streams if stream.pair is None)


def fold(op: str, inputs: Sequence[Array]) -> Array:
    """Return the reduction of some arrays, from left to right, as `dmesh.collectives` defines it."""
    dtype = inputs[0].dtype
    wide = result = dtype
    if op in ("any", "all"):
        wide = result = np.dtype(bool)
    elif dtype.kind == "b" and op in ("sum", "prod"):
        wide = result = np.dtype("i8")
    elif op == "mean" and dtype.kind in "biu":
        wide = result = np.dtype("f8")
    elif dtype == _BFLOAT16 or (dtype == np.float16 and op in ("sum", "prod", "mean")):
        wide = np.dtype("f4")
    with np.errstate(all="ignore"):
        total = inputs[0].astype(wide)
        for other in inputs[1:]:
            total = np.asarray(_UFUNCS[op](total, other.astype(wide)))
        if op == "mean":
            total = np.asarray(np.true_divide(total, len(inputs))).astype(wide)
        return np.asarray(total.astype(result))


def cases(size: int) -> Iterator[Case]:
    """Yield the calls that a group of a size is tested with."""
    yield Case("barrier", size)
    f4 = np.dtype("f4")
    for name, op in itertools.product([*_REDUCED, _BFLOAT16], _UFUNCS):
        dtype = np.dtype(name)
        if has_meaning(op, dtype):
            yield Case("all_reduce", size, (5,), dtype, {"op": op})
    for shape in ((), (0,), (1,), (2, 0, 3), (3, 5), (1023,), (LARGE,)):
        yield Case("all_reduce", size, shape, f4, {"op": "sum"})
        yield Case("all_reduce", size, shape, np.dtype("i8"), {"op": "max"})
        yield Case("reduce", size, shape, f4, {"op": "sum", "root": size - 1})
        yield Case("broadcast", size, shape, f4, {"root": size - 1})
        yield Case("all_gather", size, shape, f4)
        yield Case("gather", size, shape, f4, {"root": 0})
        yield Case("scatter", size, shape, f4, {"root": size - 1})
        yield Case("permute", size, shape, f4, {"pairs": _ring(size)})
    yield Case("permute", size, (7,), f4, {"pairs": ((0, size - 1),)})
    for rows in ((size, 3), (size, 0), (size,), (size, LARGE // size)):
        yield Case("reduce_scatter", size, rows, f4, {"op": "sum"})
        yield Case("all_to_all", size, rows, f4)
        yield Case("all_to_all", size, (2 * size, *rows[1:]), np.dtype("i2"))
    for axis in (0, 1, -1):
        yield Case("reduce_scatter", size, (2 * size, size), f4, {"op": "sum", "axis": axis})
        yield Case("all_gather", size, (2, 3), f4, {"axis": axis})
    for dtype in (np.dtype("S3"), np.dtype("M8[ns]"), np.dtype("c16"), _BFLOAT16, _RECORD):
        yield Case("broadcast", size, (4,), dtype, {"root": 0})
        yield Case("all_gather", size, (4,), dtype)
        yield Case("all_to_all", size, (size,), dtype)


def has_meaning(op: str, dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype can be reduced by an op."""
    if op.startswith("bitwise"):
        return dtype.kind in "biu"
    if dtype.kind == "m":
        return op != "prod"
    return True


def _ring(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((rank, (rank + 1) % size) for rank in range(size))


def check_values(
    group: Group,
    name: str,
    *,
    as_array: Convert = np.array,
    as_numpy: Convert = np.asarray,
    exact: bool = True,
    required: bool = True,
) -> set[str]:
    """Compare the results of all calls that a backend supports with NumPy's; all ranks must call this.

    Each call is made with a result of its own, with `out=`, in place where that is possible, and
    asynchronously.

    Args:
        group: The group.
        name: The backend's name.
        as_array: Makes an array of the backend's kind of a NumPy array; a copy.
        as_numpy: Makes a NumPy array of such an array.
        exact: Whether the backend folds in the order of ranks.
        required: Whether the group must have the backend.

    Returns:
        Names of the operations that were compared.
    """
    group.barrier()  # the group's first call chooses the backends
    if not required and group.backend(name) is None:
        return set()
    done = set()
    for case in cases(group.size):
        inputs = [case.input(rank, exact=exact) for rank in range(case.size)]
        mine, wanted = inputs[group.rank], case.expected(group.rank, inputs)
        if not case.is_supported(group, name, as_array(mine)):
            continue
        done.add(case.kind)
        _compare(case, "", case.call(group, as_array(mine)), wanted, as_numpy)
        future = case.call(group, as_array(mine), async_op=True)
        _compare(case, "async_op=True", future.result(60.0), wanted, as_numpy)
        if case.kind == "barrier":
            continue
        x, out = as_array(mine), None if wanted is None else as_array(np.zeros_like(wanted))
        found = case.call(group, x, out=out)
        assert found is out, f"{case}, out=: the result is not `out`"
        _compare(case, "out=", found, wanted, as_numpy)
        _compare(case, "out=: the input", x, mine, as_numpy)
        shape, dtype = case.shape, case.dtype
        if case.kind in _IN_PLACE and (wanted is None or (wanted.shape, wanted.dtype) == (shape, dtype)):
            out = None if wanted is None else x
            _compare(case, "in place", case.call(group, x, out=out), wanted, as_numpy)
    return done


_IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_to_all", "permute")


def _compare(case: Case, how: str, found: Any, wanted: Array | None, as_numpy: Convert) -> None:
    if wanted is None:
        assert found is None, f"{case} {how}: this rank gets no result, but {found!r}"
        return
    result = as_numpy(found)
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype), (
        f"{case} {how}: {result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
    )
    if wanted.dtype.names is not None:  # padding between fields has no value
        assert (result == wanted).all(), f"{case} {how}"
        return
    different = np.frombuffer(result.tobytes(), np.uint8) != np.frombuffer(wanted.tobytes(), np.uint8)
    assert not different.any(), (
        f"{case} {how}: {different.sum()} bytes differ, the first at {different.argmax()}:\n"
        f"{result.ravel()[:8]}, not\n{wanted.ravel()[:8]}"
    )
