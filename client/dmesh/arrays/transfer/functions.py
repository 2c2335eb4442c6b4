"""Functions that move arrays to a mesh, to another layout, and back, under TensorFlow's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmesh.arrays import ledger
from dmesh.arrays.creation import from_local, scattered
from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dtensor import DTensor, is_dtensor, move, read
from dmesh.arrays.grid import grid_of
from dmesh.arrays.spec import Spec, check_dtype, spec_for
from dmesh.errors import LayoutError, MeshError, MeshMismatchError, UnshardableError
from dmesh.layout import Layout
from dmesh.mesh import Mesh, default_mesh


def copy_to_mesh(
    tensor: ArrayLike | DTensor, layout: Layout, source_layout: Layout | None = None, *, uneven: bool = False
) -> DTensor:
    """Return a sharded array from a plain one that is equal on all clients. Nothing is sent.

    ```python
    x = dmesh.copy_to_mesh(np.arange(8.0), dmesh.Layout(["x"], mesh))
    ```

    Args:
        tensor: A NumPy array with the same elements on every client, which dmesh does not compare; or a
            sharded array, as for `relayout`.
        layout: The new layout.
        source_layout: Ignored; for compatibility with TensorFlow.
        uneven: Whether to accept lengths that the number of shards does not divide: the last shards are
            shorter.

    Raises:
        LayoutError: The layout does not fit the array.
        UnshardableError: The elements are Python objects.
    """
    del source_layout
    return relayout(tensor, layout, uneven=uneven)


@hook("relayout")
def relayout(
    tensor: ArrayLike | DTensor, layout: Layout, name: str | None = None, *, uneven: bool = False
) -> DTensor:
    """Return an array in another layout of its mesh.

    Args:
        tensor: A sharded array; or a NumPy array with the same elements on every client.
        layout: The new layout; `MATCH` keeps the sharding of a dimension.
        name: Ignored; for compatibility with TensorFlow.
        uneven: Whether to accept lengths that the number of shards does not divide: the last shards are
            shorter.

    Raises:
        LayoutError: The layout does not fit the array.
        MeshMismatchError: The layout is on another mesh than the array.
    """
    del name
    tensor = read(tensor)
    if not isinstance(tensor, DTensor):
        if not isinstance(layout, Layout):
            raise LayoutError(f"expected a dmesh.Layout, got {type(layout).__name__}: {layout!r:.200}")
        array = np.asarray(tensor)
        spec = spec_for(layout, array.shape, check_dtype(array.dtype), uneven=uneven)
        return scattered(array, spec)
    with ledger.operation("relayout"):
        return _moved(tensor, spec_for(layout, tensor.shape, tensor.dtype, tensor.spec, uneven=uneven))


def _moved(tensor: DTensor, target: Spec) -> DTensor:
    if target.grid is not tensor.spec.grid:
        raise MeshMismatchError(
            "relayout does not move an array to another mesh. Use copy_to_mesh(x.full(), layout)"
        )
    result = move(tensor, target)
    return result if result is not tensor else tensor.alias()


def relayout_like(tensor: ArrayLike | DTensor, layout_tensor: DTensor, name: str | None = None) -> DTensor:
    """Return an array in the layout of another one; see `relayout`.

    Raises:
        UnshardableError: `layout_tensor` is not a sharded array.
    """
    return relayout(tensor, fetch_layout(layout_tensor), name, uneven=True)


def fetch_layout(tensor: DTensor) -> Layout:
    """Return the layout of a sharded array or of a `DVariable`.

    Raises:
        UnshardableError: `tensor` is not a sharded array.
    """
    value = read(tensor)
    if not isinstance(value, DTensor):
        raise UnshardableError(
            f"fetch_layout expects a sharded array, got {type(tensor).__name__}: {tensor!r:.100}"
        )
    return value.layout


def check_layout(tensor: DTensor, layout: Layout) -> None:
    """Check that an array has a layout.

    Raises:
        LayoutError: The array has another layout.
        UnshardableError: `tensor` is not a sharded array.
    """
    found = fetch_layout(tensor)
    if found != layout:
        raise LayoutError(
            f"the layout of the array is {found.sharding_specs} on mesh {found.mesh.to_string()}, but "
            f"{layout.sharding_specs} on mesh {layout.mesh.to_string()} was expected"
        )


def pack(tensors: Sequence[ArrayLike], layout: Layout) -> DTensor:
    """Return a sharded array made of the clients' blocks, all of the same shape; nothing is sent.

    Args:
        tensors: One block for each of this client's devices, in their order. If the layout gives several
            devices the same block, the first one's is used.
        layout: Layout of the array.

    Raises:
        LayoutError: The number of blocks, their shapes or their rank do not fit.
        UnshardableError: Their dtypes differ, or they are variables.
    """
    if any(read(tensor) is not tensor for tensor in tensors):
        raise UnshardableError("pack takes blocks, and no variables")
    arrays = [np.asarray(tensor) for tensor in tensors]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise LayoutError(
            f"pack needs blocks of one shape, got {sorted(shapes)}; from_local(blocks, layout, shape) "
            "takes others"
        )
    return from_local(arrays, layout)


def unpack(tensor: DTensor) -> list[NDArray[Any]]:
    """Return this client's blocks, one for each of its devices, as read-only views; see `DTensor.to_local`.

    Raises:
        UnshardableError: `tensor` is not a sharded array.
    """
    if not isinstance(tensor, DTensor):
        raise UnshardableError(
            f"unpack expects a sharded array, got {type(tensor).__name__}: {tensor!r:.100}"
        )
    return tensor.to_local()


def call_with_layout(fn: Callable[..., Any], layout: Layout | None, *args: Any, **kwargs: Any) -> Any:
    """Call a function and return its result in a layout, or unchanged without a layout.

    ```python
    x = dmesh.call_with_layout(np.ones, dmesh.Layout(["x", "unsharded"], mesh), (8, 3))
    ```

    Args:
        fn: Function that returns the same array on every client.
        layout: Layout of the result.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.

    Raises:
        LayoutError: The layout does not fit the result.
    """
    result = fn(*args, **kwargs)
    return result if layout is None else relayout(result, layout)


@contextmanager
def run_on(mesh: Mesh) -> Iterator[None]:
    """Use a mesh as the default within a `with` block: TensorFlow's former name of `default_mesh`."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"run_on takes a Mesh, got {type(mesh).__name__}")
    grid_of(mesh)
    with default_mesh(mesh):
        yield


__all__ = [
    "call_with_layout", "check_layout", "copy_to_mesh", "fetch_layout", "is_dtensor", "pack", "relayout",
    "relayout_like", "run_on", "unpack",
]  # fmt: skip
