"""Inspection of the array API's namespace, and limits of dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.array_api._creation import default_device
from dmesh.arrays.dtensor import DTensor
from dmesh.mesh import Mesh

_numpy: Any = np.__array_namespace_info__()


class __array_namespace_info__:
    """Dtypes, capabilities and devices of the namespace: NumPy's dtypes, and meshes as devices."""

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities: all that the standard knows."""
        return dict(_numpy.capabilities())

    def default_device(self) -> Mesh:
        """Return the mesh of arrays that are created without `device=`."""
        return default_device()

    def devices(self) -> list[Mesh]:
        """Return the default mesh. Other meshes are devices, too."""
        return [default_device()]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """Return the default dtypes, which are NumPy's on all devices."""
        del device
        return dict(_numpy.default_dtypes())

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """Return the dtypes, which are NumPy's on all devices."""
        del device
        return dict(_numpy.dtypes(kind=kind))


def _dtype(type: Any) -> Any:
    return type.dtype if isinstance(type, (DTensor, np.ndarray)) else type


def finfo(type: Any, /) -> Any:
    """Return the limits of a floating-point dtype, or of an array's."""
    return np.finfo(_dtype(type))


def iinfo(type: Any, /) -> Any:
    """Return the limits of an integer dtype, or of an array's."""
    return np.iinfo(_dtype(type))
