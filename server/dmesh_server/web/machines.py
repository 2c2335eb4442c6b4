"""Labels of machines: host names alone do not tell machines apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Machine = tuple[str, str]
"""Host name and boot id."""

_SHORTEST = 8
"""Characters of a boot id that a label shows, if they suffice."""


def label_machines(machines: Iterable[Machine]) -> dict[Machine, str]:
    """Return a label for each machine.

    It is the host name, followed by the beginning of the boot id where several machines have that name:
    `node7 (boot 3f2a9c1e)`.
    """
    by_name: dict[str, set[str]] = {}
    for host, boot_id in machines:
        by_name.setdefault(host, set()).add(boot_id)
    return {
        (host, boot_id): f"{host} (boot {shown or 'unknown'})" if len(boot_ids) > 1 else host
        for host, boot_ids in by_name.items()
        for boot_id, shown in zip(boot_ids, _shorten(boot_ids), strict=True)
    }


def _shorten(boot_ids: Iterable[str]) -> list[str]:
    """Return the beginnings of boot ids, long enough to differ."""
    ordered = sorted(boot_ids)
    longest = max(map(len, ordered))
    common = max((_common(one, other) for one, other in pairwise(ordered)), default=0)
    length = min(longest, max(_SHORTEST, common + 1))
    return [boot_id[:length] for boot_id in boot_ids]


def _common(one: str, other: str) -> int:
    """Return the number of characters with which both begin."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
