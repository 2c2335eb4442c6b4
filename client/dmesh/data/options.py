"""Options of a dataset for its distribution."""

from __future__ import annotations

import enum
from typing import Any, Self

from dmesh.data.elements import check_integer
from dmesh.errors import ArgumentTypeError, DatasetError

__all__ = ["AutoShardPolicy", "DistributeOptions", "Options", "SHARD_HINT"]

SHARD_HINT = -1
"""In `dataset.shard(SHARD_HINT, SHARD_HINT)`: placeholder for number and index of the worker."""


class AutoShardPolicy(enum.IntEnum):
    """Division of a dataset among several workers by `experimental_distribute_dataset`."""

    OFF = -1
    """No division: every worker reads the whole dataset."""
    AUTO = 0
    """FILE if the dataset comes from files, else DATA."""
    FILE = 1
    """Each worker reads some of the files; there must be at least one for each."""
    DATA = 2
    """Every worker gets its share of every batch."""
    HINT = 3
    """The dataset is divided at its `shard(SHARD_HINT, SHARD_HINT)`."""


class _Freezable:
    """Base of options; those of a dataset cannot be changed."""

    __slots__ = ("_frozen",)

    def frozen(self) -> Self:
        """Refuse all changes from now on; return the options."""
        object.__setattr__(self, "_frozen", True)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise DatasetError(
                "the options that dataset.options() has returned cannot be changed: change "
                "dmesh.data.Options() and pass it to with_options()"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {name: getattr(self, name) for name in self.__slots__}  # copies can be changed


class DistributeOptions(_Freezable):
    """Distribution of a dataset. Part of `Options`."""

    __slots__ = ("_auto_shard_policy", "_num_devices")

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None
        self._num_devices: int | None = None

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

    @property
    def num_devices(self) -> int | None:
        """Number of devices of a worker; None if it was not set.

        It is ignored: a strategy knows its replicas.
        """
        return self._num_devices

    @num_devices.setter
    def num_devices(self, count: int | None) -> None:
        self._num_devices = None if count is None else check_integer("num_devices", count, 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistributeOptions):
            return NotImplemented
        return (self.auto_shard_policy, self.num_devices) == (other.auto_shard_policy, other.num_devices)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        devices = "" if self._num_devices is None else f", num_devices={self._num_devices}"
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy!s}{devices})"

    def take(self, others: DistributeOptions) -> None:
        """Copy options from `others` that are not set here."""
        if self._auto_shard_policy is None:
            self._auto_shard_policy = others._auto_shard_policy
        if self._num_devices is None:
            self._num_devices = others._num_devices


class Options(_Freezable):
    """Options of a dataset, for `Dataset.with_options`.

    ```python
    options = dmesh.data.Options()
    options.experimental_distribute.auto_shard_policy = dmesh.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    ```
    """

    __slots__ = ("experimental_distribute",)
    experimental_distribute: DistributeOptions
    """Distribution of the dataset."""

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.experimental_distribute == other.experimental_distribute

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"Options(experimental_distribute={self.experimental_distribute!r})"
