"""`dmesh serve`: runs a coordination server that outlives its clients."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dmesh.errors import MissingExtraError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs a coordination server. Clients that are started with DMESH_COORDINATOR set to its address connect to it.
When the server is ready, it prints one line with the actual ports on standard output:

    dmesh-server ready grpc=HOST:PORT http=http://HOST:PORT

Everything else goes to standard error."""
_EPILOG = """\
On SIGTERM or Ctrl-C, the server notifies its clients, finishes pending calls (see --shutdown-grace) and exits
with 0; a second signal ends it at once.

exit code: 0 after a signal; 2 if an address, the data directory or the command line is invalid; 3 if the data
directory is damaged or has another format (it is left unchanged)."""


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
        help="address for clients; port 0 picks a free port (default 127.0.0.1:8470)",
    )
    add(
        "--http",
        metavar="HOST:PORT",
        help="address of dashboard, REST API and metrics; port 0 picks a free port (default 127.0.0.1:8471)",
    )
    add("--no-http", action="store_true", help="do not serve HTTP")
    add(
        "--session-port",
        metavar="PORT",
        help="port for clients' sessions, or 'off' to carry them over gRPC, which is slower (default: a "
        "free port)",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--data-dir", metavar="DIR", help="directory for state that survives restarts")
    kept.add_argument("--memory", action="store_true", help="keep state in memory only (the default)")
    add("--lease", metavar="S", help="seconds of silence after which a client is declared lost (default 15)")
    add("--heartbeat-interval", metavar="S", help="seconds between heartbeats of a client (default 3)")
    add(
        "--shutdown-grace",
        metavar="S",
        help="seconds to finish pending calls when the server stops (default 2)",
    )
    limits = parser.add_argument_group("limits", "N is a number, SIZE a size such as 1MiB")
    bound = limits.add_argument
    bound("--max-connections", metavar="N", help="client connections (default: what the system allows)")
    bound("--max-calls-per-connection", metavar="N", help="pending calls of a connection (default 4096)")
    bound(
        "--max-unauthenticated-per-host",
        metavar="N",
        help="connections of one host that have not shown a token, when few are free (default 64)",
    )
    bound("--max-request-size", metavar="SIZE", help="size of a request or message (default 1.5 MiB)")
    bound("--max-message-rate", metavar="N", help="messages per second of a client (default 5000)")
    bound("--max-http-connections", metavar="N", help="HTTP connections (default 512)")
    bound("--max-http-connections-per-host", metavar="N", help="HTTP connections of one host (default 64)")
    bound("--max-clusters", metavar="N", help="clusters on this server (default 1000)")
    bound("--max-tasks", metavar="N", help="tasks of a cluster (default 100000)")
    bound("--max-key-size", metavar="SIZE", help="size of a key (default 1KiB)")
    bound("--max-value-size", metavar="SIZE", help="size of a value (default 1MiB)")
    bound("--max-store-size", metavar="SIZE", help="size of a cluster's keys and values (default 256MiB)")
    add("--reflection", action="store_true", help="let gRPC tools list the services")
    add(
        "--token-file",
        metavar="FILE",
        help="file of accepted tokens (default: DMESH_TOKEN, DMESH_TOKEN_FILE, or ~/.config/dmesh/token, "
        "which the first start creates)",
    )
    add("--tls-cert", metavar="FILE", help="the server's certificate, PEM; turns on TLS (see `dmesh certs`)")
    add("--tls-key", metavar="FILE", help="private key of the certificate, PEM")
    add("--tls-client-ca", metavar="FILE", help="require client certificates signed by this CA, PEM")
    add(
        "--tls-allow",
        metavar="NAME",
        action="append",
        help="accept only client certificates with this name; a NAME that ends in '/' is a prefix "
        "(spiffe://example.org/dmesh/); may be repeated",
    )
    add(
        "--http-no-client-certs",
        action="store_true",
        help="with --tls-client-ca: do not require client certificates over HTTP (browsers, probes)",
    )
    add(
        "--insecure",
        action="store_true",
        help="allow addresses that other machines can reach without TLS. Also requires no token, unless "
        "--token-file, DMESH_TOKEN or DMESH_TOKEN_FILE gives one",
    )
    add(
        "--allowed-host",
        metavar="NAME",
        action="append",
        help="host name that browsers may use for the HTTP address, such as that of a proxy; may be "
        "repeated (always allowed: localhost, IP addresses, and the host of --http)",
    )
    add("--open-metrics", action="store_true", help="serve /metrics without a token")
    add(
        "--otel",
        action="store_true",
        help="send OpenTelemetry traces of calls to the endpoint in the OTEL_* variables (default "
        "http://localhost:4318)",
    )
    add("--log-format", choices=("text", "json"), default="text", help="format of log lines (default text)")
    add("--verbose", action="store_true", help="also log sessions")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: A setting is invalid.
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
