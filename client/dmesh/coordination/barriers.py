"""Barriers of this process: the instances of each name, the arrivals under way, and their outcomes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dmesh._locks import Lock
from dmesh.coordination import faults
from dmesh.coordination.faults import Fault
from dmesh.coordination.members import Participant, Task
from dmesh.coordination.tracing import Carried
from dmesh.errors import BarrierMismatchError, ConfigurationError, DMeshError
from dmesh.protocol import RESERVED_PREFIX
from dmesh.v1 import coordination_pb2 as pb

MAX_NAME = 256
"""Length of a barrier's name, characters."""

MAX_PASSED = 1024
"""Barriers that are presented to the server when a session is attached: the latest ones."""

MAX_PAST = 256
"""Barriers that the flight recorder can ask for."""

MAX_NAMES = 100_000
"""Names whose instances are counted: many more than a server remembers, so that it never knows better."""


def refuse_reserved(name: str, what: str) -> None:
    """Refuse a name that is dmesh's own.

    Raises:
        ConfigurationError: It begins with `RESERVED_PREFIX`.
    """
    if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
        raise ConfigurationError(
            f"{what} that begin with {RESERVED_PREFIX!r} are reserved for dmesh: use another name than "
            f"{name!r}"
        )


def participant_tasks(
    participants: Collection[int | str] | None, own: Task, job_size: int | None
) -> tuple[Task, ...]:
    """Convert a user's list of participants; an empty result means every task of the cluster.

    Args:
        participants: Ranks (client ids) or tasks (`/job:worker/task:2`); None for every task.
        own: This process's task, which must be among them.
        job_size: Number of tasks of this process's job, if it is known.

    Raises:
        ConfigurationError: A participant does not exist or is named twice, or there is none.
        BarrierMismatchError: This process is not among them.
    """
    if participants is None:
        return ()
    if isinstance(participants, str | bytes) or not isinstance(participants, Collection):
        raise ConfigurationError(
            f"participants must be a collection of ranks or tasks, not {participants!r}; None means all "
            "clients"
        )
    tasks = []
    for participant in participants:
        if isinstance(participant, str):
            task = Task.parse(participant)
        elif isinstance(participant, bool) or not hasattr(participant, "__index__"):
            raise ConfigurationError(
                f"{participant!r} is not a participant: give a rank such as 2, or a task such as "
                "'/job:worker/task:2'"
            )
        else:
            task = Task(own.job, participant.__index__())
        if task.index < 0 or (job_size is not None and task.job == own.job and task.index >= job_size):
            limit = f"; ranks go from 0 to {job_size - 1}" if job_size is not None else ""
            raise ConfigurationError(f"participant {participant!r} does not exist{limit}")
        tasks.append(task)
    if not tasks:
        raise ConfigurationError(
            "a barrier needs participants: name at least this process, or pass None for all clients"
        )
    if len(set(tasks)) != len(tasks):
        twice = sorted({str(task) for task in tasks if tasks.count(task) > 1})
        raise ConfigurationError(f"these participants are listed more than once: {', '.join(twice)}")
    if own not in tasks:
        raise BarrierMismatchError(
            f"{own} calls the barrier but is not among its participants "
            f"({', '.join(str(task) for task in sorted(tasks))}): name it, or do not call"
        )
    return tuple(sorted(tasks))


