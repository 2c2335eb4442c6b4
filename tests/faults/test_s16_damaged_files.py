"""Scenario 16: torn tails, flipped bits, files cut short, emptied, lost, or of a newer format.

Never a silent loss: either everything that was acknowledged is there, or the server refuses to start, with
exit code 3, and names the file and the place. The store is tried at every byte; real servers at some.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.figures import Figures
from tests.faults.ledger import Ledger
from tests.faults.processes import LONG_LEASE, ServerProcess, eventually
from tests.server.store.damage import flipped, make_example, outcome

from dmesh_server.store.base import StoreRefusedError
from dmesh_server.store.sqlite import DATABASE, LOG, MARKER, SqliteStore

pytestmark = pytest.mark.faults

REFUSED = 3

Make = Callable[..., ServerProcess]


@pytest.fixture
def directory() -> Iterator[Path]:
    shm = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None))
    yield made / "data"
    shutil.rmtree(made)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", ["log", "database", "marker"])
@pytest.mark.parametrize("settled", [False, True], ids=["killed", "closed"])
def test_one_bit_flipped_at_every_byte(
    directory: Path, part: str, settled: bool, chance: random.Random, figures: Figures
) -> None:
    example = make_example(directory, settled=settled)
    name = {"database": DATABASE, "log": LOG, "marker": MARKER}[part]
    if name not in example.files:
        pytest.skip("a server that ended well leaves no log")
    content = example.files[name]
    refused = 0
    for at in range(len(content)):
        bit = chance.randrange(8)
        example.write(directory, **{part: flipped(content, at, bit)})
        found = outcome(directory)
        if isinstance(found, StoreRefusedError):
            refused += 1
            assert re.search(r"at offset \d+|\(offset \d+\)|has format|another program", str(found)), found
        else:
            assert found == example.acknowledged, f"silent loss: bit {bit} of byte {at} of {name}"
    figures.add(f"bits flipped in the {part}, {'closed' if settled else 'killed'}", len(content), "")
    figures.add(f"of these refused, {part}, {'closed' if settled else 'killed'}", refused, "")
    assert part != "log" or refused == len(content)


@pytest.mark.timeout(900)
def test_cut_at_every_byte(directory: Path, figures: Figures) -> None:
    example = make_example(directory)
    for part, name in (("log", LOG), ("database", DATABASE)):
        content = example.files[name]
        for end in range(len(content)):
            example.write(directory, **{part: content[:end]})
            found = outcome(directory)
            refused = isinstance(found, StoreRefusedError)
            assert refused or found == example.acknowledged, f"{name} cut at {end}"
            assert refused or part == "database"
        figures.add(f"lengths of a {part} cut short", len(content), "")


@pytest.mark.timeout(900)
def test_an_unacknowledged_tail_torn_at_every_byte(directory: Path) -> None:
    example = make_example(directory)
    log, start = example.files[LOG], example.end_before_last
    example.write(directory, log=log[:start], marker=None)
    store = SqliteStore(directory)
    marker = (directory / MARKER).read_bytes()
    store.close()
    for end in range(start, len(log)):
        example.write(directory, log=log[:end], marker=marker)
        assert outcome(directory) == example.before_last
        copies = [copy.read_bytes() for copy in directory.glob(f"{LOG}.broken-*")]
        assert copies == ([log[start:end]] if end > start else [])


async def killed(make_server: Make) -> tuple[ServerProcess, Ledger, dict[str, bytes]]:
    """A server that was killed, with a log, and the files that it left."""
    server, ledger = make_server(*LONG_LEASE), Ledger()
    server.start()
    await ledger.traffic(server.address, lambda: ledger.calls > 60)
    server.kill()
    assert server.data_dir is not None
    return server, ledger, {path.name: path.read_bytes() for path in server.data_dir.glob("dmesh*")}


def refusal(server: ServerProcess) -> str:
    """Starts a server that must refuse; returns what it says."""
    before = len(server.err)
    server.launch()
    assert server.process.wait() == REFUSED, server.err[before:]
    said = server.err[before:]
    assert "Traceback" not in said
    return said


def put(server: ServerProcess, files: dict[str, bytes], **changes: bytes | None) -> Path:
    assert server.data_dir is not None
    named = {"database": DATABASE, "log": LOG, "marker": MARKER}
    for path in server.data_dir.glob("dmesh*"):
        path.unlink()
    for name, content in {**files, **{named[part]: content for part, content in changes.items()}}.items():
        if content is not None:
            (server.data_dir / name).write_bytes(content)
    return server.data_dir


async def test_a_server_refuses_a_damaged_log(make_server: Make, chance: random.Random) -> None:
    server, ledger, files = await killed(make_server)
    log = files[LOG]
    for at in [0, 100, len(log) // 2, len(log) - 1, chance.randrange(len(log))]:
        directory = put(server, files, log=flipped(log, at, chance.randrange(8)))
        frame = 0 if at < 32 else 32 + (at - 32) // (24 + 4096) * (24 + 4096)
        said = refusal(server)
        assert f"dmesh serve: error: --data-dir {directory} is refused: " in said
        assert f"{directory / LOG} is damaged at offset {frame}:" in said
    directory = put(server, files, log=log[: len(log) - 4120])
    assert f"{directory / LOG} is damaged at offset {len(log) - 4120}:" in refusal(server)
    put(server, files, log=b"")
    assert "were acknowledged" in refusal(server)
    put(server, files)
    server.start()
    await ledger.check(server.address)


async def test_a_server_refuses_a_damaged_database(make_server: Make, chance: random.Random) -> None:
    server, ledger, _ = await killed(make_server)
    server.start()
    assert server.terminate() == 0
    assert server.data_dir is not None
    files = {path.name: path.read_bytes() for path in server.data_dir.glob("dmesh*")}
    content = files[DATABASE]
    place = content.index(b"0:", 4096)  # the value of a key
    for at in [place, chance.randrange(4096, len(content))]:
        directory = put(server, files, database=flipped(content, at, 0))
        launched = time.monotonic()
        server.launch()
        eventually(
            lambda since=launched: server.ready_at > since or not server.process.running,
            "a start or its refusal",
        )
        if server.process.running:
            await ledger.check(server.address)
            server.kill()
        else:
            assert server.process.wait() == REFUSED
            assert f"page {at // 4096 + 1} (offset {at // 4096 * 4096})" in server.err
    directory = put(server, files, database=b"")
    assert f"{directory / DATABASE} is damaged at offset 0: it is empty" in refusal(server)
    put(server, files, database=content[: len(content) // 2])
    assert f"{directory / DATABASE} is damaged" in refusal(server)
    put(server, files, database=None)
    assert "it is missing" in refusal(server)
    newer = bytearray(content)
    struct.pack_into(">I", newer, 60, 1_000_001)
    put(server, files, database=bytes(newer))
    assert "has format 1000001, written by a newer version of dmesh" in refusal(server)
    put(server, files)
    server.start()
    await ledger.check(server.address)


async def test_a_server_repairs_a_torn_tail(make_server: Make, chance: random.Random) -> None:
    server, ledger, files = await killed(make_server)
    for _ in range(3):
        log = files[LOG]
        kept = committed(log)  # the server may have been killed within a transaction
        torn = own_frame(log)[: chance.randrange(1, 24 + 4096)]
        directory = put(server, files, log=log + torn)
        before = len(server.err)
        server.start()
        said = server.err[before:]
        assert "store_log_repaired" in said
        assert f"offset={kept} dropped_bytes={len(log) - kept + len(torn)}" in said
        [copy] = directory.glob(f"{LOG}.broken-*")
        assert copy.read_bytes() == log[kept:] + torn
        copy.unlink()
        await ledger.check(server.address)
        await ledger.traffic(server.address, lambda: ledger.calls % 20 == 19)
        server.kill()
        files = {path.name: path.read_bytes() for path in directory.glob("dmesh*")}


def committed(log: bytes) -> int:
    """Offset of the end of the last transaction in a log."""
    end = 32
    for at in range(32, len(log), 24 + 4096):
        if log[at + 8 : at + 16] != log[16:24]:
            break  # of an earlier generation
        if log[at + 4 : at + 8] != bytes(4):  # a transaction's last frame has the size of the database
            end = at + 24 + 4096
    return end


def own_frame(log: bytes) -> bytes:
    """A frame of the log's generation, as a write that was cut short begins."""
    return log[32 : 32 + 8] + log[16:24] + bytes(8) + bytes(4096)


