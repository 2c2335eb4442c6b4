"""Control messages between ranks: a group's failure, a rank's position, the end of a program.

JSON objects, small and checked: each field has a type and a limit, everything else is refused. They come from
peers that have proved that they belong to the cluster, but a mistake over there must not become a crash over
here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from dmesh.collectives.failure import Cause, Failure

MAX_BYTES = 60_000
"""Largest message; below the transport's limit."""
MAX_TEXT = 4_000
"""Characters of any text in a message."""
_MOST_RANKS = {"ranks": 4_000, "waits_for": 16}
"""Ranks in a field; the sender leaves out further ones."""

State = Literal["behind", "unknown", "absent", "queued", "running", "finished"]
"""State of a rank with regard to a call: in an earlier generation, without such a group, not called, called
but queued, under way, over."""


class BadMessage(ValueError):
    """A control message that this client cannot make sense of."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A group failed."""

    generation: int
    group: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Blocked:
    """The barrier that keeps a rank from making a call, as it tells the rank that waits for it."""

    barrier: str = ""
    """Name of the barrier; empty if there is none for certain."""
    gives_up_in: int = 0
    """Milliseconds after which the barrier gives up; 0 for never."""
    leaving: bool = False
    """True for the barrier of the shutdown, after which the rank makes no more calls."""


NOT_BLOCKED = Blocked()


@dataclass(frozen=True, slots=True)
class Address:
    """The call that a question and its answer are about."""

    generation: int
    group: int
    """Id of the group."""
    pair: tuple[int, int] | None
    """Positions of sender and receiver of a transfer; None for a collective."""
    sequence: int
    """Number of the call."""
    question: int
    """Number of the question, which comes back in the answer."""


@dataclass(frozen=True, slots=True)
class WhereAreYou(Address):
    """The sender waits and asks where the receiver is."""

    signature: str
    """Descriptor of the call."""


@dataclass(frozen=True, slots=True)
class Position(Address):
    """The answer to `WhereAreYou`."""

    state: State
    finished: int
    """Number of the answering rank's last finished call there; 0 if there is none."""
    last: str
    """Descriptor of that call."""
    busy: str
    """Other call that it is in at the moment; empty if there is none."""
    waits_for: tuple[int, ...] = ()
    """If it is at the call: some of the ranks that it waits for."""
    blocked: Blocked = NOT_BLOCKED
    """If it has not made the call: the barrier that keeps it from that."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """Notice that the sender's program ends without a proper shutdown."""

    reason: str
    clean: bool = False
    """True if it ends normally: the calls that it has made are complete, and it makes no more."""


Message = Abort | WhereAreYou | Position | Farewell
_CAUSES = {cause.value: cause for cause in Cause if cause not in (Cause.CLOSED, Cause.JOINING)}
_PARTS = {"Failure": Failure, "Blocked": Blocked}
_KINDS = {kind.__name__: kind for kind in (Abort, WhereAreYou, Position, Farewell)}


def clean(text: str) -> str:
    """Return text that may be shown: bounded, on one line, without control characters."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def encode(message: Message) -> bytes:
    """Return a message as bytes of at most `MAX_BYTES`."""
    found = {"kind": type(message).__name__, **_encoded(message, "")}
    # Texts of 4,000 characters outside of ASCII would take six bytes each if they were escaped.
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _encoded(value: Any, name: str) -> Any:
    match value:
        case str():
            return clean(value)
        case Cause():
            return value.value
        case tuple() | list():
            return value[: _MOST_RANKS.get(name)]
        case None | int():
            return value
    return {field.name: _encoded(getattr(value, field.name), field.name) for field in fields(value)}


def decode(data: bytes) -> Message:
    """Return the message in bytes from a peer.

    Raises:
        BadMessage: There is none.
    """
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are too many")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage("no JSON") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadMessage("kind")
    return cast(Message, _record(_KINDS[kind], found))


def _record(made: type[Any], found: dict[str, Any]) -> Any:
    return made(*(_field(str(at.type), found.get(at.name), at.name) for at in fields(made)))


def _field(kind: str, value: Any, name: str) -> Any:
    """Return a field of a type, as it is annotated; raises BadMessage for any other value."""
    match kind, value:
        case "int", int() if not isinstance(value, bool) and 0 <= value < 2**64:
            return value
        case "str", str():
            return clean(value)
        case "bool", bool():
            return value
        case "State", str() if value in get_args(State):
            return value
        case "Cause", str() if value in _CAUSES:
            return _CAUSES[value]
        case "tuple[int, int] | None", None:
            return None
        case "tuple[int, int] | None", [first, second]:
            return _field("int", first, name), _field("int", second, name)
        case "tuple[int, ...]", list() if len(value) <= _MOST_RANKS[name]:
            return tuple(_field("int", rank, name) for rank in value)
        case "Failure" | "Blocked", dict():
            return _record(_PARTS[kind], value)
    raise BadMessage(name)