def timeout_ms(timeout: float | None) -> int:
    """Convert a limit in seconds to the wire's milliseconds, 0 for none.

    Raises:
        ConfigurationError: It is not a positive number of seconds.
    """
    if timeout is None:
        return 0
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ConfigurationError(
            f"timeout must be a positive number of seconds, or None for no limit; got {timeout!r}"
        )
    return max(1, math.ceil(timeout * 1000))


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Arrival:
    """One call of `barrier` that waits."""

    name: str
    """The barrier's name."""
    instance: int
    """Number of the use of the name."""
    request: pb.EnterBarrier
    """Message to the server, sent now and after every reconnection."""
    settled: bool = False
    """True once there is an outcome."""
    fault: Fault | None = None
    """Cause of its failure; None if every participant arrived. Valid once settled."""
    epoch: int = 0
    """The cluster's epoch when it ended, the same for all participants. Valid once settled."""
    called: float = field(default_factory=time.monotonic)
    """Time of this process's arrival, seconds of the monotonic clock."""
    ended: float | None = None
    """End of its wait, seconds of the monotonic clock; None while it waits."""
    thread: int = field(default_factory=threading.get_ident)
    """Id of the thread that waits."""
    present: tuple[Participant, ...] = ()
    """Participants that came to a barrier of those alive. Valid once settled."""
    error: DMeshError | None = None
    """Error with which this process ends the wait by itself. Valid once settled."""
    _asleep: threading.Lock = field(default_factory=_locked)
    """Held while there is no news. Waiting for it is done in C, where Ctrl-C does no harm (see `waiting`)."""

    def wait(self, seconds: float) -> bool:
        """Wait for the outcome; return whether it is there. May return early without one, when woken."""
        if not self.settled:
            self._asleep.acquire(timeout=seconds)
        return self.settled

    def settle(self, fault: Fault | None, epoch: int = 0) -> None:
        """Set the outcome."""
        self.fault = fault
        self.epoch = epoch
        self.ended = time.monotonic()
        self.settled = True
        self.wake()

    def wake(self) -> None:
        """Make `wait` return, now or when it is called next."""
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._asleep.release()