async def test_a_backup_of_a_running_server_can_be_restored(make_server: Make, tmp_path: Path) -> None:
    server, ledger = make_server(*LONG_LEASE), Ledger()
    server.start()
    await ledger.traffic(server.address, lambda: ledger.calls > 60)
    assert server.data_dir is not None
    copy = tmp_path / "restored" / DATABASE
    copy.parent.mkdir(mode=0o700)
    before = ledger.revision

    def back_up() -> None:
        source = sqlite3.connect(f"{server.data_dir}/{DATABASE}")
        target = sqlite3.connect(copy)
        source.backup(target)
        source.close()
        target.close()

    more = asyncio.create_task(ledger.traffic(server.address, lambda: ledger.revision > before + 40))
    await asyncio.to_thread(back_up)
    await more
    await ledger.check(server.address)
    server.kill()

    restored = make_server(*LONG_LEASE, data_dir=copy.parent)
    restored.start()
    assert "store_marker_renewed" in restored.err
    found = Ledger()
    # The same members, as of the backup: nothing that came later, all that was there before.
    client = await found.writers[0].register(restored.address)
    from dmesh.v1 import key_value_pb2 as kv

    answer = await client.key_value.List(kv.ListRequest(caller=client.caller, prefix=""), timeout=60)
    assert answer.revision >= before
    await client.channel.close()
