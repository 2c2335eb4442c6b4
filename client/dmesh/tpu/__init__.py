"""TPU systems as topologies, whose cores are logical devices.

dmesh does not compute on TPUs: a TPU system is a *topology*, its cores are logical devices of the clients,
and their arithmetic is NumPy's, on the host. `docs/tpu.md` is the guide.
"""

# - `experimental`: what `tf.tpu.experimental` has: starting and ending the TPU system.
# - `accelerator`: what a TPU system consists of, by its type and by the environment of its hosts.
# - `topology`: the mesh of cores, and which task has which of them.
# - `device_assignment`: which cores compute which replica.
# - `table`: the TPU system in the table of all clients' devices.
# - `mesh`: meshes whose neighbours are next to each other on the TPU system.
# - `features`: what programs ask compilers and TPUs for.
# - `rings`: orders in which neighbours are next to each other.

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from dmesh.tpu import experimental
    from dmesh.tpu.accelerator import TpuSystem
    from dmesh.tpu.features import XLAOptions

_HOMES: dict[str, tuple[str, ...]] = {
    "accelerator": ("TpuSystem",),
    "experimental": (),
    "features": ("XLAOptions",),
}
"""Modules of this package and their public names, which are imported at the first use."""

__getattr__ = lazy_getattr(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "experimental",
    "TpuSystem",
    "XLAOptions",
]
