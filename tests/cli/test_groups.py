"""Progress of groups, put together from their members' reports."""

from __future__ import annotations

import pytest
from tests.cli.pictures import group, member, picture, said

from dmesh.cli.groups import group_views


def members(count: int) -> list:
    return [member(rank) for rank in range(count)]


def test_groups_tell_who_is_behind_and_who_the_others_wait_for() -> None:
    def told(rank: int, waited: int) -> object:
        issued = 20 if rank else 19
        return said(rank, group(issued, 19, counted=19, elapsed_us=1000, waited_us=waited))

    [view] = group_views(picture(members(3), [told(0, 100), told(1, 800), told(2, 700)]))  # type: ignore[list-item]
    assert (view.first, view.last, view.behind, view.reporting, view.straggler) == (19, 20, (0,), 3, 0)
    assert view.waited_share == pytest.approx(1600 / 3000, abs=1e-3)
    [view] = group_views(picture(members(3), [told(0, 600), told(1, 800), told(2, 700)]))  # type: ignore[list-item]
    assert view.straggler is None
