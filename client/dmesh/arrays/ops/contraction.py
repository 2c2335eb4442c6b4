"""Products: matmul, dot and their relatives, as contractions of labeled dimensions.

Each mesh axis shards at most one label. Summing over a sharded label leaves a partial sum. Of all shardings,
the one that moves the fewest bytes is chosen, including the reduction of the result; it may gather the
smaller operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import check_operand, grid_among
from dmesh.arrays.dispatch.protocol import GENERALIZED
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.ops import mappings
from dmesh.arrays.policy import check_gather
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.arrays.transfer.plan import cost
from dmesh.errors import UnshardableError

Labels = tuple[Any, ...]


@lru_cache(maxsize=1024)
def assign(
    a: Spec, b: Spec, left: Labels, right: Labels, out: Labels, dtype: np.dtype[Any]
) -> tuple[tuple[int, Any], ...]:
    """Return the label that each mesh axis shards: the cheapest choice among those of the operands."""
    grid = a.grid
    options: list[list[Any]] = []
    for axis in range(len(grid.sizes)):
        found: list[Any] = []
        for spec, labels in ((a, left), (b, right)):
            if axis in spec.axes:
                label = labels[spec.axes.index(axis)]
                if label not in found:
                    found.append(label)
        options.append([*found, None])
    lengths = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    smaller = "a" if a.size * a.dtype.itemsize <= b.size * b.dtype.itemsize else "b"

    def price(choice: tuple[Any, ...]) -> tuple[int, int]:
        cut = {label: axis for axis, label in enumerate(choice) if label is not None}
        if len(cut) != sum(label is not None for label in choice):
            return 1 << 62, 0
        needed_a = a.complete().replace(axes=[cut.get(label, WHOLE) for label in left])
        needed_b = b.complete().replace(axes=[cut.get(label, WHOLE) for label in right])
        grown = needed_b if smaller == "a" else needed_a
        before = b if smaller == "a" else a
        forbidden = grown.shards < before.shards and grown.largest > before.complete().largest
        shape = tuple(lengths[label] for label in out)
        partial = [axis for label, axis in cut.items() if label not in out]
        result = spec_of(
            grid, shape, dtype, [cut.get(label, WHOLE) for label in out], partial, "sum" if partial else ""
        )
        moved = cost(a, needed_a) + cost(b, needed_b)
        if result.partial:
            moved += cost(result, result.complete())
        return (1 << 61 if forbidden else 0) + moved, result.largest

    choices: list[tuple[Any, ...]] = list(itertools.product(*options))
    best: tuple[Any, ...] = min(choices, key=price)
    return tuple(enumerate(best))


def contract(
    name: str, kernel: Callable[[Any, Any], Any], a: DTensor, b: DTensor, left: Labels, right: Labels,
    out: Labels, dtype: np.dtype[Any],
) -> DTensor:  # fmt: skip
    """Return the product of two arrays, summed over the labels that are not in the result."""
    for label, n in zip(right, b.shape, strict=True):
        if label in left and a.shape[left.index(label)] != n:
            raise ValueError(
                f"{name}: shapes {a.shape} and {b.shape} do not match: lengths {a.shape[left.index(label)]} "
                f"and {n} are summed "
                "together"
            )
    op = "any" if dtype.kind == "b" else "sum"
    choice = assign(a.spec, b.spec, left, right, out, dtype)
    cut = {label: axis for axis, label in choice if label is not None}
    needed = [
        x.spec.complete().replace(axes=[cut.get(label, WHOLE) for label in labels])
        for x, labels in ((a, left), (b, right))
    ]
    larger, at = (a, 0) if a.nbytes > b.nbytes else (b, 1)
    check_gather(name, larger.spec, needed[at])
    lengths = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    partial = [axis for label, axis in cut.items() if label not in out]
    shape = tuple(lengths[label] for label in out)
    target = spec_of(
        a.spec.grid, shape, dtype, [cut.get(label, WHOLE) for label in out], partial, op if partial else ""
    )
    there = [move(x, spec) for x, spec in zip((a, b), needed, strict=True)]
    blas = dtype.char in "fdFD" and not set(left) & set(right) <= set(out)
    (result,) = run_local(name.removeprefix("np."), kernel, there, needed, (target,), blas=blas)
    return result


def check_arrays(name: str, *operands: Any) -> None:
    """Raise an error for operands that cannot be combined."""
    for x in operands:
        check_operand(x, name)
    grid_among([x for x in operands if isinstance(x, DTensor)], name)


def matmul(a: Any, b: Any, /, **kwargs: Any) -> DTensor:
    """Return the matrix product, `np.matmul`."""
    check_arrays("np.matmul", a, b)
    if not isinstance(a, DTensor) or not isinstance(b, DTensor) or not a.ndim or not b.ndim:
        raise ValueError("matmul: Input operand does not have enough dimensions")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("order", "subok", "casting")}
    dtype = np.dtype(kwargs.pop("dtype", None) or _matmul_dtype(a.dtype, b.dtype))
    if kwargs:
        raise UnshardableError(f"np.matmul of sharded arrays has no argument {next(iter(kwargs))}=")
    lead = max(a.ndim, b.ndim, 2) - 2
    batch = tuple(f"b{i}" for i in range(lead))
    left = (*batch[lead - max(a.ndim - 2, 0) :], "i", "k") if a.ndim > 1 else ("k",)
    right = (*batch[lead - max(b.ndim - 2, 0) :], "k", "j") if b.ndim > 1 else ("k",)
    # Batch dimensions of length 1 are broadcast. They have their own labels, and are never sharded.
    shapes = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = _own_ones(left, a.shape, batch, shapes, "a")
    right = _own_ones(right, b.shape, batch, shapes, "b")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(
            f"matmul: Input operand 1 has a mismatch in its core dimension 0: shapes {a.shape} and {b.shape}"
        )
    out: Labels = (*batch, *(["i"] if a.ndim > 1 else []), *(["j"] if b.ndim > 1 else []))
    a, b = (x if x.dtype == dtype else astype(x, dtype) for x in (a, b))
    grid = a.spec.grid

    def kernel(x: Any, y: Any) -> Any:
        if x.ndim != 2 or y.ndim != 2:
            return np.matmul(x, y)
        return np.matmul(x, y, out=grid.empty((x.shape[0], y.shape[1]), dtype))

    return contract("np.matmul", kernel, _whole_ones(a, left), _whole_ones(b, right), left, right, out, dtype)


def _matmul_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    return np.matmul.resolve_dtypes((a, b, None))[2]


def _own_ones(labels: Labels, shape: Sequence[int], batch: Labels, full: Sequence[int], side: str) -> Labels:
    lead = len(batch)
    return tuple(
        f"{side}1{label}"
        if label in batch and n == 1 and full[len(full) - lead + batch.index(label)] != 1
        else label
        for label, n in zip(labels, shape, strict=True)
    )


def _whole_ones(x: DTensor, labels: Labels) -> DTensor:
    """Return an operand that is unsharded along its broadcast dimensions of length 1."""
    spec = x.spec
    ones = [
        d for d, label in enumerate(labels) if label[1:2] == "1" and len(label) > 2 and spec.axes[d] != WHOLE
    ]
    if not ones:
        return x
    return move(
        x, spec.complete().replace(axes=[WHOLE if d in ones else axis for d, axis in enumerate(spec.axes)])
    )


GENERALIZED[np.matmul] = matmul


@implements(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Return the sum of products over some dimensions of both arrays."""
    check_arrays("np.tensordot", a, b)
    if isinstance(axes, (int, np.integer)):
        first, second = list(range(a.ndim - int(axes), a.ndim)), list(range(int(axes)))
    else:
        first, second = (
            [int(d) for d in (x if isinstance(x, (list, tuple, np.ndarray)) else [x])] for x in axes
        )
    for x, dims in ((a, first), (b, second)):
        if any(not -x.ndim <= d < x.ndim for d in dims):
            raise IndexError(f"tensordot: axes {dims} are not all those of an array of {x.ndim} dimensions")
    first, second = [d % a.ndim for d in first], [d % b.ndim for d in second]
    if len(first) != len(second) or any(a.shape[i] != b.shape[j] for i, j in zip(first, second, strict=True)):
        raise ValueError("shape-mismatch for sum")
    left = [f"a{d}" for d in range(a.ndim)]
    right = [f"b{d}" for d in range(b.ndim)]
    for number, (i, j) in enumerate(zip(first, second, strict=True)):
        left[i] = right[j] = f"k{number}"
    out = (*(x for x in left if x[0] != "k"), *(x for x in right if x[0] != "k"))
    dtype = np.result_type(a.dtype, b.dtype)

    def kernel(x: Any, y: Any) -> Any:
        return np.tensordot(x, y, axes=(first, second))

    return contract("np.tensordot", kernel, a, b, tuple(left), tuple(right), out, dtype)


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    """Return the dot product."""
    check_arrays("np.dot", a, b)
    if not getattr(a, "ndim", 0) or not getattr(b, "ndim", 0):
        result = elementwise(np.multiply, (a, b), {})
    elif b.ndim == 1:
        result = tensordot(a, b, ([a.ndim - 1], [0]))
    else:
        result = tensordot(a, b, ([a.ndim - 1], [b.ndim - 2]))
    return result if out is None else store(result, out, "same_kind")


