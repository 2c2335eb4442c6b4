"""`dmesh certs`: a private certificate authority and certificates for one's own clusters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dmesh.cli.output import add_json, print_json
from dmesh.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from datetime import datetime
    from types import ModuleType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Creates a private certificate authority (CA) and signs certificates for the servers and clients of your
clusters:

    dmesh certs init tls
    dmesh certs issue tls --name server --host coordinator.example --host 10.0.0.7
    dmesh certs issue tls --name worker-0 --host 10.0.1.1

    dmesh serve --tls-cert tls/server.pem --tls-key tls/server.key --tls-client-ca tls/ca.pem
    DMESH_TLS_CA=tls/ca.pem DMESH_TLS_CERT=tls/worker-0.pem DMESH_TLS_KEY=tls/worker-0.key python train.py"""
_EPILOG = """\
Keep ca.key off the machines of the cluster: with it, anyone can make certificates that all of them accept.
Files are readable by their owner only, and none is overwritten."""
_MOST_DAYS = 36_500


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = subparsers.add_parser(
        "certs",
        help="create a private CA and TLS certificates",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="verbs", dest="certs_verb", metavar="VERB", required=True)
    init = verbs.add_parser("init", help="create the CA: DIR/ca.pem, DIR/ca.key", allow_abbrev=False)
    init.add_argument("directory", metavar="DIR", help="directory of the CA; created if missing")
    init.add_argument("--days", metavar="N", default="3650", help="days of validity (default 3650)")
    add_json(init)
    init.set_defaults(execute=_init)
    issue = verbs.add_parser(
        "issue", help="sign a certificate: DIR/NAME.pem, DIR/NAME.key", allow_abbrev=False
    )
    issue.add_argument("directory", metavar="DIR", help="directory of the CA")
    issue.add_argument("--name", required=True, help="name of the files, and common name")
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        help="host name, IP address or URI (spiffe://...) of the certificate; may be repeated",
    )
    issue.add_argument("--days", metavar="N", default="365", help="days of validity (default 365)")
    add_json(issue)
    issue.set_defaults(execute=_issue)


def _init(args: argparse.Namespace) -> int:
    directory = Path(args.directory)
    certificate = _authority().create(directory, _days(args.days))
    _print(args, directory / "ca", certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    return 0


def _issue(args: argparse.Namespace) -> int:
    directory = Path(args.directory)
    certificate = _authority().issue(directory, args.name, args.host, _days(args.days))
    files = directory / str(args.name)
    _print(args, files, certificate.not_valid_before_utc, certificate.not_valid_after_utc, args.host)
    return 0


def _authority() -> ModuleType:
    try:
        from dmesh.security import authority
    except ImportError as error:
        raise MissingExtraError(
            f"`dmesh certs` needs the security extra ({error}): pip install 'dmesh[security]'"
        ) from error
    return authority


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MOST_DAYS:
        raise ConfigurationError(f"--days is {text!r}; expected a whole number from 1 to {_MOST_DAYS}")
    return int(text)


def _print(
    args: argparse.Namespace, files: Path, begins: datetime, expires: datetime, hosts: Sequence[str] = ()
) -> None:
    """Lists the created files, with times in UTC."""
    cert, key = (files.with_name(f"{files.name}.{suffix}") for suffix in ("pem", "key"))
    if args.json:
        print_json(
            {
                "cert": str(cert),
                "key": str(key),
                "hosts": list(hosts),
                "begins": f"{begins:%Y-%m-%dT%H:%M:%SZ}",
                "expires": f"{expires:%Y-%m-%dT%H:%M:%SZ}",
            }
        )
        return
    what = f"{cert}, {key}: for {', '.join(hosts)}" if hosts else f"{cert}, {key}"
    print(f"{what}: expires {expires:%Y-%m-%d %H:%M} UTC")  # noqa: T201
