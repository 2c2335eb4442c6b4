"""Pods of a cluster from the Kubernetes API, through the `kubernetes` client library."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dmesh.config.addresses import shown
from dmesh.distribute.cluster_resolver.lookup_policy import Busy, LookupPolicy, parse_retry_after
from dmesh.errors import (
    ClusterLookupDeniedError,
    ClusterLookupError,
    ConfigurationError,
    MissingExtraError,
    ResolverError,
)

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVICE_ACCOUNT_VARIABLE = "DMESH_KUBERNETES_SERVICE_ACCOUNT"
"""Variable with the directory of a pod's service account files, if it is not the default."""
_INDEX_LABELS = ("batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index")
_PAGE = 500
_MOST_PAGES = 1000
_MOST_RESTARTS = 5
_CHUNK = 64 * 1024


class ExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it finds the Kubernetes API and authenticates."""

    WITHIN_CLUSTER = 0
    """In a pod, with the pod's service account."""
    OFF_CLUSTER = 1
    """Elsewhere, with a kubeconfig file: `KUBECONFIG`, or `~/.kube/config`."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Facts about a pod."""

    name: str
    namespace: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    host_ip: str | None
    """Address of its node."""
    pod_ip: str | None
    """Its own address."""
    hostname: str | None
    """Host name from its spec, if it has one."""
    index: int | None
    """Its index within an indexed job or a stateful set; None if it has none."""
    deleted: bool
    """True if it is being deleted."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class _ExpiredError(ClusterLookupError):
    """A list changed too much since its first page was read."""


class PodSource(Protocol):
    """Knows pods."""

    def pods(self, selector: str) -> list[Pod]:
        """Return the pods that match a label selector."""


class PodsOfClient:
    """Lists pods with a `CoreV1Api` of the program, or an object with the same method.

    Args:
        client: The API object.
        namespace: Namespace of the pods; None for all.
        policy: Limits of its requests.
    """

    def __init__(self, client: Any, namespace: str | None, policy: LookupPolicy) -> None:
        self._client = client
        self._namespace = namespace
        self._policy = policy

    def pods(self, selector: str) -> list[Pod]:
        """Return the pods that match a label selector.

        Raises:
            ClusterLookupError: The API refuses the request, or does not answer.
        """
        question = f"the pods {shown(selector)} from Kubernetes"

        def attempt() -> Any:
            with _translation(question):
                if self._namespace is None:
                    return self._client.list_pod_for_all_namespaces(label_selector=selector)
                return self._client.list_namespaced_pod(self._namespace, label_selector=selector)

        return [_pod_of_model(item) for item in self._policy.ask(question, attempt).items]


class KubernetesApi:
    """Lists pods with the credentials of a pod or a kubeconfig file, page by page and in bounded time.

    Args:
        location: Where the program runs.
        namespace: Namespace of the pods; None for all.
        policy: Limits of its requests.
        environ: The environment variables.

    Raises:
        MissingExtraError: The library is not installed.
        ConfigurationError: `location` is not an ExecutableLocation.
        ResolverError: There are no credentials.
    """

    def __init__(
        self,
        location: ExecutableLocation,
        namespace: str | None,
        policy: LookupPolicy,
        environ: Mapping[str, str],
    ) -> None:
        try:
            self._library: Any = importlib.import_module("kubernetes.client")
            importlib.import_module("kubernetes.config")
        except ImportError as error:
            raise MissingExtraError(
                f"KubernetesClusterResolver needs Kubernetes' client library ({error}): "
                "pip install 'dmesh[kubernetes]', or pass override_client=..."
            ) from error
        if not isinstance(location, ExecutableLocation):
            raise ConfigurationError(
                f"executable_location is {location!r:.200}; expected ExecutableLocation.WITHIN_CLUSTER or "
                "OFF_CLUSTER"
            )
        self._location = location
        self._namespace = namespace
        self._policy = policy
        self._environ = environ
        self._configuration()  # raises errors now instead of later

    def pods(self, selector: str) -> list[Pod]:
        """Return the pods that match a label selector.

        Raises:
            ClusterLookupDeniedError: The service account may not list pods, or its token is not accepted.
            ClusterLookupUnavailableError: The API does not answer.
            ClusterLookupError: The reply is malformed, or the list changes faster than it can be read.
            ResolverError: The credentials no longer exist.
        """
        configuration = self._configuration()
        place = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        question = f"the pods {shown(selector)} of {place} from {configuration.host}"
        client = self._library.ApiClient(configuration=configuration)
        pool = client.rest_client.pool_manager
        # The library would read the body of an error without a size limit.
        pool.request = functools.partial(self._request, pool.request, question)
        try:
            api = self._library.CoreV1Api(client)
            for _ in range(_MOST_RESTARTS):
                pods = self._read_list(api, selector, question)
                if pods is not None:
                    return pods
        finally:
            pool.clear()
        raise ClusterLookupError(
            f"cannot get {question}: the list expired {_MOST_RESTARTS} times while it was read (410). "
            "Narrow the selector or the namespace"
        )

    def _read_list(self, api: Any, selector: str, question: str) -> list[Pod] | None:
        """Return all pages; None if the list expired in between."""
        pods: list[Pod] = []
        token = ""
        for _ in range(_MOST_PAGES):
            read = functools.partial(self._read_page, api, selector, token, question)
            try:
                page = self._policy.ask(question, read)
            except _ExpiredError:
                return None
            items, metadata = page.get("items"), page.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, Mapping):
                raise ClusterLookupError(f"{question}: the reply is not a list of pods")
            pods += map(_pod_of_json, items)
            token = metadata.get("continue") or ""
            if not token:
                return pods
        raise ClusterLookupError(f"{question}: the list has more than the limit of {_MOST_PAGES} pages")

    def _read_page(self, api: Any, selector: str, token: str, question: str) -> Mapping[str, Any]:
        options: dict[str, Any] = {
            "label_selector": selector,
            "limit": _PAGE,
            "_preload_content": False,
            "_request_timeout": (self._policy.attempt, self._policy.attempt),
        }
        if token:
            options["_continue"] = token
        with _translation(question):
            if self._namespace is None:
                reply = api.list_pod_for_all_namespaces(**options)
            else:
                reply = api.list_namespaced_pod(self._namespace, **options)
        if reply.status != 200:
            raise _judge(reply.status, reply.headers, reply.data.decode("utf-8", "replace"), question)
        try:
            page = json.loads(reply.data)
        except ValueError as error:
            raise ClusterLookupError(f"{question}: the reply is not JSON: {error}") from error
        if not isinstance(page, Mapping):
            raise ClusterLookupError(f"{question}: the reply is not a list of pods")
        return page

    def _request(self, request: Any, question: str, *arguments: Any, **options: Any) -> Any:
        """Make a request like a urllib3 pool, and read the whole reply, with limits of time and size."""
        urllib3: Any = importlib.import_module("urllib3")
        deadline = time.monotonic() + self._policy.attempt
        body = bytearray()
        reply = request(*arguments, **options)
        try:
            for chunk in reply.stream(_CHUNK, decode_content=True):
                body += chunk
                if len(body) > self._policy.most_bytes:
                    raise ClusterLookupError(
                        f"{question}: a reply has more than {self._policy.most_bytes} bytes; narrow the "
                        "selector"
                    )
                if time.monotonic() > deadline:
                    raise Busy("the reply takes too long")
        finally:
            reply.close()
        headers = {key: value for key, value in reply.headers.items() if key.lower() != "content-encoding"}
        return urllib3.HTTPResponse(bytes(body), headers, reply.status, reason=reply.reason)

    def _configuration(self) -> Any:
        """Read the client library's configuration, each time, because token files change."""
        configuration = self._library.Configuration()
        configuration.retries = False  # dmesh retries, and logs it
        exceptions: Any = importlib.import_module("kubernetes.config.config_exception")
        try:
            if self._location is ExecutableLocation.OFF_CLUSTER:
                config: Any = importlib.import_module("kubernetes.config.kube_config")
                config.load_kube_config(
                    config_file=self._environ.get("KUBECONFIG") or None,
                    client_configuration=configuration,
                    persist_config=False,
                )
            else:
                folder = Path(self._environ.get(SERVICE_ACCOUNT_VARIABLE) or SERVICE_ACCOUNT)
                incluster: Any = importlib.import_module("kubernetes.config.incluster_config")
                incluster.InClusterConfigLoader(
                    token_filename=str(folder / "token"),
                    cert_filename=str(folder / "ca.crt"),
                    try_refresh_token=False,
                    environ=self._environ,
                ).load_and_set(configuration)
        except (exceptions.ConfigException, OSError) as error:
            advice = (
                "Set KUBECONFIG to a file that names a cluster and a user"
                if self._location is ExecutableLocation.OFF_CLUSTER
                else "Run it in a pod with a service account; elsewhere pass "
                "executable_location=KubernetesExecutableLocation.OFF_CLUSTER to use a kubeconfig file"
            )
            raise ResolverError(
                f"no access to the Kubernetes API: {str(error).rstrip('.')}. {advice}"
            ) from error
        return configuration


