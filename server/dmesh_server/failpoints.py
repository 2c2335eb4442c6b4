"""Named places at which a test can make a server crash, fail or dawdle.

A point costs one comparison with None while nothing is enabled, which is always but in tests. `dmesh serve`
enables what the environment variable DMESH_FAILPOINTS says, and refuses names and actions that it does not
know:

    DMESH_FAILPOINTS="store.before_commit=kill:after=3;store.after_commit=error:EIO:times=1"

Each entry is POINT=ACTION[:after=N][:times=M]. Actions: `kill` (SIGKILL to this process), `error:ENOSPC` (an
`OSError` of that name), `sleep:SECONDS`. With `after` the first N passages do nothing; with `times` only M
passages act, and the ones after them do nothing again.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import MappingProxyType

VARIABLE = "DMESH_FAILPOINTS"
"""Name of the environment variable that enables points."""

POINTS = MappingProxyType(
    {
        "runtime.before_apply": "an event has arrived; nothing has happened",
        "runtime.after_apply": "the core has changed; nothing is durable or sent",
        "commits.before_commit": "a batch is on its way to the store",
        "commits.after_commit": "a batch is durable; nothing is sent",
        "commits.before_release": "the effects of a batch are about to be sent",
        "store.before_write": "a transaction is about to begin",
        "store.before_commit": "all rows are written into the transaction; COMMIT is next",
        "store.after_commit": "COMMIT has returned: written and synced; not noted in the commit marker",
        "store.after_marker": "the commit is noted in the commit marker",
        "store.before_checkpoint": "the log is about to be copied into the database",
        "store.mid_checkpoint": "it is copied and synced; the commit marker lacks checksums of the new pages",
        "store.after_checkpoint": "the commit marker is synced; the log may be overwritten from its start",
        "store.before_rename": "a compacted copy is complete and synced beside the database",
        "store.after_rename": "it has taken the database's name; the directory is not synced",
        "store.before_create": "a new database is complete and synced under another name",
        "store.after_create": "it has its name; there is no commit marker",
    }
)
"""Every point and where it is."""


@dataclass
class _Action:
    """Action at a point."""

    verb: str
    error: int = 0
    seconds: float = 0.0
    after: int = 0
    times: int | None = None
    passages: int = field(default=0, compare=False)


armed = False
"""True while any point is enabled; a frequent caller of `hit` asks first."""
_active: dict[str, _Action] | None = None
_counting = threading.Lock()


def hit(point: str) -> None:
    """Pass a failpoint: run its enabled action, by default none.

    Raises:
        OSError: The point is set to fail.
    """
    if _active is not None:
        _act(point, _active)


def configure(text: str) -> None:
    """Enable exactly what `text` says, in the notation of DMESH_FAILPOINTS; nothing if it is empty.

    Raises:
        ValueError: A point or an action is not known, or a number is none. Nothing has changed.
    """
    global _active, armed
    entries = (entry.strip() for entry in text.split(";"))
    actions = dict(_parse(entry) for entry in entries if entry)
    _active = actions or None
    armed = bool(actions)


def enabled() -> tuple[str, ...]:
    """Return the names of the points that are enabled."""
    return tuple(_active or ())


def _act(point: str, active: dict[str, _Action]) -> None:
    assert point in POINTS, point
    action = active.get(point)
    if action is None:
        return
    with _counting:
        action.passages += 1
        number = action.passages - action.after
    if number <= 0 or (action.times is not None and number > action.times):
        return
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "sleep":
        time.sleep(action.seconds)
    else:
        raise OSError(action.error, f"{os.strerror(action.error)} (failpoint {point})")


def _parse(entry: str) -> tuple[str, _Action]:
    point, _, rest = entry.partition("=")
    point = point.strip()
    if point not in POINTS:
        raise ValueError(f"{VARIABLE} names {point!r}; the points are {', '.join(POINTS)}")
    verb, *words = (word.strip() for word in rest.split(":"))
    action = _Action(verb)
    try:
        if verb == "error":
            action.error = getattr(errno, words.pop(0))
        elif verb == "sleep":
            action.seconds = float(words.pop(0))
        elif verb != "kill":
            raise ValueError(verb)
        for word in words:
            name, _, number = word.partition("=")
            if name not in ("after", "times") or int(number) < 0:
                raise ValueError(word)
            setattr(action, name, int(number))
        if not isinstance(action.error, int) or not 0 <= action.seconds < float("inf"):
            raise ValueError(rest)
    except (ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{VARIABLE} has {entry!r}; expected POINT=kill, POINT=error:ENOSPC or POINT=sleep:SECONDS, each "
            "with :after=N and :times=M if wanted"
        ) from error
    return point, action
