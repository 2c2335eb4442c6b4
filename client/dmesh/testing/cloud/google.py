"""The TPU API v2 and the Compute API v1, as far as they find clusters, and a cloud with both."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from dmesh.errors import MissingExtraError
from dmesh.testing.cloud import discovery
from dmesh.testing.cloud.metadata import FakeMetadataServer
from dmesh.testing.cloud.service import Answer, FakeService, Request

_NODES = re.compile(r"/v2/(projects/([^/]+)/locations/([^/]+))/nodes(?:/([^/]+))?")
_LIST_INSTANCES = re.compile(
    r"/compute/v1/projects/([^/]+)/zones/([^/]+)/instanceGroups/([^/]+)/listInstances"
)
_INSTANCE = re.compile(r"/compute/v1/projects/([^/]+)/zones/([^/]+)/instances/([^/]+)")
_DISCOVERY = re.compile(r"/discovery/v1/apis/([^/]+)/([^/]+)/rest")
_DOCUMENTS: Mapping[tuple[str, str], Callable[[str], dict[str, Any]]] = {
    ("tpu", "v2"): discovery.tpu_v2,
    ("compute", "v1"): discovery.compute_v1,
}
_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def google_error(status: int, message: str) -> Answer:
    """Returns an error as Google's APIs word it."""
    error = {"code": status, "message": message, "status": _STATUS_NAMES.get(status, "INTERNAL")}
    return Answer(status, {"error": error})


