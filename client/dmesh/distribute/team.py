"""Replicas of a strategy, with their means of agreeing and of exchanging values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.config import client as config
from dmesh.config.settings import Settings
from dmesh.distribute import scopes
from dmesh.distribute.agreement import Agreement, Place
from dmesh.distribute.combining import Array, Combiner, describe_values
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.placement import Placement
from dmesh.distribute.replica_context import ReplicaContext
from dmesh.distribute.steps import Step
from dmesh.distribute.values import DistributedValues, select_replica
from dmesh.errors import NotInitializedError, StrategyValueError
from dmesh.runtime import context
from dmesh.structure import flatten

if TYPE_CHECKING:
    from dmesh.distribute.interfaces import StrategyInterface

__all__ = ["Team", "require_initialized_clients"]


class Team:
    """The replicas of a strategy on all clients.

    All clients that have some must make it, in the same order as other teams.

    Args:
        placement: All replicas.
        options: How they exchange values, unless a call says otherwise.
    """

    def __init__(self, placement: Placement, options: CommunicationOptions | None = None) -> None:
        self.placement = placement
        self.group: Group | None = None
        """The clients, if there are several."""
        if placement.num_clients > 1:
            communicator = context.current().get(Communicator)
            self.group = communicator.new_group(range(placement.num_clients), "strategy")
        self.agreement = Agreement(placement, self.group)
        self.combiner = Combiner(placement, self.group, options or CommunicationOptions())

    @property
    def timeout(self) -> float:
        """Seconds that a collective may take."""
        settings = context.find(Settings)
        return Settings.collective_timeout if settings is None else settings.collective_timeout

    @property
    def local_size(self) -> int:
        """Number of this client's replicas."""
        return len(self.placement.local)

    def run(
        self, strategy: StrategyInterface, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Runs a function as every replica of this client, in step with the other clients.

        Returns:
            What each replica returned.
        """
        self.check_parts((args, kwargs))
        local = self.placement.local
        step = Step(local, self.agreement, self.timeout)

        def body(index: int) -> Callable[[], Any]:
            own = ReplicaContext(strategy, local[index], index, step)
            own_args, own_kwargs = select_replica(index, (list(args), kwargs))

            def run() -> Any:
                with scopes.entered(scopes.Frame(strategy, own)):
                    return fn(*own_args, **own_kwargs)

            return run

        return step.run([body(index) for index in range(len(local))])

    def agree(self, texts: Sequence[str]) -> None:
        """Makes sure that all replicas take part in the same thing outside of `run`.

        Args:
            texts: For each replica of this client, what it is, with all in which they must agree.

        Raises:
            ReplicaMismatchError: They do not.
            CollectiveError: A client is lost, or did not come.
        """
        difference = self.agreement.compare([Place("taking part in", text) for text in texts])
        if difference is not None:
            raise difference

    def from_first(self, values: Sequence[Array], what: str) -> list[Array]:
        """Gives all clients the values that the client of replica 0 has.

        Args:
            values: The values; of the same shapes and dtypes on all clients.
            what: What they are for.
        """
        self.agree([f"{what} of {describe_values(values)}"] * self.local_size)
        return self.combiner.first(values)

    def check_parts(self, structure: Any) -> None:
        """Refuses distributed values that do not have a value for each replica of this client.

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
    """Refuses to go on alone where the environment names several clients.

    Raises:
        NotInitializedError: They have not met yet.
    """
    if context.current_or_none() is None and config.num_clients() > 1:
        raise NotInitializedError(
            f"there are {config.num_clients()} clients (DTENSOR_JOBS), which have not met yet: call "
            "dmesh.initialize_accelerator_system() before making a strategy"
        )
