"""Whether what clients of the key-value store were told can be true: linearizability, and watches.

Each client writes down what it is about to do, and what came of it (`history_worker.py`). Then:

- Is there an order of all operations that a single store could have executed one after the other, in which
  each takes effect at one instant between its call and its return? Every operation is of one key, and such
  histories can be checked key by key (Herlihy and Wing's locality); within a key, by the search of Wing and
  Gong with the memory of Lowe: try those that may come first, remember the states that led nowhere.
- Do the revisions agree with that: one change each, growing in real time, and every list what the store was
  at its revision?
- Did every watcher see every change, once, in order?

An operation whose outcome its client never learned may have taken effect at any time after its call, or not
at all.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Value = str | None
"""What a key has; None if there is no such key."""

EXISTS, NO_NUMBER = "KeyExistsError", "KeyTypeError"
"""Refusals that say for certain that nothing was changed, and in which state the key was."""

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Operation:
    """One call of one client."""

    client: str
    """Who called."""
    kind: str
    """set, create, get, cas, increment or delete: of one key; or list: of all."""
    key: str
    """The key; of a list, the prefix."""
    arguments: tuple[Any, ...] = ()
    """set, create: value; cas: expected, value; increment: amount."""
    called: float = 0.0
    """When it was called."""
    returned: float = math.inf
    """When the answer came; infinite if none ever did."""
    answer: Any = None
    """What it was; see `step`. Of a list, all keys with their values."""
    revision: int = 0
    """Revision that the answer named, if it did."""

    @property
    def known(self) -> bool:
        """Whether the outcome is known."""
        return self.returned < math.inf


@dataclass(frozen=True)
class Event:
    """One change as a watcher saw it."""

    revision: int
    key: str
    value: Value


@dataclass
class Watching:
    """What one watcher saw."""

    name: str
    first: int
    """The first revision that it asked for."""
    events: list[Event] = field(default_factory=list)


@dataclass
class Violation(Exception):
    """A history that no correct store could have produced."""

    what: str
    operations: Sequence[Operation | Event] = ()

    def __str__(self) -> str:
        shown = "\n".join(f"  {one}" for one in self.operations)
        return f"{self.what}\n{shown}" if shown else self.what


def step(state: Value, operation: Operation) -> tuple[Value, Any]:
    """Executes an operation on a key: the model of the store. Returns the key's new value, and the answer."""
    match operation.kind:
        case "set":
            return operation.arguments[0], "ok"
        case "create":
            return (operation.arguments[0], "ok") if state is None else (state, EXISTS)
        case "get":
            return state, state
        case "cas":
            expected, value = operation.arguments
            return (value, [True, value]) if state == expected else (state, [False, state])
        case "increment":
            try:
                total = int(state or "0") + operation.arguments[0]
            except ValueError:
                return state, NO_NUMBER
            return (str(total), total) if total in _INT64 else (state, NO_NUMBER)
        case "delete":
            return None, int(state is not None)
    raise ValueError(f"the model knows no {operation.kind}")


@dataclass(eq=False)
class _Entry:
    """A call or a return in the list of those that are not in the order yet."""

    operation: Operation
    number: int
    is_call: bool
    match: _Entry | None = None
    before: _Entry | None = None
    after: _Entry | None = None


def linearizable(operations: Sequence[Operation], initial: Value = None) -> bool:
    """Returns whether there is an order of the operations, all of one key, that explains their answers.

    Args:
        operations: In any order; lists are not understood.
        initial: The key's value before all of them.
    """
    head = _entries(operations)
    missing = sum(operation.known for operation in operations)
    state, done = initial, 0
    seen: set[tuple[int, Value]] = set()
    taken: list[tuple[_Entry, Value]] = []
    entry = head.after
    while missing:
        if entry is not None and entry.is_call:
            after, answer = step(state, entry.operation)
            known = entry.operation.known
            moved = (done | 1 << entry.number, after)
            # An operation of unknown outcome that changes nothing need not be in the order.
            fits = answer == entry.operation.answer if known else after != state
            if fits and moved not in seen:
                seen.add(moved)
                taken.append((entry, state))
                done, state = moved
                missing -= known
                _lift(entry)
                entry = head.after
            else:
                entry = entry.after
            continue
        # A return whose call is not in the order yet, or the end: what was tried last was wrong.
        if not taken:
            return False
        entry, state = taken.pop()
        done &= ~(1 << entry.number)
        missing += entry.operation.known
        _unlift(entry)
        entry = entry.after
    return True


def _entries(operations: Sequence[Operation]) -> _Entry:
    """Makes the list of calls and returns, in order of time; at the same time calls come first."""
    marks: list[tuple[float, int, _Entry]] = []
    for number, operation in enumerate(operations):
        call = _Entry(operation, number, True)
        marks.append((operation.called, 0, call))
        if operation.known:
            call.match = _Entry(operation, number, False)
            marks.append((operation.returned, 1, call.match))
    head = last = _Entry(Operation("", "", ""), -1, True)
    for _, _, entry in sorted(marks, key=lambda mark: mark[:2]):
        last.after, entry.before = entry, last
        last = entry
    return head


def _lift(call: _Entry) -> None:
    for entry in (call, call.match):
        if entry is not None:
            assert entry.before is not None
            entry.before.after = entry.after
            if entry.after is not None:
                entry.after.before = entry.before


def _unlift(call: _Entry) -> None:
    for entry in (call.match, call):
        if entry is not None:
            assert entry.before is not None
            entry.before.after = entry
            if entry.after is not None:
                entry.after.before = entry


