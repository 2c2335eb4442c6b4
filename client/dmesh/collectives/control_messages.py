"""Control messages between ranks: a group's failure, a rank's position, the end of a program.

JSON objects, small and checked: each field has a type and a limit, everything else is refused. They come from
peers that have proved that they belong to the cluster, but a mistake over there must not become a crash over
here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.skipped import NOT_BLOCKED, Blocked

MAX_BYTES = 60_000
"""Largest message; below the transport's limit."""
MAX_TEXT = 4_000
"""Characters of any text in a message."""
_MAX_RANKS = 4_000

State = Literal["behind", "unknown", "absent", "queued", "running", "finished"]
"""State of a rank with regard to a call: in an earlier generation, without such a group, not called, called
but queued, under way, over."""
_STATES = ("behind", "unknown", "absent", "queued", "running", "finished")
_MOST_WAITED_FOR = 16


class BadMessage(ValueError):
    """A control message that this client cannot make sense of."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A group failed."""

    generation: int
    """In which life of the groups."""
    group: int
    """Its id."""
    failure: Failure
    """Why."""


@dataclass(frozen=True, slots=True)
class WhereAreYou:
    """The sender waits and asks where the receiver is."""

    generation: int
    """In which life of the groups."""
    group: int
    """Id of the group in which it waits."""
    pair: tuple[int, int] | None
    """Positions of sender and receiver of a transfer; None for a collective."""
    sequence: int
    """Number of the call."""
    signature: str
    """Descriptor of the call."""
    question: int
    """Comes back in the answer."""


@dataclass(frozen=True, slots=True)
class Position:
    """The answer to `WhereAreYou`."""

    generation: int
    """As asked."""
    group: int
    """As asked."""
    pair: tuple[int, int] | None
    """As asked."""
    sequence: int
    """As asked."""
    question: int
    """As asked."""
    state: State
    """State of the answering rank with regard to that call."""
    finished: int
    """Number of its last finished call there; 0 if there is none."""
    last: str
    """Signature of that call."""
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
    """Why."""
    clean: bool = False
    """True if it ends normally: the calls that it has made are complete, and it makes no more."""


Message = Abort | WhereAreYou | Position | Farewell


def clean(text: str) -> str:
    """Returns text that may be shown: bounded, on one line, without control characters."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def encode(message: Message) -> bytes:
    """Returns a message as bytes of at most `MAX_BYTES`."""
    fields: dict[str, Any]
    match message:
        case Abort(generation, group, failure):
            fields = {
                "kind": "abort",
                "generation": generation,
                "group": group,
                "cause": failure.cause.value,
                "message": clean(failure.message),
                "ranks": list(failure.ranks[:_MAX_RANKS]),
                "reason": clean(failure.reason),
            }
        case WhereAreYou():
            fields = {
                "kind": "where",
                **_address(message),
                "signature": clean(message.signature),
            }
        case Position():
            fields = {
                "kind": "here",
                **_address(message),
                "state": message.state,
                "finished": message.finished,
                "last": clean(message.last),
                "busy": clean(message.busy),
                "waits_for": list(message.waits_for[:_MOST_WAITED_FOR]),
                "barrier": clean(message.blocked.barrier),
                "gives_up_in": message.blocked.gives_up_in,
                "leaving": message.blocked.leaving,
            }
        case Farewell(reason, in_order):
            fields = {"kind": "farewell", "reason": clean(reason), "clean": in_order}
    # Texts of 4,000 characters outside of ASCII would take six bytes each if they were escaped.
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(data: bytes) -> Message:
    """Returns the message in bytes from a peer.

    Raises:
        BadMessage: There is none.
    """
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are too many")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage("no JSON") from error
    if not isinstance(fields, dict):
        raise BadMessage("no object")
    kind = fields.get("kind")
    if kind == "abort":
        causes = {cause.value: cause for cause in Cause if cause not in (Cause.CLOSED, Cause.JOINING)}
        cause = causes.get(_text(fields, "cause"))
        if cause is None:
            raise BadMessage("cause")
        about = _ranks(fields, "ranks", _MAX_RANKS)
        failure = Failure(cause, _text(fields, "message"), about, _text(fields, "reason"))
        return Abort(_number(fields, "generation"), _number(fields, "group"), failure)
    if kind == "farewell":
        return Farewell(_text(fields, "reason"), fields.get("clean") is True)
    if kind not in ("where", "here"):
        raise BadMessage("kind")
    generation, group, sequence, question = (
        _number(fields, name) for name in ("generation", "group", "sequence", "question")
    )
    pair = _pair(fields.get("pair"))
    if kind == "where":
        return WhereAreYou(generation, group, pair, sequence, _text(fields, "signature"), question)
    state = fields.get("state")
    if state not in _STATES:
        raise BadMessage("state")
    return Position(
        generation,
        group,
        pair,
        sequence,
        question,
        state,
        _number(fields, "finished"),
        _text(fields, "last"),
        _text(fields, "busy"),
        _ranks(fields, "waits_for", _MOST_WAITED_FOR),
        Blocked(_text(fields, "barrier"), _number(fields, "gives_up_in"), fields.get("leaving") is True),
    )


def _address(message: WhereAreYou | Position) -> dict[str, Any]:
    return {
        "generation": message.generation,
        "group": message.group,
        "pair": message.pair,
        "sequence": message.sequence,
        "question": message.question,
    }


def _natural(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise BadMessage(name)
    return value


def _number(fields: dict[str, Any], name: str) -> int:
    return _natural(fields.get(name), name)


def _ranks(fields: dict[str, Any], name: str, limit: int) -> tuple[int, ...]:
    ranks = fields.get(name)
    if not isinstance(ranks, list) or len(ranks) > limit:
        raise BadMessage(name)
    return tuple(_natural(rank, name) for rank in ranks)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadMessage(name)
    return clean(value)


def _pair(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise BadMessage("pair")
    return _natural(value[0], "pair"), _natural(value[1], "pair")
