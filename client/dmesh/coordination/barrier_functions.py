"""Barriers of `dmesh.coordination`, for scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.barrier_methods import PendingBarrier
from dmesh.coordination.barriers import refuse_reserved
from dmesh.coordination.members import BarrierProgress, Participant


def barrier(
    name: str, participants: Collection[int | str] | None = None, timeout: float | None = None
) -> None:
    """Wait until all participants have called it with the same name.

    A name can be used again: every process counts its instances. If a participant leaves, fails or is lost,
    the barrier fails for all others at once.

    ```python
    dmesh.coordination.barrier("data loaded", timeout=60)
    ```

    Args:
        name: 1-256 characters. Names that begin with `dmesh/` are reserved.
        participants: Ranks (client ids) or tasks (`/job:worker/task:2`), in any order but the same ones in
            every call; None for every task of the cluster.
        timeout: Seconds that the first caller gives the others; None for no limit.

    Raises:
        BarrierTimeoutError: The barrier timed out; `members` has the missing tasks.
        BarrierError: A participant left, failed or was lost; `members` has it.
        BarrierCancelledError: A participant cancelled it.
        BarrierMismatchError: The callers name different participants, or this process is not one of them.
        CollectiveMismatchError: A participant waits for this process in a collective, so it cannot arrive.
        CoordinatorUnavailableError: The coordinator has been silent for too long.
    """
    refuse_reserved(name, "barrier names")
    current_agent().barrier(name, participants, timeout)


def alive_barrier(
    name: str, participants: Collection[int | str] | None = None, timeout: float | None = None
) -> tuple[Participant, ...]:
    """Wait until all participants that are alive have called it with the same name; return who they are.

    A participant that leaves, fails or is lost meanwhile is no longer waited for, and one that registers is
    waited for. All callers get the same answer: the processes that came, with their incarnations.

    ```python
    from dmesh import coordination

    [alive.rank for alive in coordination.alive_barrier("replan", timeout=60)]  # -> [0]
    ```

    Args:
        name: 1-256 characters; all calls of one name are of this kind. A name may be used again.
        participants: Ranks (client ids) or tasks (`/job:worker/task:2`), in any order but the same ones in
            every call; None for every task of the cluster.
        timeout: Seconds that the first caller gives the others; None for no limit.

    Returns:
        The processes that came, sorted by task.

    Raises:
        BarrierTimeoutError: Time ran out; `members` has everyone alive who did not come.
        BarrierCancelledError: A participant cancelled it.
        BarrierMismatchError: The callers name different participants, or another kind of barrier.
        CoordinatorUnavailableError: The coordinator has been silent for too long.
    """
    refuse_reserved(name, "barrier names")
    return current_agent().alive_barrier(name, participants, timeout)


def arrive(
    name: str, participants: Collection[int | str] | None = None, timeout: float | None = None
) -> PendingBarrier:
    """Arrive at a barrier without waiting: the work that follows overlaps with the others' arrival.

    ```python
    from dmesh import coordination

    loaded = coordination.arrive("loaded")
    loaded.wait()
    coordination.barrier_progress("loaded").finished  # -> 1
    ```

    Every arrival has to be waited for before this process comes to the same name again.

    Args:
        name: 1-256 characters, of a barrier at which others may wait with `barrier`.
        participants: As in `barrier`.
        timeout: Seconds that the first caller gives the others; None for no limit.

    Returns:
        An object that says whether all have come (`done`), and waits for them (`wait`).

    Raises:
        ConfigurationError: The name or a participant is not possible.
    """
    refuse_reserved(name, "barrier names")
    return current_agent().arrive(name, participants, timeout)


def barrier_progress(name: str) -> BarrierProgress:
    """Return a barrier's progress: its number of finished instances, and the arrivals at the next one.

    Args:
        name: The barrier's name.

    Raises:
        CoordinatorUnavailableError: The coordinator has been silent for too long.
    """
    return current_agent().barrier_progress(name)


@contextlib.contextmanager
def double_barrier(
    name: str, participants: Collection[int | str] | None = None, timeout: float | None = None
) -> Iterator[None]:
    """Enters and leaves a block together with the other processes: a barrier before and one after the body.

    ```python
    from dmesh import coordination

    with coordination.double_barrier("measurement", timeout=60):
        pass  # all are here, and none goes on before all are done
    ```

    If the body raises, this process does not wait for the others: they learn of it when it departs.

    Args:
        name: 1-250 characters; `NAME/enter` and `NAME/leave` are barriers of their own.
        participants: As in `barrier`.
        timeout: Seconds that the first caller gives the others, each time; None for no limit.

    Raises:
        BarrierError: As `barrier`.
    """
    barrier(f"{name}/enter", participants, timeout)
    yield
    barrier(f"{name}/leave", participants, timeout)


def cancel_barrier(name: str) -> None:
    """Cancel a barrier: every task that waits at it gets a `BarrierCancelledError`.

    Raises:
        CoordinationError: This process is not one of its participants, or it is not under way.
    """
    refuse_reserved(name, "barrier names")
    current_agent().cancel_barrier(name)
