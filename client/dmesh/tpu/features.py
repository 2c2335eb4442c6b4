"""Options for compilers and hardware features of TPUs: `XLAOptions` and `HardwareFeature`."""

from __future__ import annotations

import enum
from typing import NamedTuple

from dmesh.v1.topology_pb2 import TPUHardwareFeature

__all__ = ["HardwareFeature", "XLAOptions"]


class XLAOptions(NamedTuple):
    """Options of the compiler, for `RunOptions`. NumPy compiles nothing: they change nothing."""

    use_spmd_for_xla_partitioning: bool = True
    """Which of XLA's partitioners divides a computation."""
    enable_xla_dynamic_padder: bool = True
    """Whether XLA pads arrays whose shapes it does not know. NumPy knows all shapes."""
    use_shardy_partitioner: bool = False
    """Which of XLA's partitioners divides a computation."""


class HardwareFeature:
    """Hardware features of a TPU system, read from its topology.

    ```python
    feature = dmesh.tpu.experimental.HardwareFeature(resolver.tpu_hardware_feature)
    feature.embedding_feature
    ```

    Args:
        tpu_hardware_feature_proto: The message, from `TPUClusterResolver.tpu_hardware_feature`; None if no
            TPU system is initialized.
    """

    class EmbeddingFeature(enum.Enum):
        """Unit of a TPU that looks up embeddings. dmesh does not use it."""

        UNSUPPORTED = "UNSUPPORTED"
        """There is none."""
        V1 = "V1"
        """One that begins a computation."""
        V2 = "V2"
        """One that may be anywhere in a computation."""

    def __init__(self, tpu_hardware_feature_proto: TPUHardwareFeature | None) -> None:
        self.tpu_hardware_feature_proto = tpu_hardware_feature_proto or TPUHardwareFeature()
        """The message."""

    @property
    def embedding_feature(self) -> EmbeddingFeature:
        """Unit that looks up embeddings; UNSUPPORTED if the topology does not say."""
        found = {
            TPUHardwareFeature.EMBEDDING_FEATURE_V1: self.EmbeddingFeature.V1,
            TPUHardwareFeature.EMBEDDING_FEATURE_V2: self.EmbeddingFeature.V2,
        }
        return found.get(self.tpu_hardware_feature_proto.embedding_feature, self.EmbeddingFeature.UNSUPPORTED)
