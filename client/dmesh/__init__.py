"""NumPy programs that span processes and hosts.

```python
import numpy as np
import dmesh

with dmesh.session():  # joins the other clients, and leaves with them
    mesh = dmesh.create_distributed_mesh([("batch", dmesh.size())])
    total = dmesh.collectives.all_reduce(np.ones(3))
```

The names are TensorFlow DTensor's where it has one. `dmesh.collectives` moves arrays between clients,
`dmesh.coordination` lets them agree on things, `dmesh.errors` has every exception.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dmesh._lazy_imports import load
from dmesh._version import __version__

if TYPE_CHECKING:
    from dmesh import array_api, collectives, config, coordination, data, distribute, errors, tpu, train
    from dmesh.arrays import (
        ArraySpec,
        DTensor,
        DVariable,
        ImplicitGatherWarning,
        arange,
        axes,
        call_with_layout,
        check_layout,
        checkpoint,
        copy_to_mesh,
        debug,
        eye,
        fetch_layout,
        from_function,
        from_local,
        full,
        implicit_gather,
        is_dtensor,
        linspace,
        ones,
        pack,
        random,
        register_op,
        relayout,
        relayout_like,
        run_on,
        unpack,
        visualize_sharding,
        zeros,
    )
    from dmesh.arrays.explain import explain
    from dmesh.arrays.shard_map import shard_map
    from dmesh.config import client_id, full_job_name, heartbeat_enabled, job_name, jobs, num_clients
    from dmesh.devices.device import (
        DeviceSpec,
        device_name,
        local_devices,
        num_global_devices,
        num_local_devices,
        preferred_device_type,
    )
    from dmesh.distribute.dtensor_dataset import DTensorDataset
    from dmesh.distribute.reduce_op import VariableAggregation, VariableSynchronization
    from dmesh.distribute.variable import Variable
    from dmesh.engines.api import launch
    from dmesh.layout import MATCH, UNSHARDED, Layout
    from dmesh.memory import array, empty
    from dmesh.mesh import (
        Mesh,
        MeshDimension,
        create_distributed_mesh,
        create_mesh,
        default_mesh,
        get_default_mesh,
    )
    from dmesh.mesh.synchronization import barrier
    from dmesh.runtime.progress import progress
    from dmesh.runtime.ranks import local_rank, local_size, rank, size
    from dmesh.runtime.session import main, session
    from dmesh.runtime.summary import summary
    from dmesh.runtime.system import initialize_accelerator_system, shutdown_accelerator_system
    from dmesh.tpu.mesh import create_tpu_mesh

    initialize_multi_client = initialize_accelerator_system
    initialize_tpu_system = initialize_accelerator_system
    shutdown_tpu_system = shutdown_accelerator_system

# gRPC's own handlers of forks start threads in a child that go on where the parent's were: now and then it
# is aborted, and each fork prints a line on stderr. A child has no use for them: it must not use dmesh. gRPC
# reads this when it is imported; what a user sets is kept. https://github.com/grpc/grpc/issues/41768
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    "arrays": (
        "ArraySpec", "DTensor", "DVariable", "ImplicitGatherWarning", "arange", "axes",
        "call_with_layout", "check_layout", "checkpoint",
        "copy_to_mesh", "debug", "explain", "eye", "fetch_layout", "from_function", "from_local",
        "full", "implicit_gather", "is_dtensor", "linspace", "ones", "pack", "random", "register_op",
        "relayout",
        "relayout_like", "run_on", "shard_map", "unpack", "visualize_sharding", "zeros",
    ),
    "distribute.dtensor_dataset": ("DTensorDataset",),
    "config": ("client_id", "full_job_name", "heartbeat_enabled", "job_name", "jobs", "num_clients"),
    "engines.api": ("launch",),
    "devices.device": (
        "DeviceSpec", "device_name", "local_devices", "num_global_devices", "num_local_devices",
        "preferred_device_type",
    ),
    "distribute.reduce_op": ("VariableAggregation", "VariableSynchronization"),
    "distribute.variable": ("Variable",),
    "layout": ("MATCH", "UNSHARDED", "Layout"),
    "memory": ("array", "empty"),
    "mesh": (
        "Mesh", "MeshDimension", "create_distributed_mesh", "create_mesh", "default_mesh", "get_default_mesh",
    ),
    "mesh.synchronization": ("barrier",),
    "runtime.ranks": ("local_rank", "local_size", "rank", "size"),
    "runtime.progress": ("progress",),
    "runtime.session": ("main", "session"),
    "runtime.summary": ("summary",),
    "runtime.system": ("initialize_accelerator_system", "shutdown_accelerator_system"),
    "tpu.mesh": ("create_tpu_mesh",),
}  # fmt: skip
"""Modules of the public names. They are imported when they are first used: the coordination server, the
command line and the launcher are here, too, and would start half as fast with NumPy and all of the SDK."""

_SUBMODULES = (
    "array_api", "collectives", "config", "coordination", "data", "distribute", "errors", "tpu", "train",
)  # fmt: skip

_ALIASES = {
    "initialize_multi_client": "initialize_accelerator_system",
    "initialize_tpu_system": "initialize_accelerator_system",
    "shutdown_tpu_system": "shutdown_accelerator_system",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return load(f"dmesh.{name}")
    wanted = _ALIASES.get(name, name)
    for module, names in _HOMES.items():
        if wanted in names:
            value = globals()[name] = getattr(load(f"dmesh.{module}"), wanted)
            return value
    raise AttributeError(f"module 'dmesh' has no attribute {name!r}")


def load_ipython_extension(ipython: object) -> None:
    """Give an IPython shell `%%dmesh`: what `%load_ext dmesh` calls."""
    load("dmesh.notebook.magics").load(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """End the clients that `%%dmesh` keeps: what `%unload_ext dmesh` calls."""
    load("dmesh.notebook.magics").unload(ipython)


def __dir__() -> list[str]:
    return list(__all__)


__all__ = [
    "__version__",
    "arange",
    "array",
    "array_api",
    "ArraySpec",
    "axes",
    "barrier",
    "call_with_layout",
    "check_layout",
    "checkpoint",
    "client_id",
    "collectives",
    "config",
    "coordination",
    "copy_to_mesh",
    "create_distributed_mesh",
    "create_mesh",
    "create_tpu_mesh",
    "data",
    "debug",
    "default_mesh",
    "device_name",
    "DeviceSpec",
    "distribute",
    "DTensor",
    "DTensorDataset",
    "DVariable",
    "empty",
    "errors",
    "explain",
    "eye",
    "fetch_layout",
    "from_function",
    "from_local",
    "full",
    "full_job_name",
    "get_default_mesh",
    "heartbeat_enabled",
    "implicit_gather",
    "ImplicitGatherWarning",
    "initialize_accelerator_system",
    "initialize_multi_client",
    "initialize_tpu_system",
    "is_dtensor",
    "job_name",
    "jobs",
    "launch",
    "Layout",
    "linspace",
    "local_devices",
    "local_rank",
    "local_size",
    "main",
    "MATCH",
    "Mesh",
    "MeshDimension",
    "num_clients",
    "num_global_devices",
    "num_local_devices",
    "ones",
    "pack",
    "preferred_device_type",
    "progress",
    "random",
    "rank",
    "register_op",
    "relayout",
    "relayout_like",
    "run_on",
    "session",
    "shard_map",
    "shutdown_accelerator_system",
    "shutdown_tpu_system",
    "size",
    "summary",
    "tpu",
    "train",
    "unpack",
    "UNSHARDED",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "visualize_sharding",
    "zeros",
]
