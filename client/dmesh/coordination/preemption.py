"""Agreement on one step at which all members stop, when one of them is about to be preempted.

A member that learns of its preemption sets a *notice*. Every member waits for notices on a separate thread.
After a notice, the member's next call of `reached` blocks, and the member posts the earliest step of that
call. When all members have posted, the largest of these steps is the *sync point*: no member is past it, and
`reached` returns True for each member at that step. The model is JAX's preemption sync manager, with two
differences: members that die meanwhile are ignored, and after all members have passed the sync point, there
can be another notice, in the next *round*.

Keys, all of which begin with `dmesh/preemption/`:

- `notice/ROUND`: the member that set the notice, and its reason. The first one counts.
- `member/JOB/INDEX`: incarnation of the member that participates from this task slot.
- `step/ROUND/JOB/INDEX`: a member's earliest step.
- `sync/ROUND`: the sync point. A member that sees all steps posted sets it; the first one counts.
- `passed/ROUND`: a member has passed the sync point. Members that join later ignore the round.

The others do not wait for a member that took the slot of a lost one and has not yet called `reached`: it may
be waiting for them, at the barrier that admits it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.calls import Announcer
from dmesh.coordination.dispatcher import EventDispatcher
from dmesh.coordination.identity import Identity
from dmesh.coordination.key_value import KeyValueMethods
from dmesh.coordination.members import ClusterState, Member, Task
from dmesh.coordination.session import Session
from dmesh.coordination.values import Snapshot
from dmesh.coordination.waiting import Bell, Worker
from dmesh.errors import (
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    KeyExistsError,
    KeyWaitTimeoutError,
)

PREFIX = "dmesh/preemption/"
_LONGEST_REASON = 1000
_LOOK = 1.0
"""Seconds between two looks at whether the session still lives."""
_AGAIN = 1.0
"""Seconds before the coordinator is asked again after an error, and within which a departure shows."""
_LONGEST_PAUSE = 30.0
_NAMED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """Announcement that a client will be preempted."""

    task: str
    """Task that announced it: `/job:worker/task:2`."""
    host: str
    """Its host."""
    pid: int
    """Its process id there."""
    reason: str
    """Reason, in words; may be empty."""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.task} (host {self.host or '?'}, pid {self.pid}) is about to be preempted{why}"


PreemptionListener = Callable[[PreemptionNotice], object]


class PreemptionSync:
    """One member's part in it.

    Args:
        own: Who this member is.
        session: Its session.
        notices: Tells listeners, and knows who is gone.
        cluster_state: Asks for the members.
        store: The key-value store, by calls that do not announce whom they wait for.
        tracker: Knows what this process is doing.
        announce: Function that prints a line for the user.
        announce_interval: Seconds between two lines of a call that waits.
    """

    def __init__(
        self,
        own: Identity,
        session: Session,
        notices: EventDispatcher,
        cluster_state: Callable[[], ClusterState],
        store: KeyValueMethods,
        tracker: ActivityTracker,
        announce: Callable[[str], None],
        announce_interval: float,
    ) -> None:
        self._own = own
        self._session = session
        self._dispatcher = notices
        self._cluster_state = cluster_state
        self._store = store
        self._tracker = tracker
        self._announce = announce
        self._announce_interval = announce_interval
        self._lock = Lock()
        self._bell = Bell()
        self._worker: Worker | None = None
        self._closed = False
        self._listeners: list[PreemptionListener] = []
        self._round = 0
        """The round that a notice would open; 0 before it is known."""
        self._next: int | None = None
        """The earliest step at which this member could stop; None before the first call of `reached`."""
        self._notice: PreemptionNotice | None = None
        """Of this round; while there is one without a sync point, this member is held."""
        self._sync: int | None = None
        """The sync point of this round, once it is known."""
        self._trouble = ""
        """Cause of the thread's standstill, if there is one."""

    # What users call ----------------------------------------------------------------------------------------

    def reached(self, step: int) -> bool:
        """Return whether `step` is where all stop; see `coordination.reached_preemption_sync_point`."""
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise ConfigurationError(f"step must be an integer, not {step!r}")
        step = step.__index__()
        self.start()
        self._check()
        with self._lock:
            if self._notice is None:
                self._next = step + 1
                return False
            if self._next is None:
                self._next = step  # no member is past it: all wait until this one has posted
            decided = self._sync is not None
        if not decided:
            self._bell.ring()
            with self._tracker.during("waiting for the preemption sync point"):
                self._await_sync()
        with self._lock:
            self._next = step + 1
            if self._sync is None or step < self._sync:
                return False
            self._notice = self._sync = None
            self._round += 1
        self._bell.ring()
        return True

    def announce(self, reason: str) -> None:
        """Announce to all members that this one is about to be preempted. Blocks; not for users' threads."""
        self.start()
        process = self._own.process
        notice = json.dumps(
            {
                "task": str(self._own.task),
                "host": process.host,
                "pid": process.pid,
                "reason": reason[:_LONGEST_REASON],
            }
        )
        while not self._closed and self._alive():
            if not self._bell.wait_for(lambda: self._round > 0 or self._closed, _LOOK):
                continue
            if self._try_to(lambda: self._set_once(f"notice/{self._round}", notice)):
                return

    def add_listener(self, listener: PreemptionListener) -> None:
        """Add a listener for notices, including the pending one."""
        with self._lock:
            self._listeners.append(listener)
            notice = self._notice
        if notice is not None:
            self._dispatcher.dispatch(lambda: _call(listener, notice))
        self.start()

    # Life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen. Idempotent."""
        with self._lock:
            if self._worker is not None or self._closed:
                return
            self._worker = worker = Worker(self._run, "dmesh-preemption")
        worker.start()

    def wait_closed(self, seconds: float) -> bool:
        """Wait for the end of the session, for some seconds at most; return whether it has ended."""
        return self._bell.wait_for(lambda: self._closed, seconds)

    def close(self) -> None:
        """End it; the session is closed before."""
        self._closed = True
        self._bell.ring()

    # The user's thread, held --------------------------------------------------------------------------------

    def _await_sync(self) -> None:
        announcer = Announcer(self._announce, self._announce_interval)
        while not self._bell.wait_for(
            lambda: self._sync is not None or self._notice is None, min(_LOOK, announcer.left)
        ):
            self._check()
            if announcer.due:
                announcer.say(
                    f"still waiting for the step at which all stop, because {self._notice}; {self._whom()}"
                )

    def _whom(self) -> str:
        if self._trouble:
            return f"the coordinator cannot be asked: {self._trouble}"
        try:
            _, missing = self._posts(self._round)
        except CoordinationError as error:
            return f"missing: unknown ({error})"
        names = ", ".join(member.describe() for member in missing[:_NAMED_AT_ONCE])
        more = f", and {len(missing) - _NAMED_AT_ONCE} more" if len(missing) > _NAMED_AT_ONCE else ""
        return f"not there yet (they call reached_preemption_sync_point, too): {names or 'nobody'}{more}"

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        steps: tuple[Callable[[], object], ...] = (
            self._join,
            self._await_notice,
            self._await_step,
            self._post,
            self._agree,
            self._await_pass,
        )
        done = 0
        while not self._closed and self._alive():
            if self._try_to(steps[done]):
                done = done + 1 if done + 1 < len(steps) else 1

    def _try_to(self, step: Callable[[], object]) -> bool:
        """Do something that the coordinator is needed for; return False if it has to be done again."""
        try:
            step()
        except CoordinationError as error:
            if isinstance(error, CoordinatorUnavailableError) or self._alive():
                logger.debug("preemption: %s", error)
                self._trouble = str(error)
                self._bell.wait_for(lambda: self._closed, _AGAIN)
            return False
        self._trouble = ""
        return True

    def _check(self) -> None:
        """Raise why nothing can be asked any more, if so; also if the coordinator was away for too long."""
        self._session.check()
        if self._session.gone:
            raise self._session.unavailable("waiting for preemption notices")

    def _alive(self) -> bool:
        try:
            self._check()
        except CoordinatorUnavailableError:
            return True  # it may come back
        except CoordinationError:
            return False
        return True

    def _join(self) -> None:
        """Say that this member takes part, and find out which round it is."""
        incarnation = f"{self._own.incarnation:016x}"
        self._store.key_value_set(
            f"{PREFIX}member/{_name(self._own.task)}", incarnation, allow_overwrite=True
        )
        notices = self._store.key_value_list(f"{PREFIX}notice/")
        latest = max((int(key.rpartition("/")[2]) for key in notices), default=1)
        if self._store.key_value_try_get(f"{PREFIX}passed/{latest}") is not None:
            latest += 1
        with self._lock:
            self._round = latest
        self._bell.ring()

    def _await_notice(self) -> None:
        notice = _parse_notice(self._store.key_value_get(f"{PREFIX}notice/{self._round}"))
        self._announce(f"{notice}; all clients will stop at the same step")
        with self._lock:
            self._notice = notice
            listeners = tuple(self._listeners)
        for listener in listeners:
            self._dispatcher.dispatch(lambda listener=listener: _call(listener, notice))  # type: ignore[misc]

    def _await_step(self) -> None:
        while not self._bell.wait_for(lambda: self._next is not None or self._closed, _LOOK):
            if not self._alive():
                return

    def _post(self) -> None:
        with self._lock:
            step = self._next
        value = json.dumps({"next": step, "incarnation": f"{self._own.incarnation:016x}"})
        self._store.key_value_set(
            f"{PREFIX}step/{self._round}/{_name(self._own.task)}", value, allow_overwrite=True
        )

    def _agree(self) -> None:
        """Wait for the sync point. The first of the members that are left watches for the missing ones."""
        key = f"{PREFIX}sync/{self._round}"
        attempts = 0
        while (found := self._store.key_value_try_get(key)) is None:
            attempts += 1
            missing = self._decide() if self._position() == 0 or attempts > 1 else None
            if missing == ():
                continue
            awaited, pause = key, min(_AGAIN * attempts + self._position(), _LONGEST_PAUSE)
            if missing is not None and self._position() == 0:
                awaited, pause = f"{PREFIX}step/{self._round}/{_name(_task_of(missing[0]))}", _AGAIN
            try:
                self._store.key_value_get(awaited, timeout=pause)
            except KeyWaitTimeoutError:
                self._check()
        with self._lock:
            self._sync = int(found)
        self._bell.ring()

    def _position(self) -> int:
        """Return the number of members before this one that could decide."""
        gone = self._dispatcher.gone()
        return sum(task < self._own.task and task not in gone for task in self._own.all_tasks)

    def _decide(self) -> tuple[Member, ...]:
        """Set the sync point if all members have posted; return the members that have not."""
        posts, missing = self._posts(self._round)
        if any(member.incarnation == self._own.incarnation for member in missing) or not self._has_notice():
            # The store was lost with its server, before this member posted or after. All is said again.
            assert self._notice is not None
            self._join_again(self._notice)
            return missing
        if not missing and posts:
            self._set_once(f"sync/{self._round}", str(max(posts)))
            self._store.key_value_delete(f"{PREFIX}step/{self._round}/", is_prefix=True)
        return missing

    def _has_notice(self) -> bool:
        return self._store.key_value_try_get(f"{PREFIX}notice/{self._round}") is not None

    def _join_again(self, notice: PreemptionNotice) -> None:
        content = {"task": notice.task, "host": notice.host, "pid": notice.pid, "reason": notice.reason}
        self._set_once(f"notice/{self._round}", json.dumps(content))
        self._store.key_value_set(
            f"{PREFIX}member/{_name(self._own.task)}", f"{self._own.incarnation:016x}", allow_overwrite=True
        )
        self._post()

    def _posts(self, number: int) -> tuple[list[int], tuple[Member, ...]]:
        """Return the posted steps, and the members that have not posted."""
        state = self._cluster_state()
        posted = self._store.key_value_list(f"{PREFIX}step/{number}/")
        joined = self._store.key_value_list(f"{PREFIX}member/")
        replaced = self._dispatcher.replaced()
        steps, missing = [], list(state.holders(state.vacant))
        for member in state.members:
            if member.state.departed:
                continue
            step = _posted(posted, f"{PREFIX}step/{number}/{_name(_task_of(member))}", member)
            if step is not None:
                steps.append(step)
            elif not _stands_apart(member, joined, replaced):
                missing.append(member)
        return steps, tuple(missing)

    def _await_pass(self) -> None:
        while not self._bell.wait_for(lambda: self._notice is None or self._closed, _LOOK):
            if not self._alive():
                return
        if self._notice is None:
            self._set_once(f"passed/{self._round - 1}", "1")

    def _set_once(self, key: str, value: str) -> None:
        with contextlib.suppress(KeyExistsError):  # somebody was first, and that one counts
            self._store.key_value_set(PREFIX + key, value)


