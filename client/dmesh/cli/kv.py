"""`dmesh kv`: looks at the keys of a cluster, and changes them."""

from __future__ import annotations

import argparse
import base64
import secrets
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.observing import Observer
    from dmesh.v1 import key_value_pb2

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Reads and changes the keys that the programs of a cluster share. Keys that begin with dmesh/ belong to dmesh:
they are read-only here."""
_EPILOG = """\
exit code: 0; 3 if `get` or `delete` finds no key, or `put` finds an existing one; 1 if the server does not
answer; 2 for an invalid command line or environment."""
_SHOWN = 60


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "kv", _DESCRIPTION, _EPILOG, execute)
    verbs = parser.add_subparsers(title="verbs", dest="kv_verb", metavar="VERB", required=True)
    get = _verb(verbs, "get", "print a key's value unchanged")
    get.add_argument("key", metavar="KEY")
    get.add_argument("--wait", metavar="S", type=float, default=0.0, help="wait up to S seconds for the key")
    put = _verb(verbs, "put", "set a key")
    put.add_argument("key", metavar="KEY")
    put.add_argument("value", metavar="VALUE", help="the value; - reads it from standard input")
    put.add_argument("--ttl", metavar="S", type=float, help="delete the key after S seconds")
    put.add_argument("--overwrite", action="store_true", help="replace an existing value")
    listed = _verb(verbs, "list", "list keys, without their values")
    listed.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only keys with this prefix")
    delete = _verb(verbs, "delete", "delete a key")
    delete.add_argument("key", metavar="KEY")
    delete.add_argument("--prefix", action="store_true", help="delete all keys with the prefix KEY")
    increment = _verb(verbs, "increment", "add to a key whose value is an integer, and print the sum")
    increment.add_argument("key", metavar="KEY")
    increment.add_argument(
        "amount", metavar="N", type=int, nargs="?", default=1, help="amount to add (default 1)"
    )
    watch = _verb(verbs, "watch", "print changes of keys until Ctrl-C")
    watch.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only keys with this prefix")
    watch.add_argument(
        "--from", metavar="N", type=int, default=0, dest="revision", help="start from this revision"
    )
    watch.add_argument("--count", metavar="N", type=int, help="exit after N changes")


def _verb(verbs: Subparsers, name: str, text: str) -> argparse.ArgumentParser:
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json

    parser = verbs.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
    add_target(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer

    actions = {
        "get": _get, "put": _put, "list": _list, "delete": _delete, "increment": _increment, "watch": _watch,
    }  # fmt: skip
    action = actions[args.kv_verb]
    with Observer.of(args) as observer:
        return action(observer, args)


def _get(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import BAD_NEWS, print_failure, print_json
    from dmesh.errors import KeyNotFoundError, KeyWaitTimeoutError
    from dmesh.v1 import key_value_pb2 as pb

    wait = max(0.0, args.wait)
    request = pb.GetRequest(caller=observer.caller, key=args.key, timeout_ms=round(wait * 1000))
    try:
        kv = observer.ask(observer.link.key_value.Get, request, observer.patience + wait).kv
    except (KeyNotFoundError, KeyWaitTimeoutError) as error:
        print_failure("kv", str(error), type(error), as_json=args.json)
        return BAD_NEWS
    if args.json:
        print_json(_view(kv))
        return 0
    if sys.stdout.isatty():
        print(_shown(kv.value))  # noqa: T201
    else:  # as it is
        sys.stdout.buffer.write(kv.value)
        sys.stdout.flush()
    return 0


def _put(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import BAD_NEWS, print_failure, print_json, print_text
    from dmesh.errors import KeyExistsError
    from dmesh.v1 import key_value_pb2 as pb

    _refuse_own(args.key)
    value = sys.stdin.buffer.read() if args.value == "-" else args.value.encode(errors="surrogateescape")
    lease = 0 if args.ttl is None else _grant(observer, args.ttl)
    request = pb.SetRequest(
        caller=observer.caller,
        request_id=secrets.token_hex(16),
        key=args.key,
        value=value,
        allow_overwrite=args.overwrite,
        lease=lease,
    )
    try:
        revision = observer.ask(observer.link.key_value.Set, request).revision
    except KeyExistsError as error:
        message = f"{error} On this command line: --overwrite."
        print_failure("kv", message, type(error), as_json=args.json)
        return BAD_NEWS
    if args.json:
        print_json({"key": args.key, "revision": revision})
    else:
        print_text(f"{args.key}: {len(value)} bytes, revision {revision}")
    return 0


def _grant(observer: Observer, ttl: float) -> int:
    """Grants a lease without renewing it; returns its number."""
    from dmesh.v1 import key_value_pb2 as pb

    number = secrets.randbits(63) | 1
    request = pb.GrantLeaseRequest(
        caller=observer.caller, request_id=secrets.token_hex(16), lease=number, ttl_ms=round(ttl * 1000)
    )
    observer.ask(observer.link.key_value.GrantLease, request)
    return number


def _list(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_table
    from dmesh.v1 import key_value_pb2 as pb

    request = pb.ListRequest(caller=observer.caller, prefix=args.prefix, keys_only=True)
    answer = observer.ask(observer.link.key_value.List, request)
    if args.json:
        keys = [
            {"key": kv.key, "revision": kv.mod_revision, "create_revision": kv.create_revision}
            for kv in answer.kvs
        ]
        print_json({"cluster": observer.cluster, "revision": answer.revision, "keys": keys})
        return 0
    print_table(
        ("KEY", "REVISION", "CREATED"), [(kv.key, kv.mod_revision, kv.create_revision) for kv in answer.kvs]
    )
    return 0


def _delete(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import BAD_NEWS, print_json, print_text
    from dmesh.v1 import key_value_pb2 as pb

    _refuse_own(args.key)
    request = pb.DeleteRequest(
        caller=observer.caller, request_id=secrets.token_hex(16), key=args.key, is_prefix=args.prefix
    )
    answer = observer.ask(observer.link.key_value.Delete, request)
    if args.json:
        print_json({"deleted": answer.deleted, "revision": answer.revision})
    else:
        print_text(f"{answer.deleted} key{'' if answer.deleted == 1 else 's'} deleted")
    return 0 if answer.deleted else BAD_NEWS


def _increment(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_text
    from dmesh.v1 import key_value_pb2 as pb

    _refuse_own(args.key)
    request = pb.IncrementRequest(
        caller=observer.caller, request_id=secrets.token_hex(16), key=args.key, amount=args.amount
    )
    answer = observer.ask(observer.link.key_value.Increment, request)
    if args.json:
        print_json({"key": args.key, "value": answer.value, "revision": answer.revision})
    else:
        print_text(str(answer.value))
    return 0


def _watch(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json_line, printable
    from dmesh.v1 import key_value_pb2 as pb

    request = pb.WatchRequest(caller=observer.caller, prefix=args.prefix, from_revision=args.revision)
    printed = 0
    for response in observer.stream(observer.link.key_value.Watch, request):
        for event in response.events:
            if args.json:
                print_json_line({"deleted": event.deleted, **_view(event.kv), "revision": response.revision})
            elif event.deleted:
                print(f"{response.revision} deleted {printable(event.kv.key)}", flush=True)  # noqa: T201
            else:
                text = f"{response.revision} set {event.kv.key} {_shown(event.kv.value)}"
                print(printable(text), flush=True)  # noqa: T201
            printed += 1
            if printed == args.count:
                return 0
    return 0


def _refuse_own(key: str) -> None:
    from dmesh.errors import ConfigurationError
    from dmesh.protocol import RESERVED_PREFIX

    if key.startswith(RESERVED_PREFIX):
        raise ConfigurationError(
            f"keys that begin with {RESERVED_PREFIX!r} are reserved for dmesh: use another name than {key!r}"
        )


def _view(kv: key_value_pb2.KeyValue) -> dict[str, object]:
    try:
        value: dict[str, object] = {"text": kv.value.decode()}
    except UnicodeDecodeError:
        value = {"text": None}
    encoded = base64.b64encode(kv.value).decode()
    return {
        "key": kv.key,
        "revision": kv.mod_revision,
        "create_revision": kv.create_revision,
        "base64": encoded,
        **value,
    }


def _shown(value: bytes) -> str:
    """Returns a value for a person to see: short text as it is, anything else in short."""
    from dmesh.cli.output import printable

    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes that are no text)"
    return printable(text) if len(text) <= _SHOWN else f"{printable(text[:_SHOWN])}... ({len(value)} bytes)"
