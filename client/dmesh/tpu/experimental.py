"""Start and end of a TPU system, under the names of `tf.tpu.experimental`.

```python
import dmesh

topology = dmesh.tpu.experimental.initialize_tpu_system()  # with TPU_ACCELERATOR_TYPE=v2-8
assignment = dmesh.tpu.experimental.DeviceAssignment.build(
    topology, computation_shape=[1, 1, 1, 2], num_replicas=4
)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._log import logger
from dmesh.devices.device import LogicalDevices
from dmesh.distribute.cluster_resolver.tpu_metadata import TPUSystemMetadata
from dmesh.errors import AlreadyInitializedError, ArgumentTypeError, TopologyError, TpuNotFoundError
from dmesh.runtime import context
from dmesh.runtime.system import (
    add_tpu_system,
    initialize_accelerator_system,
    remove_tpu_system,
    shutdown_accelerator_system,
)
from dmesh.tpu.accelerator import TpuSystem
from dmesh.tpu.device_assignment import DeviceAssignment, DeviceOrderMode
from dmesh.tpu.features import HardwareFeature
from dmesh.tpu.topology import Topology

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Makes the cores of a TPU system logical devices of the clients, and returns their topology.

    All clients must call it. It initializes the accelerator system if that has not been done: in local mode
    this process has all cores, otherwise the clients share them equally. Their arithmetic is NumPy's, on the
    host. A second call has no effect.

    Args:
        cluster_resolver: Resolver whose `accelerator_type` is the type of the TPU system. If it is None, or
            does not know the type, `TPU_ACCELERATOR_TYPE` describes the system.

    Returns:
        The topology of the TPU system, the same for all clients.

    Raises:
        ArgumentTypeError: `cluster_resolver` is not a cluster resolver.
        TpuNotFoundError: No TPU system is described.
        TopologyError: There is no such TPU system, or the clients cannot share it.
        AlreadyInitializedError: Another TPU system is initialized.
        ConfigurationError: An environment variable is not usable.
        CoordinationError: Not all clients came; see `dmesh.initialize_accelerator_system`.
    """
    tpu = _described_by(cluster_resolver)
    if context.current_or_none() is None:
        initialize_accelerator_system("TPU", tpu=tpu)
    topology = add_tpu_system(tpu)
    if tpu is not None and tuple(topology.mesh_shape.tolist()) != tpu.mesh_shape:
        raise AlreadyInitializedError(
            f"a TPU system of shape {topology.mesh_shape.tolist()} is initialized, but the cluster resolver "
            f"means a {tpu.accelerator_type} of shape {list(tpu.mesh_shape)}; call "
            "shutdown_tpu_system() first"
        )
    remember = getattr(cluster_resolver, "set_tpu_topology", None)
    if remember is not None:
        remember(topology.serialized())
    logger.info("the TPU system is initialized: %r", topology)
    return topology


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Shuts the TPU system down; all clients must call it.

    If `initialize_tpu_system` has initialized the accelerator system, too, this process leaves the cluster as
    with `dmesh.shutdown_accelerator_system`. Otherwise the clients stay, without TPU devices.

    Args:
        cluster_resolver: As for `initialize_tpu_system`; it has no influence.

    Raises:
        ArgumentTypeError: `cluster_resolver` is not a cluster resolver.
        TpuNotFoundError: No TPU system is initialized.
        BarrierError: Not all clients came to the shutdown.
    """
    _check_resolver(cluster_resolver)
    state = context.current_or_none()
    if state is None or state.find(Topology) is None:
        raise TpuNotFoundError(
            "no TPU system is initialized; call dmesh.tpu.experimental.initialize_tpu_system() first"
        )
    if state.get(LogicalDevices).type == "TPU":
        shutdown_accelerator_system()
    else:
        remove_tpu_system()


def _described_by(cluster_resolver: object) -> TpuSystem | None:
    """Returns the TPU system that a resolver knows of, or None."""
    _check_resolver(cluster_resolver)
    accelerator_type = getattr(cluster_resolver, "accelerator_type", None)
    if accelerator_type is None:
        return None
    try:
        return TpuSystem.find(accelerator_type, context.environment())
    except TopologyError as error:
        raise TopologyError(
            f"{type(cluster_resolver).__name__} found a TPU that is not usable: {error}"
        ) from error


def _check_resolver(cluster_resolver: object) -> None:
    if cluster_resolver is not None and not all(
        callable(getattr(cluster_resolver, name, None))
        for name in ("cluster_spec", "master", "num_accelerators")
    ):
        raise ArgumentTypeError(
            f"cluster_resolver must be a cluster resolver, such as TPUClusterResolver, or None; got "
            f"{cluster_resolver!r:.200}"
        )


__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "initialize_tpu_system",
    "shutdown_tpu_system",
    "Topology",
    "TPUSystemMetadata",
]