def _call(listener: PreemptionListener, notice: PreemptionNotice) -> None:
    listener(notice)


def _name(task: Task) -> str:
    return f"{task.job}/{task.index}"


def _task_of(member: Member) -> Task:
    return Task(member.job, member.index)


def _stands_apart(member: Member, joined: Snapshot, replaced: Collection[Task]) -> bool:
    """Return whether a member replaced another and has not come to its first call of `reached`."""
    incarnation = joined.get(f"{PREFIX}member/{_name(_task_of(member))}")
    if incarnation is None:
        return _task_of(member) in replaced
    return incarnation != f"{member.incarnation:016x}".encode()


def _posted(posts: Snapshot, key: str, member: Member) -> int | None:
    """Return a member's posted step; None if its predecessor posted it, or nothing was posted."""
    if key not in posts:
        return None
    try:
        post = json.loads(posts[key])
        step, incarnation = int(post["next"]), str(post["incarnation"])
    except (ValueError, TypeError, KeyError):
        return None
    return step if incarnation == f"{member.incarnation:016x}" else None


def _parse_notice(value: bytes) -> PreemptionNotice:
    """Read a notice; one that makes no sense is a notice all the same."""
    try:
        content = json.loads(value)
        return PreemptionNotice(
            str(content["task"]), str(content["host"]), int(content["pid"]), str(content["reason"])
        )
    except (ValueError, TypeError, KeyError):
        return PreemptionNotice("a client of another version", "", 0, "")
