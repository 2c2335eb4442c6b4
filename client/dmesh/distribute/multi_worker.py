"""Training in step on all clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh.devices.device import local_devices, preferred_device_type, this_client
from dmesh.distribute.cluster_resolver.joined import cluster_of_this_process
from dmesh.distribute.extended import StrategyExtended
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.placement import Placement, Replica
from dmesh.distribute.replicas import Replicas, require_initialized_clients
from dmesh.distribute.strategy import Strategy
from dmesh.errors import StrategyTypeError

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver

__all__ = ["MultiWorkerMirroredStrategy"]


class _Extended(StrategyExtended):
    """The strategy's part for libraries, in which each client sees its own devices."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica of this client, by replica."""
        return tuple(replica.devices[0] for replica in self.replicas.placement.local)


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on all clients, one for each of their logical devices, that train in step.

    All clients create it, after `dmesh.initialize_accelerator_system`. Without other clients it has the
    replicas of this client only.

    ```python
    with dmesh.session():
        strategy = dmesh.distribute.MultiWorkerMirroredStrategy()

        def step(x):
            return dmesh.distribute.get_replica_context().all_reduce("SUM", x)

        total = strategy.run(step, args=(np.ones(3),))
        assert np.all(total == strategy.num_replicas_in_sync)
    ```

    Args:
        cluster_resolver: Resolver that found the clients, for `strategy.cluster_resolver`. Default: the one
            of this process's cluster.
        communication_options: Options of exchanges, unless a call has its own.

    Raises:
        NotInitializedError: There are other clients, which are not connected yet.
        StrategyValueError: The clients have different numbers of devices.
        StrategyTypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        CommunicationOptions.check(communication_options)
        if cluster_resolver is not None and not hasattr(cluster_resolver, "cluster_spec"):
            raise StrategyTypeError(
                f"cluster_resolver must be a ClusterResolver, got {type(cluster_resolver).__name__}"
            )
        require_initialized_clients()
        kind = preferred_device_type()
        _, client, num_clients = this_client()
        devices = [
            (owner, device.to_string())
            for owner in range(num_clients)
            for device in local_devices(kind, owner)
        ]
        replicas = tuple(Replica(number, owner, (name,)) for number, (owner, name) in enumerate(devices))
        super().__init__(
            Replicas(Placement(replicas, client, num_clients), communication_options),
            cluster_of_this_process() if cluster_resolver is None else cluster_resolver,
        )

    def _extend(self, replicas: Replicas) -> StrategyExtended:
        return _Extended(self, replicas)
