"""`dmesh serve`: runs a coordination server that outlives its clients."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dmesh.errors import MissingExtraError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs a coordination server: clients started with DMESH_COORDINATOR set to its address meet there. When it is
ready it prints one line on standard output,

    dmesh-server ready grpc=HOST:PORT http=http://HOST:PORT

with the real ports; everything else goes to standard error."""
_EPILOG = """\
SIGTERM or Ctrl-C tells all clients, gives calls under way a moment and ends with exit code 0; a second signal
ends at once. Exit code 2: an address, the data directory or the command line cannot be used; 3: what is in
the data directory is damaged or of another format, and was left as it is."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="run a coordination server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--listen",
        metavar="HOST:PORT",
        help="where clients connect; port 0: any free one (default 127.0.0.1:8470)",
    )
    add(
        "--http",
        metavar="HOST:PORT",
        help="dashboard, REST interface, metrics; port 0: any free one (default 127.0.0.1:8471)",
    )
    add("--no-http", action="store_true", help="do not serve HTTP")
    add(
        "--session-port",
        metavar="PORT",
        help="for the connections of clients' sessions; off: all over gRPC, slower (default: any free one)",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--data-dir", metavar="DIR", help="keep state here, across restarts")
    kept.add_argument("--memory", action="store_true", help="keep state in memory only (the default)")
    add("--lease", metavar="S", help="silence after which a client is lost, seconds (default 15)")
    add(
        "--heartbeat-interval", metavar="S", help="how often clients give a sign of life, seconds (default 3)"
    )
    add(
        "--shutdown-grace",
        metavar="S",
        help="time for calls under way when the server stops, seconds (default 2)",
    )
    limits = parser.add_argument_group("limits", "numbers, and sizes such as 1MiB")
    bound = limits.add_argument
    bound("--max-connections", metavar="N", help="clients' connections (default: as many as fit)")
    bound("--max-calls-per-connection", metavar="N", help="calls under way on each of them (default 4096)")
    bound(
        "--max-unauthenticated-per-host",
        metavar="N",
        help="of them, without a token from one host when few are free (default 64)",
    )
    bound("--max-request-size", metavar="SIZE", help="one request or message (default 1.5 MiB)")
    bound("--max-message-rate", metavar="N", help="messages of one client in a second (default 5000)")
    bound("--max-http-connections", metavar="N", help="HTTP connections (default 512)")
    bound("--max-http-connections-per-host", metavar="N", help="of these, from one host (default 64)")
    bound("--max-clusters", metavar="N", help="clusters on this server (default 1000)")
    bound("--max-tasks", metavar="N", help="tasks in one cluster (default 100000)")
    bound("--max-key-size", metavar="SIZE", help="a key (default 1KiB)")
    bound("--max-value-size", metavar="SIZE", help="a value (default 1MiB)")
    bound("--max-store-size", metavar="SIZE", help="keys and values of one cluster (default 256MiB)")
    add("--reflection", action="store_true", help="let gRPC tools list the services")
    add(
        "--token-file",
        metavar="FILE",
        help="tokens that are accepted (default: DMESH_TOKEN, DMESH_TOKEN_FILE, or ~/.config/dmesh/token, "
        "which is made at the first start)",
    )
    add("--tls-cert", metavar="FILE", help="encrypt: the server's certificate, PEM (see `dmesh certs`)")
    add("--tls-key", metavar="FILE", help="the key to it, PEM")
    add("--tls-client-ca", metavar="FILE", help="ask clients for certificates that this authority signed")
    add(
        "--tls-allow",
        metavar="NAME",
        action="append",
        help="of these clients, let in only those whose certificate has this name, or a name that begins "
        "with this prefix, which must end in '/': spiffe://example.org/dmesh/; may be repeated",
    )
    add(
        "--http-no-client-certs",
        action="store_true",
        help="with --tls-client-ca: let browsers and probes without a certificate reach the HTTP side",
    )
    add(
        "--insecure",
        action="store_true",
        help="listen without TLS where other machines reach the address. No token is asked for, either, "
        "unless --token-file, DMESH_TOKEN or DMESH_TOKEN_FILE names one",
    )
    add(
        "--allowed-host",
        metavar="NAME",
        action="append",
        help="host name under which browsers reach the HTTP side, as of a DNS entry or a proxy before it; "
        "may be repeated (always: localhost, IP addresses, and the name in --http)",
    )
    add("--open-metrics", action="store_true", help="let /metrics be read without a token")
    add(
        "--otel",
        action="store_true",
        help="send OpenTelemetry traces of calls; the OTEL_* variables say where (default "
        "http://localhost:4318)",
    )
    add("--log-format", choices=("text", "json"), default="text", help="how log lines look (default text)")
    add("--verbose", action="store_true", help="log sessions, too")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: A setting cannot work.
        AddressInUseError: A port is taken.
        MissingExtraError: The server extra is not installed.
    """
    try:
        from dmesh_server.main import serve_flags
    except ImportError as error:
        raise MissingExtraError(
            f"`dmesh serve` needs the server extra ({error}): pip install 'dmesh[server]'"
        ) from error
    return serve_flags(args)
