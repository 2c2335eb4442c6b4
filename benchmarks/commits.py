"""Speed of the disk's sync, and of durable changes of keys in the SQLite store.

    python benchmarks/commits.py [DIRECTORY]

A change is three records, as the server writes them: the key, the change for the history, and the answer for
a retry. Each line shows the changes in one commit, changes per second, and for one change the processor time
of the store's thread and the elapsed time.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dmesh_server.core.effects import Record
from dmesh_server.store.sqlite import DATABASE, LOG, SqliteStore

SECONDS = 2.0


def percentiles(call: Callable[[], object], seconds: float = SECONDS) -> str:
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    times.sort()
    return (
        f"p50 {times[len(times) // 2] * 1e6:.0f} us, p99 {times[int(len(times) * 0.99)] * 1e6:.0f} us"
        f" (n={len(times)})"
    )


def syncs(directory: Path) -> None:
    path, block = directory / "block", os.urandom(4120)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)

    def append() -> None:
        os.write(descriptor, block)
        os.fdatasync(descriptor)

    print(f"append one page and fdatasync:    {percentiles(append)}")
    os.lseek(descriptor, 0, os.SEEK_SET)
    print(f"overwrite one page and fdatasync: {percentiles(append)}")
    os.close(descriptor)
    path.unlink()


def commits(directory: Path, batch: int) -> None:
    store, chance, revision = SqliteStore(directory / f"batch-{batch}"), random.Random(1), 0

    def records() -> list[Record]:
        nonlocal revision
        made = []
        for _ in range(batch):
            revision += 1
            task = f"worker/{chance.randrange(32)}"
            made += [
                Record("c", "key", f"key/{chance.randrange(1000)}", os.urandom(32)),
                Record("c", "change", str(revision), os.urandom(64)),
                Record("c", "reply", f"{task}/{revision % 64}", os.urandom(120)),
            ]
            if revision > 10_000:
                made.append(Record("c", "change", str(revision - 10_000), None))
        return made

    batches = [records() for _ in range(max(8, 4096 // batch))]
    # Not the first commits: the log's blocks are not there yet, and every new database is small.
    for made in batches[: len(batches) // 4]:
        store.commit(made)
        store.maintain()
    timed = batches[len(batches) // 4 :]
    cpu, wall = time.thread_time(), time.perf_counter()
    for made in timed:
        store.commit(made)
        if store.untidy:
            store.maintain()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    count = len(timed) * batch
    sizes = ", ".join(
        f"{name} {(store.directory / name).stat().st_size >> 10} KiB" for name in (DATABASE, LOG)
    )
    print(
        f"{batch:4} a commit: {count / wall:8,.0f} changes/s, {cpu / count * 1e6:5.0f} us CPU and "
        f"{wall / count * 1e6:6.0f} us in all for one; {wall / len(timed) * 1e6:6.0f} us a commit; {sizes}"
    )
    store.close()


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as name:
        directory = Path(name)
        syncs(directory)
        for batch in (1, 8, 32, 128):
            commits(directory, batch)


if __name__ == "__main__":
    main()