def own_namespace(environ: Mapping[str, str]) -> str | None:
    """Return the namespace of this process's pod; None if it is not in a pod."""
    folder = Path(environ.get(SERVICE_ACCOUNT_VARIABLE) or SERVICE_ACCOUNT)
    try:
        return (folder / "namespace").read_text().strip() or None
    except OSError:
        return None


@contextlib.contextmanager
def _translation(question: str) -> Iterator[None]:
    """Translate errors of the client library and of urllib3 into dmesh's, also if they are not installed."""
    try:
        yield
    except (Busy, ClusterLookupError):
        raise
    except Exception as error:
        names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
        if "kubernetes.client.exceptions.ApiException" in names:
            body = getattr(error, "body", None) or getattr(error, "reason", "")
            raise _judge(
                getattr(error, "status", None) or 0,
                getattr(error, "headers", None) or {},
                body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body),
                question,
            ) from error
        if isinstance(error, OSError) or "urllib3.exceptions.HTTPError" in names:
            raise Busy(f"no connection: {_short(error)}") from error
        raise


def _judge(status: int, headers: Mapping[str, str], body: str, question: str) -> Exception:
    try:
        reply = json.loads(body)
        said = str(reply["message"]) if isinstance(reply, Mapping) and "message" in reply else body
    except ValueError:
        said = body
    said = " ".join(said.split())[:300]
    if status == 0 and "certificate" in said.lower():
        return ClusterLookupDeniedError(
            f"cannot get {question}: its certificate is not trusted ({said}). Check the authority's "
            "certificate in the service account or the kubeconfig file"
        )
    if status in (0, 408, 429) or status >= 500:
        return Busy(f"it answered {status or said}", parse_retry_after(headers.get("Retry-After")))
    if status == 410:
        return _ExpiredError(f"cannot get {question}: 410 {said}")
    if status == 401:
        return ClusterLookupDeniedError(
            f"cannot get {question}: the token is not accepted (401 {said}). It may have expired: check the "
            "service account, or renew the kubeconfig file's user"
        )
    if status == 403:
        return ClusterLookupDeniedError(
            f"cannot get {question}: the account has no permission to list them (403 {said}). Bind it to a "
            "role with the verb list on pods: a ClusterRole for all namespaces, a Role for one of them "
            "(namespace=...)"
        )
    return ClusterLookupError(f"cannot get {question}: {status} {said}")