class FakeGoogleApis(FakeService):
    """Google's discovery service, TPU API v2 (`nodes.get`, `nodes.list`) and Compute API v1.

    Of the Compute API it has `instanceGroups.listInstances` and `instances.get`.

    Args:
        token: What a request must send as bearer.
        project: The project of whatever is added.
        zone: Its zone.
        page_size: Most entries of a page, whatever a request asks for.

    Attributes:
        token: As given; requests with another one get 401.
        denied: Parts of paths that the token's owner may not see: 403.
        nodes: TPUs, as `nodes.get` has them, by full name; may be changed.
        instances: Machines, as `instances.get` has them, by name; may be changed.
        groups: The names of each instance group's machines.
    """

    def __init__(
        self, token: str = "a-token", project: str = "my-project", zone: str = "us-central1-b",  # noqa: S107
        page_size: int = 500,
    ) -> None:  # fmt: skip
        self.token, self.project, self.zone, self.page_size = token, project, zone, page_size
        self.denied: set[str] = set()
        self.nodes: dict[str, dict[str, Any]] = {}
        self.instances: dict[str, dict[str, Any]] = {}
        self.groups: dict[str, list[str]] = {}
        super().__init__()

    @property
    def discovery_url(self) -> str:
        """The template of the discovery documents' addresses."""
        return f"{self.url}/discovery/v1/apis/{{api}}/{{apiVersion}}/rest"

    def add_tpu(
        self,
        name: str,
        accelerator_type: str,
        hosts: Sequence[str],
        *,
        state: str = "READY",
        health: str = "HEALTHY",
        port: int = 8470,
    ) -> dict[str, Any]:
        """Adds a TPU, or changes it.

        Args:
            name: Its name.
            accelerator_type: Such as `v2-8`.
            hosts: The IP addresses of its hosts, in order; `HOST:PORT` if one has a port of its own.
            state: Such as CREATING, READY or PREEMPTED.
            health: Such as HEALTHY or UNHEALTHY_MAINTENANCE.
            port: The port of all other hosts.

        Returns:
            What `nodes.get` says; may be changed.
        """
        full = f"projects/{self.project}/locations/{self.zone}/nodes/{name}"
        endpoints = []
        for host in hosts:
            ip, _, own = host.partition(":")
            endpoints.append({"ipAddress": ip, "port": int(own or port), "accessConfig": {}})
        self.nodes[full] = {
            "name": full,
            "id": str(1000 + len(self.nodes)),
            "acceleratorType": accelerator_type,
            "apiVersion": "V2",
            "health": health,
            "networkEndpoints": endpoints,
            "runtimeVersion": "tpu-vm-base",
            "state": state,
        }
        return self.nodes[full]

    def add_instance(self, name: str, ip: str, *, group: str, status: str = "RUNNING") -> dict[str, Any]:
        """Adds a machine to an instance group.

        Args:
            name: Its name.
            ip: Its address.
            group: The group's name.
            status: Such as RUNNING or STAGING.

        Returns:
            What `instances.get` says; may be changed.
        """
        self.instances[name] = {
            "kind": "compute#instance",
            "name": name,
            "status": status,
            "networkInterfaces": [{"name": "nic0", "networkIP": ip}],
        }
        self.groups.setdefault(group, []).append(name)
        return self.instances[name]

    def answer(self, request: Request) -> Answer:
        """Returns what the real services would."""
        if match := _DISCOVERY.fullmatch(request.path):
            document = _DOCUMENTS.get((match[1], match[2]))
            if document is None:
                return google_error(404, f"there is no API {match[1]} {match[2]}")
            return Answer(200, document(f"{self.url}/"))
        sent = request.headers.get("authorization", "")
        if not secrets.compare_digest(sent.encode(), f"Bearer {self.token}".encode()):
            return google_error(401, "Request had invalid authentication credentials.")
        if any(part in request.path for part in self.denied):
            return google_error(403, "The caller does not have permission")
        if (match := _NODES.fullmatch(request.path)) and request.method == "GET":
            return self._get_node(request.path[4:]) if match[4] else self._list_nodes(match[1], request)
        if (match := _LIST_INSTANCES.fullmatch(request.path)) and request.method == "POST":
            return self._list_instances(match[1], match[2], match[3], request)
        if (match := _INSTANCE.fullmatch(request.path)) and request.method == "GET":
            return self._get_instance(match[1], match[2], match[3])
        return google_error(404, f"nothing is at {request.path}")

    def _get_node(self, full: str) -> Answer:
        if full not in self.nodes:
            return google_error(404, f"Resource '{full}' was not found")
        return Answer(200, self.nodes[full])

    def _list_nodes(self, parent: str, request: Request) -> Answer:
        nodes = [node for full, node in sorted(self.nodes.items()) if full.startswith(f"{parent}/nodes/")]
        return self._page("nodes", nodes, request, "pageSize")

    def _list_instances(self, project: str, zone: str, group: str, request: Request) -> Answer:
        if (project, zone) != (self.project, self.zone) or group not in self.groups:
            return google_error(404, f"The resource 'instanceGroups/{group}' was not found")
        running = b"RUNNING" in request.body
        items = [
            {
                "instance": f"{self.url}/compute/v1/projects/{project}/zones/{zone}/instances/{name}",
                "status": self.instances[name]["status"],
            }
            for name in sorted(self.groups[group])
            if not running or self.instances[name]["status"] == "RUNNING"
        ]
        return self._page("items", items, request, "maxResults")

    def _get_instance(self, project: str, zone: str, name: str) -> Answer:
        if (project, zone) != (self.project, self.zone) or name not in self.instances:
            return google_error(404, f"The resource 'instances/{name}' was not found")
        return Answer(200, self.instances[name])

    def _page(self, field: str, entries: Sequence[object], request: Request, size: str) -> Answer:
        token = request.query.get("pageToken", "0")
        if not token.isdecimal():
            return google_error(400, "Invalid page token")
        start = int(token)
        end = start + min(self.page_size, int(request.query.get(size) or self.page_size))
        page: dict[str, object] = {}  # an empty list is left out
        if entries[start:end]:
            page[field] = list(entries[start:end])
        if end < len(entries):
            page["nextPageToken"] = str(end)
        return Answer(200, page)


class FakeGoogleCloud:
    """A metadata server and the APIs that its tokens open.

    Args:
        project: The project's id.
        zone: The zone's name.
        page_size: Most entries of a page of a list.

    Attributes:
        metadata: The metadata server.
        apis: The TPU API and the Compute API.
    """

    def __init__(
        self, project: str = "my-project", zone: str = "us-central1-b", page_size: int = 500
    ) -> None:
        token = secrets.token_hex(8)
        self.metadata = FakeMetadataServer(project, zone, token)
        self.apis = FakeGoogleApis(token, project, zone, page_size)

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that let programs find it."""
        return {
            "GCE_METADATA_HOST": self.metadata.address,
            "GCE_METADATA_IP": self.metadata.address,
            "TPU_API_DISCOVERY_URL": self.apis.discovery_url,
        }

    def credentials(self) -> Any:
        """Returns credentials of google-auth's that the APIs accept.

        Raises:
            MissingExtraError: google-auth is not installed.
        """
        try:
            from google.oauth2.credentials import Credentials
        except ImportError as error:
            raise MissingExtraError(
                f"credentials need the google extra ({error}): pip install 'dmesh[google]'"
            ) from error
        return Credentials(self.apis.token)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends both services."""
        self.metadata.close()
        self.apis.close()

    def __enter__(self) -> FakeGoogleCloud:
        """Returns the cloud, which runs already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends both services."""
        self.close()
