"""A server that is killed with -9 at any instant has lost nothing that it acknowledged."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from dmesh_server.store.sqlite import SqliteStore

_WRITER = """
import sys
from dmesh_server.core.effects import Record
from dmesh_server.store.sqlite import SqliteStore

store = SqliteStore(sys.argv[1])
number = int(sys.argv[2])
while True:
    # Two records that are only right together, and one that comes and goes.
    store.commit([
        Record("c", "key", f"{number:06}", str(number).encode()),
        Record("c", "cluster", "revision", str(number).encode()),
        Record("c", "key", "flag", b"x" if number % 2 else None),
    ])
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path, seed: int) -> None:
    directory, chance = tmp_path / "data", random.Random(seed)
    kept = 0
    for _ in range(3):
        acknowledged = _write_and_kill(directory, kept + 1, chance.randrange(1, 60))
        store = SqliteStore(directory)
        records = {(record.kind, record.key): record.value for record in store.load()}
        store.close()
        value = records.pop(("cluster", "revision"))
        assert value is not None
        kept = int(value)
        assert kept in (acknowledged, acknowledged + 1), "the last commit may be there without its answer"
        assert (records.pop(("key", "flag"), None) is not None) == (kept % 2 == 1)
        assert [int(key) for _, key in sorted(records)] == list(range(1, kept + 1))


def _write_and_kill(directory: Path, first: int, count: int) -> int:
    """Kills a process that commits after `count` answers; returns the last number that it acknowledged."""
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(directory), str(first)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(count):
            last = int(process.stdout.readline())
        process.kill()
        # What it still wrote before it died was acknowledged, too; a number cut short was not.
        rest = process.stdout.read()
        complete = rest[: rest.rfind("\n") + 1].split()
        return int(complete[-1]) if complete else last
