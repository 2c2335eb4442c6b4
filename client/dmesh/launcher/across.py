"""Plan of a job on several hosts: addresses, credentials, and what each client is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dmesh.config.addresses import is_loopback, split_address
from dmesh.config.settings import Settings
from dmesh.errors import ConfigurationError, MissingExtraError
from dmesh.launcher.plan import LaunchOptions, LaunchPlan, Place, own_settings, plan_clients
from dmesh.security import tokens

CREDENTIALS = ("DMESH_TLS_CA", "DMESH_TLS_CERT", "DMESH_TLS_KEY")
"""Variables that name files here; each host gets copies of its own."""
_DAYS = 365
_NAME = "run"


@dataclass(frozen=True)
class PlanAcross:
    """A job that can be started on several hosts."""

    plan: LaunchPlan
    """Command to start; its paths are those of the launcher's machine."""
    files: Mapping[str, str] = field(repr=False)
    """Content of the files that the hosts are given, by the variables that name them."""


def plan_across(
    options: LaunchOptions,
    jobs: Sequence[str],
    places: Sequence[Place],
    environment: Mapping[str, str],
    exports: Mapping[str, str],
    directory: Path,
) -> PlanAcross:
    """Decide the clients' environments.

    Args:
        options: What the user asked for.
        jobs: HOST:PORT of each client.
        places: Where each of them is.
        environment: The launcher's own environment; dmesh's settings are handed over.
        exports: More variables to hand over.
        directory: A private directory, for certificates that this run alone uses.

    Raises:
        ConfigurationError: The settings cannot work, or would send a token unencrypted.
        MissingExtraError: There is no `cryptography` to make certificates with.
    """
    given = {name: value for name, value in environment.items() if value and own_settings(name)}
    given |= exports
    given |= _token(options, given, environment)
    hosts = [split_address(job, "a client's address")[0] for job in jobs]
    reachable = len({place.host for place in places}) > 1 or not all(map(is_loopback, hosts))
    if reachable and not options.coordinator and not given.get("DMESH_COORDINATOR"):
        given |= _certificates(given, hosts, directory)
    clients = plan_clients(options, (), jobs, places, given)
    Settings.load(clients[0].environment)
    files = {name: _content(name, given[name]) for name in CREDENTIALS if given.get(name)}
    return PlanAcross(LaunchPlan(clients, options), files)


def check_across(options: LaunchOptions, environment: Mapping[str, str]) -> None:
    """Refuse what cannot work on other machines than this one.

    Raises:
        ConfigurationError: The coordinator's address means this machine alone.
    """
    coordinator = options.coordinator or environment.get("DMESH_COORDINATOR", "").strip()
    if not coordinator:
        return
    if is_loopback(split_address(coordinator, "--coordinator")[0]):
        raise ConfigurationError(
            f"the coordinator's address {coordinator} is different on each host; start the server "
            "with `dmesh serve --listen HOST:PORT`, at an address that the hosts can reach, and pass that"
        )


def _token(
    options: LaunchOptions, given: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the token for clients on hosts that may not have this machine's token file."""
    if given.get("DMESH_TOKEN") or not (
        options.coordinator or given.get("DMESH_COORDINATOR") or given.get("DMESH_TOKEN_FILE")
    ):
        return {}
    source = tokens.find(None, given.get("DMESH_TOKEN_FILE"), environment)
    return {} if source is None else {"DMESH_TOKEN": source.read()[0].value, "DMESH_TOKEN_FILE": ""}


def _certificates(given: Mapping[str, str], hosts: Sequence[str], directory: Path) -> dict[str, str]:
    """Return settings with which the server inside client 0 is encrypted, or need not be.

    Args:
        given: Settings of the clients.
        hosts: Addresses of the hosts, the server's among them.
        directory: Where to make certificates.
    """
    if any(given.get(name) for name in CREDENTIALS):
        missing = [name for name in CREDENTIALS if not given.get(name)]
        if missing:
            raise ConfigurationError(
                f"{' and '.join(missing)} must be set, too: client 0 hosts the coordination server, and "
                "shows the others a certificate. Unset all three to let dmesh create certificates for "
                "this run"
            )
        return {}
    if Settings.load({"DMESH_INSECURE": given.get("DMESH_INSECURE", "")}).insecure:
        return {}
    try:
        from dmesh.security import authority
    except ImportError as error:
        raise MissingExtraError(
            "clients on several hosts send a token over the network, and TLS for it needs the security "
            f"extra here ({error}): pip install 'dmesh[security]'. Or set DMESH_TLS_CA, DMESH_TLS_CERT and "
            "DMESH_TLS_KEY to certificates of your own, or pass --insecure if you trust that network"
        ) from error
    authority.create(directory, _DAYS)
    authority.issue(directory, _NAME, sorted(set(hosts)), _DAYS)
    (directory / "ca.key").unlink()  # nobody needs another certificate
    paths = (directory / name for name in ("ca.pem", f"{_NAME}.pem", f"{_NAME}.key"))
    return {name: str(path) for name, path in zip(CREDENTIALS, paths, strict=True)}


def _content(variable: str, path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{variable} is {path}, which cannot be read here and handed to the hosts: {error}"
        ) from error
