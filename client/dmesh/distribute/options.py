"""Options of strategies, like TensorFlow's."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["CommunicationImplementation", "CommunicationOptions", "RunOptions"]


class CommunicationImplementation(enum.Enum):
    """Algorithm, for TensorFlow. dmesh chooses by itself, whatever the value."""

    AUTO = "AUTO"
    """Whichever is best."""
    RING = "RING"
    """A ring of the replicas."""
    NCCL = "NCCL"
    """NVIDIA's library, for GPUs."""


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. All are ignored, because NumPy does not compile."""

    experimental_enable_dynamic_batch_size: bool = True
    """Ignored: batches may always have any size."""
    experimental_bucketizing_dynamic_shape: bool = False
    """Ignored: whether to round sizes up, to compile less often."""
    experimental_xla_options: object = None
    """For XLA."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of exchanges between replicas; the same on all clients.

    Raises:
        StrategyValueError: A value is out of range.
    """

    bytes_per_pack: int = 0
    """Maximum size of a bucket, bytes; 0 for 8 MB."""
    timeout_seconds: float | None = None
    """Limit of each exchange; None for `DMESH_COLLECTIVE_TIMEOUT`."""
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    """Ignored: dmesh chooses the algorithm. May be the name of a member."""

    def __post_init__(self) -> None:
        if not isinstance(self.implementation, CommunicationImplementation):
            try:
                found = CommunicationImplementation(str(self.implementation).upper())
            except ValueError:
                known = ", ".join(member.name for member in CommunicationImplementation)
                raise StrategyValueError(
                    f"implementation must be one of {known}, got {self.implementation!r:.80}"
                ) from None
            object.__setattr__(self, "implementation", found)
        if self.bytes_per_pack < 0:
            raise StrategyValueError(f"bytes_per_pack must be 0 or more, got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise StrategyValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by options of `others` that are not the default.

        Args:
            options: The others; None for none.

        Raises:
            StrategyTypeError: They are no options.
        """
        CommunicationOptions.check(options)
        if options is None:
            return self
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds,
            self.implementation
            if options.implementation is CommunicationImplementation.AUTO
            else options.implementation,
        )

    @staticmethod
    def check(options: object) -> None:
        """Refuse an object of another type.

        Raises:
            StrategyTypeError: They are none.
        """
        if options is not None and not isinstance(options, CommunicationOptions):
            raise StrategyTypeError(
                f"options must be CommunicationOptions or None, got {type(options).__name__}"
            )
