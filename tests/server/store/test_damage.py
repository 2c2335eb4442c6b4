"""Whatever happens to the files: all that was acknowledged is there, or the store refuses and says where."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.store.damage import PAGE, Example, flipped, make_example, outcome

from dmesh_server.core.effects import Record
from dmesh_server.store.base import StoreDamagedError, StoreFormatError
from dmesh_server.store.commit_marker import CommitMarker
from dmesh_server.store.database import VERSION
from dmesh_server.store.sqlite import DATABASE, LOG, MARKER, SqliteStore

FRAME = 24 + PAGE
SOME = 80
"""Places that are tried here; tests/faults/test_s16_damage.py tries all."""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    # In memory, if possible: thousands of stores are opened, and no disk is under test.
    shm = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None))
    yield made / "data"
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def example(directory: Path) -> Example:
    return make_example(directory)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "dmesh_server")
    return caplog


def fields(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, object]:
    [found] = [record.fields for record in caplog.records if record.getMessage() == event]  # type: ignore[attr-defined]
    return dict(found)


def spread(size: int, count: int) -> list[int]:
    """Some of `size` places: the first, the last, and random ones between."""
    return sorted({0, size - 1, *random.Random(size).sample(range(size), min(size, count))})


def test_an_undamaged_store_is_read_without_a_word(
    example: Example, directory: Path, warnings: pytest.LogCaptureFixture
) -> None:
    example.write(directory)
    assert outcome(directory) == example.acknowledged
    assert warnings.records == []


@pytest.mark.parametrize("part", ["database", "log", "marker"])
def test_one_flipped_bit(
    example: Example, directory: Path, part: str, warnings: pytest.LogCaptureFixture
) -> None:
    name = {"database": DATABASE, "log": LOG, "marker": MARKER}[part]
    content = example.files[name]
    refused = 0
    for at in spread(len(content), SOME):
        example.write(directory, **{part: flipped(content, at, at % 8)})
        found = outcome(directory)
        if isinstance(found, StoreFormatError | StoreDamagedError):
            refused += 1
            assert str(directory / name) in str(found) or str(directory / DATABASE) in str(found)
            if part == "log":
                told = re.search(r"at offset (\d+)", str(found))
                assert told is not None
                # The frame that the bit is in, or the header.
                assert int(told[1]) == (0 if at < 32 else 32 + (at - 32) // FRAME * FRAME)
        else:
            assert found == example.acknowledged, f"silent loss: bit {at % 8} of byte {at}"
    if part == "log":
        assert refused == len(spread(len(content), SOME)), "every byte of this log counts"
    if part == "marker":
        assert refused == 0, "without the commit marker everything is there, too"


def test_a_damaged_database_is_refused_with_the_page(directory: Path) -> None:
    example = make_example(directory.with_name("settled"), settled=True)
    content = example.files[DATABASE]
    at = content.index(b"A" * 40) + 7
    changed = flipped(content, at, 0)
    example.write(directory, database=changed)
    found = outcome(directory)
    assert isinstance(found, StoreDamagedError)
    page = at // PAGE + 1
    assert f"page {page} (offset {(page - 1) * PAGE})" in str(found)
    assert "'key' record 'old0' of cluster 'c' is altered" in str(found)
    assert {path.name for path in directory.iterdir()} >= {DATABASE, MARKER}
    assert (directory / DATABASE).read_bytes() == changed, "what is refused is not touched"


def test_a_log_that_is_cut_is_refused_where_it_ends(example: Example, directory: Path) -> None:
    log = example.files[LOG]
    for end in spread(len(log), SOME):
        if end < len(log):
            example.write(directory, log=log[:end])
            found = outcome(directory)
            assert isinstance(found, StoreDamagedError), f"silent loss: the log ends at {end}"
            assert "acknowledged" in str(found)
            if end >= 32:
                whole = 32 + (end - 32) // FRAME * FRAME
                assert f"{directory / LOG} is damaged at offset {whole}:" in str(found)


def test_a_lost_log_is_noticed(example: Example, directory: Path) -> None:
    example.write(directory, log=None)
    found = outcome(directory)
    assert isinstance(found, StoreDamagedError)
    assert "end with commit 6, but 10 were acknowledged" in str(found)
    assert LOG in str(found)


def unfinished(example: Example, directory: Path) -> dict[str, bytes]:
    """The files as of before the last commit, with that commit in the log: written, never acknowledged."""
    example.write(directory, log=example.files[LOG][: example.end_before_last], marker=None)
    # Without a commit marker the shorter log is taken as it is, and sealed.
    store = SqliteStore(directory)
    marker = (directory / MARKER).read_bytes()
    store.close()
    return {"marker": marker}


def test_a_torn_tail_is_repaired_at_every_byte(
    example: Example, directory: Path, warnings: pytest.LogCaptureFixture
) -> None:
    log, start = example.files[LOG], example.end_before_last
    changes = unfinished(example, directory)
    warnings.clear()
    for end in range(start, len(log)):
        example.write(directory, log=log[:end], **changes)
        assert outcome(directory) == example.before_last, f"torn at {end}"
        copies = list(directory.glob(f"{LOG}.broken-*"))
        if end == start:
            assert copies == []
            assert not warnings.records
            continue
        [copy] = copies
        assert copy.read_bytes() == log[start:end]
        assert fields(warnings, "store_log_repaired") == {
            "file": directory / LOG,
            "offset": start,
            "dropped_bytes": end - start,
            "copy": copy,
            "reason": "a write was cut short, and not acknowledged",
        }
        warnings.clear()
    example.write(directory, **changes)
    assert outcome(directory) == example.acknowledged, "complete, though nobody was told: it counts"


def test_an_unacknowledged_commit_with_holes_is_torn(example: Example, directory: Path) -> None:
    # What a power failure leaves when the disk wrote the sectors in another order.
    log, start = example.files[LOG], example.end_before_last
    changes = unfinished(example, directory)
    for at in range(start, len(log), 512):
        torn = log[:at] + bytes(min(512, len(log) - at)) + log[at + 512 :]
        example.write(directory, log=torn, **changes)
        assert outcome(directory) == example.before_last


def test_damage_in_the_middle_is_refused_even_if_the_seal_lags(example: Example, directory: Path) -> None:
    # After a power failure the commit marker may be older than the log: then what follows the damage tells.
    log, start = example.files[LOG], example.end_before_last
    changes = unfinished(example, directory)
    marker = bytearray(changes["marker"])
    for at in spread(start, SOME // 2):
        example.write(directory, log=flipped(log, at, at % 8), marker=bytes(marker))
        found = outcome(directory)
        assert isinstance(found, StoreDamagedError)
        frame = 0 if at < 32 else 32 + (at - 32) // FRAME * FRAME
        assert f"{directory / LOG} is damaged at offset {frame}:" in str(found)


def test_without_a_seal_a_wrong_frame_is_refused(example: Example, directory: Path) -> None:
    log = example.files[LOG]
    example.write(directory, log=flipped(log, len(log) - 10, 1), marker=None)
    found = outcome(directory)
    assert isinstance(found, StoreDamagedError)
    assert "without the commit marker nobody knows" in str(found)


def test_a_database_that_is_cut_is_refused(example: Example, directory: Path) -> None:
    content = example.files[DATABASE]
    for end in [0, 1, 99, 100, *range(PAGE, len(content), PAGE), *spread(len(content) - 1, 40)]:
        example.write(directory, database=content[:end])
        found = outcome(directory)
        if not isinstance(found, StoreDamagedError):
            # The log may have all that was cut off.
            assert found == example.acknowledged, f"silent loss: the database ends at {end}"
        else:
            assert str(directory / DATABASE) in str(found)
    example.write(directory, database=b"")
    assert "at offset 0: it is empty" in str(outcome(directory))


def test_a_lost_database_is_noticed(example: Example, directory: Path) -> None:
    example.write(directory, database=None)
    found = outcome(directory)
    assert isinstance(found, StoreDamagedError)
    assert f"{directory / DATABASE} is damaged at offset 0: it is missing" in str(found)
    assert not (directory / DATABASE).exists()


def test_an_older_copy_of_the_database_is_noticed(
    example: Example, directory: Path, warnings: pytest.LogCaptureFixture
) -> None:
    example.write(directory, log=None)
    older = (directory / DATABASE).read_bytes()
    example.write(directory)
    assert outcome(directory) == example.acknowledged
    (directory / DATABASE).write_bytes(older)
    found = outcome(directory)
    assert isinstance(found, StoreDamagedError)
    assert f"remove {MARKER}" in str(found)
    # An operator who means it is told how; what was given up is gone.
    (directory / MARKER).unlink()
    restored = outcome(directory)
    assert isinstance(restored, list)
    assert [record.key for record in restored] == [f"old{number}" for number in range(6)]
    assert fields(warnings, "store_marker_renewed")["reason"] == "there was none"


def test_a_page_that_was_never_written_is_noticed(directory: Path) -> None:
    lost = directory.with_name("lost-write") / DATABASE
    store = SqliteStore(lost.parent, page_size=PAGE)
    store.commit([Record("c", "key", f"{number:03}", b"old" * 10) for number in range(100)])
    store.close()
    older = lost.read_bytes()
    store = SqliteStore(lost.parent)
    store.commit([Record("c", "key", "050", b"new" * 10)])
    store.close()
    newer = lost.read_bytes()
    page = next(at for at in range(0, len(newer), PAGE) if b"new" * 10 in newer[at : at + PAGE])
    lost.write_bytes(newer[:page] + older[page : page + PAGE] + newer[page + PAGE :])
    with pytest.raises(StoreDamagedError, match="which is not what was written") as caught:
        SqliteStore(lost.parent)
    assert f"(offset {page})" in str(caught.value)


def test_a_newer_format_is_refused(example: Example, directory: Path) -> None:
    content = bytearray(example.files[DATABASE])
    struct.pack_into(">I", content, 60, VERSION + 1)
    example.write(directory, database=bytes(content))
    found = outcome(directory)
    assert isinstance(found, StoreFormatError)
    assert f"has format {VERSION + 1}, written by a newer version of dmesh" in str(found)


def test_a_flip_where_nothing_is_kept_is_mentioned(
    example: Example, directory: Path, warnings: pytest.LogCaptureFixture
) -> None:
    content = example.files[DATABASE]
    # Bytes of a page that are used by no record.
    page = next(at for at in range(PAGE, len(content), PAGE) if bytes(64) in content[at : at + PAGE])
    at = content.index(bytes(64), page) + 40
    example.write(directory, database=flipped(content, at, 3), log=None, marker=None)
    assert isinstance(outcome(directory), list), "this place does not matter"
    warnings.clear()
    store = SqliteStore(directory)
    store.close()
    changed = flipped((directory / DATABASE).read_bytes(), at, 4)
    (directory / DATABASE).write_bytes(changed)
    assert isinstance(outcome(directory), list)
    told = fields(warnings, "store_marker_renewed")
    assert told["pages"] == f"page {at // PAGE + 1} (offset {at // PAGE * PAGE})"


@pytest.mark.parametrize("grown", [False, True])
def test_a_new_seal_is_on_the_disk_before_anything_is_acknowledged(
    example: Example, directory: Path, monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    """Or a power failure leaves one that says nothing, and a torn log beside it is refused."""
    synced: dict[str, bytes] = {}
    sync = os.fsync

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            synced.update({f"entry of {name}": b"" for name in os.listdir(path)})
        else:
            synced[path.name] = path.read_bytes()

    if grown:
        example.write(directory, marker=None)
    elif directory.exists():
        shutil.rmtree(directory)
    monkeypatch.setattr(os, "fsync", noted_sync)
    SqliteStore(directory).close()
    assert f"entry of {MARKER}" in synced
    (directory / MARKER).write_bytes(synced[MARKER])
    assert CommitMarker(directory / MARKER).fault is None
