"""Facts about a virtual machine of Google Compute Engine from its metadata server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dmesh.coordination.retry import RetryPolicy
from dmesh.distribute.cluster_resolver.http_exchange import exchange
from dmesh.distribute.cluster_resolver.lookup_policy import Busy, LookupPolicy, parse_retry_after
from dmesh.errors import ClusterLookupError, ClusterLookupUnavailableError
from dmesh.runtime.context import environment

_DEFAULT_HOST = "metadata.google.internal"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_TPU_ENV_LINE = re.compile(r"\s*([A-Z][A-Z0-9_]*)\s*:\s*(?:'([^']*)'|\"([^\"]*)\"|(\S*))\s*")

METADATA_POLICY = LookupPolicy(
    attempt=3.0, give_up=10.0, retry=RetryPolicy(initial=0.2, factor=2.0, maximum=2.0), most_bytes=2**20
)
"""Short limits: the server is on the same machine, so it answers at once or does not exist."""


class MetadataServer:
    """Client of the metadata server, without a cache.

    Args:
        policy: Limits of its requests.
        environ: Environment with `GCE_METADATA_HOST`, `GCE_METADATA_IP` and `NO_GCE_CHECK`; None for the
            process's.
        product_name: File with the manufacturer's name of this machine.
    """

    def __init__(
        self,
        policy: LookupPolicy = METADATA_POLICY,
        environ: Mapping[str, str] | None = None,
        product_name: Path = _PRODUCT_NAME,
    ) -> None:
        self._policy = policy
        self._environ = environment() if environ is None else environ
        self._product_name = product_name

    @property
    def host(self) -> str:
        """Address of the server: `HOST` or `HOST:PORT`."""
        environ = self._environ
        return environ.get("GCE_METADATA_HOST") or environ.get("GCE_METADATA_IP") or _DEFAULT_HOST

    def in_google_cloud(self) -> bool:
        """Return, without a request, whether this machine is in Google's cloud and so has a metadata server.

        That is the case if the environment names one, or if the firmware names Google as the manufacturer.
        """
        if self._environ.get("NO_GCE_CHECK", "").lower() == "true":
            return False
        if self.host != _DEFAULT_HOST:
            return True
        try:
            return self._product_name.read_text(errors="replace").strip().startswith("Google")
        except OSError:
            return False

    def get(self, path: str) -> str | None:
        """Return an entry.

        Args:
            path: Path below `/computeMetadata/v1/`, such as `instance/zone`.

        Returns:
            Its text, stripped of white space; None if the entry does not exist.

        Raises:
            ClusterLookupUnavailableError: There is no metadata server, or it does not answer.
            ClusterLookupError: Another server answers in its place, or it refuses the request.
        """
        url = f"http://{self.host}/computeMetadata/v1/{path}"

        def attempt() -> str | None:
            try:
                reply = exchange(
                    url,
                    timeout=self._policy.attempt,
                    most_bytes=self._policy.most_bytes,
                    headers={"Metadata-Flavor": "Google"},
                    proxies=False,
                )
            except OSError as error:
                raise Busy(f"no connection: {error}") from error
            if reply.status == 429 or reply.status >= 500:
                raise Busy(f"it answered {reply.status}", parse_retry_after(reply.headers.get("retry-after")))
            if reply.headers.get("metadata-flavor") != "Google":
                raise ClusterLookupError(
                    f"the server at {self.host} is not a metadata server of Google Compute Engine (status "
                    f"{reply.status}, no header Metadata-Flavor). Outside Google Cloud, pass the project, "
                    "the zone or the TPU's address instead"
                )
            if reply.status == 404:
                return None
            if reply.status != 200:
                raise ClusterLookupError(
                    f"the metadata server at {self.host} refuses {path}: {reply.status} {reply.text()}"
                )
            return reply.body.decode("utf-8", "replace").strip()

        return self._policy.ask(f"{path} from the metadata server at {self.host}", attempt)

    def require(self, path: str, what: str, advice: str) -> str:
        """Return an entry that must exist.

        Args:
            path: As for `get`.
            what: Description of the entry, for errors.
            advice: What to do without it, for errors.

        Raises:
            ClusterLookupUnavailableError: There is no metadata server, or it does not answer.
            ClusterLookupError: The entry does not exist.
        """
        try:
            value = self.get(path)
        except ClusterLookupUnavailableError as error:
            raise ClusterLookupUnavailableError(f"{what} is not given, and {error}. {advice}") from error
        if not value:
            raise ClusterLookupError(
                f"{what} is not given, and the metadata server at {self.host} has no {path}. {advice}"
            )
        return value

    def project(self) -> str:
        """Return the id of this machine's project.

        Raises:
            ClusterLookupError: There is no metadata server, or it lacks the entry.
        """
        return self.require("project/project-id", "the project", "Pass project=...")

    def zone(self) -> str:
        """Return the name of this machine's zone.

        Raises:
            ClusterLookupError: There is no metadata server, or it lacks the entry.
        """
        return self.require("instance/zone", "the zone", "Pass zone=...").rpartition("/")[2]

    def attribute(self, name: str) -> str | None:
        """Return an attribute of this machine, such as `accelerator-type`; None if it does not exist.

        Raises:
            ClusterLookupError: There is no metadata server, or it refuses the request.
        """
        return self.get(f"instance/attributes/{name}") or None

    def tpu_env(self) -> dict[str, str]:
        """Return the variables of the attribute `tpu-env` of TPU hosts; empty on other machines.

        Raises:
            ClusterLookupError: There is no metadata server, or it refuses the request.
        """
        return parse_tpu_env(self.attribute("tpu-env") or "")


def parse_tpu_env(text: str) -> dict[str, str]:
    """Parse lines such as `ACCELERATOR_TYPE: 'v2-8'`, and skip others."""
    matches = filter(None, map(_TPU_ENV_LINE.fullmatch, text.splitlines()))
    return {match[1]: match[2] or match[3] or match[4] or "" for match in matches}
