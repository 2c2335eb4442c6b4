"""`register_op`: operations of users, defined by a layout rule and a function of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import bring, check_operand, grid_among
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import run_local
from dmesh.arrays.dtensor import DTensor, read
from dmesh.arrays.grid import grid_of
from dmesh.arrays.spec import Spec, spec_for
from dmesh.arrays.transfer.plan import FOLDS
from dmesh.errors import ArgumentTypeError, MeshMismatchError, UnshardableError
from dmesh.layout import Layout


class ArraySpec(NamedTuple):
    """Description of an array for a layout rule, and of a result by the rule."""

    shape: tuple[int, ...]
    """Shape of the whole array."""
    dtype: DTypeLike
    """Type of its elements."""
    layout: Layout
    """Its layout."""
    partial: tuple[str, ...] = ()
    """Mesh dimensions along which the devices hold unreduced contributions."""
    reduction: str = "sum"
    """Their reduction: `sum`, `prod`, `min`, `max`, `any`, `all`."""


Rule = Callable[..., tuple[Sequence[Layout | None], ArraySpec | Sequence[ArraySpec]]]


def register_op(
    kernel: Callable[..., Any],
    rule: Rule,
    *,
    name: str | None = None,
    function: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return an operation on sharded arrays, defined by a layout rule and a NumPy function of blocks.

    dmesh moves the operands to the layouts that the rule returns, within the policy of implicit gathers.
    `explain` lists the operation.

    ```python
    def rule(x, length):
        replicated = dmesh.Layout.replicated(x.layout.mesh, 1)
        return [x.layout, None], dmesh.ArraySpec((length,), np.intp, replicated, ("x",))


    count = dmesh.register_op(lambda block, length: np.bincount(block, minlength=length), rule, name="count")
    ```

    Args:
        kernel: Function of the blocks: takes a block of each sharded operand, and the other arguments
            unchanged; returns the blocks of the results. Must not write to its arguments. Several threads may
            call it at once for large blocks.
        rule: Layout rule: takes an `ArraySpec` for each sharded operand, and the other arguments unchanged.
            Returns a list with the required layout of each operand (None for other arguments), and the
            `ArraySpec` of the result or a sequence of them. Must not depend on the elements or the client.
        name: Name in errors and `explain`; None for the kernel's name.
        function: NumPy function that calls this operation for sharded arrays from now on.

    Returns:
        The operation: a function of the operands, by position.

    Raises:
        ArgumentTypeError: `function` is not a NumPy function that arrays can override.
    """
    called = str(name or getattr(function or kernel, "__name__", "operation"))

    @wraps(kernel)
    def operation(*operands: Any) -> Any:
        with ledger.operation(called):
            return _run(called, kernel, rule, operands)

    if function is not None:
        if not hasattr(function, "_implementation"):
            raise ArgumentTypeError(
                "register_op(function=...) takes a NumPy function that arrays can override, not "
                f"{function!r:.100}"
            )
        implements(function, note="registered")(operation)
    return operation


def _run(name: str, kernel: Callable[..., Any], rule: Rule, operands: tuple[Any, ...]) -> Any:
    values = [read(x) for x in operands]
    arrays = [x for x in values if isinstance(x, DTensor)]
    if not arrays:
        raise UnshardableError(f"{name} got no sharded array")
    grid = grid_among(arrays, name)
    for x in values:
        if isinstance(x, np.ndarray):
            check_operand(x, name)
    layouts, made = rule(*(_described(x) if isinstance(x, DTensor) else x for x in values))
    several = not isinstance(made, ArraySpec)
    results: Sequence[ArraySpec] = made if not isinstance(made, ArraySpec) else [made]
    if len(layouts) != len(values):
        raise UnshardableError(
            f"the rule of {name} returned {len(layouts)} layouts for {len(values)} operands"
        )
    placed: list[Spec | None] = []
    for at, (x, layout) in enumerate(zip(values, layouts, strict=True)):
        if isinstance(x, DTensor) is (layout is None):
            raise UnshardableError(
                f"the rule of {name} returned {'None' if layout is None else 'a layout'} for operand {at}, "
                f"which is {'' if layout is None else 'not '}a sharded array"
            )
        placed.append(None if layout is None else spec_for(layout, x.shape, x.dtype, x.spec))
    targets = tuple(_placement(one, name) for one in results)
    if any(spec is not None and spec.grid is not grid for spec in (*placed, *targets)):
        raise MeshMismatchError(f"the rule of {name} returned layouts on another mesh than the operands'")
    there = [x if spec is None else bring(x, spec, name) for x, spec in zip(values, placed, strict=True)]

    def checked(*blocks: Any) -> Any:
        found = kernel(*blocks)
        for block, result in zip(found if several else (found,), results, strict=True):
            if np.ndim(block) != len(result.shape):
                raise UnshardableError(
                    f"the kernel of {name} returned a block of {np.ndim(block)} dimensions, but its "
                    "rule expects "
                    f"{len(result.shape)}"
                )
        return found

    arrived = run_local(
        name,
        checked if len(targets) > 1 or not several else lambda *b: checked(*b)[0],
        there,
        placed,
        targets,
    )
    _check_shapes(name, arrived)
    return arrived if several else arrived[0]


def _described(x: DTensor) -> ArraySpec:
    return ArraySpec(x.shape, x.dtype, x.layout)


def _placement(result: ArraySpec, name: str) -> Spec:
    spec = spec_for(result.layout, result.shape, result.dtype)
    if result.reduction not in FOLDS:
        raise UnshardableError(f"the rule of {name} returned an unknown reduction: {result.reduction!r:.100}")
    axes = [grid_of(result.layout.mesh).names.index(dim) for dim in result.partial]
    return spec.replace(partial=axes, op=result.reduction) if axes else spec


def _check_shapes(name: str, results: Sequence[DTensor]) -> None:
    for x in results:
        if x._shards is None:
            continue
        for block, shape in zip(x.blocks, x.spec.local_shapes, strict=True):
            if block.shape != shape:
                raise UnshardableError(
                    f"the kernel of {name} returned a block of shape {block.shape}; its rule declares "
                    f"{x.spec.describe()}, with a block of shape {shape} there"
                )
