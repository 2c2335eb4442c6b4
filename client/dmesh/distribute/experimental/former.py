"""Former names of strategies and options. Each names its successor when it is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dmesh._log import logger
from dmesh.distribute.multi_worker import MultiWorkerMirroredStrategy as CurrentMultiWorkerMirroredStrategy
from dmesh.distribute.options import CommunicationImplementation, CommunicationOptions, RunOptions
from dmesh.distribute.tpu_strategy import TPUStrategy as CurrentTPUStrategy

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver
    from dmesh.tpu.device_assignment import DeviceAssignment

__all__ = ["CollectiveHints", "MultiWorkerMirroredStrategy", "TPUStrategy"]


class TPUStrategy(CurrentTPUStrategy):
    """The former form of `dmesh.distribute.TPUStrategy`, which new programs should use.

    Args:
        tpu_cluster_resolver: Resolver that found the TPU system.
        device_assignment: Assignment of cores to replicas.

    Raises:
        TpuNotFoundError: As for `dmesh.distribute.TPUStrategy`, and so are the others.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        logger.warning(
            "dmesh.distribute.experimental.TPUStrategy is deprecated: use dmesh.distribute.TPUStrategy"
        )
        super().__init__(tpu_cluster_resolver, device_assignment)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run a function as every replica; the former name of `run`."""
        warnings.warn("experimental_run_v2 is deprecated: use run", DeprecationWarning, stacklevel=2)
        return self.run(fn, args, kwargs, options)


class MultiWorkerMirroredStrategy(CurrentMultiWorkerMirroredStrategy):
    """The former form of `dmesh.distribute.MultiWorkerMirroredStrategy`, which new programs should use.

    Args:
        communication: A hint, as in `CommunicationOptions`.
        cluster_resolver: Resolver that found the clients.

    Raises:
        NotInitializedError: As for `dmesh.distribute.MultiWorkerMirroredStrategy`, and so are the others.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        logger.warning(
            "dmesh.distribute.experimental.MultiWorkerMirroredStrategy is deprecated: use "
            "dmesh.distribute.MultiWorkerMirroredStrategy"
        )
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


class CollectiveHints(CommunicationOptions):
    """The former form of `CommunicationOptions`, which new programs should use.

    Args:
        bytes_per_pack: Bytes of values that are sent together; 0 for 8 MB.
        timeout_seconds: Limit of each exchange; None for `DMESH_COLLECTIVE_TIMEOUT`.

    Raises:
        StrategyValueError: A value is out of range.
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        warnings.warn(
            "CollectiveHints is deprecated: use CommunicationOptions", DeprecationWarning, stacklevel=2
        )
        super().__init__(bytes_per_pack, timeout_seconds)
