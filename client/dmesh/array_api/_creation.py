"""Functions of the array API that create arrays, by default sharded along the default mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh import arrays
from dmesh.arrays.dtensor import DTensor
from dmesh.devices.device import num_global_devices
from dmesh.errors import LayoutError
from dmesh.layout import UNSHARDED, Layout
from dmesh.mesh import Mesh, create_distributed_mesh, get_default_mesh

Device = Mesh | Layout | None
Shape = int | tuple[int, ...]
_empty: Callable[..., DTensor] = np.empty_like  # NumPy's functions, which return sharded arrays for such
_full: Callable[..., DTensor] = np.full_like


def default_device() -> Mesh:
    """Return the default mesh; outside `dmesh.default_mesh`, a one-dimensional mesh of all devices."""
    return get_default_mesh() or create_distributed_mesh(
        [("x", num_global_devices("CPU"))], device_type="CPU"
    )


def layout_of(device: Device, ndim: int) -> Layout:
    """Return the layout of a new array.

    Args:
        device: A layout; or a mesh, along whose first dimension the first dimension of the array is sharded,
            along its second one the second one, and so on. None for the default mesh.
        ndim: Number of the array's dimensions.

    Raises:
        LayoutError: `device` is neither a layout nor a mesh.
    """
    if isinstance(device, Layout):
        return device
    mesh = default_device() if device is None else device
    if not isinstance(mesh, Mesh):
        raise LayoutError(
            f"device= of the array API's functions takes a dmesh.Mesh or a dmesh.Layout, got {mesh!r:.200}"
        )
    names = [*mesh.dim_names[:ndim], *[UNSHARDED] * ndim]
    return Layout(names[:ndim], mesh)


def _ndim(shape: Shape) -> int:
    return 1 if isinstance(shape, (int, np.integer)) else len(shape)


def asarray(obj: Any, /, *, dtype: Any = None, device: Device = None, copy: bool | None = None) -> DTensor:
    """Return a sharded array from numbers or an array, which must be equal on all clients.

    Args:
        obj: A number, nested sequences of numbers, a NumPy array, or a sharded array.
        dtype: Type of the elements; None for NumPy's choice.
        device: Mesh or layout. None keeps the layout of a sharded array; see `zeros` for other objects.
        copy: Whether to copy a sharded array; None to copy it only if its dtype or layout changes.

    Raises:
        ValueError: `copy` is False, but the array must be copied.
        LayoutError: The layout does not fit the array.
    """
    if not isinstance(obj, DTensor):
        if copy is False:
            raise ValueError(
                "asarray() must copy objects other than sharded arrays, so copy=False is refused"
            )
        values = np.asarray(obj, dtype)
        return arrays.copy_to_mesh(values, layout_of(device, values.ndim), uneven=True)
    made = obj if dtype is None or obj.dtype == dtype else obj.astype(dtype)
    made = made if device is None else made.to_device(device)
    if copy is False and made is not obj:
        raise ValueError(
            "asarray() must copy the array, because its dtype or layout changes, but copy is False"
        )
    return made.copy() if copy and made is obj else made


def zeros(shape: Shape, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return zeros.

    Args:
        shape: Shape of the array.
        dtype: Type of the elements; None for float64.
        device: Mesh or layout; None for the default mesh. On a mesh, the first dimension is sharded along the
            mesh's first one, the second along its second, and so on.

    Raises:
        LayoutError: The layout does not fit the array.
    """
    return arrays.zeros(shape, float if dtype is None else dtype, layout=layout_of(device, _ndim(shape)))


def ones(shape: Shape, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return ones; see `zeros`."""
    return arrays.ones(shape, float if dtype is None else dtype, layout=layout_of(device, _ndim(shape)))


def empty(shape: Shape, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return zeros, because sharded arrays are never uninitialized; see `zeros`."""
    return zeros(shape, dtype=dtype, device=device)


def full(shape: Shape, fill_value: complex, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return an array filled with a number; see `zeros`."""
    return arrays.full(shape, fill_value, dtype, layout=layout_of(device, _ndim(shape)))


def arange(
    start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Device = None
) -> DTensor:
    """Return evenly spaced numbers within an interval; see `dmesh.arange` and `zeros`."""
    return arrays.arange(start, stop, step, dtype, layout=layout_of(device, 1))


def linspace(
    start: complex, stop: complex, /, num: int, *, dtype: Any = None, device: Device = None,
    endpoint: bool = True,
) -> DTensor:  # fmt: skip
    """Return evenly spaced numbers over an interval; see `dmesh.linspace` and `zeros`."""
    return arrays.linspace(start, stop, num, endpoint, dtype, layout=layout_of(device, 1))


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Device = None
) -> DTensor:
    """Return ones on a diagonal and zeros elsewhere; see `zeros`."""
    return arrays.eye(n_rows, n_cols, k, float if dtype is None else dtype, layout=layout_of(device, 2))


def _placed(made: DTensor, device: Device) -> DTensor:
    return made if device is None else made.to_device(device)


def empty_like(x: DTensor, /, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return an array of the same shape, and by default the same layout; see `empty`."""
    return _placed(_empty(x, dtype), device)


def zeros_like(x: DTensor, /, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return zeros of the same shape; see `empty_like`."""
    return empty_like(x, dtype=dtype, device=device)


def ones_like(x: DTensor, /, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return ones of the same shape; see `empty_like`."""
    return full_like(x, 1, dtype=dtype, device=device)


def full_like(x: DTensor, /, fill_value: complex, *, dtype: Any = None, device: Device = None) -> DTensor:
    """Return an array of the same shape, filled with a number; see `empty_like`."""
    return _placed(_full(x, fill_value, dtype), device)


def from_dlpack(x: Any, /, *, device: Device = None, copy: bool | None = None) -> DTensor:
    """Return a sharded array from another library's array in host memory; see `asarray`.

    A plain array must have the same elements on every client.
    """
    return asarray(x if isinstance(x, DTensor) else np.from_dlpack(x), device=device, copy=copy)
