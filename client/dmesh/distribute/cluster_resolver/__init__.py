"""Cluster resolvers: find the tasks of the cluster through the system that started it.

```python
resolver = dmesh.distribute.cluster_resolver.SlurmClusterResolver()
resolver.cluster_spec()                                       # all tasks of this job step
dmesh.initialize_accelerator_system(cluster_resolver=resolver)
```

A resolver queries its system at every call. `docs/resolvers.md` lists all resolvers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver
    from dmesh.distribute.cluster_resolver.coordination import CoordinationServiceResolver
    from dmesh.distribute.cluster_resolver.gce import GCEClusterResolver
    from dmesh.distribute.cluster_resolver.kubernetes import (
        KubernetesClusterResolver,
        KubernetesExecutableLocation,
    )
    from dmesh.distribute.cluster_resolver.kubernetes_service import KubernetesServiceResolver
    from dmesh.distribute.cluster_resolver.openmpi import OpenMPIClusterResolver
    from dmesh.distribute.cluster_resolver.simple import SimpleClusterResolver
    from dmesh.distribute.cluster_resolver.slurm import SlurmClusterResolver
    from dmesh.distribute.cluster_resolver.tfconfig import TFConfigClusterResolver
    from dmesh.distribute.cluster_resolver.torchelastic import TorchElasticClusterResolver
    from dmesh.distribute.cluster_resolver.tpu import TPUClusterResolver
    from dmesh.distribute.cluster_resolver.union import UnionClusterResolver, UnionResolver

_HOMES: dict[str, tuple[str, ...]] = {
    "base": ("ClusterResolver",),
    "coordination": ("CoordinationServiceResolver",),
    "gce": ("GCEClusterResolver",),
    "kubernetes": (
        "KubernetesClusterResolver",
        "KubernetesExecutableLocation",
    ),
    "kubernetes_service": ("KubernetesServiceResolver",),
    "openmpi": ("OpenMPIClusterResolver",),
    "simple": ("SimpleClusterResolver",),
    "slurm": ("SlurmClusterResolver",),
    "tfconfig": ("TFConfigClusterResolver",),
    "torchelastic": ("TorchElasticClusterResolver",),
    "tpu": ("TPUClusterResolver",),
    "union": ("UnionClusterResolver", "UnionResolver"),
}
"""Modules of this package and their public names, which are imported at the first use."""

__getattr__ = lazy_getattr(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ClusterResolver",
    "CoordinationServiceResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "KubernetesServiceResolver",
    "OpenMPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchElasticClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]
