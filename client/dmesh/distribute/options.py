"""Options that strategies take as TensorFlow's do."""

from __future__ import annotations

from dataclasses import dataclass

from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["CommunicationOptions", "RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. NumPy compiles nothing: all of them are accepted and change nothing."""

    experimental_enable_dynamic_batch_size: bool = True
    """For compilers: whether batches may have any size. They always may."""
    experimental_bucketizing_dynamic_shape: bool = False
    """For compilers: whether to round sizes up, to compile less often."""
    experimental_xla_options: object = None
    """For XLA."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of exchanges between replicas; the same on all clients.

    Raises:
        StrategyValueError: A value is out of range.
    """

    bytes_per_pack: int = 0
    """Bytes of values that are sent together; 0 for 8 MB."""
    timeout_seconds: float | None = None
    """Limit of each exchange; None for `DMESH_COLLECTIVE_TIMEOUT`."""

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise StrategyValueError(f"bytes_per_pack must be 0 or more, got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise StrategyValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")

    @staticmethod
    def check(options: object) -> None:
        """Refuses what are no options.

        Raises:
            StrategyTypeError: They are none.
        """
        if options is not None and not isinstance(options, CommunicationOptions):
            raise StrategyTypeError(
                f"options must be CommunicationOptions or None, got {type(options).__name__}"
            )