def check_keys(operations: Iterable[Operation]) -> None:
    """Checks that the operations of every key are linearizable.

    Raises:
        Violation: Those of a key are not; with the shortest beginning of its history that is not.
    """
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind != "list":
            by_key[operation.key].append(operation)
    for key, of_key in by_key.items():
        if not linearizable(of_key):
            raise Violation(f"the operations of key {key!r} are not linearizable", _shortest(of_key))


def _shortest(operations: Sequence[Operation]) -> list[Operation]:
    """Returns a beginning that is as bad as the whole: what returned after its end did not return in it."""
    ends = sorted(operation.returned for operation in operations if operation.known)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if linearizable(_until(operations, ends[middle])):
            low = middle + 1
        else:
            high = middle
    return sorted(_until(operations, ends[high]), key=lambda operation: operation.called)


def _until(operations: Sequence[Operation], end: float) -> list[Operation]:
    kept = [operation for operation in operations if operation.called <= end]
    return [
        operation
        if operation.returned <= end
        else Operation(operation.client, operation.kind, operation.key, operation.arguments, operation.called)
        for operation in kept
    ]


def check_watch(watching: Watching, last: int) -> None:
    """Checks that a watcher of everything saw each revision from its first to `last`, once, in order.

    Raises:
        Violation: It did not.
    """
    expected, previous = watching.first, None
    for event in watching.events:
        if previous is not None and event.revision == previous.revision and event.key > previous.key:
            previous = event  # one of several keys that were deleted together
            continue
        if event.revision != expected:
            kind = "again, or out of order" if event.revision < expected else f"without {expected} before it"
            saw = [one for one in (previous, event) if one is not None]
            raise Violation(f"watcher {watching.name} was told of revision {event.revision} {kind}", saw)
        expected, previous = event.revision + 1, event
    if expected <= last:
        raise Violation(f"watcher {watching.name} was told nothing after revision {expected - 1}, of {last}")


def check_revisions(operations: Iterable[Operation], journal: Sequence[Event]) -> None:
    """Checks the answers that name a revision against the store's changes from the first to the last.

    Raises:
        Violation: A change that was acknowledged is not there, or is another one, or two share a revision; a
            later call got an earlier revision; a list is not what the store was at its revision.
    """
    changes = {(event.revision, event.key): event.value for event in journal}
    states = _states(journal)
    named = [operation for operation in operations if operation.known and operation.revision]
    owners: dict[int, Operation] = {}
    for operation in named:
        if operation.kind == "list":
            if operation.revision >= len(states):
                raise Violation("a list is of a revision that never was", [operation])
            was = {k: v for k, v in states[operation.revision].items() if k.startswith(operation.key)}
            if was != operation.answer:
                raise Violation(f"a list is not what the store was at its revision: {was}", [operation])
        elif _changed(operation):
            value = operation.arguments[-1]
            if changes.get((operation.revision, operation.key), ...) != value:
                raise Violation("an acknowledged change is not in the store's journal", [operation])
            other = owners.setdefault(operation.revision, operation)
            if other is not operation:
                raise Violation("two changes have one revision", [other, operation])
    _check_order(named)


def _changed(operation: Operation) -> bool:
    return bool(
        (operation.kind in ("set", "create") and operation.answer == "ok")
        or (operation.kind == "cas" and operation.answer[0])
    )


def _check_order(named: Sequence[Operation]) -> None:
    """Who calls after another has returned gets no earlier revision, and a later one for a change."""
    returned = sorted(named, key=lambda operation: operation.returned)
    latest: Operation | None = None
    position = 0
    for operation in sorted(named, key=lambda one: one.called):
        while position < len(returned) and returned[position].returned < operation.called:
            one = returned[position]
            if latest is None or one.revision > latest.revision:
                latest = one
            position += 1
        if latest is not None and operation.revision < latest.revision + _changed(operation):
            raise Violation("revisions go back in time", [latest, operation])


def _states(journal: Sequence[Event]) -> list[dict[str, str]]:
    """Returns what the store had at each revision, from 0."""
    states: list[dict[str, str]] = [{}]
    for event in journal:
        if event.revision == len(states):
            states.append(dict(states[-1]))
        elif event.revision != len(states) - 1:
            raise Violation(f"the journal has a gap before revision {event.revision}", [event])
        if event.value is None:
            states[-1].pop(event.key, None)
        else:
            states[-1][event.key] = event.value
    return states


def load(paths: Iterable[Path]) -> tuple[list[Operation], list[Watching]]:
    """Reads what clients wrote down; a line that was cut short by a kill is the last of its file."""
    operations: list[Operation] = []
    watchings: list[Watching] = []
    for path in paths:
        calls: dict[int, dict[str, Any]] = {}
        answers: dict[int, dict[str, Any]] = {}
        watching: Watching | None = None
        for line in path.read_text().split("\n")[:-1]:
            told = json.loads(line)
            if "watch" in told:
                watching = Watching(f"{path.stem}/{told['watch']}", told["first"])
                watchings.append(watching)
            elif "event" in told:
                assert watching is not None
                watching.events.append(Event(*told["event"]))
            elif "kind" in told:
                calls[told["id"]] = told
            else:
                answers[told["id"]] = told
        for number, call in calls.items():
            got = answers.get(number)
            known = got is not None and not got.get("unknown")
            operations.append(
                Operation(
                    path.stem,
                    call["kind"],
                    call["key"],
                    tuple(call["arguments"]),
                    call["at"],
                    got["at"] if known and got else math.inf,
                    got["answer"] if known and got else None,
                    got["revision"] if known and got else 0,
                )
            )
    return operations, watchings


def rate(operations: Sequence[Operation]) -> float:
    """Returns how many operations of known outcome there were in a second."""
    known = [operation for operation in operations if operation.known]
    if len(known) < 2:
        return 0.0
    elapsed = max(one.returned for one in known) - min(one.called for one in known)
    return len(known) / max(elapsed, 1e-9)