class Barriers:
    """Counts the instances of each name and keeps the arrivals that have no outcome yet. Thread-safe.

    An instance counts as finished when its outcome was delivered to the caller. A wait that was interrupted
    leaves the count as it was: calling again presents the same instance again, and if it is over by then, the
    server answers with its outcome at once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._finished: dict[str, int] = {}
        self._waiting: dict[str, Arrival] = {}
        self._past: deque[Arrival] = deque(maxlen=MAX_PAST)
        self._passed: dict[str, tuple[pb.EnterBarrier, int, int]] = {}
        self._cluster_generation = 0
        self._callers: set[int] = set()
        self._send: Callable[[pb.EnterBarrier], None] | None = None
        self._first = 0

    def join_late(self) -> None:
        """Note that the others have started before: the number of a name's next instance is the server's."""
        self._first = -1

    def begin_generation(self, cluster_incarnation: int) -> None:
        """Note the generation of the cluster that this process is a member of.

        What was passed in another life is not presented to it.
        """
        with self._lock:
            if cluster_incarnation != self._cluster_generation:
                self._cluster_generation = cluster_incarnation
                self._passed.clear()

    def passed(self) -> list[pb.PassedBarrier]:
        """Return the latest barriers that succeeded, each name once, in order of their ends."""
        with self._lock:
            passed = tuple(self._passed.values())
        return [
            pb.PassedBarrier(
                name=request.name, instance=instance, participants=request.participants, epoch=epoch
            )
            for request, instance, epoch in passed
        ]

    def instance(self, name: str) -> int:
        """Return how many instances of the name this process has finished: the number of the next.

        -1 if only the server knows, because others used the name before this process took its task slot.
        """
        with self._lock:
            return self._finished.get(name, self._first)

    def enter(
        self,
        name: str,
        participants: Sequence[Task],
        limit_ms: int,
        carried: Carried = (),
        *,
        alive: bool = False,
    ) -> Arrival:
        """Arrive: tells the server now, or as soon as the session is attached.

        Args:
            name: The barrier's name.
            participants: Who takes part; nobody for all.
            limit_ms: What the first to arrive gives the others; 0 for no limit.
            carried: Says where the barrier belongs in a trace.
            alive: Wait only for the participants that are members.

        Raises:
            ConfigurationError: The name is not usable.
            BarrierMismatchError: Another thread of this process waits at the same barrier.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ConfigurationError(
                f"a barrier's name is a string of 1 to {MAX_NAME} characters, not {name!r}"
            )
        with self._lock:
            if name in self._waiting:
                raise BarrierMismatchError(
                    f"another thread of this process already waits at barrier {name!r}: a process can "
                    "only arrive once. Use another name in the second thread."
                )
            instance = self._finished.get(name, self._first)
            request = pb.EnterBarrier(
                name=name,
                instance=instance,
                participants=[task.to_proto() for task in participants],
                timeout_ms=limit_ms,
                trace_context=dict(carried),
                alive=alive,
            )
            arrival = Arrival(name, instance, request)
            self._waiting[name] = arrival
            self._past.append(arrival)
            self._callers.add(arrival.thread)
            if self._send is not None:
                self._send(request)
            return arrival

    def give_up(self, arrival: Arrival) -> None:
        """Stop to wait for an outcome; the arrival itself stands."""
        with self._lock:
            if self._waiting.get(arrival.name) is arrival:
                del self._waiting[arrival.name]
        if arrival.ended is None:
            arrival.ended = time.monotonic()

    def waiting(self) -> list[Arrival]:
        """Return the arrivals that have no outcome yet, oldest first."""
        with self._lock:
            return list(self._waiting.values())

    def callers(self) -> set[int]:
        """Return the ids of the threads that have called barriers."""
        with self._lock:
            return set(self._callers)

    def fail(self, name: str, error: DMeshError) -> None:
        """End this process's wait at a barrier with an error; the arrival itself stands."""
        with self._lock:
            arrival = self._waiting.pop(name, None)
        if arrival is not None:
            arrival.error = error
            arrival.settle(None)

    def past(self, most: int = MAX_PAST) -> list[Arrival]:
        """Return the last arrivals, also waiting ones, oldest first."""
        with self._lock:
            return list(self._past)[-most:]

    def attach(self, send: Callable[[pb.EnterBarrier], None]) -> None:
        """Begin to send through a new session; every arrival without an outcome is presented to it."""
        with self._lock:
            self._send = send
            for arrival in self._waiting.values():
                send(arrival.request)

    def detach(self) -> None:
        """Stop to send: the session broke."""
        with self._lock:
            self._send = None

    def resolve(self, result: pb.BarrierResult) -> None:
        """Deliver an outcome; drop it if no thread waits for the instance."""
        fault = faults.from_error(result.error) if result.HasField("error") else None
        if fault is not None and fault.transient:
            return  # the server is on its way out: the next session is presented with the arrival again
        with self._lock:
            arrival = self._waiting.get(result.name)
            if arrival is None or (arrival.instance >= 0 and result.instance not in (arrival.instance, -1)):
                return
            del self._waiting[result.name]
            arrival.present = tuple(Participant.from_proto(one) for one in result.present)
            instance = result.instance if arrival.instance < 0 else arrival.instance
            if instance >= 0:
                if fault is None and not arrival.request.alive:  # the server knows those by itself
                    self._pass(arrival, instance, result.epoch)
                if fault is None or fault.ends_barrier:
                    self._count(result.name, instance + 1)
        arrival.settle(fault, result.epoch)

    def _pass(self, arrival: Arrival, instance: int, epoch: int) -> None:
        """Note a success, to be presented to the server should it be restarted."""
        self._passed.pop(arrival.name, None)
        self._passed[arrival.name] = (arrival.request, instance, epoch)
        if len(self._passed) > MAX_PASSED:
            del self._passed[next(iter(self._passed))]

    def _count(self, name: str, finished: int) -> None:
        """Note how many instances are finished; the name that was not used for longest is forgotten."""
        self._finished.pop(name, None)
        self._finished[name] = finished
        if len(self._finished) > MAX_NAMES:
            del self._finished[next(iter(self._finished))]

    def wake(self) -> None:
        """Make every waiting thread look at the state of its agent."""
        with self._lock:
            waiting = tuple(self._waiting.values())
        for arrival in waiting:
            arrival.wake()
