"""Creation of sharded arrays: from numbers, functions, and local blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh import memory
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.grid import grid_of
from dmesh.arrays.spec import Spec, check_dtype, spec_for
from dmesh.errors import LayoutError, UnshardableError
from dmesh.layout import Layout


def from_blocks_of(spec: Spec, make: Callable[[tuple[int, ...]], NDArray[Any]]) -> DTensor:
    """Return an array whose blocks a function makes from their shapes."""
    return DTensor(spec, tuple(make(shape) for shape in spec.local_shapes))


def scattered(whole: NDArray[Any], spec: Spec) -> DTensor:
    """Return a sharded array from one that every client has whole; nothing is sent."""
    blocks = []
    for region in spec.regions:
        blocks.append(whole[tuple(slice(start, stop) for start, stop in region)].copy())
    return DTensor(spec, tuple(np.asarray(block) for block in blocks))


def _lengths(shape: int | Sequence[int]) -> tuple[int, ...]:
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(n < 0 for n in lengths):
        raise ValueError("negative dimensions are not allowed")
    return tuple(int(n) for n in lengths)


@overload
def zeros(shape: int | Sequence[int], dtype: DTypeLike = ..., *, shared: bool = ...) -> NDArray[Any]: ...
@overload
def zeros(shape: int | Sequence[int], dtype: DTypeLike = ..., *, layout: Layout) -> DTensor: ...
def zeros(
    shape: int | Sequence[int],
    dtype: DTypeLike = float,
    *,
    layout: Layout | None = None,
    shared: bool = False,
) -> Any:
    """Return an array of zeros: sharded with a layout, else a NumPy array of this client alone.

    ```python
    x = dmesh.zeros((4, 3), layout=dmesh.Layout(["x", dmesh.UNSHARDED], mesh))
    ```

    Args:
        shape: Its shape.
        dtype: Type of its elements.
        layout: Its layout; None for a NumPy array.
        shared: Whether the memory of a NumPy array is shared with the clients on this host.

    Raises:
        LayoutError: The layout does not fit the shape.
        NotInitializedError: `shared` is True, and the system is not initialized.
        SharedMemoryError: The shared memory (`DMESH_SHARED_MEMORY`) is used up.
    """
    if layout is None:
        return memory.zeros(shape, dtype, shared=shared)
    if shared:
        raise UnshardableError("zeros() takes layout= or shared=, not both: shared= is for NumPy arrays only")
    spec = spec_for(layout, _lengths(shape), dtype)
    return from_blocks_of(spec, lambda local: np.zeros(local, spec.dtype))


def ones(shape: int | Sequence[int], dtype: DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return a sharded array of ones; see `zeros`."""
    spec = spec_for(layout, _lengths(shape), dtype)
    return from_blocks_of(spec, lambda local: np.ones(local, spec.dtype))


def full(
    shape: int | Sequence[int], fill_value: Any, dtype: DTypeLike | None = None, *, layout: Layout
) -> DTensor:
    """Return a sharded array filled with a number, which all clients must pass alike; see `zeros`."""
    value = np.asarray(fill_value)
    if value.ndim:
        raise UnshardableError(
            f"full() of a sharded array takes a number, not an array of shape {value.shape}"
        )
    spec = spec_for(layout, _lengths(shape), value.dtype if dtype is None else dtype)
    number = fill_value.item() if isinstance(fill_value, DTensor) else fill_value
    return from_blocks_of(spec, lambda local: np.full(local, number, spec.dtype))


