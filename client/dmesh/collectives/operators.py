"""Your own reductions, and minimum and maximum with their location.

| op | contributions | result |
|---|---|---|
| `min_location`, `max_location` | numbers, booleans or dates | fields `value` and `rank` |
| the same | two fields: a value and an integer, its location | the same two fields |
| a ufunc of two arguments: `np.hypot` | a dtype that it keeps | the same dtype |
| a function of two arrays, or an `Op` | any dtype | the same dtype |

They are folded in the order of ranks: the result is `functools.reduce(function, arrays)`. Among equal
values the lowest rank or location is the result; NaN and NaT win. A ufunc that does what a reduction of a
name does is that reduction: `np.add` of float64 is `sum`. Ranks compare the names of functions, not what
they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from dmesh.collectives import reduction
from dmesh.collectives.request import OPS, Array, Reduction, describe_dtype, describe_type
from dmesh.errors import CollectiveTypeError, CollectiveValueError

LOCATIONS = ("min_location", "max_location")
"""Names of the reductions with location."""
_MOST_NAME = 100
_UFUNCS: dict[Any, str] = {
    np.add: "sum", np.multiply: "prod", np.minimum: "min", np.maximum: "max", np.logical_or: "any",
    np.logical_and: "all", np.bitwise_and: "bitwise_and", np.bitwise_or: "bitwise_or",
    np.bitwise_xor: "bitwise_xor",
}  # fmt: skip
_OF_ONE_ARRAY: tuple[tuple[Any, str], ...] = (
    *((function, function.__name__) for function in (sum, min, max, any, all)),
    (np.sum, "sum"), (np.prod, "prod"), (np.min, "min"), (np.max, "max"), (np.mean, "mean"),
    (np.any, "any"), (np.all, "all"),
)  # fmt: skip
"""Functions that reduce one array, and the reduction that their caller means: of two, `sum` adds the elements
of one to the other."""


@dataclass(frozen=True)
class Op:
    """User-defined reduction: a function of two arrays.

    ```python
    product = Op(np.matmul, name="product")  # of one matrix on each rank, in the order of ranks
    dmesh.collectives.all_reduce(matrix, product)
    ```

    Raises:
        CollectiveTypeError: The function cannot be called.
        CollectiveValueError: The function has no name of its own, and none is given.
    """

    function: Callable[[Any, Any], Any]
    """Combines what has been folded so far, which it may overwrite, and the next rank's array, which it may
    not. Returns an array of their dtype and shape. An exception of it fails the call on all ranks."""
    name: str = ""
    """Name by which ranks compare the operation; empty for the function's."""
    elementwise: bool = False
    """True if the function may be called with flat pieces of the arrays, which makes long ones faster; else
    it gets whole arrays."""
    commutative: bool = False
    """True if the order of the arguments does not matter. Then a group of more than 16 ranks may fold in
    another order than that of ranks, if `DMESH_FOLDING=any` allows it."""
    identity: ArrayLike | None = None
    """Result of `exscan` on rank 0, a number or an array; None if there is none."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise CollectiveTypeError(
                f"an operation needs a function of two arrays, not {describe_type(self.function)}"
            )
        meant = next((name for function, name in _OF_ONE_ARRAY if function is self.function), None)
        if meant is not None:
            raise CollectiveTypeError(
                f'{meant} is no function of two arrays, but of all elements of one: pass "{meant}"'
            )
        name = self.name or getattr(self.function, "__name__", "")
        if not isinstance(name, str) or not name.isprintable() or name in ("", "<lambda>"):
            raise CollectiveValueError(
                f"ranks compare operations by name, and {self.function!r} has none: "
                'use dmesh.collectives.Op(function, name="...")'
            )
        object.__setattr__(self, "name", name[:_MOST_NAME])


OpLike: TypeAlias = str | np.ufunc | Op | Callable[[Any, Any], Any]
"""Reduction, as public functions take it."""


@dataclass(frozen=True, slots=True)
class FunctionReduction(Reduction):
    """Reduction by a function of the user's."""

    function: Op
    shape: tuple[int, ...] = ()
    """Shape of the arrays, if they are folded whole."""

    @property
    def undivided(self) -> bool:
        """True if whole arrays must be folded."""
        return not self.function.elementwise

    @property
    def commutative(self) -> bool:
        """True if the order of contributions does not matter."""
        return self.function.commutative

    @property
    def identity(self) -> Any:
        """Value that changes nothing; None if there is none."""
        return self.function.identity

    def of_shape(self, shape: tuple[int, ...]) -> Reduction:
        """Return the reduction of arrays of a shape; see `Reduction.of_shape`."""
        return replace(self, shape=shape) if self.undivided else self

    def fold(self, contribution: Array, accumulator: Array, first: bool) -> None:
        """Fold the next rank's contribution into the accumulator; see `Reduction.fold`."""
        if first:
            np.copyto(accumulator, contribution)
            return
        shape = self.shape if self.undivided else accumulator.shape
        folded, given = accumulator.reshape(shape), contribution.reshape(shape)
        given.flags.writeable = False  # a view, of memory that is perhaps the caller's
        with np.errstate(all="ignore"):
            result = np.asarray(self.function.function(folded, given))
        if result.dtype != accumulator.dtype or result.shape != shape:
            raise CollectiveTypeError(
                f"the function of {self.op} returned an array of {describe_dtype(result.dtype)}, shape "
                f"{result.shape}; it must be of {describe_dtype(accumulator.dtype)}, shape {shape}, as its "
                "arguments are"
            )
        np.copyto(folded, result)


