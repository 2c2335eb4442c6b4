"""Finds the pods of a program in Kubernetes by their labels, through its API."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dmesh._log import announce
from dmesh.config.addresses import check_port, join_address, shown
from dmesh.config.settings import JOB_NAME_PATTERN, Settings
from dmesh.coordination.retry import RetryPolicy
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.kubernetes_pods import (
    ExecutableLocation,
    KubernetesApi,
    Pod,
    PodsOfClient,
    PodSource,
    own_namespace,
)
from dmesh.distribute.cluster_resolver.kubernetes_service import (
    DEFAULT_PORT,
    INDEX_VARIABLE,
    MOST_PODS,
    KubernetesServiceResolver,
)
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.errors import ArgumentTypeError, ClusterNotReadyError, ConfigurationError, ResolverError
from dmesh.runtime import context
from dmesh.train import ClusterSpec

KubernetesExecutableLocation = ExecutableLocation
"""Name in `tf.distribute.cluster_resolver`."""
_DEFAULT_LABELS: Mapping[str, Sequence[str]] = {"worker": ["job-name=tensorflow"]}
_POD_VARIABLES = ("DMESH_KUBERNETES_POD", "POD_NAME")
_FINISHED = ("Succeeded", "Failed")
_ANNOUNCEMENT = 10.0
_WAITS = RetryPolicy(initial=0.5, factor=1.5, maximum=3.0)
"""Pauses between lookups of pods that do not run yet: thousands of clients may poll at the same time."""


class KubernetesClusterResolver(ClusterResolver):
    """Finds the running pods of each job by their labels, through the Kubernetes API.

    A job's tasks are its pods, sorted by completion index if all have one (pods of an indexed job or a
    stateful set), otherwise by name.

    ```python
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, pod_address="pod_ip", size=4)
    ```

    Args:
        job_to_label_mapping: For each job, the label selectors of its pods; a job has the pods of all its
            selectors, in the selectors' order. Default: `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: Port on which each pod listens.
        rpc_layer: Protocol to put before the masters' addresses.
        override_client: A `kubernetes.client.CoreV1Api` with its own credentials to use instead.
        executable_location: Where the program runs, which decides where its credentials are.
        namespace: Namespace of the pods; None for all namespaces, which needs a cluster-wide role.
        pod_address: `host_ip`, the node's address and TensorFlow's default, for pods with the host's network
            or a host port; `pod_ip`, the pod's own address, for all others.
        size: Number of pods of the complete cluster; finished pods and those being deleted do not count,
            because others replace them. None: any number of pods, all of which must run.
        wait: Time to wait until all of them run, seconds.
        policy: Limits of its requests.

    Raises:
        MissingExtraError: The client library is not installed, and there is no `override_client`.
        ArgumentTypeError: The mapping is not a dict from jobs to lists of selectors.
        ConfigurationError: Another argument has a bad value.
        ResolverError: The program has no credentials for the API.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = DEFAULT_PORT,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
        pod_address: Literal["host_ip", "pod_ip"] = "host_ip",
        size: int | None = None,
        wait: float = 0.0,
        policy: LookupPolicy | None = None,
    ) -> None:
        self._environ = context.environment()
        self._policy = policy or LookupPolicy()
        self._source: PodSource
        if override_client is not None:
            self._source = PodsOfClient(override_client, namespace, self._policy)
        else:
            self._source = KubernetesApi(executable_location, namespace, self._policy, self._environ)
        self._labels = _checked_labels(job_to_label_mapping or _DEFAULT_LABELS)
        self._port = check_port("tf_server_port", tf_server_port)
        if pod_address not in ("host_ip", "pod_ip"):
            raise ConfigurationError(f"pod_address is {pod_address!r:.200}; expected host_ip or pod_ip")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigurationError(f"size is {size!r:.200}; expected a number of pods from 1, or None")
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise ConfigurationError(f"wait is {wait!r:.200}; expected a number of seconds from 0")
        self._pod_address = pod_address
        self._size = size
        self._wait = float(wait)
        self._rpc_layer = rpc_layer
        self._in_pod = override_client is None and executable_location is ExecutableLocation.WITHIN_CLUSTER

    def cluster_spec(self) -> ClusterSpec:
        """Return the pods, after all of them run.

        Raises:
            ClusterNotReadyError: A pod does not run after `wait` seconds.
            ClusterLookupError: The API refuses the request, or does not answer.
        """
        jobs = self._ready_pods()
        return ClusterSpec({job: self._addresses(pods) for job, pods in jobs.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type: Its job; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            The address; empty if the task is unknown.

        Raises:
            ClusterSpecError: The task does not exist.
            ClusterNotReadyError: A pod does not run.
            ClusterLookupError: The API refuses the request, or does not answer.
        """
        return self._master_or_own(task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str | None:
        """Job of this process's pod; None if it is not in one of the pods."""
        if self._task_type is not None:
            return self._task_type
        place = self._own_place()
        return None if place is None else place[0]

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process's pod; None if it is not in one of the pods.

        `DMESH_KUBERNETES_POD` or `POD_NAME` names the pod; else it is the one with this
        `JOB_COMPLETION_INDEX`, or with this host's name.
        """
        if self._task_id is not None:
            return self._task_id
        place = self._own_place()
        return None if place is None else place[1]

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _own_place(self) -> tuple[str, int] | None:
        if not self._in_pod:
            return None
        jobs = self._ready_pods()
        environ = self._environ
        hostname = environ.get("HOSTNAME") or socket.gethostname()
        name = next((environ[variable] for variable in _POD_VARIABLES if environ.get(variable)), None)
        index = environ.get(INDEX_VARIABLE)
        places = [(pod, (job, position)) for job, pods in jobs.items() for position, pod in enumerate(pods)]
        if name is not None:
            matching = [place for pod, place in places if pod.name == name]
        else:
            matching = [place for pod, place in places if index and str(pod.index) == index]
            if len(matching) != 1:
                matching = [place for pod, place in places if hostname in (pod.name, pod.hostname)]
        return matching[0] if len(matching) == 1 else None

    def _ready_pods(self) -> dict[str, list[Pod]]:
        clock, began = self._policy.clock, self._policy.clock()
        announced = began
        for pause in _WAITS.delays():
            try:
                return self._pods()
            except ClusterNotReadyError as error:
                passed = clock() - began
                if passed + pause > self._wait:
                    if not self._wait:
                        raise
                    raise ClusterNotReadyError(f"{error} (waited {passed:.0f} s)") from None
                if clock() - announced >= _ANNOUNCEMENT:
                    announce(f"still waiting: {error}")
                    announced = clock()
            self._policy.sleep(pause)
        raise AssertionError("a retry policy has no end")

    def _pods(self) -> dict[str, list[Pod]]:
        jobs: dict[str, list[Pod]] = {}
        for job, selectors in self._labels.items():
            jobs[job] = []
            for selector in selectors:
                pods = self._source.pods(selector)
                if self._size is not None:
                    pods = [pod for pod in pods if pod.phase not in _FINISHED and not pod.deleted]
                for pod in sorted(pods, key=lambda pod: pod.name):
                    self._check(pod)
                if all(pod.index is not None for pod in pods):
                    pods.sort(key=lambda pod: (pod.index, pod.name))
                else:
                    pods.sort(key=lambda pod: pod.name)
                jobs[job] += pods
        found = sum(map(len, jobs.values()))
        if self._size is not None and found != self._size:
            raise ClusterNotReadyError(
                f"{found} of {self._size} pods are running for the selectors "
                f"{', '.join(shown(selector) for job in self._labels.values() for selector in job)}. "
                "Check the selectors and whether the pods can be scheduled"
            )
        return jobs

    def _check(self, pod: Pod) -> None:
        if pod.phase != "Running" or pod.deleted:
            state = "being deleted" if pod.phase == "Running" else f"in the phase {shown(pod.phase)}"
            advice = "delete the pods of earlier runs" if pod.phase in _FINISHED else "try again when it runs"
            raise ClusterNotReadyError(
                f"the pod {pod} is not running; it is {state}. kubectl describe pod {pod.name} shows why; "
                f"{advice}"
            )
        if not getattr(pod, self._pod_address):
            raise ClusterNotReadyError(f"the pod {pod} is running, but has no {self._pod_address} yet")

    def _addresses(self, pods: Sequence[Pod]) -> list[str]:
        hosts = [getattr(pod, self._pod_address) for pod in pods]
        addresses = [join_address(host, self._port) for host in hosts]
        for address, count in Counter(addresses).items():
            if count > 1:
                both = [str(pod) for pod, own in zip(pods, addresses, strict=True) if own == address][:2]
                raise ResolverError(
                    f"the pods {' and '.join(both)} have the same address {address}: they are on one node. "
                    "Pass pod_address='pod_ip'; or, if they use the host's network, run only one on each "
                    "node"
                )
        return addresses


def detected() -> ClusterResolver | None:
    """Return the resolver that a pod's environment requests; None if it requests none.

    `DMESH_KUBERNETES_SELECTOR` is the label selector of all clients' pods, or `DMESH_KUBERNETES_SERVICE` the
    name of their headless service; `DMESH_KUBERNETES_SIZE` is their number.

    Raises:
        ConfigurationError: A variable is missing or malformed.
        ResolverError: The pod has no credentials, or no index.
        MissingExtraError: The client library is not installed.
    """
    environ = context.environment()
    selector = environ.get("DMESH_KUBERNETES_SELECTOR", "").strip()
    service = environ.get("DMESH_KUBERNETES_SERVICE", "").strip()
    size = environ.get("DMESH_KUBERNETES_SIZE", "").strip()
    if not selector and not service:
        if size in ("", "1"):
            return None
        raise ConfigurationError(
            f"DMESH_KUBERNETES_SIZE is {shown(size)}, but neither DMESH_KUBERNETES_SELECTOR nor "
            "DMESH_KUBERNETES_SERVICE is set: set one of them, the label selector of the clients' pods or "
            "the name of their headless service"
        )
    if not (size.isascii() and size.isdecimal() and len(size) <= 5) or not 1 <= int(size) <= MOST_PODS:
        raise ConfigurationError(
            f"DMESH_KUBERNETES_SIZE is {shown(size)}; expected the number of pods, which is the number of "
            "clients, at least 1"
        )
    port = check_port(
        "DMESH_KUBERNETES_PORT", environ.get("DMESH_KUBERNETES_PORT", "").strip() or DEFAULT_PORT
    )
    if not selector:
        return KubernetesServiceResolver(service, int(size), port)
    return KubernetesClusterResolver(
        {"worker": [selector]},
        port,
        namespace=environ.get("DMESH_KUBERNETES_NAMESPACE", "").strip() or own_namespace(environ),
        pod_address="pod_ip",
        size=int(size),
        wait=Settings.load(environ).init_timeout,
    )


def _checked_labels(mapping: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(mapping, Mapping):
        raise ArgumentTypeError(
            f"job_to_label_mapping must be a dict from jobs to lists of label selectors, got {mapping!r:.200}"
        )
    checked: dict[str, tuple[str, ...]] = {}
    for job, selectors in mapping.items():
        if not isinstance(job, str) or not JOB_NAME_PATTERN.fullmatch(job):
            raise ConfigurationError(f"{job!r:.200} in job_to_label_mapping is not the name of a job")
        if not isinstance(selectors, list | tuple) or not all(isinstance(one, str) for one in selectors):
            raise ArgumentTypeError(
                f"job_to_label_mapping[{job!r}] must be a list of label selectors, got {selectors!r:.200}"
            )
        checked[job] = tuple(selectors)
    return checked