@implements(np.inner)
def inner(a: Any, b: Any, /) -> Any:
    """Return the sum of products over the last dimensions."""
    check_arrays("np.inner", a, b)
    if not getattr(a, "ndim", 0) or not getattr(b, "ndim", 0):
        return elementwise(np.multiply, (a, b), {})
    return tensordot(a, b, ([a.ndim - 1], [b.ndim - 1]))


@implements(np.vdot)
def vdot(a: Any, b: Any, /) -> Any:
    """Return the dot product of two flattened arrays, the first one conjugated."""
    check_arrays("np.vdot", a, b)
    x = mappings.reshape(elementwise(np.conjugate, (a,), {}) if a.dtype.kind == "c" else a, (a.size,))
    return tensordot(x, mappings.reshape(b, (b.size,)), 1)


@implements(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    """Return the products of all pairs of elements."""
    check_arrays("np.outer", a, b)
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        raise UnshardableError("np.outer of a sharded array and a number: use *")
    x, y = mappings.reshape(a, (a.size,)), mappings.reshape(b, (b.size,))
    dtype = np.result_type(a.dtype, b.dtype)
    result = contract("np.outer", np.multiply.outer, x, y, ("a",), ("b",), ("a", "b"), dtype)
    return result if out is None else store(result, out, "same_kind")


@implements(np.linalg.matmul if hasattr(np.linalg, "matmul") else None)
def linalg_matmul(x1: Any, x2: Any, /) -> Any:
    """Return the matrix product."""
    return matmul(x1, x2)


@implements(getattr(np.linalg, "tensordot", None))
def linalg_tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    """Return the sum of products over some dimensions."""
    return tensordot(x1, x2, axes)


@implements(getattr(np.linalg, "outer", None))
def linalg_outer(x1: Any, x2: Any, /) -> Any:
    """Return the products of all pairs of elements of two vectors."""
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError("Input arrays must be one-dimensional")
    return outer(x1, x2)


@implements(np.linalg.multi_dot)
def multi_dot(arrays: Any, *, out: Any = None) -> Any:
    """Return the product of several matrices, from left to right."""
    if len(arrays) < 2:
        raise ValueError("Expecting at least two arrays.")
    if any(x.ndim != 2 for x in arrays[1:-1]) or any(x.ndim not in (1, 2) for x in (arrays[0], arrays[-1])):
        raise np.linalg.LinAlgError("arrays of np.linalg.multi_dot must be matrices, or vectors at the ends")
    result = arrays[0]
    for x in arrays[1:]:
        result = dot(result, x)
    return result if out is None else store(result, out, "same_kind")


@implements(np.kron)
def kron(a: Any, b: Any) -> Any:
    """Return the Kronecker product."""
    check_arrays("np.kron", a, b)
    ndim = max(a.ndim, b.ndim)
    x = mappings.reshape(a, tuple(n for m in (1,) * (ndim - a.ndim) + a.shape for n in (m, 1)))
    y = mappings.reshape(b, tuple(n for m in (1,) * (ndim - b.ndim) + b.shape for n in (1, m)))
    product = elementwise(np.multiply, (x, y), {})
    return mappings.reshape(
        product, tuple(p * q for p, q in zip(product.shape[::2], product.shape[1::2], strict=True))
    )