@dataclass(frozen=True, slots=True)
class LocationReduction(Reduction):
    """Minimum or maximum with its location: structures of a value and an integer."""

    def contribution(self, array: Array, rank: int) -> Array:
        """Return a rank's array as it travels: with its rank, unless it has locations already."""
        if array.dtype == self.wire:
            return array
        made = np.empty(array.shape, self.wire)
        made["value"], made["rank"] = array, rank
        return made

    @property
    def identity(self) -> Any:
        """None: no value is larger than all."""
        return None

    def fold(self, contribution: Array, accumulator: Array, first: bool) -> None:
        """Fold the next rank's contribution into the accumulator; see `Reduction.fold`."""
        if first:
            np.copyto(accumulator, contribution)
            return
        assert self.wire.names is not None
        value, place = self.wire.names
        ours, theirs = accumulator[value], contribution[value]
        our_nan, their_nan = ours != ours, theirs != theirs  # NaN or NaT, in any dtype
        better = theirs < ours if self.op == "min_location" else theirs > ours
        equal = (theirs == ours) | (our_nan & their_nan)
        takes = (
            (better & ~our_nan)
            | (their_nan & ~our_nan)
            | (equal & (contribution[place] < accumulator[place]))
        )
        accumulator[takes] = contribution[takes]


def resolve(op: object, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction of any op for a dtype, or refuse it before anything is sent."""
    if isinstance(op, str):
        return (
            _located(op, dtype) if op in LOCATIONS else reduction.resolve(reduction.canonical_op(op), dtype)
        )
    if isinstance(op, np.ufunc):
        return _by_ufunc(op, dtype)
    if not isinstance(op, Op):
        if not callable(op):
            raise CollectiveValueError(
                f"unknown reduction {op!r}; it must be one of {', '.join((*OPS, *LOCATIONS))}, a ufunc, or a "
                "dmesh.collectives.Op"
            )
        op = Op(op)
    name = f"op {op.name!r}" + ", elementwise" * op.elementwise
    return FunctionReduction(name, dtype, dtype, dtype, np.add, op)


def _by_ufunc(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Reduction:
    name = ufunc.__name__
    try:
        result = ufunc(np.empty(0, dtype), np.empty(0, dtype))
    except (TypeError, ValueError) as error:
        raise CollectiveTypeError(
            f"the ufunc {name} cannot reduce arrays of dtype {describe_dtype(dtype)}: {error}"
        ) from None
    if not isinstance(result, np.ndarray) or result.dtype != dtype or ufunc.signature is not None:
        given = describe_dtype(result.dtype) if isinstance(result, np.ndarray) else "several arrays"
        raise CollectiveTypeError(
            f"the ufunc {name} cannot reduce arrays of dtype {describe_dtype(dtype)}: it gives {given}"
        )
    known = None if (alias := _UFUNCS.get(ufunc)) is None else reduction.REDUCTIONS.get((alias, dtype))
    if known is not None and known.wire == known.accumulator == known.result == dtype:
        return known
    return Reduction(f"ufunc {name}", dtype, dtype, dtype, ufunc)


def _located(op: str, dtype: np.dtype[Any]) -> Reduction:
    names, value = dtype.names, dtype
    if names is not None and dtype.fields is not None:
        value = dtype.fields[names[0]][0]
        if len(names) != 2 or dtype.fields[names[1]][0].kind not in "iu":
            raise CollectiveTypeError(
                f"{op!r} needs numbers, or structures of a value and an integer, not {describe_dtype(dtype)}"
            )
    reduction.resolve("min", value)  # raises where that has no meaning
    wire = dtype if names is not None else np.dtype([("value", value), ("rank", np.int64)])
    return LocationReduction(op, wire, wire, wire, np.minimum)
