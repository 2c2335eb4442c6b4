"""The names of `tf.distribute.experimental`: an older strategy, and options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dmesh._log import logger
from dmesh.distribute.input_options import ValueContext
from dmesh.distribute.options import CommunicationOptions, RunOptions
from dmesh.distribute.tpu_strategy import TPUStrategy as CurrentTPUStrategy

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver
    from dmesh.tpu.device_assignment import DeviceAssignment

__all__ = ["CommunicationOptions", "TPUStrategy", "ValueContext"]


class TPUStrategy(CurrentTPUStrategy):
    """The former form of `dmesh.distribute.TPUStrategy`, which new programs should use.

    Args:
        tpu_cluster_resolver: What the TPU system was found with.
        device_assignment: Which cores compute which replica.

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
        """Runs a function as every replica; the former name of `run`."""
        warnings.warn("experimental_run_v2 is deprecated: use run", DeprecationWarning, stacklevel=2)
        return self.run(fn, args, kwargs, options)
