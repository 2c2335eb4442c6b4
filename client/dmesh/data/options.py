"""Wishes of a dataset for its distribution."""

from __future__ import annotations

import enum

from dmesh.errors import ArgumentTypeError

__all__ = ["AutoShardPolicy", "DistributeOptions", "Options", "SHARD_HINT"]

SHARD_HINT = -1
"""In `dataset.shard(SHARD_HINT, SHARD_HINT)`: replaced by the number of workers and this one's index."""


class AutoShardPolicy(enum.IntEnum):
    """Division of a dataset among several workers by `experimental_distribute_dataset`."""

    OFF = -1
    """Not at all: every worker reads all of it."""
    AUTO = 0
    """FILE if the dataset comes from files, else DATA."""
    FILE = 1
    """Each worker reads files of its own; there must be at least one for each."""
    DATA = 2
    """Every worker reads all of it and keeps its share of every batch."""
    HINT = 3
    """The dataset is divided at its `shard(SHARD_HINT, SHARD_HINT)`."""


class DistributeOptions:
    """Distribution of a dataset. Part of `Options`."""

    __slots__ = ("_auto_shard_policy",)

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Division of the dataset among the workers; AUTO by default."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        try:
            self._auto_shard_policy = AutoShardPolicy(policy)
        except ValueError:
            raise ArgumentTypeError(
                f"auto_shard_policy must be a dmesh.data.experimental.AutoShardPolicy, got {policy!r:.80}"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributeOptions) and self.auto_shard_policy == other.auto_shard_policy

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy!s})"

    def take(self, others: DistributeOptions) -> None:
        """Takes over what others say and these have not been told."""
        if self._auto_shard_policy is None:
            self._auto_shard_policy = others._auto_shard_policy


class Options:
    """Options of a dataset, for `Dataset.with_options`.

    ```python
    options = dmesh.data.Options()
    options.experimental_distribute.auto_shard_policy = dmesh.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    ```
    """

    __slots__ = ("experimental_distribute",)

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.experimental_distribute == other.experimental_distribute

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"Options(experimental_distribute={self.experimental_distribute!r})"
