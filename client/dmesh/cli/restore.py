"""`dmesh restore`: gives a running cluster the keys of a backup."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.backup_files import BackedUpKey
    from dmesh.v1 import common_pb2, key_value_pb2

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Loads the keys of a backup into a running cluster, atomically: readers and watches see one change with one
revision. Keys that are not in the backup are deleted, unless --merge is given. Keys that begin with dmesh/
are left alone. The whole file is checked before anything changes. Needs an admin's token."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer, or refuses; 2 for an invalid command line or environment, and
for a file that is not a backup, is damaged, or has a newer format."""
_AT_ONCE = 256 << 10
"""Bytes of keys and values in one message, unless one key has more."""
_KEY_COST = 32
_PATIENCE = 120.0
"""Seconds that the server may take."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "restore", _DESCRIPTION, _EPILOG, execute)
    parser.add_argument("file", metavar="FILE", help="a file written by `dmesh backup`; - for standard input")
    parser.add_argument("--merge", action="store_true", help="keep keys that are not in the backup")
    parser.add_argument(
        "--any-cluster", action="store_true", help="accept the backup of a cluster with another name"
    )
    add_target(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The file cannot be read, or must not be used.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli import backup_files
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import print_json, print_text
    from dmesh.errors import ConfigurationError

    try:
        content = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{args.file} cannot be read: {error.strerror or error}") from error
    description, keys = backup_files.read(content, args.file)
    del content
    with Observer.of(args) as observer:
        if description.cluster != observer.cluster and not args.any_cluster:
            raise ConfigurationError(
                f"{args.file} is a backup of cluster {description.cluster!r}, not of {observer.cluster!r}. "
                "Name the cluster with --cluster, or pass --any-cluster to restore it anyway."
            )
        answer = observer.send(
            observer.link.key_value.Restore, _requests(observer.caller, keys, merge=args.merge), _PATIENCE
        )
    counts = {"set": answer.set, "deleted": answer.deleted, "revision": answer.revision}
    if args.json:
        print_json({"cluster": observer.cluster, **counts})
    else:
        print_text(
            f"cluster {observer.cluster!r}: {answer.set} keys set, {answer.deleted} deleted, "
            f"{len(keys) - answer.set} unchanged; revision {answer.revision}"
        )
    return 0


def _requests(
    caller: common_pb2.Caller, keys: Sequence[BackedUpKey], *, merge: bool
) -> Iterator[key_value_pb2.RestoreRequest]:
    from dmesh.v1 import key_value_pb2 as pb

    request, size = pb.RestoreRequest(caller=caller, keys=len(keys), merge=merge), 0
    for key in keys:
        added = len(key.key.encode()) + len(key.value) + _KEY_COST
        if request.kvs and size + added > _AT_ONCE:
            yield request
            request, size = pb.RestoreRequest(), 0
        request.kvs.add(key=key.key, value=key.value)
        size += added
    yield request
