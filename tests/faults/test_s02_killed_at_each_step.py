"""Scenario 2: the server is killed at each step of a commit, of a checkpoint and of a compaction.

Every acknowledged write is present, no transaction is half applied, the revision never goes back. Each
DMESH_FAULTS_SEED has other random moments.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults.failing_disk import FailingDisk
from tests.faults.ledger import Ledger
from tests.faults.processes import LONG_LEASE, ServerProcess

from dmesh_server import failpoints
from dmesh_server.core.effects import Record
from dmesh_server.store.sqlite import SqliteStore

pytestmark = pytest.mark.faults

LIVES = 2
DURING_TRAFFIC = [
    "runtime.before_apply",
    "runtime.after_apply",
    "commits.before_commit",
    "commits.after_commit",
    "commits.before_release",
    "store.before_write",
    "store.before_commit",
    "store.after_commit",
    "store.after_marker",
]
AT_CHECKPOINT = ["store.before_checkpoint", "store.mid_checkpoint", "store.after_checkpoint"]
AT_COMPACTION = ["store.before_rename", "store.after_rename"]
AT_CREATION = ["store.before_create", "store.after_create"]

Make = Callable[..., ServerProcess]


def test_every_failpoint_is_tried() -> None:
    assert sorted(DURING_TRAFFIC + AT_CHECKPOINT + AT_COMPACTION + AT_CREATION) == sorted(failpoints.POINTS)


def arm(server: ServerProcess, point: str, after: int) -> None:
    server.environ[failpoints.VARIABLE] = f"{point}=kill:after={after}"


def disarm(server: ServerProcess) -> None:
    server.environ.pop(failpoints.VARIABLE, None)
    server.environ.pop("FAILING_DISK_KILL", None)


def assert_killed(server: ServerProcess) -> None:
    assert server.process.wait() == -signal.SIGKILL


async def settle(server: ServerProcess, ledger: Ledger) -> None:
    """Starts the server twice more, once after a kill and once after a good end, and checks it each time."""
    disarm(server)
    server.start()
    await ledger.check(server.address)
    assert server.terminate() == 0
    server.start()
    await ledger.check(server.address)
    server.kill()


def leave_gaps(directory: Path) -> None:
    """Makes most of a database free space."""
    store = SqliteStore(directory)
    records = [Record("c", "nothing", f"{number}", bytes(100_000)) for number in range(40)]
    store.commit(records)
    store.commit([replace(record, value=None) for record in records])
    store.close()


@pytest.mark.parametrize("point", DURING_TRAFFIC)
async def test_a_kill_during_traffic(make_server: Make, point: str, chance: random.Random) -> None:
    server, ledger = make_server(*LONG_LEASE), Ledger()
    for _ in range(LIVES):
        # Not before all have registered and what was unknown is settled.
        arm(server, point, 4 * (4 if point.startswith("runtime") else 2) + 12 + chance.randrange(60))
        server.start()
        await ledger.check(server.address)
        await ledger.traffic(server.address, lambda: not server.process.running)
        assert_killed(server)
    assert ledger.calls > LIVES * 4, "too little traffic to mean anything"
    await settle(server, ledger)


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_a_kill_within_the_commit(
    make_server: Make, tmp_path: Path, call: str, chance: random.Random
) -> None:
    # Between the writes and the sync of one COMMIT: inside SQLite, where no failpoint reaches.
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server, ledger = make_server(*LONG_LEASE, data_dir=disk.directory), Ledger()
    for _ in range(LIVES):
        server.environ = disk.kill_at(call, 40 + chance.randrange(150 if call == "write" else 40), "-wal")
        server.start()
        await ledger.check(server.address)
        await ledger.traffic(server.address, lambda: not server.process.running)
        assert_killed(server)
    await settle(server, ledger)


@pytest.mark.parametrize(
    "point", ["store.before_commit", "store.after_commit", "store.after_marker", "within"]
)
async def test_a_power_failure(make_server: Make, tmp_path: Path, point: str, chance: random.Random) -> None:
    # As a kill, but what was not synced is lost, or some of its sectors are.
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server, ledger = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ), Ledger()
    for _ in range(LIVES):
        if point == "within":
            server.environ = disk.kill_at("sync", 30 + chance.randrange(40), "-wal")
        else:
            arm(server, point, 20 + chance.randrange(40))
        server.start()
        await ledger.check(server.address)
        await ledger.traffic(server.address, lambda: not server.process.running)
        assert_killed(server)
        disk.lose_power(chance)
    await settle(server, ledger)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("point", AT_CHECKPOINT)
async def test_a_kill_at_a_checkpoint(
    make_server: Make, tmp_path: Path, point: str, power: bool, chance: random.Random
) -> None:
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server, ledger = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ), Ledger()
    # While it runs: when the log has grown to 8 MiB.
    arm(server, point, 0)
    server.start()
    await ledger.traffic(server.address, lambda: not server.process.running, size=200_000)
    assert_killed(server)
    if power:
        disk.lose_power(chance)
    # And at the start, with a log to copy.
    arm(server, point, 0)
    server.launch()
    assert_killed(server)
    if power:
        disk.lose_power(chance)
    await settle(server, ledger)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("point", AT_COMPACTION)
async def test_a_kill_at_a_compaction(
    make_server: Make, tmp_path: Path, point: str, power: bool, chance: random.Random
) -> None:
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server, ledger = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ), Ledger()
    server.start()
    await ledger.traffic(server.address, lambda: ledger.calls > 100)
    assert server.terminate() == 0
    leave_gaps(disk.directory)
    disk.settle()
    arm(server, point, 0)
    server.launch()
    assert_killed(server)
    if power:
        disk.lose_power(chance)
    await settle(server, ledger)
    assert not (disk.directory / "dmesh.sqlite3.new").exists()
    assert (disk.directory / "dmesh.sqlite3").stat().st_size < 1 << 20


@pytest.mark.parametrize("point", AT_CREATION)
async def test_a_kill_at_the_first_start(make_server: Make, point: str) -> None:
    server, ledger = make_server(*LONG_LEASE), Ledger()
    arm(server, point, 0)
    server.launch()
    assert_killed(server)
    disarm(server)
    server.start()
    await ledger.traffic(server.address, lambda: ledger.calls > 20)
    server.kill()
    await settle(server, ledger)
