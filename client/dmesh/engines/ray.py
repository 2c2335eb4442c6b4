"""Ranks in actors of a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dmesh.engines import rank as ranks
from dmesh.engines.gang import Ending
from dmesh.engines.rank import Call, Place, Report
from dmesh.errors import ConfigurationError, EngineError, MissingExtraError

_EXIT_TYPE = re.compile(r"Worker exit type: (\w+)")


class RankProcess:
    """Ray actor: the process of one rank."""

    def place(self) -> Place:
        """Return this process."""
        import ray

        return ranks.own_place(ray.util.get_node_ip_address())

    def run(
        self,
        variables: Mapping[str, str],
        function: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        initialize: bool,
        file: str,
    ) -> Report:
        """Run a rank; see `rank.run_rank`."""
        return ranks.run_rank(variables, function, args, kwargs, initialize, file)


class RayGang:
    """Actors of a Ray cluster, one for each rank, in one placement group, so that all start together.

    Args:
        size: Number of ranks.
        timeout: Seconds to wait until the cluster can place all actors.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigurationError: This process is not connected to a Ray cluster.
        EngineError: The cluster has too few CPUs, or too few free ones within the timeout; or its workers
            cannot import dmesh.
    """

    def __init__(self, size: int, timeout: float) -> None:
        try:
            import ray
            from ray.util.placement_group import placement_group
        except ImportError as error:
            raise MissingExtraError("on=\"ray\" needs Ray: pip install 'dmesh[ray]'") from error
        if not ray.is_initialized():
            raise ConfigurationError(
                "this process is not connected to a Ray cluster. Call ray.init() before dmesh.launch; pass "
                'address="auto" to connect to a running cluster'
            )
        self._ray = ray
        self._pending: dict[Any, int] = {}
        self._actors: list[Any] = []
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < size:
            raise EngineError(
                f"dmesh.launch(n={size}) needs one CPU for each rank, but the Ray cluster has {cpus}. "
                "Add nodes, or launch fewer ranks"
            )
        self._group = placement_group([{"CPU": 1}] * size, strategy="PACK")
        try:
            if not self._group.wait(timeout):
                free = int(ray.available_resources().get("CPU", 0))
                raise EngineError(
                    f"the Ray cluster could not place {size} ranks at once within {timeout:g} s "
                    f"(DMESH_INIT_TIMEOUT): {free} of its {cpus} CPUs are free. Wait for other jobs to end, "
                    "or launch fewer ranks"
                )
            self._actors = [self._actor(bundle) for bundle in range(size)]
            self.places: list[Place] = self._ask(self._actors, timeout)
        except BaseException:
            self.close()
            raise
        self._bundles = sorted(range(size), key=lambda bundle: (self.places[bundle].address, bundle))
        self._actors = [self._actors[bundle] for bundle in self._bundles]
        self.places = [self.places[bundle] for bundle in self._bundles]

    def start(self, rank: int, variables: Mapping[str, str], call: Call) -> None:
        """Start a rank in its actor."""
        reference = self._actors[rank].run.remote(
            dict(variables), call.function, call.args, dict(call.kwargs), call.initialize, call.file
        )
        self._pending[reference] = rank

    def wait(self, timeout: float | None) -> Ending | None:
        """Return the next rank that ended; None after the timeout."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout)
        if not ready:
            return None
        rank = self._pending.pop(ready[0])
        try:
            return Ending(rank, report=self._ray.get(ready[0]))
        except self._ray.exceptions.RayActorError as error:
            kind = _EXIT_TYPE.search(str(error))
            why = "" if kind is None else f" (Ray's exit type: {kind[1]})"
            return Ending(rank, how=f"was lost: its process, a Ray actor, is gone{why}")
        except Exception as error:  # noqa: BLE001 - whatever Ray or unpickling raises ends this rank
            return Ending(rank, how=f"could not be run by Ray: {type(error).__name__}: {error}")

    def replace(self, rank: int, timeout: float) -> None:
        """Start another actor in the place of a dead one."""
        self._actors[rank] = self._actor(self._bundles[rank])
        self.places[rank] = self._ask([self._actors[rank]], timeout)[0]

    def abandon(self, cluster: str) -> None:
        """Do nothing: `close` ends the actors."""

    def close(self) -> None:
        """Kill the actors, and release their CPUs."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._actors = []
        remove_placement_group(self._group)

    def _actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(RankProcess)
        return actor.options(scheduling_strategy=strategy).remote()

    def _ask(self, actors: list[Any], timeout: float) -> list[Place]:
        try:
            return list(self._ray.get([actor.place.remote() for actor in actors], timeout=timeout))
        except self._ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"the Ray cluster did not start {len(actors)} of the ranks' processes within {timeout:g} s "
                "(DMESH_INIT_TIMEOUT). Replace a lost node, or raise the limit"
            ) from error
        except (ImportError, self._ray.exceptions.RayTaskError, self._ray.exceptions.RayActorError) as error:
            raise EngineError(
                f"the Ray workers cannot run ranks: {error}. Install the version of dmesh that is installed "
                "here on them, for example with a runtime_env"
            ) from error
