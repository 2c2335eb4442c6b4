"""Public functions for programs that go on after a failure: agree, shrink and reset."""

from __future__ import annotations

from typing import cast

from dmesh.collectives.api import resolve
from dmesh.collectives.group import Group


def agree(flag: bool | int, group: Group | None = None, timeout: float | None = None) -> bool | int:
    """Return the AND of the flags of all members that are alive; works on a failed group, too.

    All members that are alive must call it; it needs a coordination service. All of them get the same value,
    even if more members die meanwhile: a member that dies in the call counts with its flag, or is missing, on
    all of them alike. Afterwards `group.missing` has the ranks that took no part, the same everywhere.

    ```python
    if not dmesh.collectives.agree(loss < 10.0):  # on all, or on none
        ...
    ```

    Args:
        flag: A bool, or an integer of 64 bits whose bits are combined one by one; the same type on all ranks.
        group: Ranks that take part; None for all clients.
        timeout: Seconds for which it waits for members that are not known to be lost; None for the cluster's
            limit.

    Returns:
        A bool or an integer, as the flag is.

    Raises:
        CollectiveError: The others consider this rank lost and have gone on, or there is no coordination
            service.
        CollectiveMismatchError: Another rank called something else, or gave a flag of another type.
        CollectiveTimeoutError: A member that is not known to be lost did not come; `missing` has it.
        CollectiveTypeError: The flag is neither a bool nor an integer.
        CollectiveValueError: The flag does not fit 64 bits.
        CoordinationError: The coordination service cannot be used.
    """
    return _group(group).agree(flag, timeout)


def shrink(group: Group | None = None, timeout: float | None = None) -> Group:
    """Return a new group of the members that are alive, in the old order.

    All members that are alive must call it; it needs a coordination service. All of them get a group of the
    same members, even if more die meanwhile: the new group may have one that has died since, which its first
    call reports, and is shrunk like any other. The given group ends: calls that are under way or made later
    fail on all members. Groups that share no lost member go on.

    ```python
    group = dmesh.collectives.world()
    while True:
        try:
            total = dmesh.collectives.all_reduce(gradients, group=group)
            break
        except dmesh.errors.PeerLostError:
            group = dmesh.collectives.shrink(group)
    ```

    Args:
        group: Group that has lost members; None for the group of all clients.
        timeout: Seconds for which it waits for members that are not known to be lost; None for the cluster's
            limit.

    Raises:
        CollectiveError: The others consider this rank lost and have gone on, or there is no coordination
            service.
        CollectiveMismatchError: Another rank called `agree`.
        CollectiveTimeoutError: A member that is not known to be lost did not come; `missing` has it.
        CoordinationError: The coordination service cannot be used.
    """
    return _group(group).shrink(timeout)


def reset(group: Group | None = None, timeout: float | None = None) -> None:
    """Make a group usable again after an error in which no rank was lost.

    All members must call it: after a mismatch, a time-out, or an exception or Ctrl-C on one of them. It ends
    what is under way in the group, and returns when all have come. Nothing that was sent before reaches a
    call that is made afterwards. If it fails, all members can call it again.

    ```python
    try:
        total = dmesh.collectives.all_reduce(gradients, timeout=30)
    except dmesh.errors.CollectiveTimeoutError:
        dmesh.collectives.reset(timeout=300)
    ```

    Args:
        group: Group that has failed; None for the group of all clients.
        timeout: Seconds that the other members get; None for the cluster's limit.

    Raises:
        CollectiveTimeoutError: A member did not come; `missing` has it.
        PeerLostError: A member is lost, or has left: see `shrink`.
    """
    _group(group).reset(timeout)


def _group(group: Group | None) -> Group:
    return cast(Group, resolve(group))
