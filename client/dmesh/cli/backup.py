"""`dmesh backup`: saves the keys of a running cluster in a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.backup_files import BackedUpKey, Description
    from dmesh.cli.observing import Observer

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Saves all keys of a cluster to a file while the cluster runs, as of one revision. Keys that begin with dmesh/
are left out: they belong to the running processes. Needs an admin's token."""
_EPILOG = """\
exit code: 0; 1 if the server does not answer, or refuses; 2 for an invalid command line, environment or file.
`dmesh restore` reads the file."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "backup", _DESCRIPTION, _EPILOG, execute)
    parser.add_argument("file", metavar="FILE", help="the file to write or replace; - for standard output")
    add_target(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The file cannot be written.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli import backup_files
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import print_json, print_text
    from dmesh.errors import ConfigurationError, CoordinationError

    with Observer.of(args) as observer:
        description, keys = _fetch(observer)
        try:
            if args.file == "-":
                count = backup_files.write(sys.stdout.buffer, description, keys)
                sys.stdout.flush()
            else:
                count = backup_files.replace(Path(args.file), description, keys)
        except OSError as error:
            raise ConfigurationError(f"{args.file} cannot be written: {error.strerror or error}") from error
        if count != description.keys:
            # The digest is right, but the file is incomplete: `dmesh restore` has to see that, too.
            raise CoordinationError(
                f"the coordination server at {observer.address} sent {count} of {description.keys} keys; "
                f"{args.file} is not complete. Make another backup."
            )
    content = {"cluster": description.cluster, "revision": description.revision, "keys": description.keys}
    if args.file == "-":
        return 0
    if args.json:
        print_json({"file": args.file, **content})
    else:
        keys_text = f"{description.keys} key{'' if description.keys == 1 else 's'}"
        print_text(
            f"{args.file}: {keys_text} of cluster {description.cluster!r}, revision {description.revision}"
        )
    return 0


def _fetch(observer: Observer) -> tuple[Description, Iterator[BackedUpKey]]:
    """Requests a backup; returns its description and an iterator over its keys."""
    from dmesh.cli.backup_files import BackedUpKey, Description
    from dmesh.v1 import key_value_pb2 as pb

    responses = observer.stream(observer.link.key_value.Backup, pb.BackupRequest(caller=observer.caller))
    first = next(responses)
    description = Description(observer.cluster, first.cluster_incarnation, first.revision, first.keys)

    def keys() -> Iterator[BackedUpKey]:
        for response in responses:
            for kv in response.kvs:
                yield BackedUpKey(kv.key, kv.value, kv.create_revision, kv.mod_revision)

    return description, keys()
