"""Operands of an operation: which ones can be combined, and their placements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.grid import Grid
from dmesh.arrays.policy import check_gather, is_larger
from dmesh.arrays.spec import WHOLE, Spec
from dmesh.arrays.transfer.plan import cost
from dmesh.errors import MeshMismatchError, UnshardableError

PYTHON_SCALARS = (bool, int, float, complex)


def is_scalar(x: Any) -> bool:
    """Return whether a value can be combined with sharded arrays: a number or a plain 0-d array."""
    return isinstance(x, (*PYTHON_SCALARS, np.generic)) or (isinstance(x, np.ndarray) and x.ndim == 0)


def check_operand(x: Any, operation: str) -> None:
    """Check that an operand can be combined with sharded arrays.

    Raises:
        UnshardableError: It is a plain array with dimensions, or neither an array nor a number.
    """
    if isinstance(x, DTensor) or is_scalar(x):
        return
    name = ledger.current_operation(operation)
    if isinstance(x, (np.ndarray, list, tuple)):
        shape = np.shape(x)
        raise UnshardableError(
            f"{name} cannot mix a sharded array with a plain one of shape {shape}, which may differ between "
            "clients. Make it a sharded array with dmesh.copy_to_mesh(x, layout)"
        )
    raise UnshardableError(f"{name} cannot mix a sharded array with {type(x).__name__}: {x!r:.100}")


def grid_among(arrays: Iterable[DTensor], operation: str) -> Grid:
    """Return the mesh of all arrays.

    Raises:
        MeshMismatchError: The arrays are on different meshes.
    """
    first: DTensor | None = None
    for array in arrays:
        if first is None:
            first = array
        elif array.spec.grid is not first.spec.grid:
            raise MeshMismatchError(
                f"{ledger.current_operation(operation)} got arrays on different meshes, {_mesh(first)} and "
                f"{_mesh(array)}. Bring one to the other mesh with dmesh.copy_to_mesh(x.full(), layout)"
            )
    assert first is not None
    return first.spec.grid


def _mesh(x: DTensor) -> str:
    grid = x.spec.grid
    dims = ", ".join(f"{name}={size}" for name, size in zip(grid.names, grid.sizes, strict=True))
    return f"{grid.mesh.name or 'a mesh'} ({dims})"


def bring(x: DTensor, target: Spec, operation: str) -> DTensor:
    """Return an operand in the placement that an operation needs, if the policy of gathers allows that."""
    if x.spec is target:
        return x
    check_gather(operation, x.spec, target)
    with ledger.operation(operation):
        return move(x, target)


@lru_cache(maxsize=4096)
def slots_for(out: Spec, operand: Spec) -> tuple[int, ...]:
    """Return, for each slot of a result, the slot of an operand on the same device."""
    return tuple(operand.slot_of[device] for device in out.devices)


def blocks_for(out: Spec, x: DTensor) -> list[Any]:
    """Return, for each slot of a result, an operand's block on the same device."""
    blocks = x.blocks
    return [blocks[slot] for slot in slots_for(out, x.spec)]


def aligned(shape: Sequence[int], out: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh axes of an operand that is broadcast to a result with the given mesh axes."""
    skip = len(out) - len(shape)
    return tuple(
        axes[skip + dim] if n == out[skip + dim] or axes[skip + dim] == WHOLE else WHOLE
        for dim, n in enumerate(shape)
    )


@lru_cache(maxsize=4096)
def choose_axes(specs: tuple[Spec, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the mesh axes of an elementwise result for which the operands move the fewest bytes.

    Candidates are the shardings of the operands, each completed by the others'. The first operand wins ties.
    """
    candidates: dict[tuple[int, ...], None] = {}
    for first in specs:
        axes = [WHOLE] * len(shape)
        for spec in (first, *(other for other in specs if other is not first)):
            skip = len(shape) - spec.ndim
            for dim, axis in enumerate(spec.axes):
                if axis == WHOLE or axis in axes or axes[skip + dim] != WHOLE:
                    continue
                if spec.shape[dim] == shape[skip + dim] or shape[skip + dim] == 1:
                    axes[skip + dim] = axis
        candidates[tuple(axes)] = None

    def price(axes: tuple[int, ...]) -> tuple[int, int]:
        targets = [spec.complete().replace(axes=aligned(spec.shape, shape, axes)) for spec in specs]
        larger = sum(is_larger(spec, target) for spec, target in zip(specs, targets, strict=True))
        return larger, sum(cost(spec, target) for spec, target in zip(specs, targets, strict=True))

    return min(candidates, key=price) if len(candidates) > 1 else next(iter(candidates))


def free_axes(spec: Spec, dims: Iterable[int]) -> Spec:
    """Return a placement in which some dimensions are unsharded, with the same number of shards if possible.

    Their mesh axes shard other dimensions instead, longest first. That moves blocks without gathering any.
    """
    taken = {dim % spec.ndim for dim in dims}
    axes = list(spec.axes)
    for dim in sorted(taken):
        axis, axes[dim] = axes[dim], WHOLE
        if axis == WHOLE:
            continue
        free = [at for at in range(spec.ndim) if at not in taken and axes[at] == WHOLE and spec.shape[at] > 1]
        if free:
            axes[max(free, key=lambda at: (spec.shape[at], -at))] = axis
    return spec.complete().replace(axes=axes)
