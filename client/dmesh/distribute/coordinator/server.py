"""Task of a cluster that runs scheduled functions, under the name of `tf.distribute.Server`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dmesh.collectives.objects import Serializer
from dmesh.distribute.coordinator.worker import run_worker
from dmesh.errors import StrategyError, StrategyTypeError, StrategyValueError
from dmesh.runtime.connecting import experimental_connect_to_cluster
from dmesh.train.cluster_spec import ClusterSpec

__all__ = ["Server"]


class Server:
    """A worker: joins a cluster as one of its tasks, and runs the functions of a `ClusterCoordinator`.

    ```python
    resolver = dmesh.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "worker":
        dmesh.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    else:
        dmesh.config.experimental_connect_to_cluster(resolver)
        coordinator = dmesh.distribute.coordinator.ClusterCoordinator()
    ```

    Args:
        server_or_cluster_def: The cluster, or the argument of a `ClusterSpec`.
        job_name: Job of this process; the only one if None.
        task_index: Its index in that job; 0 if None and there is one task.
        protocol: `grpc` or None; there is no other.
        config: None: there is nothing to configure.
        start: True to join the cluster now; otherwise `start` does.
        modules: Modules whose functions may be run, as for `run_worker`.
        serializer: As for `run_worker`.

    Raises:
        StrategyValueError: There is no such task, or it would hold variables for others (`ps`).
        StrategyTypeError: `config` is something.
        DMeshError: As for `dmesh.config.experimental_connect_to_cluster`, if it joins.
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
        *,
        modules: Iterable[str] = (),
        serializer: Serializer | None = None,
    ) -> None:
        if config is not None:
            raise StrategyTypeError("config must be None: there are no sessions that it could configure")
        self._spec = ClusterSpec(server_or_cluster_def)
        jobs = self._spec.jobs
        if job_name is None and len(jobs) == 1:
            [job_name] = jobs
        if job_name not in jobs:
            raise StrategyValueError(
                f"job_name must be one of {', '.join(jobs) or 'none'}, got {job_name!r:.80}"
            )
        if job_name == "ps":
            raise StrategyValueError(
                "no task holds variables for others here, so that a ps has nothing to do: start workers only"
            )
        if task_index is None and self._spec.num_tasks(job_name) == 1:
            [task_index] = self._spec.task_indices(job_name)
        if task_index not in self._spec.task_indices(job_name):
            raise StrategyValueError(
                f"task_index must be one of {self._spec.task_indices(job_name)} in job {job_name!r}, got "
                f"{task_index!r:.80}"
            )
        self._job, self._index, self._protocol = job_name, task_index, protocol
        self._modules, self._serializer = tuple(modules), serializer
        self._started = False
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Address of this task, such as `grpc://host:10000`."""
        return f"grpc://{self._spec.task_address(self._job, self._index)}"

    def start(self) -> None:
        """Join the cluster, and wait for all of its clients. Idempotent."""
        if not self._started:
            experimental_connect_to_cluster(self._spec, self._job, self._index, self._protocol)
            self._started = True

    def join(self) -> None:
        """Run functions until the coordinator is closed or its client leaves; see `run_worker`.

        Raises:
            StrategyError: It has not been started.
            PeerLostError: The coordinator's client is lost.
        """
        if not self._started:
            raise StrategyError("call start() first, which joins the cluster")
        run_worker(modules=self._modules, serializer=self._serializer)
