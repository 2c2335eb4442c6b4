"""The part of the Kubernetes API that tells which pods there are."""

from __future__ import annotations

import base64
import json
import re
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmesh.testing.cloud.service import Answer, FakeService, Request

_PODS = re.compile(r"/api/v1(?:/namespaces/([^/]+))?/pods(?:/([^/]+))?")
_SET_BASED = re.compile(r"([^ !=(),]+) +(in|notin) +\(([^()]*)\)")
_EQUALITY = re.compile(r"([^ !=(),]+) *(==|=|!=) *([^ !=(),]*)")
_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    410: "Expired",
}  # fmt: skip


def kubernetes_error(status: int, message: str) -> Answer:
    """Returns an error as Kubernetes words it."""
    return Answer(
        status,
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": _REASONS[status],
            "code": status,
        },
    )


class FakeKubernetes(FakeService):
    """A Kubernetes API server with pods, of all namespaces or one, by labels, in pages.

    Args:
        tls: Answer HTTPS with this, as a program in a pod insists on.
        token: What a request must send as bearer.
        page_size: Most pods of a page, whatever a request asks for.

    Attributes:
        token: As given; requests with another one get 401.
        namespaces: Where the token's owner may list pods; None for everywhere. Elsewhere it gets 403.
        pods: The pods by namespace and name; may be changed.
    """

    def __init__(
        self, tls: ssl.SSLContext | None = None, token: str | None = None, page_size: int = 500
    ) -> None:
        self.token = secrets.token_hex(8) if token is None else token
        self.namespaces: set[str] | None = None
        self.page_size = page_size
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._snapshots: dict[str, list[dict[str, Any]]] = {}
        super().__init__(tls)

    def add_pod(
        self,
        name: str,
        ip: str | None,
        *,
        labels: Mapping[str, str] | None = None,
        phase: str = "Running",
        namespace: str = "default",
        host_ip: str | None = None,
    ) -> dict[str, Any]:
        """Adds a pod, or changes it.

        Args:
            name: Its name.
            ip: Its IP address; None as long as it has none.
            labels: Its labels.
            phase: Pending, Running, Succeeded, Failed or Unknown.
            namespace: Its namespace.
            host_ip: The IP address of its node; its own if None.

        Returns:
            The pod as the API has it; may be changed.
        """
        status = {"phase": phase}
        if ip is not None:
            status |= {"podIP": ip, "hostIP": host_ip or ip}
        pod = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": dict(labels or {}),
                "uid": secrets.token_hex(8),
            },
            "spec": {"containers": [{"name": "main"}]},
            "status": status,
        }
        self.pods[namespace, name] = pod
        return pod

    def set_phase(self, name: str, phase: str, namespace: str = "default") -> None:
        """Changes a pod's phase."""
        self.pods[namespace, name]["status"]["phase"] = phase

    def expire_lists(self) -> None:
        """Forgets the lists that are being read page by page: the next page is 410."""
        self._snapshots.clear()

    def pod_environment(
        self, name: str, directory: Path, authority: bytes, namespace: str = "default"
    ) -> dict[str, str]:
        """Writes the files of a service account and returns the environment variables of a pod's program.

        Args:
            name: The pod's name.
            directory: Where the files go.
            authority: The certificate of the authority that signed the service's own, PEM.
            namespace: The pod's namespace.
        """
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "token").write_text(self.token)
        (directory / "ca.crt").write_bytes(authority)
        (directory / "namespace").write_text(namespace)
        host, _, port = self.address.partition(":")
        return {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "HOSTNAME": name,
            "DMESH_KUBERNETES_SERVICE_ACCOUNT": str(directory),
        }

    def write_kubeconfig(self, path: Path, authority: bytes | None = None) -> None:
        """Writes a file for `KUBECONFIG`.

        Args:
            path: The file.
            authority: The certificate of the authority that signed the service's own, PEM.
        """
        cluster: dict[str, str] = {"server": self.url}
        if authority is not None:
            cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "fake", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }
        path.write_text(json.dumps(config))  # which is YAML, too

    def answer(self, request: Request) -> Answer:
        """Returns what the real service would."""
        sent = request.headers.get("authorization", "")
        kind, _, token = sent.partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(token.encode(), self.token.encode()):
            return kubernetes_error(401, "Unauthorized")
        match = _PODS.fullmatch(request.path)
        if match is None:
            return kubernetes_error(404, "the server could not find the requested resource")
        if request.method != "GET":
            return kubernetes_error(405, "the server does not allow this method on the requested resource")
        namespace, name = match.groups()
        if self.namespaces is not None and namespace not in self.namespaces:
            where = "at the cluster scope" if namespace is None else f'in the namespace "{namespace}"'
            return kubernetes_error(
                403,
                'pods is forbidden: User "system:serviceaccount:default:default" cannot list resource "pods" '
                f'in API group "" {where}',
            )
        if name is not None:
            pod = self.pods.get((namespace, name))
            if pod is None:
                return kubernetes_error(404, f'pods "{name}" not found')
            return Answer(200, {"kind": "Pod", "apiVersion": "v1", **pod})
        return self._list(namespace, request)

    def _list(self, namespace: str | None, request: Request) -> Answer:
        selector = request.query.get("labelSelector", "")
        try:
            matches(selector, {})  # also where there is no pod
            selected = [
                pod
                for (where, _), pod in sorted(self.pods.items())
                if namespace in (None, where) and matches(selector, pod["metadata"]["labels"])
            ]
        except ValueError as error:
            return kubernetes_error(400, str(error))
        start = 0
        key = ""
        if token := request.query.get("continue"):
            try:
                position = json.loads(base64.urlsafe_b64decode(token))
                key, start = str(position["rv"]), int(position["start"])
            except (ValueError, KeyError, TypeError):
                return kubernetes_error(400, "continue key is not valid")
            if key not in self._snapshots:
                return kubernetes_error(410, "The provided continue parameter is too old")
            selected = self._snapshots[key]
        limit = min(int(request.query.get("limit") or self.page_size), self.page_size)
        end = start + limit
        metadata: dict[str, object] = {"resourceVersion": key or secrets.token_hex(4)}
        if end < len(selected):
            key = key or secrets.token_hex(4)
            # Later pages are of the list as it was when the first one was read.
            self._snapshots[key] = json.loads(json.dumps(selected))
            position = json.dumps({"rv": key, "start": end}).encode()
            metadata["continue"] = base64.urlsafe_b64encode(position).decode()
            metadata["remainingItemCount"] = len(selected) - end
        return Answer(
            200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": selected[start:end]}
        )


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Tells whether a label selector selects what has these labels.

    Args:
        selector: Such as `app=train,tier!=front,zone in (a, b),!old`; empty for everything.
        labels: The labels.

    Raises:
        ValueError: It is none.
    """
    for term in filter(None, (part.strip() for part in re.split(r",(?![^()]*\))", selector))):
        if match := _SET_BASED.fullmatch(term):
            inside = labels.get(match[1]) in {value.strip() for value in match[3].split(",")}
            chosen = inside if match[2] == "in" else not inside
        elif match := _EQUALITY.fullmatch(term):
            equal = labels.get(match[1]) == match[3]
            chosen = not equal if match[2] == "!=" else equal
        elif re.fullmatch(r"!?[^ !=(),]+", term):
            chosen = (term.lstrip("!") in labels) != term.startswith("!")
        else:
            raise ValueError(f"unable to parse requirement: {term!r}")
        if not chosen:
            return False
    return True
