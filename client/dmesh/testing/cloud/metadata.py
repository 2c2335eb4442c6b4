"""A metadata server as virtual machines of Google Compute Engine have one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dmesh.testing.cloud.service import Answer, FakeService, Request

_ROOT = "/computeMetadata/v1/"
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


class FakeMetadataServer(FakeService):
    """Tells a virtual machine who it is: project, zone, attributes, a token of its service account.

    Set `GCE_METADATA_HOST` to its `address`. Like the real one it refuses requests without the header
    `Metadata-Flavor: Google`, or with `X-Forwarded-For`, and answers 404 to unknown paths.

    Args:
        project: The project's id.
        zone: The zone's name.
        token: The access token that it gives out.

    Attributes:
        entries: Everything that it knows: text by path below `/computeMetadata/v1/`; may be changed.
    """

    def __init__(
        self,
        project: str = "my-project",
        zone: str = "us-central1-b",
        token: str = "a-token",  # noqa: S107
    ) -> None:
        email = "robot@my-project.iam.gserviceaccount.com"
        account = {
            "email": email,
            "scopes": "https://www.googleapis.com/auth/cloud-platform\n",
            "token": json.dumps({"access_token": token, "expires_in": 3599, "token_type": "Bearer"}),
        }
        self.entries: dict[str, str] = {
            "project/project-id": project,
            "project/numeric-project-id": "123456789012",
            "instance/id": "4520031799277581759",
            "instance/name": "my-vm",
            "instance/zone": f"projects/123456789012/zones/{zone}",
            "instance/network-interfaces/0/ip": "127.0.0.1",
        }
        for name in ("default", email):
            self.entries |= {
                f"instance/service-accounts/{name}/{key}": value for key, value in account.items()
            }
        super().__init__()

    def be_tpu_vm(
        self, accelerator_type: str, hosts: Sequence[str], worker: int = 0, name: str = "my-tpu"
    ) -> None:
        """Makes the machine a host of a TPU.

        Args:
            accelerator_type: Such as `v2-8`.
            hosts: The IP addresses of all hosts, in order.
            worker: Which of them the machine is.
            name: The TPU's name.
        """
        zone = self.entries["instance/zone"].rpartition("/")[2]
        tpu_env = {
            "ACCELERATOR_TYPE": accelerator_type,
            "NODE_ID": name,
            "WORKER_ID": str(worker),
            "ZONE": zone,
        }
        self.set_attributes(
            {
                "accelerator-type": accelerator_type,
                "agent-worker-number": str(worker),
                "instance-id": name,
                "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
                "worker-network-endpoints": ",".join(f"unknown:unknown:{host}" for host in hosts),
            }
        )

    def set_attributes(self, attributes: Mapping[str, str]) -> None:
        """Sets attributes of the machine."""
        self.entries |= {f"instance/attributes/{key}": value for key, value in attributes.items()}

    def answer(self, request: Request) -> Answer:
        """Returns what the real server would."""
        if request.method != "GET":
            return Answer(405, "Method Not Allowed", _FLAVOR)
        if request.path == "/":
            return Answer(200, "computeMetadata/\n", _FLAVOR)
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return Answer(403, "Your client does not have permission to get URL from this server.", _FLAVOR)
        if not request.path.startswith(_ROOT):
            return Answer(404, "", _FLAVOR)
        path = request.path.removeprefix(_ROOT)
        if path in self.entries:
            value = self.entries[path]
            kind = "application/json" if path.endswith("/token") else "application/text"
            return Answer(200, value, {**_FLAVOR, "Content-Type": kind})
        below = {
            key.removeprefix(path.rstrip("/")).lstrip("/"): value
            for key, value in self.entries.items()
            if key.startswith(f"{path.rstrip('/')}/") or not path
        }
        if not below:
            return Answer(404, "Not Found", _FLAVOR)
        if request.query.get("recursive") == "true":
            return Answer(200, _tree(below), _FLAVOR)
        names = {key.partition("/")[0] + ("/" if "/" in key else "") for key in below}
        return Answer(200, "".join(f"{name}\n" for name in sorted(names)), _FLAVOR)


def _tree(entries: Mapping[str, str]) -> dict[str, object]:
    """Returns the entries as nested objects, with the server's names: `serviceAccounts`, a list of scopes."""
    tree: dict[str, object] = {}
    for path, value in entries.items():
        *folders, leaf = path.split("/")
        place = tree
        for folder in folders:
            below = place.setdefault(_camel(folder), {})
            assert isinstance(below, dict)
            place = below
        place[_camel(leaf)] = value.split() if leaf == "scopes" else value
    return tree


def _camel(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(part.capitalize() for part in rest)