def from_function(
    function: Callable[..., ArrayLike],
    shape: int | Sequence[int],
    dtype: DTypeLike = float,
    *,
    layout: Layout,
) -> DTensor:
    """Return a sharded array whose elements are a function of their indices.

    Each client makes its own blocks. Like `numpy.fromfunction`, but the function must return an array of the
    shape of the indices, or one that is broadcast to it.

    ```python
    x = dmesh.from_function(lambda i, j: 10 * i + j, (4, 3), layout=dmesh.Layout(["x", "unsharded"], mesh))
    ```

    Args:
        function: Function with an array of indices for each dimension as its arguments.
        shape: Shape of the array.
        dtype: Type of its elements.
        layout: Its layout.

    Raises:
        LayoutError: The layout does not fit the shape.
    """
    spec = spec_for(layout, _lengths(shape), dtype)
    blocks = []
    for region, local in zip(spec.regions, spec.local_shapes, strict=True):
        indices = np.meshgrid(*(np.arange(start, stop) for start, stop in region), indexing="ij", copy=False)
        block = np.empty(local, spec.dtype)
        block[...] = function(*indices)
        blocks.append(block)
    return DTensor(spec, tuple(blocks))


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    dtype: DTypeLike | None = None,
    *,
    layout: Layout,
) -> DTensor:
    """Return evenly spaced numbers within an interval, as `numpy.arange` does, sharded; see `zeros`."""
    first, last = (0, start) if stop is None else (start, stop)
    kind = np.arange(first, first + (last - last), step, dtype=dtype).dtype  # depends on all three numbers
    if not step:
        raise ZeroDivisionError("arange() needs a step other than 0")
    whole = all(isinstance(x, (int, np.integer)) for x in (first, last, step))
    count = max(0, -int(-(last - first) // step) if whole else math.ceil((last - first) / step))
    made = np.dtype(kind)
    # Like NumPy: the step is the difference of the first two numbers in the dtype of the result.
    begin = np.asarray(first, made)
    difference = np.asarray(first + step if count > 1 else first, made) - begin

    def values(i: NDArray[Any]) -> NDArray[Any]:
        steps = i.astype(made) if made.kind in "iuf" else i
        return np.asarray(begin + steps * difference, made)

    return from_function(values, count, made, layout=layout)


def linspace(
    start: complex,
    stop: complex,
    num: int = 50,
    endpoint: bool = True,
    dtype: DTypeLike | None = None,
    *,
    layout: Layout,
) -> DTensor:
    """Return evenly spaced numbers over an interval, as `numpy.linspace` does, sharded; see `zeros`."""
    if num < 0:
        raise ValueError(f"Number of samples, {num}, must be non-negative.")
    kind = np.linspace(start, stop, 2, endpoint=endpoint, dtype=dtype).dtype
    parts = (num - 1) if endpoint else num
    exact = np.result_type(start, stop, float(num))

    def values(i: NDArray[Any]) -> Any:
        step = (stop - start) / parts if parts > 0 else 0
        made = i.astype(exact) * step + start if step or parts <= 0 else i / parts * (stop - start) + start
        if endpoint and num > 1:
            made = np.where(i == num - 1, stop, made)
        return np.floor(made) if kind.kind in "iu" else made

    return from_function(values, num, kind, layout=layout)


def eye(n: int, m: int | None = None, k: int = 0, dtype: DTypeLike = float, *, layout: Layout) -> DTensor:
    """Return ones on a diagonal and zeros elsewhere, as `numpy.eye` does, sharded; see `zeros`."""
    return from_function(lambda i, j: j - i == k, (n, n if m is None else m), dtype, layout=layout)


def from_local(blocks: Sequence[ArrayLike], layout: Layout, shape: Sequence[int] | None = None) -> DTensor:
    """Return a sharded array made of the clients' blocks; nothing is sent.

    Args:
        blocks: This client's blocks, one for each of its devices, in their order. If the layout gives several
            devices the same block, the first one's is used.
        layout: Layout of the array.
        shape: Shape of the whole array; None if all blocks, on all clients, have the same shape.

    Raises:
        LayoutError: The number of blocks or their shapes do not fit the layout.
        UnshardableError: The dtypes of the blocks differ, or are of Python objects.
    """
    arrays = [np.asarray(block) for block in blocks]
    if not isinstance(layout, Layout):
        raise LayoutError(f"expected a dmesh.Layout, got {type(layout).__name__}")
    grid = grid_of(layout.mesh)
    if len(arrays) != len(grid.positions):
        raise LayoutError(
            f"client {grid.client} has {len(grid.positions)} devices in the mesh, but passed {len(arrays)} "
            "blocks: pass one for each device"
        )
    first = arrays[0]
    if any(array.dtype != first.dtype for array in arrays):
        raise UnshardableError(f"the blocks have different dtypes: {sorted({str(a.dtype) for a in arrays})}")
    if first.ndim != layout.rank:
        raise LayoutError(f"the blocks have {first.ndim} dimensions, but the layout is for {layout.rank}")
    whole = layout.global_shape_from_local_shape(first.shape) if shape is None else _lengths(shape)
    spec = spec_for(layout, whole, check_dtype(first.dtype))
    found = []
    for device, array in enumerate(arrays):
        wanted = spec.local_shapes[spec.slot_of[device]]
        if array.shape != wanted:
            raise LayoutError(
                f"block {device} has shape {array.shape}, but the layout {layout.sharding_specs} gives "
                "device "
                f"{grid.positions[device]} a block of shape {wanted} of an array of shape {tuple(whole)}"
            )
    for device in spec.devices:
        found.append(np.ascontiguousarray(arrays[device], dtype=spec.dtype).reshape(arrays[device].shape))
    return DTensor(spec, tuple(found))
