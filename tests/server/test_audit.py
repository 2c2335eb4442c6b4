"""The audit log: entries come back newest first, across restarts, within bounds."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dmesh_server.security.audit import FILE, AuditLog


@pytest.mark.parametrize("on_disk", [True, False])
async def test_entries_are_found_by_number_action_and_token(tmp_path: Path, on_disk: bool) -> None:
    log = AuditLog(tmp_path if on_disk else None, wall_clock=lambda: 5.0)
    for number in range(6):
        log.note(
            "evict_member" if number % 2 else "create_token",
            who=f"token 0123456{number} (ops)", remote="10.0.0.1", target=f"100% of {number}\n",
        )  # fmt: skip
    found = await log.latest(2)
    assert [(one.number, one.target, one.time) for one in found] == [
        (6, "100% of 5\n", 5.0), (5, "100% of 4\n", 5.0),
    ]  # fmt: skip
    assert [one.number for one in await log.latest(9, before=5, action="create_token")] == [3, 1]
    assert [one.number for one in await log.latest(9, who="01234562")] == [3]
    assert len(await log.latest(9, who="ops")) == 6
    assert await log.latest(9, who="op") == []
    log.close()


async def test_a_restart_goes_on_and_half_a_line_is_skipped(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.note("a", who="w", remote="r").result()
    log.close()
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write('{"number": 2, "ti')
    log = AuditLog(tmp_path)
    log.note("b", who="w", remote="r").result()
    assert [(one.number, one.action) for one in await log.latest(9)] == [(2, "b"), (1, "a")]
    log.close()


async def test_the_files_are_bounded_and_the_latest_entries_stay(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, largest=2_000, older=2)
    for number in range(200):
        log.note("a", who="w", remote="r", target=str(number)).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, f"{FILE}.1", f"{FILE}.2"]
    assert all(path.stat().st_size <= 2_000 for path in tmp_path.iterdir())
    found = await log.latest(1000)
    assert [one.number for one in found] == list(range(200, 200 - len(found), -1))
    assert len(found) > 20
    log.close()
