"""Strategies of one client: the default strategy outside all scopes, one device, several devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from dmesh.devices.device import DeviceSpec, local_devices, preferred_device_type, this_client
from dmesh.distribute.placement import Placement, Replica
from dmesh.distribute.replica_context import ReplicaContext
from dmesh.distribute.replicas import Replicas
from dmesh.distribute.strategy import Strategy
from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["DefaultStrategy", "MirroredStrategy", "OneDeviceStrategy", "default_strategy"]


class DefaultStrategy(Strategy):
    """Strategy of code outside all scopes, with one replica."""

    def __init__(self) -> None:
        replica = Replica(0, 0, ("/device:CPU:0",))
        super().__init__(Replicas(Placement((replica,), 0)))
        self.only_replica = ReplicaContext(self, replica, 0, None)
        """The replica of code outside all scopes."""


@cache
def default_strategy() -> DefaultStrategy:
    """Return the default strategy, a singleton."""
    return DefaultStrategy()


class MirroredStrategy(Strategy):
    """Replicas on the devices of this client.

    ```python
    strategy = dmesh.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weights = dmesh.Variable(np.zeros(3))

        def step():
            weights.assign_add(np.ones(3))
            return weights.numpy().sum()

        assert strategy.run(step) == 3.0
    ```

    Args:
        devices: Names of the devices, such as `["CPU:0", "CPU:1"]`; by default all that this client has of
            the preferred type.

    Raises:
        StrategyValueError: There is no device, one is named twice, or one is not there.
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        names = _own_devices(devices)
        client = this_client().client_id
        replicas = tuple(Replica(index, client, (name,)) for index, name in enumerate(names))
        super().__init__(Replicas(Placement(replicas, client)))


class OneDeviceStrategy(MirroredStrategy):
    """One replica on one device, for trying out code written for strategies.

    Args:
        device: Its name, such as `CPU:0`.

    Raises:
        StrategyTypeError: It is no name.
        StrategyValueError: There is no such device.
    """

    def __init__(self, device: str) -> None:
        if not isinstance(device, str):
            raise StrategyTypeError(f"OneDeviceStrategy needs the name of a device, got {device!r:.200}")
        super().__init__([device])


def _own_devices(wanted: Sequence[str] | None) -> list[str]:
    """Return full names of devices of this client."""
    if wanted is None:
        return [device.to_string() for device in local_devices(preferred_device_type())]
    if isinstance(wanted, str):
        raise StrategyTypeError(f"devices must be a list of names, got {wanted!r:.200}")
    names: list[str] = []
    for name in wanted:
        spec = DeviceSpec.from_string(name)
        own = local_devices(spec.device_type or "CPU")
        full = own[0].make_merged_spec(spec) if own else spec
        if full not in own or full.to_string() in names:
            problem = "is named twice" if full in own else "is no device of this client"
            raise StrategyValueError(f"{name!r:.200} {problem}; it has {', '.join(map(str, own)) or 'none'}")
        names.append(full.to_string())
    if not names:
        raise StrategyValueError("a strategy needs at least one device")
    return names
