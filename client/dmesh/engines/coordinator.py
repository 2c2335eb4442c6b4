"""Coordination server of a launch, and the environment variables with which ranks find it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dmesh.config.addresses import join_address
from dmesh.config.settings import Settings
from dmesh.distribute.cluster_resolver.launched import own_host
from dmesh.engines.rank import Place
from dmesh.errors import ConfigurationError
from dmesh.launcher.ports import LOOPBACK
from dmesh.runtime.bootstrap import start_coordinator
from dmesh.security import tokens


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Return the settings of the launching process, which is not a client itself.

    Raises:
        ConfigurationError: A variable is malformed.
    """
    return Settings.load({**environ, "DTENSOR_JOBS": "", "DTENSOR_CLIENT_ID": ""})


@contextlib.contextmanager
def coordinator(own: Place, places: Sequence[Place], environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a coordination server for the ranks, unless `DMESH_COORDINATOR` names one.

    Args:
        own: This process.
        places: The ranks' processes. The server listens on the loopback interface if all share
            this process's.
        environ: Environment of this process.

    Yields:
        The environment variables with which the ranks find the server, the token included.

    Raises:
        ConfigurationError: A variable is malformed, or ranks run on other hosts, so that the token would
            travel unencrypted.
        ResolverError: This host has no route to the hosts of the ranks.
    """
    settings = settings_of(environ)
    variables = {
        "DMESH_CLUSTER": environ.get("DMESH_CLUSTER", "").strip() or f"launch-{secrets.token_hex(4)}"
    }
    if settings.coordinator is not None:
        source = tokens.find(settings.token, settings.token_file)
        if source is not None:
            variables["DMESH_TOKEN"] = source.read()[0].value
        yield {**variables, "DMESH_COORDINATOR": settings.coordinator}
        return
    remote = [place for place in places if not place.shares_loopback(own)]
    if remote and not settings.insecure and settings.tls_ca is None:
        raise ConfigurationError(
            f"ranks would run on other hosts ({', '.join(sorted({place.host for place in remote})[:4])}); "
            "without TLS, the token and all other data would travel unencrypted. Set DMESH_TLS_CA, "
            "DMESH_TLS_CERT and DMESH_TLS_KEY here and on the workers (see `dmesh certs`), or "
            "DMESH_INSECURE=1 here if you trust everyone on that network, or point DMESH_COORDINATOR at a "
            "running server"
        )
    host = own_host(join_address(remote[0].address or remote[0].host, 1)) if remote else LOOPBACK
    token = tokens.generate()
    server = start_coordinator(host, replace(settings, token=token))
    try:
        yield {**variables, "DMESH_COORDINATOR": server.address, "DMESH_TOKEN": token}
    finally:
        server.stop(grace=0.5)