def _short(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)[:300]


def _pod_of_json(item: object) -> Pod:
    entry = item if isinstance(item, Mapping) else {}
    metadata, spec, status = (entry.get(key) or {} for key in ("metadata", "spec", "status"))
    if not metadata or not all(isinstance(part, Mapping) for part in (metadata, spec, status)):
        raise ClusterLookupError(f"Kubernetes returned an entry that is not a pod: {item!r:.200}")
    labels = metadata.get("labels")
    return Pod(
        str(metadata.get("name") or ""),
        str(metadata.get("namespace") or ""),
        str(status.get("phase") or "Unknown"),
        _text(status.get("hostIP")),
        _text(status.get("podIP")),
        _text(spec.get("hostname")),
        _index(labels if isinstance(labels, Mapping) else {}),
        bool(metadata.get("deletionTimestamp")),
    )


def _pod_of_model(item: Any) -> Pod:
    # Values other than str count as missing: mocks have every attribute.
    metadata, status = item.metadata, item.status
    labels = getattr(metadata, "labels", None)
    deletion = getattr(metadata, "deletion_timestamp", None)
    return Pod(
        str(metadata.name),
        _text(getattr(metadata, "namespace", None)) or "",
        str(status.phase),
        _text(getattr(status, "host_ip", None)),
        _text(getattr(status, "pod_ip", None)),
        _text(getattr(getattr(item, "spec", None), "hostname", None)),
        _index(labels if isinstance(labels, Mapping) else {}),
        deletion is not None and type(deletion).__module__ in ("datetime", "builtins"),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _index(labels: Mapping[str, object]) -> int | None:
    for label in _INDEX_LABELS:
        text = labels.get(label)
        if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
    return None
