"""Replicas of a strategy on all clients, with their agreement and the exchange of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.config import client as config
from dmesh.config.host import own_cpus
from dmesh.config.settings import Settings
from dmesh.distribute.agreement import Agreement, call_outside
from dmesh.distribute.combining import Array, Combiner, describe_values
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.placement import Placement
from dmesh.distribute.values import DistributedValues
from dmesh.errors import NotInitializedError, StrategyValueError
from dmesh.runtime import context
from dmesh.structure import flatten

__all__ = ["Replicas", "require_initialized_clients"]


class Replicas:
    """Replicas of a strategy on all clients.

    All clients that have some must make it, in the same order as other strategies.

    Args:
        placement: All replicas.
        options: Options of exchanges, unless a call has its own.
    """

    def __init__(self, placement: Placement, options: CommunicationOptions | None = None) -> None:
        self.placement = placement
        self.local_size = len(placement.local)
        """Number of this client's replicas."""
        self.group = self._new_group("strategy")
        """The clients, if there are several."""
        self.agreement = Agreement(placement, self.group, self._recover)
        """Comparison of the replicas' calls."""
        self.combiner = Combiner(placement, self.group, options or CommunicationOptions())
        """Exchange of the replicas' values."""
        self._overlapping: Group | None = None

    def _new_group(self, name: str) -> Group | None:
        count = self.placement.num_clients
        return context.current().get(Communicator).new_group(range(count), name) if count > 1 else None

    @property
    def timeout(self) -> float:
        """Limit of a collective in seconds."""
        settings = context.find(Settings)
        return Settings.collective_timeout if settings is None else settings.collective_timeout

    def overlapping(self) -> Group | None:
        """Return the group for reductions that overlap with other exchanges; all clients must ask for it.

        None if there is nothing to gain: the clients are on one host, and have no core to spare.
        """
        if self.group is None:
            return None
        neighbours = self.group.communicator.neighbours
        gains = neighbours < self.placement.num_clients or len(own_cpus()) > neighbours
        # Each time: a client that replaces a lost one does not know yet.
        if not self.group.all_gather(np.array(gains)).all():
            return None
        if self._overlapping is None:
            self._overlapping = self._new_group("strategy, overlapping")
        return self._overlapping

    def _recover(self) -> None:
        """End reductions that are under way when a step has failed on all clients."""
        if self._overlapping is not None:
            self._overlapping.reset()

    def agree(self, texts: Sequence[str]) -> None:
        """Refuse to go on unless all replicas make the same call outside of `run`.

        Args:
            texts: Description of the call for each replica of this client.

        Raises:
            ReplicaMismatchError: They differ.
            CollectiveError: A client was lost, or did not arrive in time.
        """
        first = call_outside(texts[0])
        if all(text == texts[0] for text in texts):
            self.agreement.check(first)
            return
        difference = self.agreement.compare([call_outside(text).state for text in texts])
        if difference is not None:
            raise difference

    def from_first(self, values: Sequence[Array], what: str) -> list[Array]:
        """Return the values of the client of replica 0, on all clients.

        Args:
            values: The values; of the same shapes and dtypes on all clients.
            what: Name of the call.
        """
        self.agreement.check(call_outside(f"{what} of {describe_values(values)}"))
        return self.combiner.first(values)

    def check_parts(self, structure: Any) -> None:
        """Refuse distributed values that do not have a value for each replica of this client.

        Raises:
            StrategyValueError: There is one in the nested structure.
        """
        for leaf in flatten(structure):
            if isinstance(leaf, DistributedValues) and len(leaf.values) != self.local_size:
                raise StrategyValueError(
                    f"a {type(leaf).__name__} has {len(leaf.values)} values, but this client has "
                    f"{self.local_size} replicas: it belongs to another strategy"
                )


def require_initialized_clients() -> None:
    """Refuse to go on alone where the environment names several clients.

    Raises:
        NotInitializedError: They are not connected yet.
    """
    if context.current_or_none() is None and config.num_clients() > 1:
        raise NotInitializedError(
            f"there are {config.num_clients()} clients (DTENSOR_JOBS), which are not connected yet: call "
            "dmesh.initialize_accelerator_system() before you create a strategy"
        )
